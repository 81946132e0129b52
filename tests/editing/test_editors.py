"""Editors: their closed forms, one step of autograd, and targets that become likelier."""

import copy
import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interp import Batch, Edit, HookedTransformer
from interp.editing import (
    FineTuning,
    Rome,
    WeightEdit,
    finetune_edit,
    gradient_edit,
    key_moment,
    rome_edit,
    shift_edit,
)
from interp.edits import Scale
from interp.model import MLP, MoE, Weights
from interp.weights.matrices import matrix_place
from tests.configs import CAUSAL, CONFIGS, build, perturbed, some_tokens
from tests.editing.test_weight_edit import BLOCK, matrices
from tests.loops import over
from tests.tiny import CORPUS, hooked
from tests.tolerances import assert_close

WITH_MLP = tuple(name for name in CAUSAL if isinstance(CONFIGS[name].mlp, MLP))
PROMPT = "The capital of France is"
TARGETS = [3, 14, 7]


@functools.cache
def model_of(name: str, dtype: torch.dtype = torch.float64) -> HookedTransformer:
    return HookedTransformer(build(name, dtype))


def ragged() -> Batch:
    """Rows of 9, 6 and 4 tokens, with other tokens where nothing is kept."""
    keep = torch.arange(9)[None] < torch.tensor([9, 6, 4])[:, None]
    return Batch(some_tokens(3, 9), keep)


def row(batch: Batch, i: int) -> Tensor:
    """The real tokens of one row."""
    return batch.tokens[i] if batch.keep is None else batch.tokens[i][batch.keep[i]]


def wrong(model: HookedTransformer, tokens: Tensor) -> int:
    """A token that is not the argmax: the least likely one."""
    return int(model.transformer(tokens[None])[0, -1].argmin())


def probability(
    model: HookedTransformer, prompt: str | Tensor, target: int, edit: WeightEdit | None = None
) -> float:
    batch = model.text.batch(prompt)
    if edit is None:
        return float(model.transformer(batch.tokens)[0, -1].softmax(-1)[target])
    with edit.applied(model):
        return float(model.transformer(batch.tokens)[0, -1].softmax(-1)[target])


@functools.cache
def autograd(name: str) -> dict[str, Tensor]:
    """The gradient of the summed loss by every matrix, from `.backward()`; each ragged row in a pass of its own."""
    network = copy.deepcopy(build(name)).requires_grad_(True)
    network.tie()
    for i, target in enumerate(TARGETS):
        (-network(row(ragged(), i)[None])[0, -1].log_softmax(-1)[target]).backward()
    found = {}
    for matrix in (m for m in matrices(network) if m.startswith("blocks")):
        where = matrix_place(network, matrix)
        gradient = network.get_parameter(where.parameter).grad
        assert gradient is not None
        found[matrix] = where.view(gradient)
    return found


@over("layer", [0, 1])
@pytest.mark.parametrize("name", WITH_MLP)
def test_a_shift_adds_eta_times_both_squared_lengths_to_the_target(name: str, layer: int) -> None:
    """(x W' - x W) u = eta |x|^2 |u|^2 with x the post-activation of the last token, read off a pass of its own."""
    model, tokens = model_of(name), some_tokens(1)[0]
    target, eta = wrong(model, tokens), 0.3
    edit = shift_edit(model, tokens, answer=target, layer=layer, eta=eta)
    x = model.run_with_cache(tokens[None])[1][f"blocks.{layer}.mlp.hook_post"][0, -1]
    u, writable = (
        Weights(model.transformer).W_U[:, target],
        HookedTransformer(copy.deepcopy(model.transformer)),
    )
    before = x @ Weights(writable.transformer).W_out[layer]
    with edit.applied(writable):
        after = x @ Weights(writable.transformer).W_out[layer]
    assert_close((after - before) @ u, eta * x.square().sum() * u.square().sum())
    assert edit.rank == 1


def test_a_shift_leaves_alone_what_is_answered_already() -> None:
    model, batch = model_of("gpt2"), ragged()
    best = [int(model.transformer(row(batch, i)[None])[0, -1].argmax()) for i in range(3)]
    assert shift_edit(model, batch, answer=best, layer=1, eta=1.0).rank == 0
    other = [best[0], (best[1] + 1) % 31, best[2]]
    found = shift_edit(model, batch, answer=other, layer=1, eta=1.0)
    alone = shift_edit(model, row(batch, 1), answer=other[1], layer=1, eta=1.0)
    assert found.rank == 1
    assert_close(found.dense, alone.dense)


@pytest.mark.parametrize("name", CAUSAL)
def test_a_gradient_step_is_minus_eta_times_autograds_gradient(name: str) -> None:
    model, batch = model_of(name), ragged()
    for matrix in BLOCK:
        full = f"blocks.0.{matrix}"
        if full not in autograd(name) or ("mlp_before" in CONFIGS[name].mlps and matrix.startswith("mlp")):
            continue
        found = gradient_edit(model, batch, answer=TARGETS, layer=0, eta=0.7, matrix=matrix)
        assert_close(found.dense, -0.7 * autograd(name)[full])
        assert found.rank == 9 + 6 + 4


@pytest.mark.parametrize("name", CAUSAL)
def test_one_step_of_plain_fine_tuning_is_the_gradient_step(name: str) -> None:
    model, tuning = model_of(name), FineTuning(steps=1, rate=0.7, optimiser="sgd")
    for full in (f"blocks.1.{matrix}" for matrix in BLOCK):
        if full in autograd(name):
            found = finetune_edit(
                model, ragged(), answer=TARGETS, layer=1, matrix=full.removeprefix("blocks.1."), tuning=tuning
            )
            assert_close(found.dense, -0.7 * autograd(name)[full])


@pytest.mark.parametrize("matrix", ["mlp_before.W_in", "mlp_before.W_out", "mlp.W_in"])
def test_of_two_mlps_in_a_block_the_step_is_of_the_one_that_is_named(matrix: str) -> None:
    model, tuning = model_of("macaron"), FineTuning(steps=1, rate=0.7, optimiser="sgd")
    asked = {"answer": TARGETS, "layer": 1, "matrix": matrix}
    found = gradient_edit(model, ragged(), eta=0.7, **asked)
    assert found.name == f"blocks.1.{matrix}" and float(found.dense.abs().max()) > 1e-3
    assert_close(found.dense, finetune_edit(model, ragged(), tuning=tuning, **asked).dense)


def test_fine_tuning_ends_at_the_target_and_not_before() -> None:
    model, tokens = model_of("llama-gqa"), some_tokens(1)[0]
    target = wrong(model, tokens)
    least = next(
        steps
        for steps in range(1, 200)
        if _best(model, tokens, _tuned(model, tokens, target, steps)) == target
    )
    assert least > 1
    long, exact = (_tuned(model, tokens, target, steps) for steps in (least + 50, least))
    assert torch.equal(long.dense, exact.dense)
    best = int(model.transformer(tokens[None])[0, -1].argmax())
    assert float(_tuned(model, tokens, best, 9).dense.abs().max()) == 0


def _tuned(model: HookedTransformer, tokens: Tensor, target: int, steps: int) -> WeightEdit:
    return finetune_edit(model, tokens, answer=target, layer=0, tuning=FineTuning(steps, rate=0.02))


def _best(model: HookedTransformer, tokens: Tensor, edit: WeightEdit) -> int:
    with edit.applied(model):
        return int(model.transformer(tokens[None])[0, -1].argmax())


METHODS: dict[str, Callable[[HookedTransformer, int, int], WeightEdit]] = {
    "shift": lambda m, t, layer: shift_edit(m, PROMPT, answer=t, layer=layer, eta=0.05),
    "gradient": lambda m, t, layer: gradient_edit(m, PROMPT, answer=t, layer=layer, eta=0.05),
    "fine-tuning": lambda m, t, layer: finetune_edit(m, PROMPT, answer=t, layer=layer),
    "rome": lambda m, t, layer: rome_edit(
        m, PROMPT, answer=t, subject="France" if layer == 0 else " is", keys=key_moment(m, list(CORPUS), layer=layer),
        rome=Rome(rate=0.1, ridge=0.01, essence=None),
    ),
}  # fmt: skip


@over("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "post-norm", "tied"])
@over("method", METHODS)
def test_every_editor_makes_its_target_likelier_and_touches_no_weight(
    method: str, name: str, dtype: torch.dtype
) -> None:
    model = hooked(name, dtype)
    before = {n: p.clone() for n, p in model.transformer.named_parameters()}
    target = wrong(model, model.to_tokens(PROMPT)[0])
    plain = probability(model, PROMPT, target)
    for layer in (0, 1):
        with torch.no_grad():
            edit = METHODS[method](model, target, layer)
        assert edit.name == f"blocks.{layer}.mlp.W_out"
        assert probability(model, PROMPT, target, edit) > plain
    parameters = dict(model.transformer.named_parameters())
    assert all(torch.equal(parameters[n], value) for n, value in before.items())
    assert all(p.grad is None for p in parameters.values())


@pytest.mark.parametrize("edit", [shift_edit, gradient_edit])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_half_precision_weights_give_factors_in_float32(edit: Callable[..., WeightEdit], name: str) -> None:
    wide, narrow = (
        edit(hooked(name, dtype), PROMPT, answer=" Paris", layer=1, eta=0.1).dense
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert narrow.dtype == torch.float32
    assert float((narrow - wide).norm() / wide.norm()) < 0.05


EDITORS: dict[str, Callable[..., WeightEdit]] = {
    "shift": functools.partial(shift_edit, eta=0.1),
    "gradient": functools.partial(gradient_edit, eta=0.1),
    "fine-tuning": finetune_edit,
}


@pytest.mark.parametrize("editor", EDITORS)
def test_what_cannot_be_edited_is_refused_by_name(editor: str) -> None:
    edit = EDITORS[editor]
    with pytest.raises(ValueError, match="an answer of at least one token is required"):
        edit(hooked(), PROMPT, answer="", layer=0)
    with pytest.raises(ValueError, match=r"answer tokens must be in \[0, "):
        edit(hooked(), PROMPT, answer=10**6, layer=0)
    with pytest.raises(ValueError, match="got 2 answers for 1 prompts"):
        edit(hooked(), PROMPT, answer=[1, 2], layer=0)
    for layer in (-1, 2):
        with pytest.raises(IndexError, match=f"layers are 0 to 1 in this model, got {layer}"):
            edit(hooked(), PROMPT, answer=" Paris", layer=layer)
    with pytest.raises(ValueError, match="has no MLP"):
        edit(hooked("attention-only"), PROMPT, answer=" Paris", layer=0)
    assert isinstance(CONFIGS["gpt-oss"].mlp, MoE)
    with pytest.raises(ValueError, match="a mixture of 3 experts"):
        edit(hooked("gpt-oss"), PROMPT, answer=" Paris", layer=0)
    with pytest.raises(ValueError, match="causal decoder with an unembedding; this model is not causal"):
        edit(hooked("bidirectional"), PROMPT, answer=" Paris", layer=0)
    bare = HookedTransformer(perturbed(replace(CONFIGS["gpt2"], unembed=False)))
    with pytest.raises(ValueError, match="this model has no logits"):
        edit(bare, some_tokens(1), answer=3, layer=0)


def test_sizes_that_mean_nothing_are_refused() -> None:
    for eta in (0.0, -1.0, float("nan")):
        for edit in (shift_edit, gradient_edit):
            with pytest.raises(ValueError, match="eta > 0 is required"):
                edit(hooked(), PROMPT, answer=" Paris", layer=0, eta=eta)
    with pytest.raises(ValueError, match="steps must be a whole number from 1"):
        FineTuning(steps=0)
    with pytest.raises(ValueError, match="rate must be a number above 0"):
        FineTuning(rate=0.0)
    with pytest.raises(ValueError, match="prefixes require at least one text"):
        Rome(prefixes=())


def appended(batch: Batch, token: int) -> Batch:
    """The prompts with one more token each."""
    return Batch.of([[*row(batch, i).tolist(), token] for i in range(len(batch))])


def test_shift_towards_several_tokens_is_the_sum_of_the_shifts_towards_each_after_those_before_it() -> None:
    model, prompts, (first, second) = model_of("llama-gqa"), ragged(), TARGETS[:2]
    whole = shift_edit(model, prompts, answer=[(first, second)], layer=0, eta=0.1).dense
    alone = shift_edit(model, prompts, answer=first, layer=0, eta=0.1).dense
    after = shift_edit(model, appended(prompts, first), answer=second, layer=0, eta=0.1).dense
    assert_close(whole, alone + after)


@over("matrix", ["mlp.W_out", "mlp.W_in", "attn.W_V"])
def test_step_towards_several_tokens_is_down_the_gradient_of_all_of_their_losses(matrix: str) -> None:
    """Answers of two tokens, of one and of three, in rows of other lengths; the loss is a slow loop's."""
    model, prompts, answers = model_of("llama-gqa"), ragged(), [(3, 14), (7,), (5, 5, 2)]
    found = gradient_edit(model, prompts, answer=answers, layer=1, eta=0.5, matrix=matrix)
    network = copy.deepcopy(model.transformer).requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for i, tokens in enumerate(answers):
        ids = row(prompts, i)
        for token in tokens:
            loss = loss - network(ids[None])[0, -1].log_softmax(-1)[token]
            ids = torch.cat((ids, torch.tensor([token])))
    place = matrix_place(network, found.name)
    (gradient,) = torch.autograd.grad(loss, network.get_parameter(place.parameter))
    assert_close(found.dense, -0.5 * place.view(gradient))


def test_fine_tuning_ends_where_every_token_of_the_answer_is_the_argmax() -> None:
    model, answer = hooked(), (5, 9, 12)
    edit = finetune_edit(model, PROMPT, answer=[answer], layer=0, tuning=FineTuning(steps=200, rate=3e-3))
    with edit.applied(model):
        said = model.generate(PROMPT, 3, stop_at_eos=False).tokens[0, -3:]
    assert tuple(said.tolist()) == answer


@pytest.mark.parametrize("editor", EDITORS)
def test_bare_network_will_do_and_the_model_under_study_is_the_edited_one(editor: str) -> None:
    """Inside `hooks` the edit is that of a model with the same edits."""
    edit, model, tokens = EDITORS[editor], model_of("gpt2"), some_tokens(1)[0]
    answer = wrong(model, tokens)
    plain = edit(model, tokens, answer=answer, layer=0)
    assert torch.equal(edit(model.transformer, tokens, answer=answer, layer=0).dense, plain.dense)
    silent = Edit("blocks.0.hook_mlp_out", Scale(0.5))
    with model.hooks(edits=[silent]):
        inside = edit(model, tokens, answer=answer, layer=1)
    assert torch.equal(inside.dense, edit(model.edited(silent), tokens, answer=answer, layer=1).dense)
    assert not torch.equal(inside.dense, edit(model, tokens, answer=answer, layer=1).dense)


def test_bos_is_prepended_unless_that_is_not_wanted() -> None:
    model = hooked()
    ids = torch.tensor(model.text.ids(PROMPT, prepend_bos=False))
    for edit in EDITORS.values():
        bare = edit(model, PROMPT, answer=" Paris", layer=0, prepend_bos=False)
        assert torch.equal(bare.dense, edit(model, ids, answer=" Paris", layer=0).dense)
