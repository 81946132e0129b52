"""A statement of a paper as a record: where a measured number has to lie if it is so, and where it lay here.

There is one rule for all verdicts. Whoever adds a claim writes down, before measuring, the region in which its number
has to lie: `above(x)`, `below(x)`, or `near(x, within)` for a closed form with its tolerance. The claim holds if the
whole 95 % interval lies in that region, and it does not hold otherwise, also where the interval is merely too wide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from interp.findings import Measured as Measured, Region as Region

Verdict = Literal["holds", "does not hold", "not testable here"]


def above(value: float) -> Region:
    """The numbers from this one on."""
    return Region(lowest=value)


def below(value: float) -> Region:
    """The numbers up to this one."""
    return Region(highest=value)


def near(value: float, within: float) -> Region:
    """A closed form and its tolerance."""
    return Region(value - within, value + within)


@dataclass(frozen=True)
class Claim:
    """One statement of a paper, where its number has to lie, and where it lay here.

    Example:
        >>> from experiments.papers import Claim, Measured, Region
        >>> slope = Measured(3.0, 2.99, 3.01, 5, "seeds")
        >>> Claim("one layer cubes the residual", "slope 3", slope, Region(2.95, 3.05)).verdict
        'holds'
    """

    text: str
    """What is said, in terms of the number that is measured."""
    published: str
    """The paper's own number or finding, or the closed form."""
    ours: Measured | None
    """What was measured here; None = it cannot be."""
    region: Region
    """Where the number has to lie if it is so; written down before it is measured."""
    unit: str = "1"
    """Of the number."""
    note: str = ""
    """What differs from the paper, or why it cannot be tested here."""

    @property
    def verdict(self) -> Verdict:
        """The one rule: the whole interval lies in the region, or the claim does not hold."""
        if self.ours is None:
            return "not testable here"
        return "holds" if self.region.holds(self.ours.low, self.ours.high) else "does not hold"


def untestable(text: str, published: str, why: str) -> Claim:
    """A claim that nothing on this machine can test."""
    return Claim(text, published, None, Region(), note=why)
