"""ROME: the constraint holds exactly, the change is the least one in C's norm, and the search is the gradient's."""

import copy
import math
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import interp
from interp import Batch, HookedTransformer
from interp.editing import Rome, key_moment, rome_edit
from interp.editing.rome import Keys, mention_mask
from interp.model import Edit, Read, Tap, Weights
from interp.passes.observe import observe
from tests.configs import CONFIGS
from tests.loops import over
from tests.tiny import CORPUS, hooked
from tests.tolerances import assert_close

PROMPT, SUBJECT, ANSWER = "The capital of France is", "France", " Rome"
FAMILIES = ("gpt2", "llama-gqa", "parallel", "post-norm", "tied", "t5", "no-norm")


def keys_of(model: HookedTransformer, layer: int = 0) -> Keys:
    return key_moment(model, list(CORPUS), layer=layer)


def post(model: HookedTransformer, text: str, layer: int = 0) -> Tensor:
    """Post-activations `[p m]` of one text."""
    return model.run_with_cache(text)[1][f"blocks.{layer}.mlp.hook_post"][0]


def out(model: HookedTransformer, text: str) -> Tensor:
    """What block 0's MLP adds `[p d]` to one text."""
    return model.run_with_cache(text)[1]["blocks.0.hook_mlp_out"][0]


def subject_index(model: HookedTransformer, text: str, subject: str = SUBJECT) -> int:
    """The first token at which the text so far holds the subject, by decoding every beginning."""
    ids = model.text.ids(text)
    return next(i for i in range(len(ids)) if "".join(model.text.pieces(ids[: i + 1])).endswith(subject))


def factors(edit: object) -> tuple[Tensor, Tensor]:
    return edit.change.A[:, 0], edit.change.B[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_key_gives_the_value_exactly_and_the_mlp_writes_it(name: str) -> None:
    """k* W' - k* W = delta, and what block 0's MLP adds at the subject (and nowhere before it) moves by delta."""
    model = hooked(name)
    edit = rome_edit(
        model, PROMPT, answer=ANSWER, subject=SUBJECT, keys=keys_of(model), rome=Rome(ridge=0.01)
    )
    at, (_, delta) = subject_index(model, PROMPT), factors(edit)
    key, writable = (
        post(model, PROMPT)[at],
        HookedTransformer(copy.deepcopy(model.transformer), model.text.tokenizer),
    )
    before, weights = Weights(model.transformer).W_out[0], Weights(writable.transformer)
    plain = model.run_with_cache(PROMPT)[1]["blocks.0.hook_mlp_out"][0]
    with edit.applied(writable):
        assert_close(key @ weights.W_out[0] - key @ before, delta)
        moved = writable.run_with_cache(PROMPT)[1]["blocks.0.hook_mlp_out"][0]
    assert_close(moved[at] - plain[at], delta)
    assert float(delta.norm()) > 0.1


def test_the_key_is_the_mean_over_prefixes() -> None:
    model, prefixes = hooked(), ("", "The dog sat on the cat. ", "Mary and John: ")
    rome = Rome(prefixes=prefixes, ridge=0.01)
    edit = rome_edit(model, PROMPT, answer=ANSWER, subject=SUBJECT, keys=keys_of(model), rome=rome)
    texts = [prefix + PROMPT for prefix in prefixes]
    each = torch.stack([post(model, text)[subject_index(model, text)] for text in texts])
    left, delta = factors(edit)
    assert_close(each.mean(0) @ edit.dense, delta)
    assert not torch.allclose(each[0] @ left, torch.ones((), dtype=left.dtype), rtol=1e-3)


def test_the_change_is_the_smallest_in_the_norm_of_the_keys() -> None:
    """Among all changes D with k* D = delta it has the least tr(D^T C D): any other differs by N with k* N = 0."""
    model, ridge = hooked(), 0.05
    keys = keys_of(model)
    edit = rome_edit(model, PROMPT, answer=ANSWER, subject=SUBJECT, keys=keys, rome=Rome(ridge=ridge))
    key = post(model, PROMPT)[subject_index(model, PROMPT)]
    damped = keys.moment + ridge * keys.moment.diagonal().mean() * torch.eye(len(key), dtype=torch.float64)

    def cost(change: Tensor) -> Tensor:
        return torch.einsum("io,ij,jo->", change, damped, change)

    for _ in range(5):
        other = torch.randn_like(edit.dense)
        other -= torch.outer(key, key @ other) / key.square().sum()
        assert_close(key @ (edit.dense + other), factors(edit)[1])
        assert_close(cost(edit.dense + other), cost(edit.dense) + cost(other))  # Pythagoras: no cross term


def test_keys_orthogonal_in_the_inverse_moment_keep_their_values() -> None:
    model, ridge = hooked("llama-gqa"), 0.05
    keys = keys_of(model)
    edit = rome_edit(model, PROMPT, answer=ANSWER, subject=SUBJECT, keys=keys, rome=Rome(ridge=ridge))
    key = post(model, PROMPT)[subject_index(model, PROMPT)]
    damped = keys.moment + ridge * keys.moment.diagonal().mean() * torch.eye(len(key), dtype=torch.float64)
    direction = torch.linalg.inv(damped) @ key
    others = torch.randn(20, len(key), dtype=torch.float64)
    orthogonal = others - torch.outer(others @ direction, direction) / direction.square().sum()
    assert_close(orthogonal @ edit.dense, torch.zeros(20, 24, dtype=torch.float64))
    assert float((others @ edit.dense).abs().max()) > 1e-3


@over("answer", [ANSWER, " Mary and John"])
@pytest.mark.parametrize("name", FAMILIES[1:4])
def test_first_step_of_the_search_descends_the_gradient_at_the_subject(name: str, answer: str) -> None:
    """Adam's first step is -rate sign(gradient); the gradient is that of the site, from one pass without any edit."""
    model = hooked(name)
    rome = Rome(steps=1, rate=1e-3, essence=None, ridge=0.01)
    edit = rome_edit(model, PROMPT, answer=answer, subject=SUBJECT, keys=keys_of(model), rome=rome)
    tokens, read = model.text.tokenizer.encode(answer), Read("blocks.0.hook_mlp_out", grad=True)
    batch = model.text.batch([[*model.text.batch(PROMPT).tokens[0].tolist(), *tokens[:-1]]])

    def loss(logits: Tensor) -> Tensor:
        each = logits[0, -len(tokens) :].log_softmax(-1)
        return -torch.stack([each[j, token] for j, token in enumerate(tokens)]).mean()

    run = observe(model.transformer, batch, [read], metric=loss)
    found = run.trace[read][0, subject_index(model, PROMPT)]
    large = found.abs() > 1e-4 * found.abs().max()
    step = torch.full_like(found, 1e-3)
    torch.testing.assert_close(factors(edit)[1][large], (-step * found.sign())[large], rtol=1e-2, atol=0)


def test_the_value_stays_within_its_reach_and_the_search_ends_when_it_may() -> None:
    model = hooked()
    keys, at = keys_of(model), subject_index(model, PROMPT)
    value = model.run_with_cache(PROMPT)[1]["blocks.0.hook_mlp_out"][0, at]

    def length(rome: Rome) -> float:
        edit = rome_edit(model, PROMPT, answer=ANSWER, subject=SUBJECT, keys=keys, rome=rome)
        return float(factors(edit)[1].norm())

    held = length(Rome(rate=5.0, reach=0.25, ridge=0.01))
    assert held == pytest.approx(0.25 * float(value.norm()), rel=1e-9)
    assert length(Rome(enough=math.inf)) == 0


def test_steps_after_the_search_is_over_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device is asked late whether the loss is low enough."""
    model = hooked()
    keys, steps = keys_of(model), []

    def delta(rome: Rome) -> Tensor:
        return factors(rome_edit(model, PROMPT, answer=ANSWER, subject=SUBJECT, keys=keys, rome=rome))[1]

    def asked(done: Tensor, step: int) -> bool:
        steps.append(bool(done))
        return False

    early = Rome(enough=6.0, rate=0.5, decay=0.0, reach=1e3, steps=12, ridge=0.01)
    ended = delta(early)
    monkeypatch.setattr(interp.editing.rome, "ended", asked)
    assert torch.equal(delta(early), ended)
    assert len(steps) == 12 and 1 <= sum(steps) < 12
    assert not torch.equal(delta(replace(early, enough=0.0)), ended)


def slow_search(model: HookedTransformer, rome: Rome, subject: str) -> Tensor:
    """The search one prompt at a time, by the paper's formula, without padding or a shared prefix pass."""
    essence = str(rome.essence).format(subject=subject)
    texts = [prefix + PROMPT for prefix in rome.prefixes]
    value = torch.stack([out(model, t)[subject_index(model, t)] for t in texts]).mean(0).norm()
    delta = torch.zeros(24, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([delta], lr=rome.rate)

    def after(text: str, delta: Tensor) -> Tensor:
        place = torch.zeros(len(model.text.ids(text)), 1, dtype=torch.float64)
        place[subject_index(model, text)] = 1
        edit = Edit("blocks.0.hook_mlp_out", lambda y: y + place * delta)
        return model.transformer(model.to_tokens(text), Tap(edits=[edit]))[0, -1].log_softmax(-1)

    for _ in range(rome.steps):
        likely = torch.stack([after(text, delta)[model.text.single(ANSWER)] for text in texts])
        new, old = after(essence, delta), after(essence, torch.zeros_like(delta))
        loss = (
            -likely.mean() + rome.kl * (new.exp() * (new - old)).sum() + rome.decay * delta.norm() / value**2
        )
        delta.grad = torch.autograd.grad(loss, delta)[0]
        optimiser.step()
        with torch.no_grad():
            delta *= min(1.0, float(rome.reach * value / delta.norm()))
    return delta.detach()


@pytest.mark.parametrize("reach", [0.1, 4.0])
def test_the_search_is_that_of_the_paper_one_prompt_at_a_time(reach: float) -> None:
    model = hooked()
    rome = Rome(
        prefixes=("", "The dog sat. "), essence="Mary and {subject} went to", steps=4, rate=0.1, kl=3.0, reach=reach,
        ridge=0.01,
    )  # fmt: skip
    edit = rome_edit(model, PROMPT, answer=ANSWER, subject=SUBJECT, keys=keys_of(model), rome=rome)
    assert_close(factors(edit)[1], slow_search(model, rome, SUBJECT))


@pytest.mark.parametrize("layer", [0, 1])
def test_the_moment_is_a_sum_over_tokens_whatever_the_batches(layer: int) -> None:
    model = hooked("llama-gqa")
    rows = torch.cat([post(model, text, layer) for text in CORPUS])
    expected = sum(torch.outer(key, key) for key in rows) / len(rows)
    for size in (1, 2, 32):
        found = key_moment(model, list(CORPUS), layer=layer, batch_size=size)
        assert_close(found.moment, expected)  # type: ignore[arg-type]
        assert found.tokens == len(rows)
    texts = [model.text.ids(text) for text in CORPUS]
    for same in (Batch.of(texts, side="left"), iter(CORPUS)):
        found = key_moment(model, same, layer=layer)
        assert_close(found.moment, expected)  # type: ignore[arg-type]
        assert found.tokens == len(rows)
    short = [ids[:n] for ids, n in zip(texts, (12, 9, 7), strict=True)]
    packed, apart = (key_moment(model, each, layer=layer) for each in (Batch.packed(short, 24), short))
    assert_close(packed.moment, apart.moment)
    assert packed.tokens == apart.tokens == 28


def test_the_moment_is_that_of_the_edited_model() -> None:
    model, edit = hooked("llama-gqa"), Edit("blocks.0.hook_mlp_out", lambda y: 2 * y)
    expected = key_moment(model.edited(edit), list(CORPUS), layer=1).moment
    assert torch.equal(key_moment(model, list(CORPUS), layer=1, edits=[edit]).moment, expected)
    with model.hooks(edits=[edit]):
        assert torch.equal(key_moment(model, list(CORPUS), layer=1).moment, expected)
    assert not torch.equal(key_moment(model, list(CORPUS), layer=1).moment, expected)


def test_a_moment_of_numbers_that_are_not_finite_is_refused() -> None:
    model = HookedTransformer(copy.deepcopy(hooked().transformer), hooked().text.tokenizer)
    model.transformer.embed.weight[model.text.ids(CORPUS[1])[3]] = torch.nan
    with pytest.raises(ValueError, match="key_moment: row 1: the post-activations of some prompt are NaN"):
        key_moment(model, list(CORPUS[:2]), layer=0, batch_size=1)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_mention_is_the_last_one_and_its_last_token(side: str) -> None:
    model = hooked()
    texts = ["Mary and John: John gave", "Mary John", "a John"]
    batch = model.text.batch(texts, side=side)  # type: ignore[arg-type]
    found = mention_mask(model.text, batch, "John")
    assert found.sum(1).tolist() == [1, 1, 1]
    for i, text in enumerate(texts):
        kept = batch.tokens[i] if batch.keep is None else batch.tokens[i][batch.keep[i]]
        column = int(found[i][slice(None) if batch.keep is None else batch.keep[i]].int().argmax())
        pieces = model.text.pieces(kept)
        behind = text[text.rfind("John") + 4 :]
        assert "".join(pieces[column + 1 :]) == behind and "".join(pieces[: column + 1]).endswith("John")


def test_edit_towards_several_tokens_makes_all_of_them_likelier_than_one_towards_the_first() -> None:
    model, answer = hooked(), " Mary and John"
    ids, tokens = model.text.batch(PROMPT).tokens[0].tolist(), model.text.tokenizer.encode(answer)

    def loss(towards: str | int | None) -> float:
        rome = Rome(steps=100, rate=0.1, reach=50.0, decay=0.0, ridge=0.01, essence=None)
        with ExitStack() as stack:
            if towards is not None:
                edit = rome_edit(
                    model, PROMPT, answer=towards, subject=SUBJECT, keys=keys_of(model), rome=rome
                )
                stack.enter_context(edit.applied(model))
            each = model.transformer(torch.tensor([[*ids, *tokens[:-1]]]))[0, -len(tokens) :].log_softmax(-1)
        return -sum(float(each[j, token]) for j, token in enumerate(tokens)) / len(tokens)

    assert loss(answer) < loss(tokens[0]) < loss(None)


def test_what_cannot_be_edited_is_refused_by_name() -> None:
    model = hooked()
    keys = keys_of(model)
    with pytest.raises(
        ValueError, match=r"must mention the subject 'Spain', got '.*The capital of France is'"
    ):
        rome_edit(model, PROMPT, answer=ANSWER, subject="Spain", keys=keys)
    with pytest.raises(ValueError, match="an answer of at least one token is required"):
        rome_edit(model, PROMPT, answer="", subject=SUBJECT, keys=keys)
    c = keys.moment
    for moment in (c[:39], c[0], c[None], c.float(), c.half(), c * math.nan):
        with pytest.raises(
            ValueError, match=r"moment must be (finite numbers in float64|Float\[Tensor, 'm m'\]), got"
        ):
            replace(keys, moment=moment)
    for essence in ("{", "{}", "{other} is", "{subject.x} is", "{subject!z}"):
        with pytest.raises(
            ValueError, match=r"essence must be a text with \{subject\} as its only field, or None"
        ):
            Rome(essence=essence)
    few = key_moment(model, "The cat", layer=0)
    with pytest.raises(ValueError, match=r"C of 40 neurons over .* is singular: more text or a larger ridge"):
        rome_edit(model, PROMPT, answer=ANSWER, subject=SUBJECT, keys=few, rome=Rome(ridge=0.0))
    with pytest.raises(ValueError, match=r"keys of 36 neurons are required, got C of \[40, 40\]"):
        rome_edit(hooked("llama-gqa"), PROMPT, answer=ANSWER, subject=SUBJECT, keys=keys)
    with pytest.raises(
        ValueError, match=r"in the last block only the last token .* a layer below 1 is required"
    ):
        rome_edit(model, PROMPT, answer=ANSWER, subject=SUBJECT, keys=keys_of(model, 1))
    for name in ("gemma2", "olmo2"):
        assert CONFIGS[name].norms_output
        normed = hooked(name)
        with pytest.raises(ValueError, match="norms what the sublayer adds"):
            rome_edit(normed, PROMPT, answer=ANSWER, subject=SUBJECT, keys=keys_of(normed))
    with pytest.raises(ValueError, match="has no MLP"):
        keys_of(hooked("attention-only"))
    with pytest.raises(ValueError, match="a mixture of 3 experts"):
        keys_of(hooked("gpt-oss"))
    with pytest.raises(IndexError, match="layers are 0 to 1"):
        keys_of(model, 2)
