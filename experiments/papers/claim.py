"""A statement of a paper as a record: where a measured number has to lie if it is so, and where it lay here.

There is one rule for all verdicts. Whoever adds a claim writes down, before measuring, the region in which its number
has to lie: `above(x)`, `below(x)`, or `near(x, within)` for a closed form with its tolerance. The claim holds if the
whole 95 % interval lies in that region, and it does not hold otherwise, also where the interval is merely too wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from interp.core.stats import share_interval, t95

Verdict = Literal["holds", "does not hold", "not testable here"]


@dataclass(frozen=True)
class Region:
    """Where a number has to lie: from `lowest` to `highest`, either of which may be infinite. ValueError if empty.

    Example:
        >>> from experiments.papers import Region
        >>> str(Region(2.5, 3.5)), str(Region(0.0))
        ('2.5 to 3.5', '> 0')
    """

    lowest: float = -math.inf
    highest: float = math.inf

    def __post_init__(self) -> None:
        if not self.lowest < self.highest:
            raise ValueError(f"a region requires lowest < highest, got {self.lowest} and {self.highest}")

    def __str__(self) -> str:
        if math.isinf(self.highest):
            return f"> {self.lowest:g}"
        return f"< {self.highest:g}" if math.isinf(self.lowest) else f"{self.lowest:g} to {self.highest:g}"

    def holds(self, low: float, high: float) -> bool:
        """Whether the whole interval lies inside; an end that is no number lies nowhere."""
        return self.lowest <= low <= high <= self.highest


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
class Measured:
    """A number with the ends of its 95 % interval, and over what it is: rows, seeds, ... ("exact": no interval)."""

    value: float
    low: float
    high: float
    n: int
    over: str

    @classmethod
    def exact(cls, value: float) -> Measured:
        """A number that is no estimate: its interval is itself."""
        return cls(float(value), float(value), float(value), 0, "exact")

    @classmethod
    def mean(cls, values: Sequence[float] | torch.Tensor, over: str) -> Measured:
        """The mean of independent values with Student's t interval; NaN ends for fewer than three.

        Example:
            >>> from experiments.papers import Measured
            >>> Measured.mean([1.0, 2.0, 3.0], "seeds").value
            2.0
        """
        every = torch.as_tensor(values, dtype=torch.float64)
        n, centre = len(every), float(every.mean())
        half = float(t95(n)) * float(every.std()) / n**0.5 if n > 1 else math.nan
        return cls(centre, centre - half, centre + half, n, over)

    @classmethod
    def share(cls, hits: int | float, n: int, over: str) -> Measured:
        """A share of n independent cases with its interval, `share_interval`."""
        value = torch.tensor([hits / n], dtype=torch.float64)
        low, high = share_interval(value, n)
        return cls(float(value), float(low), float(high), n, over)


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
