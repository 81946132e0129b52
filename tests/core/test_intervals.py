"""95 % intervals against scipy's, and the equations they solve."""

import pytest
import torch
from scipy import stats

from interp.core.stats import Z95, t95, wilson


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
