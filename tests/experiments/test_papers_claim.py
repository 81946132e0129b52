"""The one rule of verdicts, and the intervals of what is measured."""

import math

import numpy as np
import pytest
from scipy import stats

from experiments.papers import Claim, Measured, Region
from experiments.papers.claim import above, below, near, untestable


@pytest.mark.parametrize(
    ("region", "low", "high", "verdict"),
    [
        (above(0.0), 0.1, 0.2, "holds"),
        (above(0.0), -0.1, 0.2, "does not hold"),
        (below(1.0), 0.5, 0.9, "holds"),
        (below(1.0), 0.5, 1.1, "does not hold"),
        (near(3.0, 0.1), 2.95, 3.05, "holds"),
        (near(3.0, 0.1), 2.0, 4.0, "does not hold"),
        (near(3.0, 0.1), 3.2, 3.3, "does not hold"),
        (above(0.0), math.nan, math.nan, "does not hold"),
    ],
)
def test_a_claim_holds_where_its_whole_interval_lies_in_the_region(
    region: Region, low: float, high: float, verdict: str
) -> None:
    assert Claim("", "", Measured((low + high) / 2, low, high, 5, "rows"), region).verdict == verdict


def test_what_is_not_measured_is_not_testable() -> None:
    claim = untestable("a law", "65 %", "a law of scale")
    assert (claim.verdict, claim.note) == ("not testable here", "a law of scale")


def test_a_region_says_itself_and_is_not_empty() -> None:
    assert [str(each) for each in (above(0.5), below(-1.0), near(3.0, 0.5))] == [
        "> 0.5",
        "< -1",
        "2.5 to 3.5",
    ]
    with pytest.raises(ValueError, match=r"a region requires lowest < highest, got 1\.0 and 1\.0"):
        Region(1.0, 1.0)


def test_means_have_students_interval_and_shares_clopper_and_pearsons() -> None:
    values = [0.3, 0.5, 0.1, 0.9]
    found = Measured.mean(values, "seeds")
    ends = stats.t.interval(0.95, 3, loc=np.mean(values), scale=stats.sem(values))
    np.testing.assert_allclose((found.low, found.high), ends, rtol=1e-9)
    share = Measured.share(7, 20, "rows")
    known = stats.binomtest(7, 20).proportion_ci(method="exact")
    np.testing.assert_allclose((share.low, share.high), (known.low, known.high), rtol=1e-6)
    assert math.isnan(Measured.mean([1.0, 2.0], "seeds").low)
    exact = Measured.exact(2.0)
    assert (exact.low, exact.high, exact.over) == (2.0, 2.0, "exact")
