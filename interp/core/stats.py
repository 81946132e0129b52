"""Sums that merge: partial results of any split of the data add up to the same numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

Z95 = 1.959963984540054
"""Half-width of a 95 % interval in standard errors of a normal mean."""


@dataclass(frozen=True)
class Moments:
    """Count, mean and summed squared deviation over rows, in float64; `merge` is exact and order-free to rounding.

    Merging uses Chan's pairwise update, so a large common offset costs no digits.
    """

    n: int
    mean: Float[Tensor, "..."]
    spread: Float[Tensor, "..."]

    @classmethod
    def of(cls, rows: Float[Tensor, "b ..."]) -> "Moments":
        """The moments of one batch over its first axis."""
        wide = rows.double()
        mean = wide.mean(0)
        return cls(rows.shape[0], mean, (wide - mean).square().sum(0))

    def merge(self, other: "Moments") -> "Moments":
        """The moments of both batches together."""
        n = self.n + other.n
        step = other.mean - self.mean
        mean = self.mean + step * (other.n / n)
        spread = self.spread + other.spread + step.square() * (self.n * other.n / n)
        return Moments(n, mean, spread)

    def standard_error(self) -> Float[Tensor, "..."]:
        """Standard error of the mean over rows; NaN for a single row."""
        if self.n < 2:
            return torch.full_like(self.mean, torch.nan)
        return (self.spread / (self.n - 1) / self.n).sqrt()

    def interval(self) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
        """A 95 % interval of the mean, normal approximation over rows."""
        half = Z95 * self.standard_error()
        return self.mean - half, self.mean + half

    def cells(self, name: str, dims: Sequence[str]) -> "dict[str, tuple[Sequence[str], Tensor]]":
        """The mean and the ends of its 95 % interval as variables: `name`, `name_low`, `name_high`."""
        low, high = self.interval()
        return {name: (dims, self.mean), f"{name}_low": (dims, low), f"{name}_high": (dims, high)}


@dataclass(frozen=True)
class Means:
    """A reduction: keep only the moments of each named per-row value."""

    moments: Mapping[str, Moments]

    @classmethod
    def of(cls, rows: Mapping[str, Tensor]) -> "Means":
        """The partial result of one batch."""
        return cls({name: Moments.of(value) for name, value in rows.items()})

    def merge(self, other: "Means") -> "Means":
        """Both partial results together."""
        return Means({name: m.merge(other.moments[name]) for name, m in self.moments.items()})


@dataclass(frozen=True)
class Rows:
    """A reduction: keep every row of each named value, in order."""

    rows: Mapping[str, Tensor]

    @classmethod
    def of(cls, rows: Mapping[str, Tensor]) -> "Rows":
        """The partial result of one batch."""
        return cls(dict(rows))

    def merge(self, other: "Rows") -> "Rows":
        """The rows of this part followed by those of the other."""
        return Rows({name: torch.cat((r, other.rows[name])) for name, r in self.rows.items()})
