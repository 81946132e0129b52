"""The rule of verdicts, and the intervals of what is measured."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from interp.findings import CLAIMS, Measured, Region, verdict
from interp.findings.claim import Verdict
from interp.findings.facts import correlation

ABOVE, BELOW, NEAR = Region(0.5), Region(highest=-0.1), Region(2.5, 3.5)


@pytest.mark.parametrize(
    ("region", "low", "high", "seeds", "said"),
    [
        (ABOVE, 0.6, 0.9, (), "holds"),
        (ABOVE, 0.5, 0.9, (), "holds"),
        (ABOVE, 0.6, 0.9, (0.7, 0.8, 0.6), "holds"),
        (ABOVE, 0.6, 0.9, (0.7, 0.8, 0.4), "cannot be told"),
        (ABOVE, 0.6, 0.9, (0.7, 0.8, math.nan), "cannot be told"),
        (ABOVE, 0.4, 0.9, (), "cannot be told"),
        (ABOVE, 0.1, 0.5, (), "cannot be told"),
        (ABOVE, 0.1, 0.49, (), "does not hold"),
        (ABOVE, 0.1, 0.4, (0.9, 0.1, 0.1), "does not hold"),
        (BELOW, -0.9, -0.2, (), "holds"),
        (BELOW, -0.9, 0.2, (), "cannot be told"),
        (BELOW, 0.0, 0.2, (), "does not hold"),
        (NEAR, 2.6, 3.4, (), "holds"),
        (NEAR, 2.0, 3.0, (), "cannot be told"),
        (NEAR, 2.0, 4.0, (), "cannot be told"),
        (NEAR, 3.6, 4.0, (), "does not hold"),
        (NEAR, 1.0, 2.0, (), "does not hold"),
        (ABOVE, math.nan, math.nan, (), "cannot be told"),
    ],
)
def test_a_verdict_is_of_the_whole_interval_and_each_seed(
    region: Region, low: float, high: float, seeds: tuple[float, ...], said: Verdict
) -> None:
    measured = Measured(0.0, low, high, 9, "rows", seeds=seeds)
    assert verdict(measured, region) == said


def test_what_was_not_measured_cannot_be_told() -> None:
    assert verdict(None, Region()) == "cannot be told"


@pytest.mark.parametrize("region", [ABOVE, BELOW, NEAR, *(claim.region for claim in CLAIMS.values())])
def test_no_interval_lies_both_inside_and_outside(region: Region) -> None:
    ends = [-math.inf, -3.0, *(x for x in (region.lowest, region.highest) if math.isfinite(x)), 3.0, math.inf]
    for low in ends:
        for high in ends:
            assert not (region.holds(low, high) and region.excludes(low, high))
            if low > high:
                assert not region.holds(low, high) and not region.excludes(low, high)


def test_a_region_says_itself_and_is_not_empty() -> None:
    assert [str(each) for each in (ABOVE, BELOW, NEAR)] == ["> 0.5", "< -0.1", "2.5 to 3.5"]
    for low, high in ((1.0, 1.0), (2.0, 1.0), (math.nan, 1.0)):
        with pytest.raises(ValueError, match="a region requires lowest < highest, got"):
            Region(low, high)


def test_a_mean_has_students_interval() -> None:
    values = [0.3, 0.5, 0.1, 0.9]
    found = Measured.mean(values, "seeds", null=0.2)
    ends = stats.t.interval(0.95, 3, loc=np.mean(values) - 0.2, scale=stats.sem(values))
    np.testing.assert_allclose((found.low, found.high), ends, rtol=1e-9)
    assert (found.n, found.null, found.seeds, found.over) == (4, 0.2, (), "seeds")
    assert found.value == pytest.approx(np.mean(values) - 0.2, rel=1e-12)
    assert Measured.mean(values, "seeds", null=0) == Measured.mean(values, "seeds")


def test_a_mean_of_seeds_is_of_all_rows_and_subtracts_each_rows_own_null() -> None:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(n, generator=generator) for n in (5, 3, 4)]
    nulls = [torch.randn(n, generator=generator) for n in (5, 3, 4)]
    found = Measured.mean(values, "rows", null=nulls, about="L0H0")
    each = (torch.cat(values).double() - torch.cat(nulls).double()).numpy()
    ends = stats.t.interval(0.95, 11, loc=each.mean(), scale=stats.sem(each))
    np.testing.assert_allclose((found.low, found.high), ends, rtol=1e-9)
    np.testing.assert_allclose(found.seeds, [each[:5].mean(), each[5:8].mean(), each[8:].mean()], rtol=1e-12)
    assert found.null == pytest.approx(float(torch.cat(nulls).double().mean()), rel=1e-12)
    assert (found.n, found.about) == (12, "L0H0")


def test_each_value_has_its_null() -> None:
    with pytest.raises(ValueError, match="3 texts gave a number, 2 their null"):
        Measured.mean([torch.ones(3)], "texts", null=[torch.ones(2)])


@pytest.mark.parametrize("values", [[0.0, math.nan, 1.0], [0.0, math.inf, 1.0], torch.ones(0)])
def test_a_mean_is_of_numbers(values: list[float]) -> None:
    with pytest.raises(ValueError, match="not all texts give a number"):
        Measured.mean(values, "texts")


def test_two_values_have_no_interval_and_an_exact_number_is_its_own() -> None:
    assert math.isnan(Measured.mean([1.0, 2.0], "seeds").low)
    exact = Measured.exact(2.0)
    assert (exact.low, exact.high, exact.over) == (2.0, 2.0, "exact")


@pytest.mark.parametrize(("hits", "n"), [(0, 5), (7, 20), (20, 20), (400, 1000)])
def test_a_share_has_clopper_and_pearsons_interval(hits: int, n: int) -> None:
    share = Measured.share(hits, n, "rows", null=0.1)
    known = stats.binomtest(hits, n).proportion_ci(method="exact")
    np.testing.assert_allclose((share.low, share.high), (known.low - 0.1, known.high - 0.1), atol=1e-6)
    assert share.value == pytest.approx(hits / n - 0.1)
    truths = torch.arange(n) < hits
    of_seeds = Measured.share(list(truths.tensor_split(3)), over="rows", null=0.1)
    assert (of_seeds.low, of_seeds.high) == pytest.approx((share.low, share.high), abs=1e-12)
    assert of_seeds.n == n
    np.testing.assert_allclose(
        of_seeds.seeds, [float(part.double().mean()) - 0.1 for part in truths.tensor_split(3)]
    )


def test_the_interval_of_a_share_minus_its_cases_own_null_holds_it_in_95_of_100() -> None:
    generator = torch.Generator().manual_seed(3)
    draws, inside = 400, 0
    for _ in range(draws):
        after, before = (torch.rand(36, generator=generator) < share for share in (0.7, 0.2))
        found = Measured.share(list(after.split(12)), over="edits", null=list(before.split(12)))
        inside += found.low <= 0.5 <= found.high
    assert stats.binomtest(inside, draws, 0.95, alternative="less").pvalue > 1e-3


def test_a_correlation_is_spearmans_with_ties_too() -> None:
    generator = torch.Generator().manual_seed(1)
    one = [torch.randn(n, generator=generator) for n in (12, 9, 15)]
    other = [(x + torch.randn(len(x), generator=generator)).round() for x in one]
    found = correlation(one, other, "edits")
    assert found.value == pytest.approx(
        stats.spearmanr(torch.cat(one), torch.cat(other)).statistic, abs=1e-12
    )
    np.testing.assert_allclose(
        found.seeds, [stats.spearmanr(x, y).statistic for x, y in zip(one, other, strict=True)], atol=1e-12
    )
    assert found.low < found.value < found.high


def test_a_constant_has_no_correlation() -> None:
    with pytest.raises(ValueError, match="all edits are alike in one of the two numbers"):
        correlation([torch.ones(5)] * 3, [torch.arange(5.0)] * 3, "edits")


@pytest.mark.parametrize("rho", [0.0, 0.6])
def test_the_interval_of_a_correlation_holds_it_in_95_of_100(rho: float) -> None:
    generator = torch.Generator().manual_seed(2)
    draws, n = 400, 36
    truth = 6 / math.pi * math.asin(rho / 2)  # Spearman's rho of a normal pair with Pearson's rho
    inside = 0
    for _ in range(draws):
        x, noise = torch.randn(2, n, generator=generator)
        y = rho * x + math.sqrt(1 - rho**2) * noise
        found = correlation([x], [y], "rows")
        inside += found.low <= truth <= found.high
    known = stats.binomtest(inside, draws).proportion_ci(0.999)
    assert known.low <= 0.95 <= known.high
