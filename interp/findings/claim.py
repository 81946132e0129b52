"""A statement about models as a record: what is measured, where the number has to lie, and where it lay in a model.

There is one rule for all verdicts. A claim says, before anything is measured, in which region its number has to lie. It
holds if the whole 95 % interval and the number of each seed lie in that region, it does not hold if the whole interval
lies outside of it, and it cannot be told otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import Finite
from interp.core.stats import share_interval, t95

if TYPE_CHECKING:
    from interp.findings.setting import Setting

Verdict = Literal["holds", "does not hold", "cannot be told"]


@public()
@dataclass(frozen=True)
class Region:
    """Where a number has to lie: from `lowest` to `highest`, either of which may be infinite.

    Raises:
        ValueError: an empty region.

    Example:
        >>> str(interp.findings.Region(2.5, 3.5)), str(interp.findings.Region(0.0))
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

    def excludes(self, low: float, high: float) -> bool:
        """Whether the whole interval lies outside."""
        return low <= high and (high < self.lowest or low > self.highest)


@public()
@dataclass(frozen=True)
class Measured:
    """A number above its null, with the ends of its 95 % interval."""

    value: Finite
    """What was measured, minus its null."""
    low: float
    """NaN where there are too few."""
    high: float
    n: int
    """Over how many it is a mean."""
    over: str
    """Over what: prompts, texts, heads, seeds; "exact": no estimate, the interval is the number."""
    null: Finite = 0.0
    """What would be measured if there were nothing to it."""
    seeds: tuple[float, ...] = ()
    """The same number of the rows of each seed alone."""
    about: str = ""
    """What else was seen, such as the head that was found."""

    @classmethod
    def exact(cls, value: float) -> Measured:
        """A number that is no estimate: its interval is itself."""
        return cls(float(value), float(value), float(value), 0, "exact")

    @classmethod
    def mean(
        cls,
        values: Sequence[float] | Tensor | Sequence[Tensor],
        over: str,
        *,
        null: int | float | Sequence[Tensor] = 0.0,
        about: str = "",
    ) -> Measured:
        """The mean of independent values minus their null, with Student's t interval; NaN ends for fewer than three.

        Args:
            values: the values, or those of each seed.
            over: what each value is of.
            null: what is subtracted: one number, or one for each value, by seed.
            about: what else was seen.

        Raises:
            ValueError: not as many nulls as values, none, or some that are NaN or infinite.

        Example:
            >>> interp.findings.Measured.mean([1.0, 2.0, 3.0], "seeds").value
            2.0
        """
        by_seed = _by_seed(values)
        nulls = _nulls(null, by_seed)
        if [*map(len, by_seed)] != [*map(len, nulls)]:
            raise ValueError(
                f"{len(torch.cat(by_seed))} {over} gave a number, {len(torch.cat(nulls))} their null"
            )
        each = torch.cat([value - chance for value, chance in zip(by_seed, nulls, strict=True)])
        if not len(each) or not bool(each.isfinite().all()):
            raise ValueError(f"not all {over} give a number")
        n, centre = len(each), float(each.mean())
        half = float(t95(n)) * float(each.std()) / n**0.5 if n > 1 else math.nan
        seeds = [float((value - chance).mean()) for value, chance in zip(by_seed, nulls, strict=True)]
        return cls(
            centre, centre - half, centre + half, n, over, float(torch.cat(nulls).mean()),
            tuple(seeds) if len(seeds) > 1 else (), about,
        )  # fmt: skip

    @classmethod
    def share(
        cls,
        hits: int | float | Sequence[Tensor],
        n: int | None = None,
        over: str = "",
        *,
        null: int | float | Sequence[Tensor] = 0.0,
        about: str = "",
    ) -> Measured:
        """A share of independent cases minus its null, with the interval of `share_interval`.

        Args:
            hits: how many of `n` cases; or for each seed the truths, or numbers from 0 to 1, of its cases.
            n: number of cases, where `hits` is a number.
            over: what each case is.
            null: the share that chance would give; or for each seed that of its cases, such as before an edit.
            about: what else was seen.

        Example:
            >>> found = interp.findings.Measured.share(7, 20, "rows")
            >>> found.value, round(found.low, 3), round(found.high, 3)
            (0.35, 0.154, 0.592)
        """
        if isinstance(hits, int | float):
            assert n is not None and isinstance(null, int | float)
            mean = torch.tensor([hits / n], dtype=torch.float64)
            low, high = (float(end) - null for end in share_interval(mean, n))
            return cls(float(mean) - null, low, high, n, over, null, (), about)
        values = _by_seed(hits)
        chance = _nulls(null, values)
        gaps = [value - other for value, other in zip(values, chance, strict=True)]
        seeds = tuple(float(each.mean()) for each in gaps)
        lowest, width = (-null, 1.0) if isinstance(null, int | float) else (-1.0, 2.0)  # of a gap
        inside = (torch.cat(gaps) - lowest) / width
        variance = inside.var(correction=0)[None]
        low, high = (
            lowest + width * float(end) for end in share_interval(inside.mean()[None], len(inside), variance)
        )
        centre = float(torch.cat(gaps).mean())
        return cls(centre, low, high, len(inside), over, float(torch.cat(chance).mean()), seeds, about)


def _by_seed(values: Sequence[float] | Tensor | Sequence[Tensor]) -> list[Float[Tensor, "_"]]:
    """Values by seed, in float64 on the host; numbers alone are those of one seed."""
    if isinstance(values, Tensor) or not isinstance(values[0], Tensor):
        return [torch.as_tensor(values, dtype=torch.float64).cpu()]
    return [_number(value) for value in values if isinstance(value, Tensor)]


def _nulls(
    null: int | float | Sequence[Tensor], values: Sequence[Float[Tensor, "_"]]
) -> list[Float[Tensor, "_"]]:
    """What is subtracted from the values of each seed."""
    return (
        [torch.full_like(each, null) for each in values] if isinstance(null, int | float) else _by_seed(null)
    )


def _number(value: Shaped[Tensor, "n"]) -> Float[Tensor, "n"]:
    return value.detach().double().cpu()


@public()
@dataclass(frozen=True)
class Claim:
    """A statement that can be asked of a decoder, the region that its number has to lie in, and its measurement."""

    text: str
    """What is claimed, in a sentence."""
    source: str
    """The paper that says so."""
    measured: str
    """What number is measured."""
    null: str
    """What is subtracted: the number that stands for nothing to it."""
    region: Region
    """Where the number minus its null has to lie."""
    unit: str
    """Of the number."""
    measure: Callable[[Setting], Measured]
    """The measurement. ValueError, KeyError or AttributeError, in words: the model lacks what it is about."""


@public()
def verdict(measured: Measured | None, region: Region) -> Verdict:
    """The one rule: inside with all seeds, outside, or neither.

    Args:
        measured: the number with its interval; None where it could not be measured.
        region: where the number has to lie.

    Returns:
        The verdict.

    Example:
        >>> from interp.findings import Measured, Region, verdict
        >>> [verdict(Measured.share(hits, 20, "rows"), Region(0.5)) for hits in (1, 10, 20)]
        ['does not hold', 'cannot be told', 'holds']
    """
    if measured is None:
        return "cannot be told"
    if region.holds(measured.low, measured.high) and all(region.holds(seed, seed) for seed in measured.seeds):
        return "holds"
    return "does not hold" if region.excludes(measured.low, measured.high) else "cannot be told"
