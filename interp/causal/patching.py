"""Activation patching: put activations of one run into another, cell by cell or all at once, and watch the answer.

Denoising puts clean activations into the corrupted run (which of them suffice to bring the answer back?), noising puts
corrupted ones into the clean run (which are needed to keep it?); Heimersheim & Nanda 2024, "How to use and interpret
activation patching". Every cell is a variant of one planned sweep, so a map costs a few batched passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from interp.causal.contrast import Contrast, Direction, site_names
from interp.causal.effects import (
    EffectTable,
    MeasuredEffects,
    causal,
    cells_along,
    dims_asked,
    site_coords,
    site_dims,
)
from interp.core.boundary import public
from interp.core.wording import nearest
from interp.data.batch import Batch, Prompts
from interp.data.sources import Data
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.edits import Edit, Set
from interp.model.sites import DIMS
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes import needs
from interp.passes.metrics import LogitFunction, Metric, as_metric
from interp.passes.needs import Steps
from interp.passes.observe import Model, Subject, as_network
from interp.passes.question import ByRow, Question
from interp.passes.variants import Variant
from interp.runs.functions import of_pairs

if TYPE_CHECKING:
    import xarray as xr

_AXES = {dim: axis for axis, dim in DIMS.items()}
_USUAL = {"b p d": ("layer", "pos"), "b p m": ("layer", "pos"), "b p x": ("layer", "expert")}
"""The dims of a map where none are named; heads otherwise."""


@dataclass(frozen=True, eq=False)
class Patch(Question):
    """What patching each cell of a site does to the metric: Dataset over the dims `by`.

    A value of one prompt is put into the run of the other: where the answer follows, that place carries it.

    denoise: clean values into the corrupted run; noise: corrupted ones into the clean run (Heimersheim & Nanda 2024).
    Variables: `value`, the metric of the patched run minus that of the same run unpatched, mean over prompts with the
    ends `low` and `high` of its 95 % interval and `n`; `normalised`, (patched - corrupt) / (clean - corrupt) of the
    mean metrics, 0 = like the corrupted run and 1 = like the clean one in both directions; `each` [prompt, ...], the
    effect in every prompt; `changed`, whether the cell's values differ in any prompt and can reach the metric (where
    not, the effect is 0 because nothing was done); `clean` and `corrupt` [prompt], the metric of the two runs.

    clean, corrupt: prompts, each pair of one length and aligned token for token; or files and the like, row by row.
    site: any site up to the last block, full or short: "resid_pre", "z", "k", "attn_out", "mlp.hook_post", "pattern".
    metric: a `Metric` or a function of the logits at the last token; None is the logit difference of the answers that
    the clean prompts bring. One that compares (KL divergence) compares with the clean run.
    by: which cells: any of `layer` and the site's own dims (`pos`, `head`, `kv_head`, `query`, `key`, `neuron`, ...);
    along dims that are not named everything is patched at once. None: layer and position for streams, layer and head
    for the insides of attention. Positions are each prompt's own tokens: where prompts differ in length, a cell beyond
    one's end is NaN in `each`, and `n` counts the prompts that have it.
    each=False keeps only the moments over prompts, for data of any size.
    Errors: ValueError for pairs that do not align, or a metric that is the same for clean and corrupted runs in every
    prompt; KeyError for an unknown site or dim.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> patch(model, *pairs, "z", metric=interp.logit_difference(3, 4)).value.dims
        ('layer', 'head')
    """

    site: str = "resid_pre"
    """Any site up to the last block, full or short."""
    _: KW_ONLY
    metric: Metric | LogitFunction | None = None
    """None = the logit difference of the answers that the data bring."""
    by: Sequence[str] | None = None
    """Which cells: any of `layer` and the site's own dims; along dims that are not named everything is patched."""
    direction: Direction = "denoise"
    """denoise: clean values into the corrupted run; noise: the other way round."""
    each: bool = True
    """Whether every prompt's effects are kept."""

    def bind(self, model: Subject) -> ByRow:
        """One planned sweep per batch of pairs."""
        config, metric = model.transformer.config, as_metric(self.metric, model.text)
        cells = PatchedCells.of(self.site, self.by, config)
        coords = site_coords(cells.names, cells.dims, config)
        attrs = {"site": self.site, "direction": self.direction}
        table = EffectTable(self.name, cells.dims, coords, metric, model.text, attrs)
        measure = partial(_measured, cells=cells, metric=metric, direction=self.direction)
        return causal(model, table, measure, each=self.each, pairs=True)


patch = of_pairs(Patch)


@dataclass(frozen=True)
class PatchedCells:
    """Which cells of which sites make one variant each."""

    names: tuple[str, ...]
    """The site in every layer."""
    dims: tuple[str, ...]
    """What tells variants apart, `layer` first."""

    @classmethod
    def of(cls, site: str, by: Sequence[str] | None, config: ModelConfig) -> PatchedCells:
        """The cells that `patch` was asked for, see there."""
        names = site_names(site, config)
        possible = site_dims(names)
        return cls(names, dims_asked(_usual(names[0], possible) if by is None else by, possible, site))

    def variants(self, values: Mapping[str, Tensor], batch: Batch) -> tuple[list[Variant], tuple[int, ...]]:
        """One variant per cell in the order of `dims`, and the length of every dim; those of positions that some of the
        rows lack leave these as they are.
        """
        shape = self._shape(values)
        return self.some(values, batch, range(prod(shape))), shape

    def some(self, values: Mapping[str, Tensor], batch: Batch, numbers: Sequence[int]) -> list[Variant]:
        """The variants of the cells with these numbers, counted in the order of `variants`."""
        shape, layered = self._shape(values), "layer" in self.dims
        along = {
            dim: cells_along(dim, batch, n) for dim, n in zip(self.dims, shape, strict=True) if dim != "layer"
        }
        put = {name: Set(values[name]) for name in self.names}
        found = []
        for place in zip(*np.unravel_index(numbers, shape), strict=True) if shape else [()] * len(numbers):
            index = dict(zip(self.dims, map(int, place), strict=True))
            names = [self.names[index.pop("layer")]] if layered else self.names
            at = {dim: along[dim][i] for dim, i in index.items()}
            found.append(Variant([Edit(name, put[name], at) for name in names]))
        return found

    def _shape(self, values: Mapping[str, Tensor]) -> tuple[int, ...]:
        """The length of every dim."""
        axes, shape = sites.axes_of(self.names[0]).split(), values[self.names[0]].shape
        return tuple(
            len(self.names) if dim == "layer" else shape[axes.index(_AXES[dim])] for dim in self.dims
        )


def _usual(name: str, possible: Sequence[str]) -> tuple[str, ...]:
    usual = _USUAL.get(sites.axes_of(name)) or ("layer", "head" if "head" in possible else "kv_head")
    return tuple(dim for dim in usual if dim in possible)


def _measured(
    model: Transformer, batch: Batch, cells: PatchedCells, metric: Metric, direction: Direction
) -> Steps[MeasuredEffects]:
    """The effect of every cell in every pair."""
    pair = Contrast.of(batch, direction)
    reads = [Read(name) for name in cells.names]
    ahead = [needs.Ahead(pair.own, cells.names)]
    given = yield from needs.recorded(pair.other, reads, final=True, exact=True, ahead=ahead)
    variants, shape = cells.variants({name: given.trace[Read(name)] for name in cells.names}, pair.own)
    # What compares does so with the clean run: the other one, or the one that is patched.
    clean = given.home(metric) if metric.compares and direction == "denoise" else None
    found = yield from needs.swept(pair.own, variants, metric, reference=clean)
    other = given.value(metric, found.reference if metric.compares else None)
    return MeasuredEffects.of(found, shape, pair.runs(found.base, other))


_INSIDE = ("z", "q", "k", "v", "pattern")
PRESETS: Mapping[str, tuple[tuple[str, tuple[str, ...]], ...]] = MappingProxyType(
    {
        **{site: ((site, ("layer", "pos")),) for site in ("resid_pre", "resid_mid", "attn_out", "mlp_out")},
        **{
            f"attn_head_{name}_{suffix}": ((site, ("layer", *extra, "head")),)
            for name, site in (("out", "z"), ("q", "q"), ("k", "k"), ("v", "v"))
            for suffix, extra in (("by_pos", ("pos",)), ("all_pos", ()))
        },
        "attn_head_pattern_by_pos": (("pattern", ("layer", "query", "head")),),
        "attn_head_pattern_all_pos": (("pattern", ("layer", "head")),),
        "attn_head_pattern_dest_src_pos": (("pattern", ("layer", "head", "query", "key")),),
        "attn_head_all_pos_every": tuple((site, ("layer", "head")) for site in _INSIDE),
        "attn_head_by_pos_every": tuple(
            (site, ("layer", "query" if site == "pattern" else "pos", "head")) for site in _INSIDE
        ),
        "block_every": tuple((site, ("layer", "pos")) for site in ("resid_pre", "attn_out", "mlp_out")),
    }
)
"""TransformerLens' ready sweeps, by what follows `get_act_patch_` in their names: the sites and dims of each."""


@public()
def patch_preset(
    model: Model,
    clean: Prompts | Data,
    corrupt: Prompts | Data,
    preset: str,
    *,
    metric: Metric | LogitFunction | None = None,
    direction: Direction = "denoise",
) -> dict[str, xr.Dataset]:
    """The results of `patch` for every site of a ready sweep (`PRESETS`), by site: "block_every", "resid_pre", ...

    Keys and values are patched per key/value head (dim `kv_head`), which heads may share. "block_every" of Macaron
    blocks has `mlp_before_out` too.
    Errors: KeyError for an unknown preset, and those of `patch`.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> list(patch_preset(model, *pairs, "block_every", metric=interp.logit_difference(3, 4)))
        ['resid_pre', 'attn_out', 'mlp_out']
    """
    if preset not in PRESETS:
        raise KeyError(f"unknown preset {preset!r}; {nearest(preset, PRESETS)}")
    return {
        site: patch(
            model, clean, corrupt, site, metric=metric, by=_own_dims(site, by), direction=direction,
        )
        for site, by in (*_first_mlps(preset, as_network(model).config), *PRESETS[preset])
    }  # fmt: skip


def _first_mlps(preset: str, config: ModelConfig) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """The first MLP of Macaron blocks, which "block_every" has besides: TransformerLens does not know it."""
    return (
        (("mlp_before_out", ("layer", "pos")),)
        if preset == "block_every" and "mlp_before" in config.mlps
        else ()
    )


def _own_dims(site: str, by: Sequence[str]) -> list[str]:
    """Heads of keys and values have a dim of their own."""
    return ["kv_head" if dim == "head" and site in ("k", "v") else dim for dim in by]
