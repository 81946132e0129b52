"""Means, intervals, p-values and random draws whose results do not depend on how the data were split into batches.

A *reduction* turns the per-row values of one batch into a *partial* result (`of`); partial results are merged.
`tensors` and `load` save and restore a partial result, bit for bit, for files and other processes.

95 % intervals are Student's t for means and Gaffke's for shares; each function says from how many rows on it is valid.
`experiments/bench/coverage.py` measures their coverage on values of trained models,
`experiments/bench/coverage_shares.py` on shares of known distributions, next to other intervals.

A bootstrap or a permutation test over a corpus must not depend on how the rows are batched, ordered or distributed over
machines. So there is no generator with a state: draw j of row r is output j of a SplitMix64 generator whose seed is
output r of SplitMix64(seed), and each output can be computed by itself (Steele, Lea and Flood, "Fast Splittable
Pseudorandom Number Generators", OOPSLA 2014, figure 17, with the constants of Vigna's splitmix64.c). Integer arithmetic
gives the same bits on every device. Two uses of one seed on the same rows are not independent of each other.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp, factorial, inf
from typing import ClassVar, Protocol, TypeVar, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.transfers import to_device, to_host


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor holds NaN or infinity, judged by their sums; False also if a sum of finite numbers overflows.

    Example:
        >>> all_finite([torch.ones(3), torch.tensor([1.0, torch.nan])])
        False
    """
    return bool(finite(tensors))


def finite(tensors: Iterable[Tensor]) -> Bool[Tensor, ""]:
    """`all_finite` as a tensor on the device, for callers that do not want to wait for it yet."""
    floats = [x for x in tensors if x.is_floating_point()]
    sums = [x.sum(dtype=None if x.dtype in WIDE else torch.float32).to(floats[0].device) for x in floats]
    return torch.stack([total.float() for total in sums]).isfinite().all() if sums else torch.tensor(True)


def upcast(x: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return x if x.dtype in WIDE else x.to(torch.promote_types(x.dtype, torch.float32))


def narrowed(x: Tensor, dtype: torch.dtype, what: str) -> Tensor:
    """The tensor rounded to a dtype that holds its finite numbers; ValueError, naming it, where one is too large.

    Example:
        >>> narrowed(torch.tensor([1e5]), torch.bfloat16, "weights").isfinite().all()
        tensor(True)
    """
    rounded = x.to(dtype)
    if torch.finfo(dtype).max < torch.finfo(x.dtype).max and not all_finite([rounded]):
        lost = rounded.isinf() & x.isfinite()
        if bool(lost.any()):
            raise ValueError(
                f"{what}: numbers up to {torch.finfo(dtype).max:g} fit {str(dtype).removeprefix('torch.')}, got "
                f"{float(x[lost].abs().max()):g}: take bfloat16 or float32"
            )
    return rounded


WIDE = (torch.float32, torch.float64)
"""The dtypes that hold float32."""


FEWEST = 3
"""The fewest rows for an interval of a mean: with two, Student's t is 12.7 standard errors, too wide to be of use."""
FEWEST_MASSES = 64
"""The fewest rows for an interval of numbers between two ends where most rows lie near one of them: attention masses,
entropies.
"""
FEWEST_LOSSES = 256
"""The fewest rows for an interval of losses, log-probabilities and divergences: most rows lie near zero, some far
above.
"""
FEWEST_PROBABILITIES = 512
"""The fewest rows for an interval of probabilities of one answer: they are near zero in most rows, and a few rows
make the mean.
"""
ACCEPTED_MISS = 0.05
"""Error of an integral, as a share of what it integrates, above which a result says that it did not converge."""
ANYWHERE, POSITIVE, SIGNED = (-inf, inf), (0.0, inf), (-1.0, 1.0)
"""Ranges of numbers: any; losses, divergences, entropies and sizes; cosines, correlations and differences of shares."""
Z95 = 1.959963984540054
"""Half-width of a 95 % interval, in standard errors, of a normal mean with known variance."""


def t95(n: Real[Tensor, "..."] | int | float, fewest: int = FEWEST) -> Float[Tensor, "..."]:
    """Half-width of a 95 % interval of the mean of `n` rows, in standard errors (Student 1908); NaN below `fewest`.

    n need not be whole: with clusters it is the effective number of rows.

    Example:
        >>> [round(float(x), 3) for x in t95(torch.tensor([2.0, 4.0, 1001.0]))]
        [nan, 3.182, 1.962]
    """
    from scipy.special import stdtrit

    rows = torch.as_tensor(n, dtype=torch.float64)
    half_widths = torch.as_tensor(stdtrit((rows - 1).clamp_min(1.0).cpu().numpy(), 0.975)).to(rows)
    return half_widths.masked_fill(rows < fewest, torch.nan)


def over(rows: str, fewest: int = FEWEST) -> str:
    """Words about an interval: over which rows it is taken, and from how many of them on.

    Example:
        >>> over("prompts", 64)
        '95 % over prompts, if at least 64'
    """
    return f"95 % over {rows}" + (f", {if_at_least(fewest)}" if fewest > FEWEST else "")


def if_at_least(fewest: int) -> str:
    """Words for the fewest rows that an interval requires."""
    return f"if at least {fewest}"


def wilson(
    share: Float[Tensor, "*n"], n: Real[Tensor, "*n"] | int
) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """Wilson's 95 % interval of a share of `n` independent cases (Wilson 1927), inside [0, 1] also at its ends.

    0 and 1 where there are no cases.

    Example:
        >>> low, high = wilson(torch.tensor([1.0]), 200)
        >>> 0.98 < float(low) < 0.982 and float(high) == 1
        True
    """
    count = torch.as_tensor(n, dtype=share.dtype, device=share.device)
    z2 = Z95**2 / count

    def low(share: Tensor) -> Tensor:  # the ends' product is share^2 / (1 + z2): exactly 0 at 0
        root = Z95 * (share * (1 - share) / count + z2 / (4 * count)).sqrt()
        return (share.square() / (share + z2 / 2 + root)).masked_fill(count == 0, 0.0)

    return low(share), 1 - low(1 - share)


def share_interval(
    mean: Float[Tensor, "*n"],
    n: Real[Tensor, "*#n"] | int,
    variance: Float[Tensor, "*n"] | None = None,
) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """A 95 % interval of the mean of `n` rows between 0 and 1, inside [0, 1], valid for skewed rows as well.

    Gaffke's bound (Gaffke 2005; Learned-Miller and Thomas 2020): the rows and one more, at 0 or at 1, get weights drawn
    uniformly from the simplex, and the end of the interval is a quantile of the weighted mean. The distribution of that
    mean is approximated by the Beta distribution with its mean and variance. For rows that are 0 or 1 this is exact,
    and gives the interval of Clopper and Pearson: if no row is 1, `high` is the share at which that happens in 2.5 % of
    samples.

    If `low` is 0 the statement is "at most `high`", at 97.5 %. Rows that hardly differ get a wide interval too, since a
    few rows cannot exclude rare rows with other values. The ends are 0 and 1 without rows, and NaN for a mean of NaN.

    Args:
        mean: mean of the rows.
        n: number of rows, or of clusters of rows; need not be whole.
        variance: mean squared deviation of the rows (divided by n); None: mean (1 - mean), for rows that are 0 or 1.

    Example:
        >>> low, high = share_interval(torch.zeros(1), 8)
        >>> float(low), round(float(high), 4), round(1 - 0.025 ** (1 / 8), 4)
        (0.0, 0.3694, 0.3694)
    """
    tensors = {"m": mean, "n": torch.as_tensor(n)} | ({} if variance is None else {"v": variance})
    on_host = {name: value.double() for name, value in to_host(tensors).items()}
    m, count = torch.broadcast_tensors(on_host["m"].clamp(0.0, 1.0), on_host["n"])
    most = m * (1 - m)
    spread = torch.minimum(on_host["v"], most) if "v" in on_host else most
    low, high = _lower_end(m, count, spread), 1 - _lower_end(1 - m, count, spread)
    return torch.minimum(low, m).to(mean), torch.maximum(high, m).to(mean)


SHARE_ROUNDING = 1e-2
"""How far half precision may round a mean of shares outside [0, 1]; means further outside are not of shares."""
_FEW, _MANY = 5e-3, 1e12


def _lower_end(m: Tensor, n: Tensor, variance: Tensor) -> Tensor:
    """The 2.5 % quantile of the mean of n rows and one that is 0, weighted by a uniform draw from the simplex."""
    from scipy.special import betaincinv

    mu = m * n / (n + 1)
    size = m * (1 - mu) * (n + 2) / (variance + m.square() / (n + 1)) - 1  # a + b of the Beta law
    a, b = mu * size, (1 - mu) * size
    # Below a = _FEW the quantile is under 1e-300; above b = _MANY only its ratio to the mean counts (a Gamma law).
    few, bounded = a.clamp_min(_FEW), b.clamp_max(_MANY)
    quantile = torch.as_tensor(betaincinv(few.numpy(), bounded.numpy(), 0.025))
    return (quantile * mu * (few + bounded) / few).masked_fill((m < 1e-150) | (n == 0), 0.0)


def upper_p(value: Float[Tensor, "*h"], chance: Float[Tensor, "*#h n"]) -> Float[Tensor, "*h"]:
    """One-sided p of each value against n chance values: (1 + #{chance >= value}) / (1 + n).

    If value and draws are exchangeable, P(p <= a) is at most a, and equal to a if a (n + 1) is whole and there are no
    ties (Phipson and Smyth 2010); ties increase p. Draws that are NaN do not count. p is NaN for a value that is NaN,
    or without draws.

    Example:
        >>> upper_p(torch.tensor([3.0, 1.0]), torch.tensor([0.0, 1.0, 2.0]))
        tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    column, n = value.double()[..., None], (~chance.isnan()).sum(-1)
    p = (1 + (chance.double() >= column).sum(-1)).double() / (1 + n)
    return p.masked_fill(column[..., 0].isnan() | (n == 0), torch.nan)


def two_sided_p(value: Float[Tensor, "*h"], chance: Float[Tensor, "*#h n"]) -> Float[Tensor, "*h"]:
    """Two-sided p of each value against n chance values: twice the smaller of both one-sided p, at most 1."""
    return (2 * torch.minimum(upper_p(value, chance), upper_p(-value, -chance))).clamp(max=1)


def ranks(values: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """The rank of every value from 0 upwards, equal values sharing the mean of theirs."""
    _, group, count = values.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0).double() - 1
    return (last - (count.double() - 1) / 2)[group]


def uniforms(rows: Int[Tensor, "n"], draws: int, seed: int, *, start: int = 0) -> Float[Tensor, "draws n"]:
    """Draws `start` to `start + draws - 1` of each row: float64 multiples of 2^-53, uniform in [0, 1).

    `rows` are the rows' numbers in their source, `seed` any integer. Rows that repeat repeat their draws.

    Raises:
        ValueError: a negative number of draws.

    Example:
        >>> bool((uniforms(torch.arange(5), 3, seed=0)[:, 2:] == uniforms(torch.arange(2, 5), 3, seed=0)).all())
        True
    """
    return _shift_right(bits(rows, draws, seed, start), 11).double() * 2.0**-53


def poisson_weights(
    rows: Int[Tensor, "n"], replicates: int, seed: int, *, start: int = 0
) -> Float[Tensor, "replicates n"]:
    """How often each row occurs in each bootstrap replicate: independent Poisson(1) counts, as float64.

    A resample of n rows gives each row a Binomial(n, 1/n) count, whose limit is Poisson(1). Poisson counts of different
    rows are independent, so batches can be merged (Chamandy et al. 2012, "Estimating uncertainty for massive data
    streams"). Computed from `uniforms` by the inverse CDF. Caveat: a replicate has n rows only on average; divide by
    the sum of the weights, and expect replicates without any row if n is small (a share of e^-n).

    Example:
        >>> poisson_weights(torch.arange(1000), 200, seed=0).mean().round(decimals=1).item()
        1.0
    """
    cumulative = torch.tensor(_POISSON_CDF, dtype=torch.float64, device=rows.device)
    return torch.bucketize(uniforms(rows, replicates, seed, start=start), cumulative, right=True).double()


def signs(rows: Int[Tensor, "n"], draws: int, seed: int, *, start: int = 0) -> Float[Tensor, "draws n"]:
    """Fair coins: +1.0 where the row's uniform is below 1/2, else -1.0.

    Example:
        >>> signs(torch.tensor([4, 4]), 1, seed=0).prod().item()
        1.0
    """
    return torch.where(bits(rows, draws, seed, start) >= 0, 1.0, -1.0).double()


_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# P(count <= k); one more term would be below half a unit in the last place of 1.
_POISSON_CDF = tuple(accumulate(exp(-1) / factorial(k) for k in range(18)))


def bits(rows: Int[Tensor, "n"], draws: int, seed: int, start: int) -> Int[Tensor, "draws n"]:
    """64 random bits per draw and row, as int64."""
    if draws < 0 or start < 0:
        raise ValueError(f"a number of draws >= 0 from a start >= 0 is required, got {draws} from {start}")
    keys = splitmix64(to_device(_signed(seed), rows.device), rows.long())
    return splitmix64(keys, torch.arange(start, start + draws, device=rows.device)[:, None])


def splitmix64(seed: Int[Tensor, "..."], index: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Output `index` of SplitMix64 with this seed: the mixed sum of the seed and index + 1 golden increments."""
    z = seed + (index + 1) * _signed(_GOLDEN)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        z = (z ^ _shift_right(z, shift)) * _signed(multiplier)
    return z ^ _shift_right(z, 31)


def _shift_right(z: Int[Tensor, "..."], by: int) -> Int[Tensor, "..."]:
    """The right shift of an unsigned integer: fills with zeros, where torch fills with the sign bit."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    """The int64 with these low 64 bits."""
    return (bits + 2**63) % 2**64 - 2**63


P = TypeVar("P")


@runtime_checkable
class Partial(Protocol):
    """Protocol of a partial result: a reduction of some rows."""

    def merge(self: P, other: P) -> P:
        """Both partial results together."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the partial result, flat; names of tensors that belong together are joined by "/"."""
        ...


@runtime_checkable
class Reduction(Protocol):
    """How rows combine; a class with class methods, or a record with parameters."""

    def of(self, values: Mapping[str, Tensor], rows: Int[Tensor, "n"] | None = None) -> Partial:
        """The partial result of one batch, from values `[n ...]` and the identities of their rows."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> Partial:
        """The partial result that was saved as these `tensors`."""
        ...


@dataclass(frozen=True)
class Replicates:
    """Weighted sums of the rows in each bootstrap replicate (Efron 1979; Poisson weights), which can be merged.

    A weight depends on the row's identity, not on the batch, so the split and order of the rows do not change it.
    """

    weight: Float[Tensor, "r ..."]
    total: Float[Tensor, "r ..."]

    @classmethod
    def of(cls, values: Float[Tensor, "n ..."], weights: Float[Tensor, "r n"]) -> "Replicates":
        """Weighted sums of the values in each replicate, and sums of the weights; NaN values are left out of both."""
        weights, absent, shape = weights.to(values.device), values.isnan(), (len(weights), *values.shape[1:])
        total = weights @ values.masked_fill(absent, 0.0).reshape(len(values), -1)
        if not bool(absent.any()):
            return cls(weights.sum(1), total.view(shape))
        weight = weights @ (~absent).double().reshape(len(values), -1)
        return cls(weight.view(shape), total.view(shape))

    def merge(self, other: "Replicates") -> "Replicates":
        """The sums over both parts."""
        total = self.total + other.total
        if self.weight.ndim == other.weight.ndim:
            return Replicates(self.weight + other.weight, total)
        return Replicates(self.per_cell() + other.per_cell(), total)

    def per_cell(self) -> Float[Tensor, "r ..."]:
        """The weights in every cell of `total`."""
        if self.weight.ndim == self.total.ndim:
            return self.weight
        return self.weight.view(-1, *[1] * (self.total.ndim - 1)).expand_as(self.total)

    def widened(self, pad: Sequence[int]) -> "Replicates":
        """The sums with zeros appended to their axes; pad: as in `F.pad`."""
        return Replicates(F.pad(self.per_cell(), pad), F.pad(self.total, pad))

    def error(self, mean: Float[Tensor, "..."], n: Float[Tensor, "..."]) -> tuple[Tensor, Tensor]:
        """The standard error of a mean of n rows, and the number of equal clusters with the same information.

        A replicate's sum minus the mean times its weight is a sum over clusters of centred values times the deviation
        of the cluster's weight. Its variance, over n^2, is the squared standard error (Cameron and Miller 2015,
        equation 11), without the bias of a ratio in small samples. The variance of the weight is the sum of squared
        cluster sizes.
        """
        weight = self.per_cell()
        clusters = (n.square() / weight.var(0)).round().clamp(max=n)
        centred = (self.total - mean * weight).square().mean(0).sqrt() / n
        return centred * (clusters / (clusters - 1)).sqrt(), clusters


@dataclass(frozen=True)
class Moments:
    """Count, mean and summed squared deviation over rows, in float64; `merge` is exact up to rounding, in any order.

    Merging uses Chan's pairwise update, so a large common offset costs no digits. With `replicates`, standard errors
    are those of the bootstrap, in which rows of one identity are one cluster.
    """

    n: int
    mean: Float[Tensor, "..."]
    spread: Float[Tensor, "..."]
    replicates: Replicates | None = None

    @classmethod
    def of(cls, rows: Float[Tensor, "b ..."], weights: Float[Tensor, "r b"] | None = None) -> "Moments":
        """The moments of one batch over its first axis; weights: those of each row in each replicate."""
        wide = rows.double()
        mean = wide.mean(0)
        replicates = None if weights is None else Replicates.of(wide, weights)
        return cls(rows.shape[0], mean, (wide - mean).square().sum(0), replicates)

    def merge(self, other: "Moments") -> "Moments":
        """The moments of both batches together. ValueError for rows of different shapes."""
        if self.mean.shape != other.mean.shape:
            mine, theirs = shape_text(self.mean.shape), shape_text(other.mean.shape)
            raise ValueError(
                f"moments require rows of one shape, got {mine} and {theirs}: keep every row, or pad them"
            )
        n = self.n + other.n
        step = other.mean - self.mean
        mean = self.mean + step * (other.n / n)
        spread = self.spread + other.spread + step.square() * (self.n * other.n / n)
        return Moments(n, mean, spread, _merged_replicates(self.replicates, other.replicates))

    def standard_error(self) -> Float[Tensor, "..."]:
        """Standard error of the mean over rows; NaN for a single row."""
        return self._error_and_rows()[0]

    def interval(
        self,
        *,
        share: bool = False,
        fewest: int = FEWEST,
        within: tuple[float, float] = ANYWHERE,
    ) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
        """A 95 % interval of the mean by Student's t over rows, or over clusters with replicates.

        Args:
            fewest: number of rows below which the ends are NaN; above `FEWEST` for skewed numbers, for which Student's
                t requires many rows.
            share: whether the rows are between 0 and 1: then `share_interval`, from one row on, which is valid for
                skewed rows as well. Means outside [0, 1] (possible under edits of a pattern) keep Student's t.
            within: the range of rows that are no shares, at which the interval is cut off.
        """
        mean, (error, rows) = self.mean, self._error_and_rows()
        if share:  # on the host, where scipy computes the quantiles
            mean, error, rows = to_host(dict(enumerate((mean, error, rows)))).values()
        half = t95(rows, fewest) * error
        low, high = (mean - half).clamp_min(within[0]), (mean + half).clamp_max(within[1])
        if not share:
            return low, high
        variance = (error.square() * (rows - 1)).masked_fill(rows < 2, 0.0)  # of one row: nothing known
        least, most = share_interval(mean, rows, variance)
        apart = (mean < -SHARE_ROUNDING) | (mean > 1 + SHARE_ROUNDING)
        ends = torch.stack((torch.where(apart, low, least), torch.where(apart, high, most)))
        ends_on_device = to_device(ends, self.mean.device)
        return ends_on_device[0], ends_on_device[1]

    def _error_and_rows(self) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
        """The standard error of every mean (NaN for fewer than two rows), and its number of independent rows."""
        n = self.count().double()
        if self.replicates is not None:
            error, n = self.replicates.error(self.mean, n)
        else:
            error = (self.spread / (n - 1).clamp_min(1.0) / n.clamp_min(1.0)).sqrt()
        return error.masked_fill(n < 2, torch.nan), n

    def estimate(
        self,
        dims: Sequence[str],
        *,
        null: Tensor | float | None = None,
        share: bool = False,
        fewest: int = FEWEST,
        within: tuple[float, float] = ANYWHERE,
    ) -> "dict[str, tuple[Sequence[str], Tensor]]":
        """The variables of a result that is one estimate per cell: `value`, `low`, `high`, `n` and, if given, `null`.

        value: the mean; low, high: the ends of its 95 % interval (`interval`); n: its rows; null: its chance
        level, any shape that broadcasts against the mean. share, fewest, within: as there.
        """
        low, high = self.interval(share=share, fewest=fewest, within=within)
        variables = {"value": self.mean, "low": low, "high": high, "n": self.count()}
        if null is not None:
            variables["null"] = (
                torch.as_tensor(null, dtype=self.mean.dtype).to(self.mean.device).expand_as(self.mean)
            )
        return {name: (tuple(dims), value) for name, value in variables.items()}

    def count(self) -> Int[Tensor, "..."]:
        """How many rows every mean is of."""
        return torch.full_like(self.mean, self.n, dtype=torch.long)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the moments, by name."""
        tensors = {"n": torch.tensor(self.n), "mean": self.mean, "spread": self.spread}
        if self.replicates is None:
            return tensors
        return tensors | {"weight": self.replicates.weight, "total": self.replicates.total}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> "Moments":
        """The moments that were saved as these `tensors`."""
        replicates = Replicates(tensors["weight"], tensors["total"]) if "total" in tensors else None
        return cls(int(tensors["n"]), tensors["mean"], tensors["spread"], replicates)


@dataclass(frozen=True, kw_only=True)
class MaskedMoments(Moments):
    """Moments of rows with missing entries (NaN): every entry has its own count. Merging pads shorter axes."""

    counts: Float[Tensor, "..."]
    """Number of rows that have each entry; the mean is 0 where it is 0."""

    @classmethod
    def of(cls, rows: Float[Tensor, "b ..."], weights: Float[Tensor, "r b"] | None = None) -> "MaskedMoments":
        """The moments of one batch over its first axis."""
        wide, absent = rows.double(), rows.isnan()
        counts = (~absent).sum(0).double()
        mean = wide.masked_fill(absent, 0.0).sum(0) / counts.clamp_min(1.0)
        spread = (wide - mean).masked_fill(absent, 0.0).square().sum(0)
        replicates = None if weights is None else Replicates.of(wide, weights)
        return cls(rows.shape[0], mean, spread, replicates, counts=counts)

    def merge(self, other: Moments) -> "MaskedMoments":
        """The moments of both batches together."""
        assert isinstance(other, MaskedMoments)
        a, b = self.widened(other.mean.shape), other.widened(self.mean.shape)
        counts = a.counts + b.counts
        share, step = b.counts / counts.clamp_min(1.0), b.mean - a.mean
        spread = a.spread + b.spread + step.square() * a.counts * share
        replicates = _merged_replicates(a.replicates, b.replicates)
        return MaskedMoments(a.n + b.n, a.mean + step * share, spread, replicates, counts=counts)

    def widened(self, shape: torch.Size) -> "MaskedMoments":
        """The moments padded to a shape, with entries of count 0."""
        more = [max(0, length - have) for length, have in zip(shape, self.mean.shape, strict=True)]
        if not any(more):
            return self
        pad = [n for missing in reversed(more) for n in (0, missing)]
        mean, spread, counts = (F.pad(x, pad) for x in (self.mean, self.spread, self.counts))
        replicates = None if self.replicates is None else self.replicates.widened(pad)
        return MaskedMoments(self.n, mean, spread, replicates, counts=counts)

    def count(self) -> Int[Tensor, "..."]:
        """How many rows every mean is of."""
        return self.counts.long()

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the moments, by name."""
        return super().tensors() | {"counts": self.counts}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> "MaskedMoments":
        """The moments that were saved as these `tensors`."""
        plain = Moments.load(tensors)
        return cls(plain.n, plain.mean, plain.spread, plain.replicates, counts=tensors["counts"])


ROUNDING = 1e-12
"""A difference of sums below this share of the sums counts as rounding."""


def ratio(
    top: Moments,
    bottom: Moments,
    both: Moments,
    fewest: int = FEWEST,
    *,
    within: tuple[float, float] = ANYWHERE,
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."], Float[Tensor, "..."]]:
    """The mean of `top` divided by that of `bottom`, and its 95 % interval over rows (linearised, Student's t).

    The variance of top - ratio * bottom requires their covariance, which follows from `both`, the moments of top +
    bottom. The ends are NaN below `fewest` rows. within: the range at which the interval is cut off.

    Example:
        >>> rows = torch.tensor([1.0, 2.0, 4.0])
        >>> [float(x) for x in ratio(*(Moments.of(x) for x in (rows, 2 * rows, 3 * rows)))]
        [0.5, 0.5, 0.5]
    """
    value = top.mean / bottom.mean
    covariance = (both.spread - top.spread - bottom.spread) / 2
    terms = top.spread + value.square() * bottom.spread
    spread = terms - 2 * value * covariance
    spread = spread.masked_fill(spread < ROUNDING * terms, 0.0)
    error = (spread / max(top.n - 1, 1) / top.n).sqrt() / bottom.mean.abs()
    half = t95(top.n, fewest) * error
    return value, (value - half).clamp_min(within[0]), (value + half).clamp_max(within[1])


@dataclass(frozen=True)
class Means:
    """A reduction: keep only the moments of each named per-row value."""

    moments: Mapping[str, Moments]
    refuses_nan: ClassVar[bool] = True
    """Whether a row with a value that is not finite must be left out."""

    @classmethod
    def of(
        cls,
        values: Mapping[str, Tensor],
        rows: Int[Tensor, "n"] | None = None,
        weights: Float[Tensor, "r n"] | None = None,
    ) -> "Means":
        """The partial result of one batch; weights: of each row in each replicate of a bootstrap."""
        return cls({name: cls._kind().of(value, weights) for name, value in values.items()})

    def merge(self, other: "Means") -> "Means":
        """Both partial results together."""
        return type(self)({name: m.merge(other.moments[name]) for name, m in self.moments.items()})

    def tensors(self) -> dict[str, Tensor]:
        """The moments of every value, as `value/mean` and so on."""
        return joined({name: m.tensors() for name, m in self.moments.items()})

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> "Means":
        """The partial result that was saved as these `tensors`."""
        return cls({name: cls._kind().load(part) for name, part in parted(tensors).items()})

    @classmethod
    def _kind(cls) -> type[Moments]:
        return Moments


@dataclass(frozen=True)
class MaskedMeans(Means):
    """A reduction: the moments of each named value over the rows that have it (not NaN)."""

    refuses_nan: ClassVar[bool] = False

    @classmethod
    def _kind(cls) -> type[Moments]:
        return MaskedMoments


@dataclass(frozen=True)
class Rows:
    """A reduction: keep every row of each named value, in order."""

    rows: Mapping[str, Tensor]
    ids: Int[Tensor, "n"] | None = None
    """The identity of each row; None if the rows have none."""

    @classmethod
    def of(cls, values: Mapping[str, Tensor], rows: Int[Tensor, "n"] | None = None) -> "Rows":
        """The partial result of one batch."""
        return cls(dict(values), rows)

    def merge(self, other: "Rows") -> "Rows":
        """The rows of this part followed by those of the other; shorter ones end in NaN (floats) or -1 (integers)."""
        ids = None if self.ids is None or other.ids is None else torch.cat((self.ids, other.ids))
        return Rows({name: _concatenated(r, other.rows[name]) for name, r in self.rows.items()}, ids)

    def ordered(self) -> "Rows":
        """The rows sorted by identity; rows of equal identity keep their order."""
        if self.ids is None:
            return self
        order = self.ids.argsort(stable=True)
        return Rows({name: r[order.to(r.device)] for name, r in self.rows.items()}, self.ids[order])

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the rows, by name; the identities as "/ids"."""
        return dict(self.rows) | ({} if self.ids is None else {"/ids": self.ids})

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> "Rows":
        """The partial result that was saved as these `tensors`."""
        values = dict(tensors)
        ids = values.pop("/ids", None)
        return cls(values, ids)


@dataclass(frozen=True)
class Bootstrap:
    """A reduction: that of `kind`, with intervals from a bootstrap over rows.

    The weight of a row in a replicate is Poisson(1), drawn from the row's identity, the replicate's number and the
    seed. Rows of one identity (pieces of a text) stay together, so they count as one cluster.
    """

    kind: type[Means]
    replicates: int = 1000
    seed: int = 0

    def __post_init__(self) -> None:
        if self.replicates < 20:
            raise ValueError(f"a 95 % interval requires at least 20 replicates, got {self.replicates}")

    @property
    def refuses_nan(self) -> bool:
        """As `kind` says."""
        return self.kind.refuses_nan

    def of(self, values: Mapping[str, Tensor], rows: Int[Tensor, "n"] | None = None) -> Means:
        """The partial result of one batch; ValueError for rows without identities."""
        if rows is None:
            raise ValueError("a bootstrap requires rows with identities: number the batch (`Batch.row`)")
        return self.kind.of(values, rows, poisson_weights(rows, self.replicates, self.seed))

    def load(self, tensors: Mapping[str, Tensor]) -> Means:
        """The partial result that was saved as these `tensors`."""
        return self.kind.load(tensors)


def joined(parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Named groups of tensors as one flat group, `group/name`."""
    return {f"{group}/{name}": value for group, part in parts.items() for name, value in part.items()}


def parted(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """The named groups of a flat mapping of `joined`; the name of a group may contain "/"."""
    parts: dict[str, dict[str, Tensor]] = {}
    for path, value in tensors.items():
        group, _, name = path.rpartition("/")
        parts.setdefault(group, {})[name] = value
    return parts


def on_host(partial: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies of the tensors on the CPU, each contiguous and with memory of its own."""
    form = torch.contiguous_format
    return {name: value.clone(memory_format=form) for name, value in to_host(partial).items()}


def _merged_replicates(first: Replicates | None, second: Replicates | None) -> Replicates | None:
    if first is None or second is None:
        return None
    return first.merge(second)


def _concatenated(first: Tensor, second: Tensor) -> Tensor:
    """The two tensors concatenated along the first axis; where other axes differ, the shorter tensor is padded."""
    if first.shape[1:] == second.shape[1:]:
        return torch.cat((first, second))
    shape = [max(pair) for pair in zip(first.shape[1:], second.shape[1:], strict=True)]
    return torch.cat([_padded(x, shape) for x in (first, second)])


def _padded(value: Tensor, shape: Sequence[int]) -> Tensor:
    pad = [n for length, have in zip(reversed(shape), reversed(value.shape[1:]), strict=True)
           for n in (0, length - have)]  # fmt: skip
    return F.pad(value, pad, value=torch.nan if value.is_floating_point() else -1)
