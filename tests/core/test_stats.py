"""Sums that merge: any split of the rows, in any order, gives the numbers of the whole."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from interp.core.resampling import poisson_weights
from interp.core.stats import Z95, Bootstrap, Means, Moments, Rows, wilson
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
            assert float(low[i, j]) == pytest.approx(mean - 1.96 * error, abs=1e-4)
            assert float(high[i, j]) == pytest.approx(mean + 1.96 * error, abs=1e-4)


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


def test_the_interval_covers_the_truth_about_95_times_in_100() -> None:
    samples = torch.randn(60, 4000, generator=torch.Generator().manual_seed(0))
    low, high = Moments.of(samples).interval()
    covered = float(((low <= 0) & (high >= 0)).double().mean())
    assert 0.93 < covered < 0.96


def test_the_bootstraps_interval_holds_the_middle_95_percent_of_its_replicates() -> None:
    values, ids = rows(30), torch.arange(5, 35)
    merged = Bootstrap(Means, 300, seed=2).of({"x": values}, ids).moments["x"]
    means = []
    for weights in poisson_weights(ids, 300, seed=2).numpy():
        means.append(sum(w * row for w, row in zip(weights, values.numpy(), strict=True)) / weights.sum())
    for found, percent in zip(merged.interval(), (2.5, 97.5), strict=True):
        np.testing.assert_allclose(found, np.percentile(means, percent, axis=0), rtol=1e-9)
    np.testing.assert_allclose(merged.standard_error(), np.std(means, axis=0, ddof=1), rtol=1e-9)


def test_one_row_has_no_standard_error() -> None:
    moments = Moments.of(rows(1))
    assert moments.standard_error().isnan().all()
    assert all(bound.isnan().all() for bound in moments.interval())
    assert_close(moments.mean, rows(1)[0])


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


@pytest.mark.parametrize(("successes", "n"), [(0, 5), (3, 7), (9, 9), (40, 90)])
def test_wilsons_interval_is_that_of_scipy(successes: int, n: int) -> None:
    expected = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    found = wilson(torch.tensor([successes / n], dtype=torch.float64).double(), torch.tensor([n]))
    assert [float(end) for end in found] == pytest.approx(list(expected), abs=1e-12)


@pytest.mark.parametrize("count", [1, 7, 200])
def test_wilsons_ends_are_where_the_score_test_stops_rejecting(count: int) -> None:
    """Both ends p solve (share - p)^2 = z^2 p (1 - p) / n, Wilson 1927."""
    share = torch.linspace(0, 1, 11, dtype=torch.float64)
    for end in wilson(share, count):
        torch.testing.assert_close(
            (share - end).square(), Z95**2 * end * (1 - end) / count, rtol=0, atol=1e-12
        )
    low, high = wilson(share, count)
    assert bool((low <= share).all()) and bool((share <= high).all())
    assert float(low[0]) == 0 and float(high[-1]) == 1


def test_wilsons_interval_of_nothing_is_everything() -> None:
    low, high = wilson(torch.zeros(2), torch.tensor([0, 5]))
    assert (float(low[0]), float(high[0])) == (0.0, 1.0) and float(high[1]) < 0.5
