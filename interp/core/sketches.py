"""Histograms, which hold a distribution in constant memory and give every quantile up to a known error.

Counts are integers, so any split and any order of the rows gives the same bits. A quantile sketch is a histogram whose
edges grow geometrically (DDSketch; Masson, Rim and Lee 2019), so that quantiles have a fixed relative error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from interp.core.named import pooled
from interp.core.transfers import to_device


@dataclass(frozen=True, eq=False)
class Histogram:
    """Counts of observations between each two edges, cell by cell.

    Bins are half-open, [edge, next edge), the last one closed, as in numpy. Observations outside of the edges are
    counted as well, and so are missing ones (NaN: padding, undefined).

    Example:
        >>> Histogram.of(torch.tensor([0.0, 0.5, 1.0, 2.0, 9.0]), torch.tensor([0.0, 1.0, 2.0])).counts.tolist()
        [2, 2]
    """

    edges: Float[Tensor, "e"]
    """Strictly increasing, in float64."""
    tally: Int[Tensor, "*cells e+2"]
    """Counts of observations below the first edge, in each bin, above the last edge, and missing (NaN)."""

    @classmethod
    def of(cls, values: Shaped[Tensor, "n *cells"], edges: Float[Tensor, "e"]) -> "Histogram":
        """The histogram of each cell over the first axis; numbers of any type, compared in float64.

        Raises:
            ValueError: unless there are two finite edges at least, strictly increasing.
        """
        edges, slots = to_device(_checked_edges(edges), values.device), len(edges) + 2
        wide = rearrange(values.double(), "n ... -> n (...)")
        slot = torch.bucketize(wide, edges, right=True) - (wide == edges[-1]).long()
        slot = slot.masked_fill(wide.isnan(), slots - 1)
        slot = slot + slots * torch.arange(wide.shape[1], device=wide.device)
        tally = slot.flatten().bincount(minlength=slots * wide.shape[1])
        return cls(edges, tally.view(*values.shape[1:], slots))

    def merge(self, other: "Histogram") -> "Histogram":
        """The histogram of both parts; ValueError if they do not have the same bins."""
        if not torch.equal(self.edges, other.edges):
            raise ValueError(
                "histograms of the same edges are required, got "
                f"{_edges_text(self.edges)} and {_edges_text(other.edges)}"
            )
        return Histogram(self.edges, self.tally + other.tally)

    @property
    def counts(self) -> Int[Tensor, "*cells bins"]:
        """Observations in each bin."""
        return self.tally[..., 1:-2]

    @property
    def below(self) -> Int[Tensor, "*cells"]:
        """Observations below the first edge."""
        return self.tally[..., 0]

    @property
    def above(self) -> Int[Tensor, "*cells"]:
        """Observations above the last edge."""
        return self.tally[..., -2]

    @property
    def absent(self) -> Int[Tensor, "*cells"]:
        """Number of NaN values, which are no observations."""
        return self.tally[..., -1]

    @property
    def n(self) -> Int[Tensor, "*cells"]:
        """Number of observations, inside and outside the edges."""
        return self.tally[..., :-1].sum(-1)

    def quantile(self, q: float) -> Float[Tensor, "*cells"]:
        """About the smallest observation x with (observations <= x) / n >= q, per cell: q = 0 the least, 1 the largest.

        That observation lies in a known bin [a, b]; the answer is 2ab / (a + b), whose relative error is at most
        (b - a) / |a + b|, and (a + b) / 2 in a bin that touches or contains 0, with an absolute error of at most half
        its width. Below the first edge -inf, above the last inf: no more is known. NaN without observations.

        Raises:
            ValueError: unless 0 <= q <= 1.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile between 0 and 1 is required, got {q}")
        running = self.tally[..., :-1].cumsum(-1)
        reached = (running > 0) & (running / self.n[..., None].double() >= q)
        infinite = torch.full((1,), torch.inf, dtype=torch.float64, device=self.edges.device)
        place = torch.cat((-infinite, _centres(self.edges), infinite))
        return place[reached.int().argmax(-1)].masked_fill(self.n == 0, torch.nan)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the histogram, by name."""
        return {"edges": self.edges, "tally": self.tally}

    @classmethod
    def load(cls, tensors: Mapping[str, Tensor]) -> "Histogram":
        """The histogram that was saved as these `tensors`."""
        return cls(tensors["edges"], tensors["tally"])


@dataclass(frozen=True)
class Histograms:
    """A reduction: the histogram of one named value `[n ... *cells]`.

    The last `cells` axes are kept apart; observations are pooled over all others: rows, and positions if there are
    any.

    Raises:
        ValueError: bad edges, or a value that is missing or has too few axes.

    Memory:
        8 bytes per cell and edge.

    Example:
        >>> Histograms("loss", edges=(0.0, 1.0, 2.0)).of({"loss": torch.rand(3, 7)}).n.item()
        21
    """

    value: str
    edges: Sequence[float]
    cells: int = 0

    def __post_init__(self) -> None:
        _checked_edges(self._edges())

    def of(self, values: Mapping[str, Tensor], rows: Int[Tensor, "n"] | None = None) -> Histogram:
        """The histogram of one batch."""
        return Histogram.of(pooled(values, self.value, self.cells), self._edges())

    def load(self, tensors: Mapping[str, Tensor]) -> Histogram:
        """The histogram that was saved as these `tensors`."""
        return Histogram.load(tensors)

    def _edges(self) -> Float[Tensor, "e"]:
        return torch.tensor(tuple(self.edges), dtype=torch.float64)


def quantiles(
    value: str, *, cells: int = 0, relative_error: float = 0.01, low: float = 1e-6, high: float = 1e6
) -> Histograms:
    """A reduction: every quantile of one named value to a relative error, by bins on a logarithmic scale.

    `.of(...).quantile(q)` is within `relative_error` of the true quantile (the smallest observation that reaches q) if
    low <= |quantile| <= high; smaller ones are reported as 0, larger ones as infinite. value, cells: `Histograms`.
    Masson, Rim and Lee 2019, "DDSketch", section 2, with bins that are fixed once instead of collapsed on the way.

    Memory:
        About 8 log(high / low) / relative_error bytes per cell, 22 kB by default; for many cells raise the error.

    Example:
        >>> sketch = quantiles("norm").of({"norm": torch.arange(1, 1001)})
        >>> abs(sketch.quantile(0.5).item() / 500 - 1) <= 0.01
        True
    """
    return Histograms(value, tuple(logarithmic_edges(relative_error, low, high).tolist()), cells)


def logarithmic_edges(relative_error: float, low: float, high: float) -> Float[Tensor, "e"]:
    """Edges +-low g^i up to +-high, g = (1 + error) / (1 - error): all of a bin is within `error` of its centre.

    Raises:
        ValueError: unless 1e-5 <= relative_error < 1 and 1e-300 <= low < high <= 1e300.
    """
    if not (1e-5 <= relative_error < 1 and 1e-300 <= low < high <= 1e300):
        raise ValueError(
            "1e-5 <= relative_error < 1 and 1e-300 <= low < high <= 1e300 are required, "
            f"got relative_error={relative_error}, low={low}, high={high}"
        )
    growth = (1 + relative_error) / (1 - relative_error)
    edges = [low]
    while edges[-1] < high:  # products round alike on every machine; exp and pow do not
        edges.append(edges[-1] * growth)
    positive = torch.tensor(edges, dtype=torch.float64)
    return torch.cat((-positive.flip(0), positive))


def _checked_edges(edges: Float[Tensor, "e"]) -> Float[Tensor, "e"]:
    edges = edges.double()
    if len(edges) < 2 or not bool(edges.isfinite().all() and (edges.diff() > 0).all()):
        raise ValueError(f"two or more finite, increasing edges are required, got {edges.tolist()[:9]}")
    return edges


def _centres(edges: Float[Tensor, "e"]) -> Float[Tensor, "e-1"]:
    """The point of each bin with the smallest relative error to all of the bin; its middle if the bin contains 0."""
    a, b = edges[:-1], edges[1:]
    return torch.where(a * b > 0, 2 * a * b / (a + b), (a + b) / 2)


def _edges_text(edges: Float[Tensor, "e"]) -> str:
    return f"{len(edges)} from {edges[0]:g} to {edges[-1]:g}"
