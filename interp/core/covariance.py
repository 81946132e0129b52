"""Covariances and correlations of numbers, over any split of the observations."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from interp.core.named import pooled

ROUNDING = 16 * torch.finfo(torch.float64).eps
"""A deviation below this share of the mean is rounding: such a column is constant."""


@dataclass(frozen=True, eq=False)
class Covariance:
    """Means and products of deviations of two sets of columns, in float64; `merge` is order-free to rounding.

    Chan, Golub and LeVeque 1979: S = S_1 + S_2 + (n_1 n_2 / n) (m_2 - m_1)(m_2 - m_1)', so a large common offset costs
    no digits. An observation with a NaN on either side is left out. Memory: 8 f g bytes.
    """

    n: Int[Tensor, ""]
    """Observations without NaN."""
    mean: Float[Tensor, "f"]
    mean_other: Float[Tensor, "g"]
    spread: Float[Tensor, "f"]
    """Summed squared deviation of each column."""
    spread_other: Float[Tensor, "g"]
    scatter: Float[Tensor, "f g"]
    """Summed products of the deviations."""

    @classmethod
    def of(cls, x: Shaped[Tensor, "n f"], y: Shaped[Tensor, "n g"] | None = None) -> "Covariance":
        """The covariance of the columns of x with those of y; with each other if y is None."""
        y = x if y is None else y
        complete = ~(x.isnan().any(1) | y.isnan().any(1))
        complete_rows = complete.nonzero()[:, 0]
        x, y = x[complete_rows].double(), y[complete_rows].double()
        mean, mean_other = (z.sum(0) / max(len(z), 1) for z in (x, y))
        x, y = x - mean, y - mean_other
        n = complete.sum()
        return cls(n, mean, mean_other, x.square().sum(0), y.square().sum(0), x.mT @ y)

    def merge(self, other: "Covariance") -> "Covariance":
        """The covariance over the observations of both parts."""
        n = self.n + other.n
        share = other.n / n.clamp_min(1).double()
        weight = self.n * share
        step, step_other = other.mean - self.mean, other.mean_other - self.mean_other
        return Covariance(
            n,
            self.mean + share * step,
            self.mean_other + share * step_other,
            self.spread + other.spread + weight * step.square(),
            self.spread_other + other.spread_other + weight * step_other.square(),
            self.scatter + other.scatter + weight * step[:, None] * step_other,
        )

    def covariance(self) -> Float[Tensor, "f g"]:
        """Unbiased: divided by n - 1; NaN for fewer than two observations."""
        return (self.scatter / (self.n - 1).clamp_min(1)).masked_fill(self.n < 2, torch.nan)

    def correlation(self) -> Float[Tensor, "f g"]:
        """Pearson's r of every pair of columns, in [-1, 1]; NaN where a column is constant."""
        sides = ((self.spread, self.mean), (self.spread_other, self.mean_other))
        x, y = (torch.where(s > self.n * (ROUNDING * m).square(), s, torch.nan) for s, m in sides)
        return (self.scatter / (x.sqrt()[:, None] * y.sqrt())).clamp(-1, 1)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the covariance, by name."""
        return dict(vars(self))

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> "Covariance":
        """The covariance that was saved as these `tensors`."""
        return cls(**tensors)


@dataclass(frozen=True)
class Covariances:
    """A reduction: how the last axis of `value` varies with that of `other`, or with itself.

    Observations are all other axes: rows, and positions if there are any. NaN on either side: not an observation.

    Raises:
        ValueError: a value that is missing or has no last axis besides its rows, unequal observations.

    Example:
        >>> Covariances("x").of({"x": torch.randn(9, 4, 3)}).correlation().shape
        torch.Size([3, 3])
    """

    value: str
    other: str | None = None

    def of(self, values: Mapping[str, Tensor], rows: Int[Tensor, "n"] | None = None) -> Covariance:
        """The covariance of one batch."""
        x = pooled(values, self.value, 1)
        y = x if self.other is None else pooled(values, self.other, 1)
        if len(x) != len(y):
            raise ValueError(
                f"as many observations of {self.value} as of {self.other} are required, got {len(x)} and {len(y)}"
            )
        return Covariance.of(x, y)

    def load(self, tensors: Mapping[str, Tensor]) -> Covariance:
        """The covariance that was saved as these `tensors`."""
        return Covariance.load(tensors)
