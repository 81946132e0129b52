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
_DEFAULT_DIMS = {"b p d": ("layer", "pos"), "b p m": ("layer", "pos"), "b p x": ("layer", "expert")}
"""Default dims `by`, by the axes of the site; other sites have layer and head."""


@dataclass(frozen=True, eq=False)
class Patch(Question):
    """Effect of patching each cell of a site: how far the metric moves when its values come from the other prompt.

    A cell is a layer, head, position or any combination that `by` names. Its values, as one prompt of a pair has them,
    are put into the run of the other prompt; where the answer follows, that cell carries it. Denoising puts clean
    values into the corrupted run (which cells suffice to bring the answer back?), noising corrupted values into the
    clean run (which cells does the answer need?).

    Args:
        clean, corrupt: prompts; each pair has the same number of tokens, aligned one by one. Files and streams are
            paired row by row.
        site: which activation: a site up to the last block, in full or short: "resid_pre", "z", "k", "attn_out",
            "mlp.hook_post", "pattern".
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            answers that come with the clean prompts. A metric that compares, such as the KL divergence, compares with
            the clean run.
        by: dims that tell cells apart: any of `layer` and the site's own (`pos`, `head`, `kv_head`, `query`, `key`,
            `neuron`, ...). Along the other dims everything is patched at once. None: layer and position for streams,
            layer and head for what is inside attention. Positions count the tokens of each prompt without padding.
        direction: "denoise" patches clean values into the corrupted run, "noise" the other way round.
        each: False keeps no values of single prompts, which data of any size requires.

    Returns:
        Dataset over the dims `by`, in the metric's unit:

        - `value`: metric of the patched run minus that of the same run unpatched, mean over prompts, with the ends
          `low` and `high` of its 95 % interval and the number of prompts `n`.
        - `normalised`: (patched - corrupt) / (clean - corrupt) of the mean metrics; in both directions 0 is the
          corrupted and 1 the clean run.
        - `each` [prompt, ...]: effect in every prompt; NaN at positions beyond a prompt's end.
        - `changed`: whether the patched values differ in any prompt and can reach the metric. Where they do not, the
          effect is 0 because nothing was done.
        - `clean`, `corrupt` [prompt]: metric of the two runs.

    Raises:
        ValueError: pairs that do not align, or a metric with the same value on clean and corrupted runs everywhere.
        KeyError: an unknown site or dim.

    Source:
        Heimersheim & Nanda 2024, "How to use and interpret activation patching".

    See Also:
        `attribution_patch`: an estimate of the same map from two forward passes and one backward pass.
        `path_patch`: the effect along one path. `ablate`: replaces values without a second prompt.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> patch(model, *pairs, "z", metric=interp.logit_difference(3, 4)).value.dims
        ('layer', 'head')
    """

    site: str = "resid_pre"
    _: KW_ONLY
    metric: Metric | LogitFunction | None = None
    by: Sequence[str] | None = None
    direction: Direction = "denoise"
    each: bool = True

    def bind(self, model: Subject) -> ByRow:
        """One planned sweep per batch of pairs."""
        config, metric = model.transformer.config, as_metric(self.metric, model.text)
        cells = PatchedCells.of(self.site, self.by, config)
        coords = site_coords(cells.names, cells.dims, config)
        attrs = {"site": self.site, "direction": self.direction}
        table = EffectTable(self.name, cells.dims, coords, metric, model.text, attrs)
        measure = partial(_effects, cells=cells, metric=metric, direction=self.direction)
        return causal(model, table, measure, each=self.each, pairs=True)


patch = of_pairs(Patch)


@dataclass(frozen=True)
class PatchedCells:
    """The cells of sites that make one variant each."""

    names: tuple[str, ...]
    """The site in every layer."""
    dims: tuple[str, ...]
    """The dims that tell variants apart, `layer` first."""

    @classmethod
    def of(cls, site: str, by: Sequence[str] | None, config: ModelConfig) -> PatchedCells:
        """The cells of `patch`'s arguments."""
        names = site_names(site, config)
        possible = site_dims(names)
        return cls(names, dims_asked(_default_dims(names[0], possible) if by is None else by, possible, site))

    def variants(self, values: Mapping[str, Tensor], batch: Batch) -> tuple[list[Variant], tuple[int, ...]]:
        """One variant per cell in the order of `dims`, and the length of every dim.

        Variants of positions that some rows lack leave these rows as they are.
        """
        shape = self._shape(values)
        return self.variants_of(values, batch, range(prod(shape))), shape

    def variants_of(
        self, values: Mapping[str, Tensor], batch: Batch, numbers: Sequence[int]
    ) -> list[Variant]:
        """The variants of the cells with these numbers, counted in the order of `variants`."""
        shape, layered = self._shape(values), "layer" in self.dims
        along = {
            dim: cells_along(dim, batch, n) for dim, n in zip(self.dims, shape, strict=True) if dim != "layer"
        }
        put = {name: Set(values[name]) for name in self.names}
        variants = []
        for place in zip(*np.unravel_index(numbers, shape), strict=True) if shape else [()] * len(numbers):
            index = dict(zip(self.dims, map(int, place), strict=True))
            names = [self.names[index.pop("layer")]] if layered else self.names
            at = {dim: along[dim][i] for dim, i in index.items()}
            variants.append(Variant([Edit(name, put[name], at) for name in names]))
        return variants

    def _shape(self, values: Mapping[str, Tensor]) -> tuple[int, ...]:
        """Number of cells along every dim."""
        axes, shape = sites.axes_of(self.names[0]).split(), values[self.names[0]].shape
        return tuple(
            len(self.names) if dim == "layer" else shape[axes.index(_AXES[dim])] for dim in self.dims
        )


def _default_dims(name: str, possible: Sequence[str]) -> tuple[str, ...]:
    usual = _DEFAULT_DIMS.get(sites.axes_of(name)) or ("layer", "head" if "head" in possible else "kv_head")
    return tuple(dim for dim in usual if dim in possible)


def _effects(
    model: Transformer, batch: Batch, cells: PatchedCells, metric: Metric, direction: Direction
) -> Steps[MeasuredEffects]:
    """The effect of every cell in every pair."""
    pair = Contrast.of(batch, direction)
    reads = [Read(name) for name in cells.names]
    ahead = [needs.Ahead(pair.own, cells.names)]
    other_run = yield from needs.recorded(pair.other, reads, final=True, exact=True, ahead=ahead)
    variants, shape = cells.variants({name: other_run.trace[Read(name)] for name in cells.names}, pair.own)
    # A metric that compares does so with the clean run: the other run (denoise), or the own run (noise).
    clean = other_run.final_at(metric) if metric.compares and direction == "denoise" else None
    sweep = yield from needs.swept(pair.own, variants, metric, reference=clean)
    other_value = other_run.value(metric, sweep.reference if metric.compares else None)
    return MeasuredEffects.of(sweep, shape, pair.runs(sweep.base, other_value))


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
"""TransformerLens' ready sweeps: the sites and dims of each, under the part of its name after `get_act_patch_`."""


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
    """The results of `patch` for every site of a ready sweep of TransformerLens, by site.

    Keys and values are patched per key/value head (dim `kv_head`), which heads may share. "block_every" of Macaron
    blocks has `mlp_before_out` too.

    Args:
        clean, corrupt: prompts; each pair has the same number of tokens, aligned one by one. Files and streams are
            paired row by row.
        preset: a key of `PRESETS`, which are the names of TransformerLens after `get_act_patch_`: "block_every",
            "resid_pre", ...
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            answers that come with the clean prompts.
        direction: "denoise" patches clean values into the corrupted run, "noise" the other way round.

    Returns:
        The Dataset of `patch` for each site.

    Raises:
        KeyError: an unknown preset, or a site that the model does not have.
        ValueError: as in `patch`.

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
    """The MLP before attention of Macaron blocks, unknown to TransformerLens: an addition to "block_every"."""
    return (
        (("mlp_before_out", ("layer", "pos")),)
        if preset == "block_every" and "mlp_before" in config.mlps
        else ()
    )


def _own_dims(site: str, by: Sequence[str]) -> list[str]:
    """The dims of a preset, with `kv_head` in place of `head` for the sites k and v."""
    return ["kv_head" if dim == "head" and site in ("k", "v") else dim for dim in by]
