"""An answer of several tokens: what is said of each equals what is said of a prompt that goes on up to it."""

import functools
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp import Batch, HookedTransformer
from interp.edits import Scale
from interp.lenses import gradient_cosines, gradient_rank, logit_lens, output_lens
from interp.model.transformer import Transformer
from interp.passes import checkpointed
from interp.residual import paths
from interp.tokens import token_attribution
from tests.batches import in_batches
from tests.configs import build, some_tokens
from tests.loops import over
from tests.tiny import hooked

LENGTHS = (7, 4, 5)
ANSWERS = [(3, 14, 3), (7,), (5, 9)]
"""Of three prompts: of three tokens, one, and two."""
Asked = Callable[[HookedTransformer, object, object], xr.Dataset]
ASKED: dict[str, Asked] = {
    **{
        f"attribute by {parts}": functools.partial(interp.attribute, parts=parts)  # type: ignore[arg-type]
        for parts in ("layer", "head", "source", "neuron")
    },
    **{
        method: functools.partial(token_attribution, method=method)  # type: ignore[arg-type]
        for method in ("gradient_x_input", "integrated_gradients", "alti_logit")
    },
    "backward lens": functools.partial(interp.backward_lens, top=3),  # type: ignore[arg-type]
    "gradient rank": gradient_rank,
    "gradient cosines": gradient_cosines,
    "paths": paths,
}


@functools.cache
def model_of(asked: str) -> HookedTransformer:
    return HookedTransformer(build("attention-only" if asked == "paths" else "llama-gqa", torch.float64))


def prompts() -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(some_tokens(3, 7, seed=6), LENGTHS, strict=True)]


def real(values: xr.DataArray) -> np.ndarray:
    """The numbers of one prompt, without padding."""
    flat = values.to_numpy().ravel()
    return flat[~np.isnan(flat)] if flat.dtype.kind == "f" else flat[flat != -1]


@over("asked", ASKED)
@pytest.mark.parametrize("side", ["right", "left"])
def test_numbers_of_each_token_are_those_of_the_prompt_up_to_it(asked: str, side: str) -> None:
    model, ask = model_of(asked), ASKED[asked]
    batch = Batch.of(prompts(), side=side)  # type: ignore[arg-type]
    found = ask(model, in_batches(model, batch, 2), ANSWERS)
    assert (
        found.sizes["answer_token"] == 3 and found.value.dims[:2] == ("prompt", "answer_token")
        if ("value" in found)
        else True
    )
    for i, (prompt, answer) in enumerate(zip(prompts(), ANSWERS, strict=True)):
        for j, token in enumerate(answer):
            alone = ask(model, Batch.of([prompt + list(answer[:j])]), [token])
            for name, values in alone.data_vars.items():
                if values.dtype.kind not in "fi" or "prompt" not in values.dims:
                    continue
                one = found[name].isel(prompt=i, answer_token=j)
                np.testing.assert_allclose(real(one), real(values.isel(prompt=0)), rtol=1e-7, atol=1e-9)
        rest = found.isel(prompt=i, answer_token=slice(len(answer), None))
        assert all(values.isnull().all() for values in rest.values() if values.dtype.kind == "f")
    if "token" in found.coords:
        rows = [[*row, *answer[:-1]] for row, answer in zip(prompts(), ANSWERS, strict=True)]
        assert [[word for word in row if word] for row in found.token.to_numpy()] == [
            [f"<{token}>" for token in row] for row in rows
        ]
    words = [[f"<{token}>" for token in answer] + [""] * (3 - len(answer)) for answer in ANSWERS]
    assert found["answer"].to_numpy().tolist() == words and found.prompt.to_numpy().tolist() == [0, 1, 2]


@over("asked", ASKED)
def test_answers_of_one_token_give_the_same_bits_as_ids(asked: str) -> None:
    model, ask, batch = model_of(asked), ASKED[asked], Batch.of(prompts())
    assert ask(model, batch, [(3,), (7,), (5,)]).identical(ask(model, batch, [3, 7, 5]))


@over("asked", [name for name in ASKED if name not in ("gradient rank", "gradient cosines")])
def test_contrasted_answers_are_compared_at_the_first_token_in_which_they_differ(asked: str) -> None:
    model, ask = model_of(asked), ASKED[asked]
    found = ask(model, Batch.of(prompts()), [(3, 14, 3)], [(3, 14, 8)])  # type: ignore[call-arg]
    alone = ask(model, Batch.of([[*row, 3, 14] for row in prompts()]), 3, 8)  # type: ignore[call-arg]
    assert "answer_token" not in found.dims
    for name, values in alone.data_vars.items():
        if values.dtype.kind == "f":
            np.testing.assert_allclose(real(found[name]), real(values), rtol=1e-7, atol=1e-9)


def test_edits_at_the_prompts_end_hold_for_every_token_of_the_answer() -> None:
    """A negative position counts from the prompt's end, not from that of the answer."""
    model = model_of("attribute by layer")
    edits = [interp.Edit("blocks.0.hook_mlp_out", Scale(0.0), {"pos": -1})]
    with model.hooks(edits=edits):
        found = interp.attribute(model, [prompts()[1]], [(3, 14)], parts="sublayer")
    at = [interp.Edit("blocks.0.hook_mlp_out", Scale(0.0), {"pos": LENGTHS[1] - 1})]
    with model.hooks(edits=at):
        alone = interp.attribute(model, [[*prompts()[1], 3]], 14, parts="sublayer")
    np.testing.assert_allclose(
        found.value.isel(prompt=0, answer_token=1), alone.value[0], rtol=1e-8, atol=1e-10
    )


@over("edited", [False, True])
def test_gradients_of_all_tokens_by_runs_of_blocks_are_those_of_one_pass(edited: bool) -> None:
    model = model_of("gradient_x_input")
    edits = [interp.Edit("blocks.1.hook_mlp_out", Scale(0.5), {"pos": -1})] if edited else []
    asked = ASKED["gradient_x_input"]
    whole = asked(model.edited(edits), Batch.of(prompts()), ANSWERS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpointed, "ROOM", 1)
        by_runs = asked(model.edited(edits), Batch.of(prompts()), ANSWERS)
    np.testing.assert_allclose(by_runs.value, whole.value, rtol=1e-8, atol=1e-10)


def test_gradients_of_all_tokens_take_one_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    model, forward, passes = model_of("gradient_x_input"), Transformer.forward, []

    def counted(self: Transformer, tokens: Tensor, *args: object, **kwargs: object) -> Tensor:
        passes.append(tuple(tokens.shape))
        return forward(self, tokens, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Transformer, "forward", counted)
    ASKED["gradient_x_input"](model, Batch.of(prompts()[:1]), ANSWERS[:1])
    assert passes == [(1, LENGTHS[0] + len(ANSWERS[0]) - 1)]


def log_probs(
    model: HookedTransformer, prompt: list[int], answer: tuple[int, ...], depth: str
) -> list[Tensor]:
    """Of every token of an answer, by reading the state of one depth at the end of a prompt that goes on up to it."""
    found = []
    for j, token in enumerate(answer):
        lens = logit_lens(model, [[*prompt, *answer[:j]]], answer=token, pos=-1)
        found.append(torch.tensor(float(lens.target_prob.sel(depth=depth).isel(prompt=0, pos=0))).log())
    return found


@pytest.mark.parametrize("side", ["right", "left"])
def test_lens_gives_the_log_probability_of_the_whole_answer_at_every_depth(side: str) -> None:
    model = model_of("attribute by layer")
    batch = Batch.of(prompts(), side=side)  # type: ignore[arg-type]
    found = logit_lens(model, in_batches(model, batch, 2), answer=ANSWERS)
    at_end = logit_lens(model, batch, answer=ANSWERS, pos=-1)
    for i, (prompt, answer) in enumerate(zip(prompts(), ANSWERS, strict=True)):
        for depth in found.depth.values:
            each = log_probs(model, prompt, answer, str(depth))
            cell = found.sel(depth=depth, prompt=i)
            assert float(cell.answer_log_prob) == pytest.approx(float(sum(each)), rel=1e-6)
            ranks = cell.target_rank.values[len(prompt) - 1 : len(prompt) - 1 + len(answer)]
            assert int(cell.answer_worst_rank) == max(ranks)
            assert float(at_end.answer_log_prob.sel(depth=depth, prompt=i)) == pytest.approx(
                float(cell.answer_log_prob), rel=1e-9
            )
        ids = torch.tensor([[*prompt, *answer]])
        own = model.transformer(ids)[0].log_softmax(-1)
        whole = sum(float(own[len(prompt) - 1 + j, token]) for j, token in enumerate(answer))
        assert float(found.answer_log_prob[i, -1]) == pytest.approx(whole, rel=1e-6)


def test_probabilities_of_all_continuations_sum_to_1_at_every_depth() -> None:
    model, prompt = model_of("attribute by layer"), prompts()[1]
    every = list(itertools.product(range(model.cfg.d_vocab), repeat=2))
    lens = logit_lens(model, [prompt] * len(every), answer=every, pos=-1)
    np.testing.assert_allclose(np.exp(lens.answer_log_prob).sum("prompt"), 1, rtol=1e-5)


def test_answer_cut_in_two_has_the_log_probability_of_its_parts() -> None:
    model, prompt = model_of("attribute by layer"), prompts()[0]
    whole = logit_lens(model, [prompt], answer=[(3, 14, 9)]).answer_log_prob[0, -1]
    part = np.log(logit_lens(model, [prompt], answer=3, pos=-1).target_prob[0, -1, 0])
    rest = logit_lens(model, [[*prompt, 3]], answer=[(14, 9)]).answer_log_prob[0, -1]
    assert float(whole) == pytest.approx(float(part + rest), rel=1e-6)


def test_target_of_a_lens_is_the_first_token_up_to_the_prompts_end_and_then_the_one_that_follows() -> None:
    model, prompt = model_of("attribute by layer"), prompts()[1]
    found = output_lens(model, [prompt], part="L1H0", answer=[(3, 14)])
    first = output_lens(model, [[*prompt, 3]], part="L1H0", answer=3)
    second = output_lens(model, [[*prompt, 3]], part="L1H0", answer=14)
    expected = [*first.target_logit.values[0, :-1], second.target_logit.values[0, -1]]
    np.testing.assert_allclose(found.target_logit.values[0], expected, rtol=1e-9)


def test_what_is_of_one_token_alone_says_so() -> None:
    model = hooked()
    with pytest.raises(ValueError, match="must be a single token"):
        interp.attribute(model, "The cat sat", " Mary and John", pos=1)
    with pytest.raises(ValueError, match="must be a single token"):
        token_attribution(model, "The cat sat", " Mary and John", method="gradient_x_input", pos=1)
    short = HookedTransformer(build("llama-gqa"))
    with pytest.raises(ValueError, match="must fit into the context"):
        interp.attribute(short, [list(range(short.cfg.n_ctx))], [(3, 4)])
