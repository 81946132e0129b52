"""The one rule of verdicts of published claims, which has two values."""

import math

import pytest

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
    assert Claim("", "", Measured(0.0, low, high, 5, "rows"), region).verdict == verdict


def test_what_is_not_measured_is_not_testable() -> None:
    claim = untestable("a law", "65 %", "a law of scale")
    assert (claim.verdict, claim.note) == ("not testable here", "a law of scale")
