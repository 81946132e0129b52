"""Direct logit attribution: sums at every grain, equals a slow loop, and does not see batches or padding."""

import pytest
import torch

import interp
from interp import Batch, HookedTransformer
from interp.analyses.attribution import labels
from interp.model import MLP
from tests.configs import CAUSAL, CONFIGS, build, some_tokens
from tests.tolerances import assert_close

LINEAR = tuple(name for name, config in CONFIGS.items() if not config.mlm_head)
GRAINS = ("layer", "sublayer", "head", "source", "neuron")
ANSWER, WRONG = torch.tensor([3, 14, 7]), torch.tensor([5, 1, 30])


def attributed(name: str, by: str, dtype: torch.dtype = torch.float64, **options: object):  # type: ignore[no-untyped-def]
    return interp.attribute(
        HookedTransformer(build(name, dtype)), some_tokens(), ANSWER, WRONG, by=by, **options
    )


def logit_difference(name: str) -> torch.Tensor:
    """Of the model's own logits, their soft cap undone."""
    last, cap = build(name)(some_tokens())[:, -1], CONFIGS[name].logit_softcap
    last = last if cap is None else cap * (last / cap).atanh()
    return last.gather(1, ANSWER[:, None])[:, 0] - last.gather(1, WRONG[:, None])[:, 0]


@pytest.mark.parametrize("by", GRAINS)
@pytest.mark.parametrize("name", LINEAR)
def test_components_sum_to_the_logit_difference_at_every_grain(name: str, by: str) -> None:
    if by == "neuron" and not isinstance(CONFIGS[name].mlp, MLP):
        kind = "attention-only" if CONFIGS[name].mlp is None else "a mixture of experts"
        with pytest.raises(ValueError, match=f"requires a plain or gated MLP, this model is {kind}"):
            attributed(name, by)
        return
    result = attributed(name, by)
    assert_close(torch.tensor(result.logits.sum("component").values), logit_difference(name))
    assert result.attrs["completeness_error"] <= 1e-11
    assert tuple(result.component.values) == labels(CONFIGS[name], by)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_the_completeness_error_is_below_one_in_a_hundred_thousand_in_float32(name: str) -> None:
    assert attributed(name, "head", torch.float32).attrs["completeness_error"] <= 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "no-norm", "parallel"])
def test_a_heads_attribution_equals_pushing_its_write_through_the_frozen_norm(name: str) -> None:
    model = HookedTransformer(build(name))
    cache = model.run_with_cache(some_tokens())[1]
    parts = cache.apply_ln_to_stack(cache.stack_head_results().values)[:, :, -1]
    direction = model.W_U.mT[ANSWER] - model.W_U.mT[WRONG]
    result = attributed(name, "head")
    for i, label in enumerate(cache.stack_head_results().labels[:-1]):
        expected = (parts[i] * direction).sum(-1)
        assert_close(torch.tensor(result.logits.sel(component=label).values), expected)


def test_logits_behind_a_masked_lm_head_have_no_linear_parts() -> None:
    for by in GRAINS:
        with pytest.raises(ValueError, match=r"linear in the normed stream \(no masked-LM head\)"):
            attributed("masked-lm", by)


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
                torch.tensor(result.logits.sel(component=f"L{layer}H{head}").values),
            )
    config = CONFIGS[name]
    for layer in range(2):
        reach = 9 if config.window is None or not config.is_local(layer) else config.window
        nothing = torch.tensor(result.by_source.sel(layer=layer).values == 0).all((0, 1))
        assert nothing.tolist() == [k < 9 - reach for k in range(9)]


def test_a_single_logit_counts_the_final_bias_and_a_batch_of_answers_is_one_each() -> None:
    model = HookedTransformer(build("attention-only-rotary"))
    result = interp.attribute(model, some_tokens(), [3, 14, 7])
    logits = model(some_tokens())[:, -1].gather(1, ANSWER[:, None])[:, 0]  # type: ignore[union-attr]
    assert_close(torch.tensor(result.total.values), logits)
    assert_close(torch.tensor(result.logits.sum("component").values), logits)
    bias = model.b_U[ANSWER] + model.W_U.mT[ANSWER] @ model.transformer.ln_final.bias
    assert_close(torch.tensor(result.logits.sel(component="final_bias").values), bias)


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_no_attribution(name: str, side: str) -> None:
    rows = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9], [7, 9]]
    model = HookedTransformer(build(name))
    padded = interp.attribute(model, Batch.of(rows, side=side), ANSWER, WRONG, by="head")  # type: ignore[arg-type]
    for i, row in enumerate(rows):
        alone = interp.attribute(model, torch.tensor(row), ANSWER[i : i + 1], WRONG[i : i + 1], by="head")
        assert_close(torch.tensor(padded.logits.values[i]), torch.tensor(alone.logits.values[0]))


def test_answers_must_fit_the_prompts_and_the_vocabulary() -> None:
    model = HookedTransformer(build("gpt2"))
    with pytest.raises(ValueError, match="one answer per prompt is required, got 2 answers for 3"):
        interp.attribute(model, some_tokens(), [1, 2])
    with pytest.raises(ValueError, match=r"must be in \[0, 30\], got 31"):
        interp.attribute(model, some_tokens(), 31)
