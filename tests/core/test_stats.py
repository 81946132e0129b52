"""Sums that merge: any split of the rows, in any order, gives the numbers of the whole."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from interp.core.stats import Bootstrap, Means, Moments, Rows, narrowed, poisson_weights
from tests.tolerances import assert_close


def rows(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def merged(parts: list[Tensor]) -> Moments:
    first, *rest = (Moments.of(part) for part in parts)
    for part in rest:
        first = first.merge(part)
    return first


def agree(a: Moments, b: Moments) -> None:
    assert a.n == b.n
    assert_close(a.mean, b.mean)
    assert_close(a.spread, b.spread)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=8), st.integers(0, 99))
def test_any_split_gives_the_moments_of_the_whole(sizes: list[int], seed: int) -> None:
    whole = rows(sum(sizes), seed)
    agree(merged(list(whole.split(sizes))), Moments.of(whole))


@given(st.permutations(range(6)))
def test_the_order_of_the_parts_does_not_matter(order: list[int]) -> None:
    parts = list(rows(12).split(2))
    agree(merged([parts[i] for i in order]), Moments.of(rows(12)))


def test_merging_is_associative() -> None:
    a, b, c = (Moments.of(part) for part in rows(10).split([2, 5, 3]))
    agree(a.merge(b).merge(c), a.merge(b.merge(c)))


def test_moments_are_those_of_a_slow_loop() -> None:
    values = rows(5)
    moments = Moments.of(values)
    for i in range(2):
        for j in range(3):
            column = [float(v) for v in values[:, i, j]]
            mean = sum(column) / 5
            spread = sum((v - mean) ** 2 for v in column)
            assert float(moments.mean[i, j]) == pytest.approx(mean, abs=1e-12)
            assert float(moments.spread[i, j]) == pytest.approx(spread, abs=1e-12)
            error = (spread / 4 / 5) ** 0.5
            low, high = moments.interval()
            assert float(moments.standard_error()[i, j]) == pytest.approx(error, abs=1e-12)
            ends = scipy.stats.t.interval(0.95, 4, mean, error)
            assert (float(low[i, j]), float(high[i, j])) == pytest.approx(ends, abs=1e-9)


def test_a_large_common_offset_costs_no_digits() -> None:
    """The textbook sum of squares would lose all of them."""
    shifted = [part + 1e8 for part in rows(12).split(3)]
    torch.testing.assert_close(merged(shifted).spread, Moments.of(rows(12)).spread, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_half_precision_rows_are_summed_in_float64(dtype: torch.dtype) -> None:
    values = rows(4000).to(dtype)
    moments = Moments.of(values)
    assert moments.mean.dtype == torch.float64
    assert_close(moments.mean, values.double().mean(0))


@pytest.mark.parametrize("n", [3, 4, 8, 60])
def test_the_interval_covers_the_truth_about_95_times_in_100(n: int) -> None:
    samples = torch.randn(n, 20_000, generator=torch.Generator().manual_seed(0))
    low, high = Moments.of(samples).interval()
    covered = float(((low <= 0) & (high >= 0)).double().mean())
    assert abs(covered - 0.95) < 0.006  # four standard errors of the simulation


def test_skewed_numbers_have_an_interval_from_a_number_of_rows_on() -> None:
    samples = rows(6)
    few, enough = (Moments.of(samples).interval(fewest=n) for n in (7, 6))
    assert few[0].isnan().all() and few[1].isnan().all()
    assert torch.equal(torch.stack(enough), torch.stack(Moments.of(samples).interval()))


@pytest.mark.parametrize("n", [4, 8, 34])
def test_interval_of_hits_is_clopper_pearson_and_covers_95_times_in_100(n: int) -> None:
    """Clopper and Pearson 1934: at least .95 for every share, more for most, since counts are whole."""
    hits = (torch.arange(n)[:, None] < torch.arange(n + 1)).double()
    low, high = Moments.of(hits).interval(share=True)
    for k, ends in enumerate(zip(low.tolist(), high.tolist(), strict=True)):
        theirs = scipy.stats.binomtest(k, n).proportion_ci(0.95, "exact")
        assert ends == pytest.approx((theirs.low, theirs.high), abs=1e-12)
        assert ends[1] - ends[0] > 0.05, "no point, also where all are equal"
    shares = np.linspace(0.01, 0.99, 99)
    inside = (low.numpy()[:, None] <= shares) & (shares <= high.numpy()[:, None])
    covered = (scipy.stats.binom.pmf(np.arange(n + 1)[:, None], n, shares) * inside).sum(0)
    assert covered.min() >= 0.95 - 1e-9


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("clusters", [4, 8, 30])
def test_the_bootstraps_interval_covers_the_mean_of_rows_in_clusters(clusters: int, size: int) -> None:
    """Rows of one identity share most of their value: an interval over rows would cover half as often."""
    columns, generator = 4000, torch.Generator().manual_seed(1)
    shared = torch.randn(clusters, 1, columns, generator=generator, dtype=torch.float64)
    own = torch.randn(clusters, size, columns, generator=generator, dtype=torch.float64)
    values, ids = (shared + 0.3 * own).flatten(0, 1), torch.arange(clusters).repeat_interleave(size)
    covered = 0.0
    for seed in range(4):  # the draws of one seed err for all columns alike
        found = Bootstrap(Means, 1000, seed).of({"x": values[:, seed::4]}, ids).moments["x"]
        low, high = found.interval()
        covered += float(((low <= 0) & (high >= 0)).double().mean()) / 4
    assert 0.93 < covered < 0.97
    if size > 1:
        low, high = Moments.of(values).interval()
        assert float(((low <= 0) & (high >= 0)).double().mean()) < 0.85


def test_the_bootstraps_error_is_that_of_a_slow_loop() -> None:
    values, ids = rows(30), torch.arange(5, 35)
    found = Bootstrap(Means, 300, seed=2).of({"x": values}, ids).moments["x"]
    missed, drawn = [], []
    for weights in poisson_weights(ids, 300, seed=2).numpy():
        drawn.append(weights.sum())
        missed.append(
            sum(w * (row - values.numpy().mean(0)) for w, row in zip(weights, values.numpy(), strict=True))
        )
    clusters = min(round(30**2 / np.var(drawn, ddof=1)), 30)
    error = np.sqrt(np.square(missed).mean(0)) / 30 * math.sqrt(clusters / (clusters - 1))
    np.testing.assert_allclose(found.standard_error(), error, rtol=1e-9)


def test_one_row_has_no_standard_error() -> None:
    moments = Moments.of(rows(1))
    assert moments.standard_error().isnan().all()
    assert_close(moments.mean, rows(1)[0])
    for few in (1, 2):
        assert all(bound.isnan().all() for bound in Moments.of(rows(few)).interval())


def test_means_merge_name_by_name() -> None:
    values = {"a": rows(7), "b": rows(7, seed=1)[:, 0]}
    parts = [Means.of({k: v[part] for k, v in values.items()}) for part in (slice(0, 2), slice(2, 7))]
    both = parts[0].merge(parts[1])
    assert both.moments.keys() == {"a", "b"}
    for name, value in values.items():
        agree(both.moments[name], Moments.of(value))


def test_rows_are_kept_in_order() -> None:
    values = {"a": rows(7), "b": torch.arange(7)}
    parts = [
        Rows.of({k: v[part] for k, v in values.items()}) for part in (slice(0, 2), slice(2, 5), slice(5, 7))
    ]
    whole = parts[0].merge(parts[1]).merge(parts[2])
    assert all(torch.equal(whole.rows[name], value) for name, value in values.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_number_that_a_narrower_dtype_would_make_infinite_is_refused(dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    fits = torch.tensor([1.0, -limit, torch.inf, torch.nan], dtype=torch.float64)
    assert torch.equal(narrowed(fits, dtype, "w")[:3], fits[:3].to(dtype)), (
        "what is infinite already stays that"
    )
    with pytest.raises(
        ValueError, match=rf"w: numbers up to {limit:g} fit .*, got {1.5 * limit:g}".replace("+", r"\+")
    ):
        narrowed(torch.tensor([0.0, 1.5 * limit], dtype=torch.float64), dtype, "w")
