"""Direct logit attribution: sums at every grain, equals a slow loop, and does not see batches or padding."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import interp
from interp import Batch, Edit, HookedEncoderDecoder, HookedTransformer
from interp.data.batch import Answers
from interp.edits import Add, PerRow, Scale, Zero
from interp.model import MLP
from interp.model.norm import Normalize
from interp.model.transformer import Transformer
from interp.passes.observe import observe
from interp.residual import Attribute, IncompleteSumError, attribute
from interp.residual.attribution import labels
from tests.batches import in_batches
from tests.configs import CAUSAL, CONFIGS, build, perturbed, some_tokens
from tests.edited import without_head
from tests.loops import over
from tests.model import test_encoder_decoder as pairs
from tests.tolerances import assert_close

LINEAR = tuple(name for name, config in CONFIGS.items() if not config.mlm_head)
GRAINS = ("layer", "sublayer", "head", "source", "neuron")
ANSWER, WRONG = torch.tensor([3, 14, 7]), torch.tensor([5, 1, 30])


def attributed(  # type: ignore[no-untyped-def]
    name: str, parts: str, dtype: torch.dtype = torch.float64, edits: Sequence[Edit] = (), **options: object
):
    model = HookedTransformer(build(name, dtype)).edited(edits)
    return interp.attribute(model, some_tokens(), ANSWER, WRONG, parts=parts, **options)


def logit_difference(name: str) -> torch.Tensor:
    """Of the model's own logits, their soft cap undone."""
    last, cap = build(name)(some_tokens())[:, -1], CONFIGS[name].logit_softcap
    last = last if cap is None else cap * (last / cap).atanh()
    return last.gather(1, ANSWER[:, None])[:, 0] - last.gather(1, WRONG[:, None])[:, 0]


def test_several_grains_share_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    plain = Transformer.forward

    def counted(self: Transformer, tokens: Tensor, *more: object, **how: object) -> Tensor:
        passes.append(len(tokens))
        return plain(self, tokens, *more, **how)  # type: ignore[arg-type]

    model, batch = HookedTransformer(build("gpt2")), Batch(some_tokens(), answer=ANSWER, wrong=WRONG)
    alone = {grain: attribute(model, batch, parts=grain) for grain in GRAINS}  # type: ignore[arg-type]
    monkeypatch.setattr(Transformer, "forward", counted)
    found = interp.run({grain: Attribute(parts=grain) for grain in GRAINS}, model, [batch])  # type: ignore[arg-type]
    assert passes == [len(batch)]
    for grain in GRAINS:
        np.testing.assert_allclose(found[grain].value, alone[grain].value, rtol=1e-9, atol=1e-12)


def test_answers_belong_to_the_prompts_by_place_in_any_batch() -> None:
    model, taken = HookedTransformer(build("gpt2", torch.float64)), torch.tensor([2, 0])
    question = Attribute(ANSWER[taken], WRONG[taken])
    some = Batch(some_tokens()).numbered().rows(taken)
    expected = attribute(model, some_tokens()[taken], ANSWER[taken], WRONG[taken])
    xr.testing.assert_identical(attribute(model, some, ANSWER[taken], WRONG[taken]), expected)
    xr.testing.assert_identical(interp.run([question], model, some)["attribute"], expected)


@over("parts", GRAINS)
@pytest.mark.parametrize("name", LINEAR)
def test_components_sum_to_the_logit_difference_at_every_grain(name: str, parts: str) -> None:
    if parts == "neuron" and not isinstance(CONFIGS[name].mlp, MLP):
        kind = "attention-only" if CONFIGS[name].mlp is None else "a mixture of experts"
        with pytest.raises(ValueError, match=f"requires a plain or gated MLP, this model is {kind}"):
            attributed(name, parts)
        return
    result = attributed(name, parts)
    assert_close(torch.tensor(result.value.sum("part").values), logit_difference(name))
    assert result.attrs["completeness_error"] <= 1e-11
    assert tuple(result.part.values) == labels(CONFIGS[name], parts)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_completeness_error_is_below_1e_5_in_float32(name: str) -> None:
    assert attributed(name, "head", torch.float32).attrs["completeness_error"] <= 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "no-norm", "parallel"])
def test_heads_attribution_equals_its_write_through_the_frozen_norm(name: str) -> None:
    model = HookedTransformer(build(name))
    cache = model.run_with_cache(some_tokens())[1]
    written = cache.apply_ln_to_stack(cache.stack_head_results().values)[:, :, -1]
    direction = model.W_U.mT[ANSWER] - model.W_U.mT[WRONG]
    result = attributed(name, "head")
    for i, label in enumerate(cache.stack_head_results().parts[:-1]):
        expected = (written[i] * direction).sum(-1)
        assert_close(torch.tensor(result.value.sel(part=label).values), expected)


def test_logits_behind_a_masked_lm_head_have_no_linear_parts() -> None:
    for parts in GRAINS:
        with pytest.raises(ValueError, match=r"linear in the normed stream \(no masked-LM head\)"):
            attributed("masked-lm", parts)


def test_under_a_soft_cap_the_parts_sum_to_the_logits_before_it() -> None:
    """And not to those that the model returns, which are well inside the cap."""
    result, capped = attributed("gemma2", "sublayer"), build("gemma2")(some_tokens())[:, -1]
    difference = capped.gather(1, ANSWER[:, None])[:, 0] - capped.gather(1, WRONG[:, None])[:, 0]
    assert capped.abs().max() < 3.0
    assert (torch.tensor(result.total.values) - difference).abs().max() > 0.1


@pytest.mark.parametrize("name", LINEAR)
def test_sources_sum_to_their_heads_and_masked_sources_give_nothing(name: str) -> None:
    result = attributed(name, "source")
    for layer in range(2):
        for head in range(4):
            summed = result.by_source.sel(layer=layer, head=head).sum("source")
            assert_close(
                torch.tensor(summed.values),
                torch.tensor(result.value.sel(part=f"L{layer}H{head}").values),
            )
    config = CONFIGS[name]
    for layer in range(2):
        reach = 9 if config.window is None or not config.is_local(layer) else config.window
        nothing = torch.tensor(result.by_source.sel(layer=layer).values == 0).all((0, 1))
        assert nothing.tolist() == [k < 9 - reach for k in range(9)]


def test_single_logit_counts_the_final_bias_and_answers_are_one_each() -> None:
    model = HookedTransformer(build("attention-only-rotary"))
    result = interp.attribute(model, some_tokens(), [3, 14, 7])
    logits = model(some_tokens())[:, -1].gather(1, ANSWER[:, None])[:, 0]  # type: ignore[union-attr]
    assert_close(torch.tensor(result.total.values), logits)
    assert_close(torch.tensor(result.value.sum("part").values), logits)
    bias = model.b_U[ANSWER] + model.W_U.mT[ANSWER] @ model.transformer.ln_final.bias
    assert_close(torch.tensor(result.value.sel(part="final_bias").values), bias)


@pytest.mark.parametrize("name", CAUSAL)
@over("side", ["left", "right"])
def test_padding_on_either_side_changes_no_attribution(name: str, side: str) -> None:
    rows = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9], [7, 9]]
    model = HookedTransformer(build(name))
    padded = interp.attribute(model, Batch.of(rows, side=side), ANSWER, WRONG, parts="head")  # type: ignore[arg-type]
    for i, row in enumerate(rows):
        alone = interp.attribute(model, torch.tensor(row), ANSWER[i : i + 1], WRONG[i : i + 1], parts="head")
        assert_close(torch.tensor(padded.value.values[i]), torch.tensor(alone.value.values[0]))


def test_answers_must_fit_the_prompts_and_the_vocabulary() -> None:
    model = HookedTransformer(build("gpt2"))
    with pytest.raises(
        ValueError, match="attribute holds answers or labels for 2 prompts, got 3 rows of data"
    ):
        interp.attribute(model, some_tokens(), [1, 2])
    with pytest.raises(ValueError, match=r"must be in \[0, 30\], got 31"):
        interp.attribute(model, some_tokens(), 31)


# --- directions -----------------------------------------------------------------------------------------------------


def directions(rows: int = 3) -> Tensor:
    return torch.randn(rows, 24, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@over("parts", GRAINS)
@pytest.mark.parametrize("name", CONFIGS)
def test_components_sum_to_the_normed_final_stream_on_each_direction(name: str, parts: str) -> None:
    """Behind a masked-LM head too: the normed stream is in front of it."""
    if parts == "neuron" and not isinstance(CONFIGS[name].mlp, MLP):
        return
    normed = build(name).ln_final(build(name)(some_tokens(), stop=2)[:, -1])
    result = interp.attribute(HookedTransformer(build(name)), some_tokens(), directions(), parts=parts)  # type: ignore[arg-type]
    expected = (normed * directions()).sum(-1)
    assert_close(torch.tensor(result.total.values), expected)
    assert_close(torch.tensor(result.value.sum("part").values), expected)
    assert result.attrs["completeness_error"] <= 1e-11
    assert result.value.attrs["unit"] == "projection on the direction"


def test_a_model_without_logits_has_directions() -> None:
    encoder = replace(CONFIGS["bidirectional"], unembed=False, unembed_bias=False)
    model = HookedTransformer(perturbed(encoder))
    with pytest.raises(ValueError, match=r"requires logits .* or a direction"):
        interp.attribute(model, some_tokens(), 3)
    result = interp.attribute(model, some_tokens(), directions()[0], parts="neuron")
    normed = model.transformer(some_tokens())[:, -1]
    assert_close(torch.tensor(result.value.sum("part").values), normed @ directions()[0])


@pytest.mark.parametrize("name", LINEAR)
def test_direction_of_a_logit_difference_gives_what_tokens_give_but_b_u(name: str) -> None:
    model = HookedTransformer(build(name))
    columns = (model.W_U.mT[ANSWER] - model.W_U.mT[WRONG]) * CONFIGS[name].logit_scale
    on_direction = interp.attribute(model, some_tokens(), columns, parts="head").value
    of_tokens = attributed(name, "head").value
    others = [part for part in of_tokens.part.values if part != "final_bias"]
    np.testing.assert_allclose(
        on_direction.sel(part=others), of_tokens.sel(part=others), rtol=1e-9, atol=1e-9
    )
    b_U = (model.b_U[ANSWER] - model.b_U[WRONG]) * CONFIGS[name].logit_scale
    bias = of_tokens.sel(part="final_bias") - on_direction.sel(part="final_bias")
    np.testing.assert_allclose(bias, b_U, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_directions_belong_to_their_prompts_in_any_batch_and_dtype(dtype: torch.dtype) -> None:
    model = HookedTransformer(build("gpt2", dtype))
    together = interp.attribute(model, in_batches(model, some_tokens(), 2), directions())
    for i in range(3):
        alone = interp.attribute(model, some_tokens()[i], directions()[i])
        assert_close(torch.tensor(together.value.values[i]), torch.tensor(alone.value.values[0]), dtype)


def test_a_direction_that_nothing_writes_is_no_error() -> None:
    result = interp.attribute(
        HookedTransformer(build("gpt2")), some_tokens(), torch.zeros(24), parts="source"
    )
    assert not result.value.values.any() and result.attrs["completeness_error"] == 0


@pytest.mark.parametrize(
    ("answer", "wrong", "message"),
    [
        (torch.ones(23), None, r"\[d_model\] = \[24\] or \[prompt, d_model\] = \[prompt, 24\], got \[23\]"),
        (torch.ones(2, 24), None, "attribute holds answers or labels for 2 prompts, got 3 rows of data"),
        (torch.tensor([3.0, 14.0, 7.0]), None, r"= \[prompt, 24\], got \[3\]"),
        (torch.full((24,), torch.nan), None, "finite numbers"),
        (torch.ones(24), 5, "a direction has no wrong answer: pass the difference of two"),
    ],
)
def test_a_direction_that_does_not_fit_is_refused_by_its_shape(
    answer: Tensor, wrong: Answers | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        interp.attribute(HookedTransformer(build("gpt2")), some_tokens(), answer, wrong)


# --- positions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CAUSAL)
@over("side", ["left", "right"])
def test_a_position_of_each_prompt_gives_the_models_logits_there(name: str, side: str) -> None:
    rows, positions = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9], [7, 9]], [-3, 5, -2]
    model, batch = HookedTransformer(build(name)), Batch.of(rows, side=side)  # type: ignore[arg-type]
    result = interp.attribute(model, batch, ANSWER, WRONG, parts="source", pos=PerRow(positions))
    for i, (row, pos) in enumerate(zip(rows, positions, strict=True)):
        logits, cap = model(torch.tensor([row]))[0, pos], CONFIGS[name].logit_softcap  # type: ignore[call-overload]
        logits = logits if cap is None else cap * (logits / cap).atanh()
        assert_close(torch.tensor(result.total.values[i]), logits[ANSWER[i]] - logits[WRONG[i]])
    np.testing.assert_allclose(result.value.sum("part"), result.total, rtol=1e-9, atol=1e-9)
    assert result.sizes["source"] == 6
    assert np.isnan(result.by_source.values[2, ..., 1:]).all(), "of the first token nothing else is there"


def test_positions_that_a_prompt_lacks_or_that_look_ahead_are_refused() -> None:
    model, batch = HookedTransformer(build("gpt2")), Batch.of([[1, 2, 3], [4, 5]])
    for pos in (2, -3):
        with pytest.raises(
            IndexError, match=rf"position {pos} is required of every row, but row 1 has 2 tokens"
        ):
            interp.attribute(model, batch, 3, pos=pos)
    with pytest.raises(
        ValueError, match="attribute holds answers or labels for 3 prompts, got 2 rows of data"
    ):
        interp.attribute(model, batch, 3, pos=PerRow([0, 1, 0]))
    with pytest.raises(ValueError, match=r"one of each is required for every prompt.*2 answers, 3 positions"):
        interp.attribute(model, batch, [3, 4], pos=PerRow([0, 1, 0]))


@pytest.mark.parametrize("parts", ["layer", "sublayer", "head", "source", "neuron"])
def test_parts_of_a_bidirectional_model_sum_to_its_logit_anywhere(parts: str) -> None:
    network = build("bidirectional")
    rows, positions = [[1, 5, 2, 9], [4, 7, 3]], [0, -2]
    for side in ("left", "right"):
        batch = Batch.of(rows, side=side)
        found = interp.attribute(
            HookedTransformer(network), batch, [3, 8], [6, 2], parts=parts, pos=PerRow(positions)
        )
        for i, (row, pos) in enumerate(zip(rows, positions, strict=True)):
            logits = network(torch.tensor([row]))[0, pos]
            assert_close(torch.tensor(found.total.values[i]), logits[[3, 8][i]] - logits[[6, 2][i]])
        np.testing.assert_allclose(found.value.sum("part"), found.total, rtol=1e-6, atol=1e-6)
    last, whole = (
        interp.attribute(HookedTransformer(network), batch, 3, pos=pos) for pos in (-1, PerRow([3, 2]))
    )
    np.testing.assert_allclose(last.value, whole.value, rtol=1e-6, atol=1e-6)


def is_neuron(part: str) -> bool:
    return interp.Part.of(part).kind == "neuron"


# --- neurons --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "post-norm", "parallel"])
def test_largest_neurons_stand_alone_and_the_others_of_a_layer_together(name: str) -> None:
    every, some = attributed(name, "neuron").value, attributed(name, "neuron", top=7)
    neurons = [c for c in every.part.values.tolist() if is_neuron(c)]
    size = {c: abs(every.sel(part=c)).mean() for c in neurons}
    largest = sorted(size, key=lambda c: -float(size[c]))[:7]
    found = some.part.values.tolist()
    assert [c for c in found if is_neuron(c)] == [c for c in size if c in largest]
    for part in set(found) & set(every.part.values):
        one = some.value.sel(part=part)
        np.testing.assert_allclose(one, every.sel(part=part), rtol=1e-12, atol=1e-12)
    for layer in range(2):
        others = [c for c in size if c.startswith(f"L{layer}N") and c not in largest]
        rest = some.value.sel(part=f"L{layer}.mlp_rest")
        np.testing.assert_allclose(rest, every.sel(part=others).sum("part"), rtol=1e-12, atol=1e-12)
    assert len(found) == len(every.part) - len(size) + 7 + 2
    np.testing.assert_allclose(some.value.sum("part"), some.total, rtol=1e-9, atol=1e-9)


def test_the_number_of_neurons_must_fit_the_model_and_the_grain() -> None:
    for top in (0, 81):
        with pytest.raises(ValueError, match=rf"top must be in \[1, 80\] neurons, got {top}"):
            attributed("gpt2", "neuron", top=top)
    with pytest.raises(ValueError, match="top requires parts='neuron' or parts='feature', got parts='head'"):
        attributed("gpt2", "head", top=3)


class Largest(TorchDispatchMode):
    """The largest number of values that any operator returned."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.values = max(self.values, result.numel())
        return result


@pytest.mark.parametrize("parts", ["head", "neuron"])
def test_nothing_of_every_head_or_neuron_is_as_wide_as_the_stream(parts: str) -> None:
    """Rows of one token, so that all activations at all positions are smaller than that."""
    rows, units, d_model = 64, 40 if parts == "neuron" else 4, 24
    with Largest() as largest:  # type: ignore[no-untyped-call]
        interp.attribute(
            HookedTransformer(build("gpt2")),
            in_batches(HookedTransformer(build("gpt2")), some_tokens(rows, 1), rows),
            3,
            parts=parts,
        )  # type: ignore[arg-type]
    assert rows * 3 * d_model <= largest.values < rows * units * d_model


# --- encoder-decoders -----------------------------------------------------------------------------------------------


@over("parts", GRAINS)
@pytest.mark.parametrize("name", pairs.CONFIGS)
def test_a_decoders_parts_sum_to_the_logits_of_the_encoder_decoder(name: str, parts: str) -> None:
    """Sources and targets of different lengths; each at a position of its own."""
    if parts == "neuron" and pairs.CONFIGS[name].decoder.mlp is None:
        return
    network, positions = pairs.model(name), [8, 3, 0]
    model = HookedEncoderDecoder(network)
    source = Batch(pairs.SOURCE, pairs.KEEP)
    target = Batch(pairs.TARGET, torch.arange(9) < torch.tensor([[9], [6], [2]]))
    given, decoder = model.given(source, target), HookedTransformer(network.decoder)
    result = interp.attribute(decoder, given, ANSWER, WRONG, parts=parts, pos=PerRow(positions))  # type: ignore[arg-type]
    rows = torch.arange(3)
    logits = network(pairs.SOURCE, pairs.TARGET, source_keep=pairs.KEEP)[rows, positions]
    expected = logits[rows, ANSWER] - logits[rows, WRONG]
    assert_close(torch.tensor(result.total.values), expected)
    assert_close(torch.tensor(result.value.sum("part").values), expected)
    if parts == "source":
        memory = torch.tensor(result.by_memory.values)
        crossed = [f"L{layer}X{head}" for layer in range(3) for head in range(4)]
        heads = torch.tensor(result.value.sel(part=crossed).values).unflatten(1, (3, 4))
        assert_close(memory.sum(-1), heads)
        assert (
            not memory.masked_select(~pairs.KEEP[:, None, None]).any() and memory.abs().min(-1)[0].max() > 0
        )


def test_cross_attention_head_moves_what_the_formula_says_from_each_source() -> None:
    """a_j (v_j W_O) through the frozen final norm; the last block of a pre-norm decoder."""
    network = pairs.model("pre-norm")
    given = HookedEncoderDecoder(network).given(pairs.SOURCE, pairs.TARGET)
    decoder = HookedTransformer(network.decoder)
    result = interp.attribute(decoder, given, directions(), parts="source")
    seen = HookedEncoderDecoder(network).run_with_cache(pairs.SOURCE, pairs.TARGET)[1]["decoder"]
    pattern, v = (seen[f"blocks.2.cross_attn.hook_{part}"] for part in ("pattern", "v"))
    stream = seen["blocks.2.hook_resid_post"][:, -1]
    W_O = decoder.weights.layer(2, cross=True).W_O
    for head in range(4):
        for j in range(7):
            part = pattern[:, head, -1, j, None] * (v[:, j, head // 2] @ W_O[head])
            expected = (through(network.decoder.ln_final, part, stream) * directions()).sum(-1)
            assert_close(torch.tensor(result.by_memory.values[:, 2, head, j]), expected)


def through(norm: Normalize, part: Tensor, whole: Tensor) -> Tensor:
    """LayerNorm without beta, its scale that of the whole; eps as GPT-2's."""
    assert norm.weight is not None
    sigma = (whole.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    return (part - part.mean(-1, keepdim=True)) / sigma * norm.weight


# --- the question ---------------------------------------------------------------------------------------------------


def test_a_pass_holds_as_many_prompts_as_asked_and_no_number_depends_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, tokens, sizes = HookedTransformer(build("gpt2")), some_tokens(5, 7), list[int]()

    def watched(network, batch, *args, **options):  # type: ignore[no-untyped-def]
        sizes.append(len(batch))
        return observe(network, batch, *args, **options)

    monkeypatch.setattr("interp.passes.schedule.observe", watched)
    whole = attribute(model, tokens, 3)
    for size, expected in ((2, [2, 2, 1]), (1, [1] * 5), (5, [5])):
        sizes.clear()
        found = attribute(model, in_batches(model, tokens, size), 3)
        assert sizes == expected
        np.testing.assert_allclose(found.value, whole.value, rtol=0, atol=1e-12)


def test_answers_come_with_the_data_where_the_question_brings_none() -> None:
    model = HookedTransformer(build("gpt2"))
    found = attribute(model, Batch(some_tokens()).with_answers(ANSWER, WRONG))
    xr.testing.assert_identical(found, attribute(model, some_tokens(), ANSWER, WRONG))
    with pytest.raises(ValueError, match="requires an answer for every prompt, got none"):
        attribute(model, some_tokens())


# --- edits ----------------------------------------------------------------------------------------------------------


@over("parts", ["layer", "sublayer", "head", "source", "neuron"])
@pytest.mark.parametrize("name", LINEAR)
def test_a_zeroed_head_gives_the_numbers_of_the_model_without_its_output(name: str, parts: str) -> None:
    if parts == "neuron" and not isinstance(CONFIGS[name].mlp, MLP):
        return
    found = attributed(name, parts, edits=[Edit("L1H2", Zero())])
    expected = attribute(HookedTransformer(without_head(name)), some_tokens(), ANSWER, WRONG, parts=parts)  # type: ignore[arg-type]
    assert_close(torch.tensor(found.value.values), torch.tensor(expected.value.values))
    assert_close(torch.tensor(found.total.values), torch.tensor(expected.total.values))
    assert float(abs(found.total - attributed(name, parts).total).max()) > 1e-6
    if parts in ("head", "source"):
        assert not found.value.sel(part="L1H2").any()
    if parts == "source":
        assert_close(torch.tensor(found.by_source.values), torch.tensor(expected.by_source.values))
        assert not found.by_source.sel(layer=1, head=2).any()


def test_edits_that_hold_around_a_call_are_those_of_the_edited_model() -> None:
    model, edit = HookedTransformer(build("gpt2")), Edit("L1H2", Zero())
    expected = attributed("gpt2", "head", edits=[edit])
    with model.hooks(edits=[edit]):
        xr.testing.assert_identical(attribute(model, some_tokens(), ANSWER, WRONG, parts="head"), expected)


def test_what_no_part_wrote_is_refused_by_the_name_of_its_edit() -> None:
    steering = Edit("L1.resid", Add(1.5 * torch.arange(24.0)))
    with pytest.raises(IncompleteSumError, match=r"under the edits of L1\.resid the stream holds what none"):
        attributed("gpt2", "head", edits=[steering])
    silent = Edit("L1.attn", Zero())
    assert_close(
        torch.tensor(attributed("gpt2", "sublayer", edits=[silent]).value.sum("part").values),
        torch.tensor(attributed("gpt2", "sublayer", edits=[silent]).total.values),
    )
    with pytest.raises(IncompleteSumError, match=r"edits of L1\.attn"):
        attributed("gpt2", "head", edits=[silent])
    with pytest.raises(ValueError, match=r"what the edits of L1H2 write comes from no source"):
        attributed("gpt2", "source", edits=[Edit("L1H2", Add(torch.arange(6.0)))])
    with pytest.raises(ValueError, match="edit inside the blocks"):
        attributed("gpt2", "head", edits=[Edit("ln_final.hook_normalized", Scale(2.0))])
