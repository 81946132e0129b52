"""95 % intervals against scipy's, and the equations they solve."""

import numpy as np
import pytest
import torch
from scipy import stats

from experiments.bench.coverage_shares import SHARES
from interp.core.stats import POSITIVE, Z95, Moments, share_interval, t95, wilson


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


def test_students_quantile_is_that_of_scipy_and_two_rows_have_none() -> None:
    n = torch.tensor([[1.0, 2.0, 3.0], [3.5, 16.0, 1e6]])
    expected = torch.from_numpy(stats.t.ppf(0.975, n.double().numpy() - 1))
    expected[0, :2] = torch.nan
    torch.testing.assert_close(t95(n), expected, equal_nan=True)
    assert float(t95(1e9)) == pytest.approx(Z95, abs=1e-6)


@pytest.mark.parametrize("n", [1, 3, 8, 33, 400])
def test_interval_of_hits_is_clopper_pearson_and_at_most_where_none(n: int) -> None:
    for hits in {0, 1, n // 2, n - 1, n}:
        expected = stats.binomtest(hits, n).proportion_ci(0.95, method="exact")
        found = share_interval(torch.tensor(hits / n, dtype=torch.float64), n)
        assert [float(end) for end in found] == pytest.approx(list(expected), abs=1e-10)
    low, high = share_interval(torch.zeros(1), n)
    assert float(low) == 0 and float(high) == pytest.approx(1 - 0.025 ** (1 / n)), "none in 2.5 % of samples"


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e-12, 1e-30])
def test_ends_are_quantiles_of_the_beta_law_of_a_simplex_weighted_mean(scale: float) -> None:
    """Oracle: the moments of Dirichlet weights, one by one (their covariance is (diag(p) - p p^T) / (n + 2))."""
    rows = torch.tensor([0.9, 0.2, 0.0, 0.05, 0.3], dtype=torch.float64) * scale
    n = len(rows)
    p = torch.full((n + 1,), 1 / (n + 1), dtype=torch.float64)
    spread = (p.diag() - p[:, None] * p) / (n + 2)
    found = Moments.of(rows).interval(share=True)
    for end, far, quantile in zip(found, (0.0, 1.0), (0.025, 0.975), strict=True):
        points = torch.cat((rows, torch.tensor([far]))).double()
        mean, variance = float(points @ p), float(points @ spread @ points)
        size = mean * (1 - mean) / variance - 1
        expected = stats.beta.ppf(quantile, mean * size, (1 - mean) * size)
        assert float(end) == pytest.approx(expected, rel=1e-6)


def test_interval_of_a_share_is_known_and_in_range_around_its_mean() -> None:
    draw = torch.Generator().manual_seed(0)
    kinds = [torch.rand(3, 500, generator=draw), torch.rand(3, 500, generator=draw) ** 40,
             1 - torch.rand(3, 500, generator=draw) ** 9, (torch.rand(3, 500, generator=draw) < 0.1).double(),
             torch.full((3, 500), 1e-300), torch.full((3, 500), 0.3), torch.ones(3, 500)]  # fmt: skip
    for rows in kinds:
        for some in (rows[:1], rows[:2], rows):
            moments = Moments.of(some)
            low, high = moments.interval(share=True)
            assert bool((low >= 0).all() and (low <= moments.mean).all())
            assert bool((high <= 1).all() and (high >= moments.mean).all())


def test_means_that_no_shares_can_have_keep_students_interval() -> None:
    rows = torch.tensor([[0.5, 5.0], [0.7, 7.0], [0.9, 8.0]]).double()
    moments = Moments.of(rows)
    low, high = moments.interval(share=True)
    student_low, student_high = moments.interval()
    assert float(low[1]) == float(student_low[1]) and float(high[1]) == float(student_high[1])
    assert float(high[0]) < 1 < float(student_high[0]) or float(high[0]) != float(student_high[0])


def test_an_interval_is_cut_at_the_range_of_its_rows() -> None:
    moments = Moments.of(torch.tensor([0.0, 0.0, 3.0]).double())
    assert float(moments.interval()[0]) < 0 == float(moments.interval(within=POSITIVE)[0])
    assert float(moments.interval(within=POSITIVE)[1]) == float(moments.interval()[1])


@pytest.mark.parametrize("n", [3, 8, 16, 32])
@pytest.mark.parametrize("name", sorted(SHARES))
def test_interval_of_a_share_holds_its_mean_95_times_in_100_however_skewed(name: str, n: int) -> None:
    """Of 4 000 draws, fewer are held by chance once in 10 000 times where it is 95 in 100: that is the allowance."""
    draws, law = 4000, SHARES[name]
    rows = law.rows(np.random.default_rng(n), (n, draws))
    low, high = Moments.of(torch.from_numpy(rows)).interval(share=True)
    held = int(((low <= law.mean) & (law.mean <= high)).sum())
    assert held >= stats.binom.ppf(1e-4, draws, 0.95)
