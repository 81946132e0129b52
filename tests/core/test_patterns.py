"""Scores of a pattern on repeated tokens: equal to slow loops, exact on ideal heads, chance for even attention."""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from interp.core.patterns import (
    NEAR,
    SCORES,
    copy_keys,
    copy_scores,
    distance_kernel,
    entropy,
    even_attention,
    even_copy_scores,
    pattern_scores,
    relative_entropy,
    repeat_scores,
)
from interp.data.batch import Batch
from interp.model import Read
from interp.passes.observe import observe
from tests.attention.slow_heads import causal, slow_scores, tokens_of
from tests.configs import build, some_tokens
from tests.tolerances import assert_close

N, PERIOD = 101, 25


def scores(pattern: Tensor, period: int = PERIOD) -> dict[str, float]:
    return dict(zip(SCORES, pattern_scores(pattern[None, None], period)[0, 0].tolist(), strict=True))


@pytest.mark.parametrize(("n", "period"), [(101, 25), (19, 6), (15, 6), (13, 4), (9, 2)])
def test_scores_equal_the_definition_token_by_token(n: int, period: int) -> None:
    pattern = causal(torch.rand(n, n, dtype=torch.float64))
    assert scores(pattern, period) == pytest.approx(slow_scores(pattern, tokens_of(period, n))[0], rel=1e-9)


def test_an_ideal_induction_head_scores_one_over_75_of_101_queries() -> None:
    tokens = tokens_of(PERIOD, N)
    pattern = torch.zeros(N, N)
    for i in range(N):
        targets = [j + 1 for j in range(1, i) if tokens[j] == tokens[i]] or [0]
        pattern[i, targets] = 1 / len(targets)
    assert slow_scores(pattern, tokens)[1] == 75
    found = scores(pattern)
    assert found["induction"] == pytest.approx(1.0) and found["duplicate_token"] == 0.0
    assert found["previous_token"] < 0.02 and found["first_token"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("score", "back"), [("current_token", 0), ("previous_token", 1), ("first_token", None), ("duplicate_token", 25)]
)  # fmt: skip
def test_an_ideal_head_scores_one_and_its_entropy_is_zero(score: str, back: int | None) -> None:
    targets = [0 if back is None or (back == 25 and i < 26) else max(i - back, 0) for i in range(N)]
    found = scores(torch.eye(N)[targets])
    assert found[score] == pytest.approx(1.0)
    assert found["entropy"] == 0.0
    near = {"current_token": 1.0, "previous_token": 0.99, "first_token": 0.0, "duplicate_token": 0.0}
    assert found["local"] == pytest.approx(near[score])  # the previous token of token 1 is BOS


def test_even_attention_scores_chance_in_closed_form() -> None:
    found = scores(even_attention(N, None)[0, 0])
    one = (sum(1 / i for i in range(1, N + 1)) - 1) / (N - 1)
    assert found["current_token"] == pytest.approx(one) and found["first_token"] == pytest.approx(one)
    assert found["previous_token"] == pytest.approx(one)
    assert found["entropy"] == pytest.approx(1.0, abs=1e-12)
    assert found["local"] == pytest.approx(sum(min(i, NEAR) / (i + 1) for i in range(1, N)) / (N - 1))
    assert found["induction"] == pytest.approx(0.031, abs=5e-4)


def test_even_attention_under_a_window_is_even_over_the_window() -> None:
    pattern = even_attention(9, 4)[0, 0]
    assert pattern[8].tolist() == [0.0] * 5 + [0.25] * 4
    assert pattern[2].tolist() == pytest.approx([1 / 3] * 3 + [0.0] * 6)
    found = scores(pattern, 4)
    assert found["current_token"] == pytest.approx((1 / 2 + 1 / 3 + 6 / 4) / 8)
    assert found["entropy"] < 1.0


@pytest.mark.parametrize("window", [None, 1, 4, 20])
@pytest.mark.parametrize("side", ["left", "right", None])
def test_chance_on_own_rows_is_the_score_of_the_pattern_written_out(
    window: int | None, side: Literal["left", "right"] | None
) -> None:
    rows = [[1, 2, 1, 3, 2, 1, 1, 2, 3, 4], [5, 5, 6, 5, 6, 6], [7, 8, 7, 8]]
    batch = Batch(torch.tensor(rows[:1])) if side is None else Batch.of(rows, side=side)
    place = batch.places.masked_fill(~batch.real, -1)
    back = place[:, :, None] - place[:, None, :]
    there = batch.real[:, :, None] & batch.real[:, None, :]
    keys = copy_keys((batch.tokens[:, :, None] == batch.tokens[:, None, :]) & (back > 0) & there, place)
    seen = ((back >= 0) & there & (back < (window or 20))).double()
    even = seen / seen.sum(-1, keepdim=True).clamp_min(1)
    assert_close(even_copy_scores(keys, place, window), copy_scores(even[:, None], keys, place)[:, 0])


@pytest.mark.parametrize(("n", "farthest"), [(11, 0), (11, 6), (11, 9)])
def test_the_kernel_is_the_mean_attention_at_each_distance_without_bos(n: int, farthest: int) -> None:
    pattern = causal(torch.rand(n, n, dtype=torch.float64))
    expected = []
    for distance in range(farthest + 1):
        cells = [float(pattern[i, i - distance]) for i in range(n) if i - distance >= 1]
        expected.append(sum(cells) / len(cells))
    assert distance_kernel(pattern[None, None], farthest)[0, 0].tolist() == pytest.approx(expected, rel=1e-9)


def test_the_kernel_of_a_head_at_one_distance_is_one_there() -> None:
    pattern = torch.eye(N)[[max(i - 3, 0) for i in range(N)]]
    assert distance_kernel(pattern[None, None], 5)[0, 0].tolist() == [0, 0, 0, 1, 0, 0]
    with pytest.raises(ValueError, match="distances of 0 to 99 are required for 101 columns, got 100"):
        distance_kernel(pattern[None, None], 100)


@pytest.mark.parametrize(("spread", "error"), [(0.5, 0.001), (1.0, 0.014), (1.5, 0.024)])
def test_gaussian_scores_have_the_entropy_of_the_formula(spread: float, error: float) -> None:
    """H = log n - s^2 / 2, within the stated error for n = 20 000 and three deviations of eight rows."""
    n, rows = 20_000, 8
    generator = torch.Generator().manual_seed(0)
    drawn = spread * torch.randn(rows, n, dtype=torch.float64, generator=generator)
    found = entropy(drawn.softmax(-1))
    noise = 3 * float(found.std()) / rows**0.5
    assert abs(float(found.mean()) - (math.log(n) - spread**2 / 2)) < error + noise


def test_a_row_that_leaves_mass_to_a_sink_is_scored_on_the_rest() -> None:
    pattern = causal(torch.rand(9, 9, dtype=torch.float64))
    assert_close(relative_entropy(0.3 * pattern[None, None]), relative_entropy(pattern[None, None]))
    assert not relative_entropy(torch.zeros(1, 1, 9, 9)).any()


def test_scores_are_computed_in_float32_at_least() -> None:
    pattern = causal(torch.rand(19, 19))
    half = pattern.bfloat16()
    assert pattern_scores(half[None, None], 6).dtype == torch.float32
    assert scores(half, 6) == pytest.approx(scores(half.double(), 6), rel=1e-5)
    assert pattern_scores(pattern[None, None].double(), 6).dtype == torch.float64


def test_too_few_repeats_are_refused() -> None:
    with pytest.raises(
        ValueError, match="at least two repeats of 5 tokens after BOS are required, got 6 columns"
    ):
        repeat_scores(torch.zeros(1, 1, 6, 6), 5)


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "no-norm"])
def test_recorded_attention_is_as_dispersed_as_its_scores_are_bounded(name: str) -> None:
    """Veličković et al. 2024: e^-d / n <= a <= e^d / n and log n - H <= d, with d the spread of the row's scores."""
    reads = [Read(f"blocks.1.attn.hook_{part}") for part in ("attn_scores", "pattern")]
    trace = observe(build(name), Batch(some_tokens(n=20)), reads).trace
    scores, pattern = (trace[read] for read in reads)
    for row in range(1, 20):
        seen, weights, n = scores[:, :, row, : row + 1], pattern[:, :, row, : row + 1], row + 1
        spread = (seen.amax(-1) - seen.amin(-1))[..., None]
        assert bool((weights <= spread.exp() / n * (1 + 1e-12)).all())
        assert bool((weights >= (-spread).exp() / n * (1 - 1e-12)).all())
        lacking = math.log(n) - entropy(weights)
        assert bool((lacking <= spread[..., 0] + 1e-12).all())
        assert float(lacking.max()) > 1e-3, "as if nobody looked anywhere in particular"


@pytest.mark.parametrize("m", [10, 1000, 100_000])
def test_needle_ahead_by_the_log_of_the_haystack_keeps_half_the_attention(m: int) -> None:
    row = torch.zeros(m + 1, dtype=torch.float64)
    row[0] = math.log(m)
    weights = row.softmax(-1)
    assert float(weights[0]) == pytest.approx(0.5)
    assert float(entropy(weights)) == pytest.approx(math.log(2) + math.log(m) / 2)
