"""Permutation tests over rows: whether two conditions differ by more than chance, for any distribution.

Under the null the labels (the sign of a paired difference, or the group of a row) carry no information. The test
permutes them: all labellings if they are few enough, else random ones drawn from the identity of each row
(`core.stats`), so that the p-value depends on the rows and the seed only.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, islice
from math import comb

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.kinds import Count
from interp.core.stats import signs, uniforms

ENTRIES = 2**22
"""Labels and statistics in memory at a time: about 0.2 GiB with the memory for drawing them."""
ROUNDING = 1e-12
"""Normalised statistics that differ by less count as equal, so that rounding breaks no ties."""
CONSTANT = 16 * torch.finfo(torch.float64).eps
"""Deviations below this share of the values count as rounding."""


@dataclass(frozen=True, eq=False)
class PermutationTest:
    """A difference of means in every cell, and the chance of one as large without an effect."""

    difference: Float[Tensor, "*cells"]
    """Mean of the first condition minus mean of the second."""
    p: Float[Tensor, "*cells"]
    """Two-sided p-value of each cell by itself."""
    p_adjusted: Float[Tensor, "*cells"]
    """Two-sided p-value of each cell against the largest difference of any cell: reporting all cells below 0.05 errs
    in 5 % of all tests.
    """
    permutations: int
    """Number of labellings tried."""
    exact: bool
    """Whether all labellings were tried."""


@public()
@torch.no_grad()
def permutation_test(
    first: Float[Tensor, "n ..."],
    second: Float[Tensor, "m ..."] | None = None,
    *,
    paired: bool,
    permutations: Count = 10_000,
    seed: int = 0,
    rows: Int[Tensor, "r"] | None = None,
) -> PermutationTest:
    """Whether the mean over rows differs between two conditions, per cell, with p-values that need no distribution.

    Args:
        first: [n, ...], a row per item and any number of cells.
        second: [m, ...], the other condition; None: `first` holds paired differences.
        paired: True: row i of both conditions is one item, and signs of the differences are flipped. False: the rows
            of both are dealt anew into groups of the same sizes.
        permutations: number of labellings drawn; all of them are taken where there are at most as many.
        seed: seed of the labellings drawn.
        rows: [r], identities of the pairs, or of first and then second; None: 0, 1, ... Pairs of one identity flip
            together.

    Returns:
        `PermutationTest` over the cells: `difference` of the means, `p` and `p_adjusted`, both two-sided. p is the
        share of labellings with |difference| >= the observed one: (1 + count) / (1 + permutations) for drawn ones
        (Phipson and Smyth 2010), or of all of them. p_adjusted is the single-step maximum statistic over cells
        (Westfall and Young 1993) of |difference| / root mean square, which orders labellings as Student's t does, so
        that no noisy cell drowns the others: it bounds the family-wise error under any dependence of cells.

    Raises:
        ValueError: shapes that do not fit, values that are not finite, or unpaired rows of one identity.

    Caveats:
        The smallest p is 1 / (1 + permutations). Unpaired, the null is equal laws, not only equal means: with unequal
        variances and group sizes the test rejects too often or too rarely.

    Cost:
        permutations x rows x cells.

    Example:
        >>> permutation_test(torch.tensor([1.0, 2.0, 3.0, 4.0]), paired=True).p.item()
        0.125
    """
    if permutations < 1:
        raise ValueError(f"at least one permutation is required, got {permutations}")
    conditions, ids = _checked_conditions(first, second, paired, rows)
    flat = [rearrange(x.double(), "n ... -> n (...)") for x in conditions]
    labels = _Flips.of(ids) if paired else _Deals(ids, len(first))
    exact = labels.few(permutations)
    total = labels.total() if exact else permutations
    counts = _exceedance_counts(labels, labels.parts(*flat), total, None if exact else seed)
    added = 0 if exact else 1  # the observed labelling: one of all, but not of those drawn
    p, p_adjusted = ((counts + added) / (total + added)).view(2, *first.shape[1:])
    difference = flat[0].mean(0) - (flat[1].mean(0) if second is not None else 0)
    return PermutationTest(difference.view_as(p), p, p_adjusted, total, exact)


def _exceedance_counts(
    labels: _Flips | _Deals, parts: Float[Tensor, "g c"], total: int, seed: int | None
) -> Float[Tensor, "2 c"]:
    """Number of labellings in which the cell's own statistic, and the largest of any cell, is at least the observed."""
    observed = (labels.observed() @ parts).abs() - ROUNDING
    counts = parts.new_zeros(2, parts.shape[1])
    step = max(1, ENTRIES // sum(parts.shape))
    for start in range(0, total, step):
        size = min(step, total - start)
        labelling = labels.every(start, size) if seed is None else labels.drawn(start, size, seed)
        statistic = (labelling @ parts).abs()  # [labelling cell]
        counts[0] += (statistic >= observed).sum(0)
        counts[1] += (statistic.amax(1, keepdim=True) >= observed).sum(0)
    return counts


@dataclass(frozen=True, eq=False)
class _Flips:
    """Labellings of paired rows: a sign of the difference for each identity."""

    ids: Int[Tensor, "g"]
    member: Int[Tensor, "n"]
    """Index into `ids` of each pair's identity."""

    @classmethod
    def of(cls, ids: Int[Tensor, "n"]) -> _Flips:
        return cls(*ids.unique(return_inverse=True))

    def parts(
        self, first: Float[Tensor, "n c"], second: Float[Tensor, "n c"] | None = None
    ) -> Float[Tensor, "g c"]:
        """Difference of each identity (its term in the statistic), divided by the norm over identities."""
        difference = first if second is None else first - second
        size = difference.norm(dim=0) if second is None else (first.abs() + second.abs()).norm(dim=0)
        zeros = difference.new_zeros(len(self.ids), difference.shape[1])
        return _normalised_terms(zeros.index_add(0, self.member, difference), size)

    def few(self, most: int) -> bool:
        return len(self.ids) < most.bit_length()

    def total(self) -> int:
        return 2 ** len(self.ids)

    def observed(self) -> Float[Tensor, "g"]:
        return torch.ones(len(self.ids), dtype=torch.float64, device=self.ids.device)

    def every(self, start: int, size: int) -> Float[Tensor, "size g"]:
        number = torch.arange(start, start + size, device=self.ids.device)
        return 1 - 2 * (number[:, None] >> torch.arange(len(self.ids), device=self.ids.device) & 1).double()

    def drawn(self, start: int, size: int, seed: int) -> Float[Tensor, "size g"]:
        return signs(self.ids, size, seed, start=start)


@dataclass(frozen=True, eq=False)
class _Deals:
    """Labellings of unpaired rows: 1 for each row that is assigned to the first condition, else 0."""

    ids: Int[Tensor, "n"]
    first: int

    def parts(self, first: Float[Tensor, "n c"], second: Float[Tensor, "m c"]) -> Float[Tensor, "r c"]:
        """Each row minus the mean of all, divided by the norm: a group's sum is proportional to the difference."""
        pooled = torch.cat((first, second))
        return _normalised_terms(pooled - pooled.mean(0), pooled.norm(dim=0))

    def few(self, most: int) -> bool:
        smaller = min(self.first, len(self.ids) - self.first)
        # the binomial coefficient is at least 2^smaller, and slow to compute for a large `smaller`
        return smaller < most.bit_length() and self.total() <= most

    def total(self) -> int:
        return comb(len(self.ids), self.first)

    def observed(self) -> Float[Tensor, "r"]:
        return (torch.arange(len(self.ids), device=self.ids.device) < self.first).double()

    def every(self, start: int, size: int) -> Float[Tensor, "size r"]:
        dealt = islice(combinations(range(len(self.ids)), self.first), start, start + size)
        return self._labelling(torch.tensor(list(dealt), device=self.ids.device))

    def drawn(self, start: int, size: int, seed: int) -> Float[Tensor, "size r"]:
        """Random labellings: the rows with the smallest uniforms are assigned to the first condition."""
        chance = uniforms(self.ids, size, seed, start=start)
        return self._labelling(chance.topk(self.first, largest=False).indices)

    def _labelling(self, index: Int[Tensor, "size n"]) -> Float[Tensor, "size r"]:
        zeros = torch.zeros(len(index), len(self.ids), dtype=torch.float64, device=index.device)
        return zeros.scatter(1, index, 1.0)


def _normalised_terms(parts: Float[Tensor, "g c"], size: Float[Tensor, "c"]) -> Float[Tensor, "g c"]:
    """Each column divided by its norm; 0 where the norm is only rounding, relative to `size`, the original values'."""
    norm = parts.norm(dim=0)
    return torch.where(norm > CONSTANT * size, parts / norm, 0.0)


def _checked_conditions(
    first: Tensor, second: Tensor | None, paired: bool, rows: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """The one or two conditions, and the identities of their rows, after checks of shapes and values."""
    conditions = [first] if second is None else [first, second]
    if second is None and not paired:
        raise ValueError("an unpaired test requires a second condition, got one")
    shapes = [shape_text(x.shape) for x in conditions]
    shared_axes = slice(0 if paired else 1, None)
    if any(x.numel() == 0 for x in conditions) or any(
        x.shape[shared_axes] != first.shape[shared_axes] for x in conditions
    ):
        required = "one shape" if paired else "one shape up to the number of rows"
        raise ValueError(
            f"conditions of {required}, none of them empty, are required, got {' and '.join(shapes)}"
        )
    if not all(bool(x.isfinite().all()) for x in conditions):
        raise ValueError("finite values are required, got NaN or infinity: set those rows aside first")
    n = len(first) if paired else sum(map(len, conditions))
    ids = torch.arange(n, device=first.device) if rows is None else rows.to(first.device).long()
    if len(ids) != n:
        raise ValueError(f"{n} row identities are required, got {len(ids)}")
    if not paired and len(ids.unique()) != n:
        raise ValueError("an unpaired test requires rows of different identities, got some twice")
    return conditions, ids
