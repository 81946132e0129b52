"""What goes together: covariances of numbers and co-occurrences of events, over any split of the observations."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from interp.core.named import pooled

EXACT = 2**24
"""Up to so many ones add up exactly in float32."""
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
        """Of the columns of x with those of y; with each other if y is None."""
        y = x if y is None else y
        whole = ~(x.isnan().any(1) | y.isnan().any(1))
        x, y = x[whole].double(), y[whole].double()
        mean, mean_other = (z.sum(0) / max(len(z), 1) for z in (x, y))
        x, y = x - mean, y - mean_other
        n = whole.sum()
        return cls(n, mean, mean_other, x.square().sum(0), y.square().sum(0), x.mT @ y)

    def merge(self, other: "Covariance") -> "Covariance":
        """Of the observations of both parts."""
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
        """Everything it holds, by name."""
        return dict(vars(self))

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> "Covariance":
        """The covariance whose `tensors` these are."""
        return cls(**tensors)


@dataclass(frozen=True, eq=False)
class CoOccurrence:
    """How often two features are active in the same observation: A'B of zeros and ones, as exact integers.

    Memory: 8 f g bytes.
    """

    n: Int[Tensor, ""]
    """Observations."""
    active: Int[Tensor, "f"]
    """Those in which each feature is active."""
    active_other: Int[Tensor, "g"]
    together: Int[Tensor, "f g"]

    @classmethod
    def of(cls, a: Bool[Tensor, "n f"], b: Bool[Tensor, "n g"] | None = None) -> "CoOccurrence":
        """Of the features in a with those in b; with each other if b is None."""
        b = a if b is None else b
        chunks = zip(a.split(EXACT), b.split(EXACT), strict=True)
        together = torch.stack([(x.float().mT @ y.float()).long() for x, y in chunks]).sum(0)
        return cls(torch.tensor(len(a), device=a.device), a.sum(0), b.sum(0), together)

    def merge(self, other: "CoOccurrence") -> "CoOccurrence":
        """Of the observations of both parts."""
        return CoOccurrence(
            self.n + other.n,
            self.active + other.active,
            self.active_other + other.active_other,
            self.together + other.together,
        )

    def phi(self) -> Float[Tensor, "f g"]:
        """Pearson's r of the two indicators, (n n_ij - n_i n_j) / sqrt(n_i (n - n_i) n_j (n - n_j)).

        0 for independent features, 1 for features that always come together; NaN if one is never or always active.
        """
        a, b = self.active.double(), self.active_other.double()
        spread, spread_other = a * (self.n - a), b * (self.n - b)
        return (self.n * self.together - a[:, None] * b) / (spread.sqrt()[:, None] * spread_other.sqrt())

    def pmi(self) -> Float[Tensor, "f g"]:
        """Pointwise mutual information log(n n_ij / (n_i n_j)) in nats (Church and Hanks 1990).

        0 for independent features, -inf for features never active together, NaN if one is never active at all.
        """
        expected = self.active.double()[:, None] * self.active_other.double()
        return (self.n * self.together.double() / expected).log()

    def tensors(self) -> dict[str, Tensor]:
        """Everything it holds, by name."""
        return dict(vars(self))

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> "CoOccurrence":
        """The counts whose `tensors` these are."""
        return cls(**tensors)


@dataclass(frozen=True)
class Covariances:
    """A reduction: how the last axis of `value` varies with that of `other`, or with itself.

    Observations are all other axes: rows, and positions if there are any. NaN on either side: not an observation.
    Errors: ValueError for a value that is missing or has no last axis besides its rows, unequal observations.

    Example:
        >>> Covariances("x").of({"x": torch.randn(9, 4, 3)}).correlation().shape
        torch.Size([3, 3])
    """

    value: str
    other: str | None = None

    def of(self, values: Mapping[str, Tensor], rows: Int[Tensor, "n"] | None = None) -> Covariance:
        """The covariance of one batch."""
        return Covariance.of(*_pair(values, self.value, self.other))

    def load(self, tensors: Mapping[str, Tensor]) -> Covariance:
        """The covariance whose `tensors` these are."""
        return Covariance.load(tensors)


@dataclass(frozen=True)
class CoOccurrences:
    """A reduction: how often features of `value` and of `other` (or of `value` again) are above `threshold` together.

    Features are the last axis, observations all others. NaN on either side: no observation. Errors: as `Covariances`.

    Example:
        >>> CoOccurrences("f").of({"f": torch.tensor([[1.0, 2.0], [0.0, 3.0]])}).together.tolist()
        [[1, 1], [1, 2]]
    """

    value: str
    other: str | None = None
    threshold: float = 0.0

    def of(self, values: Mapping[str, Tensor], rows: Int[Tensor, "n"] | None = None) -> CoOccurrence:
        """The counts of one batch."""
        a, b = _pair(values, self.value, self.other)
        whole = ~(a.isnan().any(1) | b.isnan().any(1))
        return CoOccurrence.of(a[whole] > self.threshold, b[whole] > self.threshold)

    def load(self, tensors: Mapping[str, Tensor]) -> CoOccurrence:
        """The counts whose `tensors` these are."""
        return CoOccurrence.load(tensors)


def _pair(values: Mapping[str, Tensor], value: str, other: str | None) -> tuple[Tensor, Tensor]:
    x = pooled(values, value, 1)
    y = x if other is None else pooled(values, other, 1)
    if len(x) != len(y):
        raise ValueError(
            f"as many observations of {value} as of {other} are required, got {len(x)} and {len(y)}"
        )
    return x, y
