"""Comprehensiveness and sufficiency equal a loop of single erased prompts; a planted cause is found."""

from math import ceil

import numpy as np
import pytest
import torch
import xarray as xr

import interp
from interp import Batch, HookedTransformer
from interp.core.stats import Moments
from interp.model import Edit, Tap
from interp.tokens.faithfulness import RANDOM, Erasure, compare_methods, faithfulness, top_share
from interp.tokens.input_gradients import IntegratedGradients
from interp.tokens.token_attribution import METHODS, Mixed, token_attribution
from tests.configs import build, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

ROWS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3], [7, 9, 2]]
ANSWER, WRONG = [3, 14, 7], [5, 1, 30]


def model(name: str = "gpt2") -> HookedTransformer:
    return HookedTransformer(build(name))


def scored(values: torch.Tensor) -> xr.Dataset:
    return xr.Dataset({"score": (("prompt", "pos"), values.numpy())})


@over("bos", [False, True])
@over("measure", ["probability", "logits"])
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "masked-lm"])
def test_both_equal_a_loop_over_prompts_and_shares(name: str, measure: str, bos: bool) -> None:
    batch, how = Batch.of(ROWS, bos=bos), Erasure((0.1, 0.5), replacement=6, measure=measure)  # type: ignore[arg-type]
    score = torch.rand(3, 11)
    found = faithfulness(model(name), batch, ANSWER, WRONG, attribution=scored(score), erasure=how)

    def value(i: int, holes: set[int]) -> float:
        tokens = torch.tensor([[6 if j in holes else t for j, t in enumerate(ROWS[i])]])
        logits = build(name)(tokens)[0, -1]
        if measure == "probability":
            return float(logits.softmax(-1)[ANSWER[i]])
        return float(logits[ANSWER[i]] - logits[WRONG[i]])

    for i, row in enumerate(ROWS):
        ranked = sorted(range(int(bos), len(row)), key=lambda j: -float(score[i, j]))
        fall, rest = [], []
        for share in how.shares:
            top = set(ranked[: ceil(share * len(ranked))])
            fall.append(value(i, set()) - value(i, top))
            rest.append(value(i, set()) - value(i, set(ranked) - top))
        np.testing.assert_allclose(found.comprehensiveness[i], np.mean(fall), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(found.sufficiency[i], np.mean(rest), rtol=1e-9, atol=1e-9)


def test_the_mean_embedding_stands_in_without_moving_anybody() -> None:
    tokens, mean = some_tokens(1, 6), build("gpt2").embed.weight.mean(0)
    score = torch.tensor([[0.0, 9.0, 0.0, 0.0, 8.0, 0.0]])
    how = Erasure((1 / 3,), measure="logits")
    found = faithfulness(model(), tokens, 3, attribution=scored(score), erasure=how)

    def replaced(value: torch.Tensor) -> torch.Tensor:
        value[:, [1, 4]] = mean
        return value

    whole, erased = (
        build("gpt2")(tokens, Tap(edits=e))[0, -1, 3] for e in ([], [Edit("hook_embed", replaced)])
    )
    assert_close(torch.tensor(found.comprehensiveness.values[0]), whole - erased)


def test_everything_removed_is_the_same_for_every_ranking_and_everything_kept_is_the_prompt() -> None:
    how = Erasure((1.0,))
    found = [
        faithfulness(model(), Batch.of(ROWS), ANSWER, attribution=scored(torch.rand(3, 11)), erasure=how)
        for _ in range(2)
    ]
    np.testing.assert_allclose(found[0].comprehensiveness, found[1].comprehensiveness, rtol=1e-12)
    assert float(abs(found[0].comprehensiveness).min()) > 1e-6
    np.testing.assert_allclose(found[0].sufficiency, 0, atol=1e-12)


def test_shares_are_rounded_up_ties_go_to_the_earlier_and_fixed_tokens_stay() -> None:
    score = torch.tensor([[9.0, 1.0, 3.0, 3.0, 2.0, 3.0]])
    removable = torch.tensor([[False, True, True, True, True, True]])
    wanted = {0.01: [2], 0.2: [2], 0.21: [2, 3], 0.6: [2, 3, 5], 0.8: [2, 3, 4, 5], 1.0: [1, 2, 3, 4, 5]}
    for share, expected in wanted.items():
        assert top_share(score, removable, share)[0].nonzero()[:, 0].tolist() == expected
    with pytest.raises(ValueError, match="a score for every removable token is required, got NaN"):
        top_share(score / torch.tensor([[1.0, 1, 1, 1, 1, float("nan")]]) * float("nan"), removable, 0.5)


def test_a_prepended_bos_is_never_removed() -> None:
    batch = Batch(some_tokens(2, 6), bos=True)
    score = torch.zeros(2, 6)
    score[:, 0] = 5
    how = Erasure((0.2,))
    found = faithfulness(model(), batch, 3, attribution=scored(score), erasure=how)
    score[:, 0], score[:, 1] = -5, 1
    same = faithfulness(model(), batch, 3, attribution=scored(score), erasure=how)
    assert found.identical(same), "without BOS, token 1 is the first among equals"
    plain = faithfulness(
        model(), batch.tokens, 3, attribution=scored(torch.eye(6)[:1].expand(2, 6)), erasure=how
    )
    assert float(abs(plain.comprehensiveness - found.comprehensiveness).min()) > 1e-6


def test_the_token_that_causes_the_answer_is_worth_more_than_any_other() -> None:
    """The hand-built induction circuit: without the first `d`, or the `c` before it, it cannot answer `d`."""
    small = interp.HookedTransformer.from_pretrained("groundtruth-induction")
    prompt, how = "abcdefghabc", Erasure((0.01,), replacement="zero")
    falls = {}
    for place in range(1, 12):
        one = torch.zeros(1, 12)
        one[0, place] = 1
        falls[place] = float(
            faithfulness(small, prompt, "d", attribution=scored(one), erasure=how).comprehensiveness[0]
        )
    assert sorted(falls, key=lambda place: -falls[place])[:3] in ([3, 4, 11], [3, 11, 4], [4, 3, 11],
                                                                  [4, 11, 3], [11, 3, 4], [11, 4, 3])  # fmt: skip
    assert max(falls[place] for place in range(1, 11) if place not in (3, 4)) < 0.1 * min(falls[3], falls[4])


def test_comparison_has_every_method_its_interval_and_chance() -> None:
    batch = Batch.of(ROWS)
    methods = {"rollout": METHODS["rollout"], "mine": Mixed("values", 0), "ig": IntegratedGradients(steps=2)}
    result = compare_methods(model(), batch, ANSWER, WRONG, methods=methods, draws=2)
    assert list(result.attribution.values) == [*methods, RANDOM]
    for name, how in methods.items():
        found = token_attribution(model(), batch, ANSWER, WRONG, method=how)
        alone = faithfulness(model(), batch, ANSWER, WRONG, attribution=found)
        for value in ("comprehensiveness", "sufficiency"):
            row, rows = result.sel(attribution=name), torch.tensor(alone[value].values)
            np.testing.assert_allclose(row[f"{value}_each"], alone[value])
            low, high = Moments.of(rows).interval()
            np.testing.assert_allclose(
                [row[value], row[f"{value}_low"], row[f"{value}_high"]], [rows.mean(), low, high]
            )


def test_chance_is_the_mean_of_random_orders_and_repeats_with_its_seed() -> None:
    batch, dice = Batch.of(ROWS), torch.Generator().manual_seed(4)
    draws = [
        faithfulness(model(), batch, ANSWER, attribution=scored(torch.rand(3, 11, generator=dice)))
        for _ in range(3)
    ]
    found = compare_methods(model(), batch, ANSWER, methods=[], draws=3, seed=4)
    expected = np.mean([draw.comprehensiveness for draw in draws], axis=0)
    np.testing.assert_allclose(found.comprehensiveness_each.sel(attribution=RANDOM), expected)
    other = compare_methods(model(), batch, ANSWER, methods=[], draws=3, seed=5)
    assert not np.allclose(other.comprehensiveness, found.comprehensiveness)


def test_batch_size_changes_no_number() -> None:
    methods, how = ["alti", "gradient_x_input"], Erasure((0.5,))
    one, other = (
        compare_methods(
            model(), Batch.of(ROWS), ANSWER, methods=methods, erasure=how, draws=1, batch_size=size
        )
        for size in (2, 32)
    )
    xr.testing.assert_allclose(one, other, rtol=1e-9)


def test_what_cannot_be_compared_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"unknown method 'rolout'.*rollout"):
        compare_methods(model(), some_tokens(), 3, methods=["rolout"])
    with pytest.raises(ValueError, match="at least one random order is required, got draws=0"):
        compare_methods(model(), some_tokens(), 3, draws=0)
    with pytest.raises(ValueError, match=r"one score per token is required, \[3, 9\], got \[3, 8\]"):
        faithfulness(model(), some_tokens(), 3, attribution=scored(torch.rand(3, 8)))
    with pytest.raises(ValueError, match=r"shares in \(0, 1\] are required, at least one, got \(1.5,\)"):
        Erasure((1.5,))
