"""How large the effects of cells may be that nobody patched: an upper bound from patches of random subsets.

Estimates of effects (`attribution_patch`) can miss a cell, and to patch every cell is what they are meant to avoid. But
many cells at once are one patch: where random subsets of all cells that are left are patched, the mean effect of the
subsets with a cell minus that of the subsets without it is the cell's effect before a random background, and Welch's
interval says how large it can be (Kramár et al. 2024, "AtP*", section 3.3 and algorithm 1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.causal.contrast import Contrast, Direction, site_names
from interp.causal.effects import COLUMN_DIMS, dims_asked, site_coords, site_dims
from interp.core.axes import shape_text
from interp.core.kinds import PositiveCount, Probability, Seed
from interp.core.results import labelled
from interp.core.stats import Partial, Rows
from interp.core.transfers import to_device
from interp.data.batch import Batch
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.edits import Edit
from interp.model.parts import axis_size
from interp.model.sites import DIMS
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.metrics import LogitFunction, Metric, as_metric
from interp.passes.needs import Steps, recorded, swept
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question, Values
from interp.passes.variants import Variant
from interp.runs.functions import of_pairs

if TYPE_CHECKING:
    import xarray as xr

SHUFFLES = 20
"""Shuffles of the subsets' effects, of which the chance level of the bound is the mean."""
_AXES = {dim: axis for axis, dim in DIMS.items()}


@dataclass(frozen=True, eq=False)
class MissedEffects(Question):
    """Upper bound on the effects of all cells whose patches were not measured, from patches of random subsets of them.

    With the stated confidence no cell that is left has an effect whose size, averaged over random backgrounds, is more
    than `bound`. Each subset has every cell with probability `share`; its cells are patched together. For a cell the
    difference D of the mean effects of the subsets with it and without it is tested by Welch's t-test against every
    size above |D|; the largest upper end over all cells is the bound. No correction for the number of cells is due: it
    has to be exceeded by the one cell with the largest effect.

    Args:
        clean, corrupt: prompts; each pair has the same number of tokens, aligned one by one. Files and streams are
            paired row by row.
        site: which activation, as in `patch`.
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            answers that come with the clean prompts. A metric that compares, such as the KL divergence, compares with
            the clean run.
        by: dims that tell cells apart, at most one of them a position; None keeps `layer` and all of the site's own.
        known: true at the cells whose effects are known, from patches: they are never patched here, and the bound says
            nothing about them. Over the dims of the result in their order; positions beyond its end are not known.
            None: no cell is.
        direction: "denoise" patches clean values into the corrupted run, "noise" the other way round.
        subsets: number of subsets, all of which are patched in every prompt.
        share: probability of a cell to be in a subset. Every cell is in `share` times `subsets` of them, which ones is
            drawn at random.
        confidence: probability that the bound holds.
        seed: seed of the subsets.

    Returns:
        Dataset over the dims `by`, in the metric's unit:

        - `value`: difference D of the mean effects of the subsets with a cell and without it, with the ends `low` and
          `high` of its 95 % interval over subsets, and the number `n` of subsets with the cell. NaN at known cells.
        - `upper`: the size that the effect of this one cell does not exceed, with the confidence.
        - `bound`: the largest `upper`.
        - `null`: the bound where the effects are shuffled among the subsets, mean of 20 shuffles: what is left of it if
          no cell matters more than another. A bound near it takes more subsets to fall.
        - `clean`, `corrupt` [prompt]: metric of the two runs.

    Raises:
        ValueError: pairs that do not align, cells of two positions, `known` of another shape, no cell that is left,
            fewer than two subsets with or without a cell, and a confidence outside 0.5 to 1.
        KeyError: an unknown site or dim.

    Caveats:
        An effect is that of the mean over these prompts, before a background in which `share` of the other cells are
        patched too. A cell whose effect others cancel in the run as it is (self-repair) has its effect before such
        backgrounds; one that acts in that run alone may stay hidden. A small share is nearer to the single patch, a
        larger one has a tighter bound.

    Cost:
        A forward pass for every subset and pair, and two more for the pair itself.

    Source:
        Kramár et al. 2024, "AtP*: An efficient and scalable method for localizing LLM behaviour to components",
        arXiv:2403.00745, section 3.3 and algorithm 1; with equal counts of every cell. Welch 1947, Biometrika 34.

    See Also:
        `attribution_patch`: estimates that say which cells to patch first. `patch`: the effects of single cells.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> missed_effects(model, *pairs, "z", metric=interp.logit_difference(3, 4), subsets=40).upper.dims
        ('layer', 'pos', 'head')
    """

    site: str = "z"
    _: KW_ONLY
    metric: Metric | LogitFunction | None = None
    by: Sequence[str] | None = None
    known: Bool[Tensor, "..."] | None = None
    direction: Direction = "denoise"
    subsets: PositiveCount = 200
    share: Probability = 0.1
    confidence: Probability = 0.95
    seed: Seed = 0

    def bind(self, model: Subject) -> ByRow:
        """One sweep per batch of pairs, with a variant for each subset."""
        config, metric = model.transformer.config, as_metric(self.metric, model.text)
        if not 0.5 < self.confidence < 1:
            raise ValueError(f"confidence above 0.5 and below 1 is required, got {self.confidence}")
        names = site_names(self.site, config)
        possible = site_dims(names)
        dims = dims_asked(possible if self.by is None else self.by, possible, self.site)
        sizes = {
            dim: len(names) if dim == "layer" else _size(dim, names, config)
            for dim in dims
            if dim not in COLUMN_DIMS
        }
        drawn = Subsets(dims, sizes, self.known, self.subsets, self.share, self.seed)
        attrs: dict[str, str | float | int] = {
            "site": self.site, "direction": self.direction, "metric": metric.name, "unit": metric.unit,
            "subsets": self.subsets, "share": self.share, "confidence": self.confidence, "seed": self.seed,
            "interval": "95 % over subsets",
        }  # fmt: skip
        table = BoundTable(self.name, drawn, self.confidence, site_coords(names, dims, config), attrs)
        return ByRow(
            self.name,
            partial(_rows, names=names, metric=metric, direction=self.direction, drawn=drawn),
            Rows,
            partial(_result, table=table),
            answers=metric.answers(model.text),
            pairs=True,
        )


missed_effects = of_pairs(MissedEffects)


def _size(dim: str, names: Sequence[str], config: ModelConfig) -> int:
    """Number of cells along a dim of a site. ValueError where layers have different numbers of them."""
    layers = [sites.find(name, config)[1] for name in names]
    found = {axis_size(_AXES[dim], config if layer is None else config.at_layer(layer)) for layer in layers}
    if len(found) > 1:
        raise ValueError(
            f"as many {dim}s in every layer are required, got {sorted(found)}: name the site of one layer, {names[0]!r}"
        )
    return found.pop()


@dataclass(frozen=True, eq=False)
class Subsets:
    """Random subsets of the cells of a table, the same in every prompt, whatever the batches are."""

    dims: tuple[str, ...]
    sizes: Mapping[str, int]
    """Number of cells along every dim but that of positions."""
    known: Bool[Tensor, "..."] | None
    """Cells that are in no subset."""
    count: int
    share: float
    seed: int

    def __post_init__(self) -> None:
        if sum(dim in COLUMN_DIMS for dim in self.dims) > 1:
            raise ValueError(
                f"by: cells at one position each are required, got the dims {', '.join(self.dims)}"
            )
        if not 2 <= self.with_cell <= self.count - 2:
            raise ValueError(
                f"at least two subsets with every cell and two without it are required, got {self.with_cell} with it "
                f"of {self.count}: share {self.share}"
            )
        if self.known is not None:
            self._check_known(tuple(self.known.shape))

    def _check_known(self, shape: tuple[int, ...]) -> None:
        expected = tuple(self.sizes.get(dim) for dim in self.dims)
        fits = len(shape) == len(expected) and all(
            e is None or n == e for n, e in zip(shape, expected, strict=True)
        )
        if not fits:
            wanted = ", ".join(
                dim if n is None else f"{dim} {n}" for dim, n in zip(self.dims, expected, strict=True)
            )
            raise ValueError(f"known requires a value for every cell of [{wanted}], got {shape_text(shape)}")

    @property
    def with_cell(self) -> int:
        """Number of subsets that have a cell."""
        return round(self.share * self.count)

    @property
    def place(self) -> int | None:
        """The axis of positions among the dims; None: cells have no position."""
        return next((i for i, dim in enumerate(self.dims) if dim in COLUMN_DIMS), None)

    def at(self, position: int) -> "np.ndarray":
        """Whether each cell at a position is in each subset: `[subset, *cells]`, without the axis of positions."""
        shape = tuple(self.sizes[dim] for dim in self.dims if dim in self.sizes)
        dice = np.random.default_rng([self.seed, position]).random((self.count, prod(shape)))
        inside = (dice.argsort(0).argsort(0) < self.with_cell).reshape(self.count, *shape)
        return inside & ~self.known_at(position)

    def known_at(self, position: int) -> "np.ndarray":
        """Whether each cell at a position is known."""
        shape = tuple(self.sizes[dim] for dim in self.dims if dim in self.sizes)
        if self.known is None:
            return np.zeros(shape, dtype=bool)
        known = self.known.bool().cpu().numpy()
        if self.place is None:
            return known
        return (
            known.take(position, self.place)
            if position < known.shape[self.place]
            else np.zeros(shape, dtype=bool)
        )

    def over(self, positions: int) -> Bool[Tensor, "subset ..."]:
        """Whether each cell is in each subset, for cells at so many positions."""
        if self.place is None:
            return torch.from_numpy(self.at(0))
        return torch.from_numpy(np.stack([self.at(i) for i in range(positions)], self.place + 1))


@torch.no_grad()
def _rows(
    model: Transformer,
    batch: Batch,
    names: Sequence[str],
    metric: Metric,
    direction: Direction,
    drawn: Subsets,
) -> Steps[Values]:
    """The effect of every subset in every prompt, the metric of the two runs, and the number of tokens."""
    pair = Contrast.of(batch, direction)
    other = yield from recorded(pair.other, [Read(name) for name in names], final=True, exact=True)
    variants = _variants(other.trace, pair.own, names, drawn)
    clean = other.final_at(metric) if metric.compares and direction == "denoise" else None
    sweep = yield from swept(pair.own, variants, metric, reference=clean)
    runs = pair.runs(sweep.base, other.value(metric, sweep.reference if metric.compares else None))
    lengths = pair.own.lengths.to(sweep.base.device)
    return {"effect": (sweep.values - sweep.base).mT, "lengths": lengths, **runs}


def _variants(other: Trace, own: Batch, names: Sequence[str], drawn: Subsets) -> list[Variant]:
    """One variant per subset: the other run's values in all its cells."""
    device, layered = other[Read(names[0])].device, "layer" in drawn.dims
    where = to_device(positions_of(own.host()), device)
    inside = to_device(drawn.over(own.tokens.shape[1]), device)  # [subset (layer) *cells]
    dims = tuple(dim for dim in drawn.dims if dim != "layer")
    return [
        Variant(
            [
                Edit(name, PutInCells(other[Read(name)], chosen[layer] if layered else chosen, where, dims))
                for layer, name in enumerate(names)
            ]
        )
        for chosen in inside
    ]


def positions_of(own: Batch) -> Int[Tensor, "b p"]:
    """The position of every column, -1 at padding.

    Args:
        own: the prompts, on the host.

    Returns:
        [b, p].
    """
    where = own.layout.positions(own.tokens.shape[1], 0, own.tokens.device)
    return where.expand(len(own), -1).masked_fill(~own.real, -1)


@dataclass(frozen=True, eq=False)
class PutInCells:
    """The change of a site to given values in some of its cells."""

    values: Float[Tensor, "..."]
    """The values of the site; one number, or one row, for all prompts alike."""
    chosen: Bool[Tensor, "..."]
    """Whether each cell is changed, over `dims`; positions count each row's tokens."""
    where: Int[Tensor, "b p"]
    """The position of every column, -1 at padding."""
    dims: tuple[str, ...]

    def at_site(self, site: str, memory: dict[str, object]) -> Callable[[Tensor], Tensor]:
        """The change of a site with these axes."""
        return partial(self._changed, axes=sites.axes_of(site).split()[1:])

    def _changed(self, cells: Float[Tensor, "b ..."], axes: Sequence[str]) -> Float[Tensor, "b ..."]:
        return torch.where(self._mask(axes).to(cells.device), self.values.to(cells), cells)

    def _mask(self, axes: Sequence[str]) -> Bool[Tensor, "#b ..."]:
        """The chosen cells on the axes of the site, of length 1 along those that are changed at once."""
        mask, place = self.chosen[None], next((i for i, d in enumerate(self.dims) if d in COLUMN_DIMS), None)
        if place is not None:
            rows = self.chosen.movedim(place, 0)[self.where.clamp_min(0)]  # [p ...] -> [b p ...]
            real = (self.where >= 0).view(*self.where.shape, *[1] * (rows.ndim - 2))
            mask = (rows & real).movedim(1, place + 1)  # [b ... p ...]
        for i, axis in enumerate(axes, 1):
            mask = mask if DIMS.get(axis) in self.dims else mask.unsqueeze(i)
        return mask


# the bound


@dataclass(frozen=True, eq=False)
class BoundTable:
    """Labels of the result."""

    name: str
    drawn: Subsets
    confidence: float
    coords: Mapping[str, object]
    attrs: Mapping[str, str | float | int]


@dataclass(frozen=True, eq=False)
class Welch:
    """Mean effect of the subsets with each cell minus that of the subsets without it, and its standard error."""

    difference: Float[Tensor, "..."]
    error: Float[Tensor, "..."]
    freedom: Float[Tensor, "..."]
    """Degrees of freedom (Welch and Satterthwaite)."""

    @classmethod
    def of(cls, effect: Float[Tensor, "subset ..."], inside: Bool[Tensor, "subset ..."]) -> Welch:
        """The comparison for every cell; NaN for cells that are in fewer than two subsets.

        Args:
            effect: effect of every subset, over all its cells or as each of the cells has it.
            inside: which cells are in which subset.
        """
        means, squares, counts = [], [], []
        for chosen in (inside.double(), (~inside).double()):
            n = chosen.sum(0)
            mean = (chosen * effect).sum(0) / n
            spread = (chosen * (effect - mean) ** 2).sum(0) / (n - 1)
            means.append(mean)
            squares.append((spread / n).masked_fill(n < 2, torch.nan))
            counts.append(n)
        square = squares[0] + squares[1]
        parts = sum(s**2 / (n - 1) for s, n in zip(squares, counts, strict=True))
        return cls(means[0] - means[1], square.sqrt(), square**2 / parts)

    def end(self, confidence: float) -> Float[Tensor, "..."]:
        """How far the true difference is from the measured one at most, on one side, with this confidence."""
        from scipy.special import stdtrit

        quantile = torch.from_numpy(np.asarray(stdtrit(self.freedom.numpy(), confidence)))
        return torch.where(self.error == 0, 0.0, quantile * self.error)

    def upper(self, confidence: float) -> Float[Tensor, "..."]:
        """The size that the true difference does not exceed, with this confidence."""
        return self.difference.abs() + self.end(confidence)


def _result(merged: Partial, table: BoundTable) -> xr.Dataset:
    """The comparison of every cell, and the bound over all of them."""
    assert isinstance(merged, Rows)
    rows, drawn = {name: x.cpu() for name, x in merged.rows.items()}, table.drawn
    effect, lengths = rows["effect"].double(), rows["lengths"]
    inside = drawn.over(int(lengths.max()))
    by_cell = _effect_by_cell(effect, lengths, drawn)
    welch = Welch.of(by_cell, inside)
    upper, counted = welch.upper(table.confidence), inside.sum(0)
    if bool(upper.isnan().all()):
        raise ValueError("known: at least one cell must be left, got none")
    half = welch.end(0.975)
    shuffled = _shuffled_bound(by_cell, inside, table)
    unit = str(table.attrs["unit"])
    names = {
        "value": welch.difference,
        "low": welch.difference - half,
        "high": welch.difference + half,
        "upper": upper,
    }
    values: dict[str, tuple[Sequence[str], Tensor]] = {name: (drawn.dims, x) for name, x in names.items()}
    values |= {
        "n": (drawn.dims, counted),
        "bound": ((), upper.nan_to_num(nan=0.0).max()),
        "null": ((), shuffled),
    }
    values |= {name: (("prompt",), rows[name]) for name in ("clean", "corrupt")}
    coords = {name: x for name, x in table.coords.items() if name in drawn.dims or isinstance(x, tuple)}
    return labelled(table.name, values, coords=coords, units=unit, attrs=table.attrs)


def _effect_by_cell(
    effect: Float[Tensor, "b subset"], lengths: Tensor, drawn: Subsets
) -> Float[Tensor, "subset ..."]:
    """The mean effect of every subset over the prompts that have a cell's position, to broadcast over the cells."""
    if drawn.place is None:
        return effect.mean(0).view(-1, *[1] * len(drawn.dims))
    has = (torch.arange(int(lengths.max())) < lengths[:, None]).double()  # [b p]
    by_position = (effect.mT @ has) / has.sum(0)  # [subset p]
    shape = [1] * len(drawn.dims)
    shape[drawn.place] = -1
    return by_position.view(len(by_position), *shape)


def _shuffled_bound(
    effect: Float[Tensor, "subset ..."], inside: Bool[Tensor, "subset ..."], table: BoundTable
) -> Float[Tensor, ""]:
    """Mean bound over shuffles of the effects among the subsets."""
    generator = np.random.default_rng([table.drawn.seed, SHUFFLES])
    bounds = []
    for _ in range(SHUFFLES):
        order = torch.from_numpy(generator.permutation(len(effect)))
        bounds.append(Welch.of(effect[order], inside).upper(table.confidence).nan_to_num(nan=0.0).max())
    return torch.stack(bounds).mean()
