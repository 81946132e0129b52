"""Ablation: how far the metric moves without a head, an MLP, a neuron, a whole layer, or several of them together.

The classic question of necessity. Two cautions come with it: redundant parts show nothing one by one (McGrath et al.
2023, "The Hydra Effect"; hence sets of parts), and the number depends on what stands in for the part (hence the
change, a record that the result carries). Every cell is a variant of one planned sweep.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from interp.causal.effects import (
    EffectTable,
    MeasuredEffects,
    causal,
    cells_along,
    dims_asked,
    listed,
    part_names,
    swept,
)
from interp.causal.stand_ins import (
    StandIn,
    StandIns,
    check_left,
    recorded,
    stand_in_text,
    unused_data_text,
    with_required_data,
)
from interp.data.batch import Batch, Prompts, is_prompts
from interp.data.pairs import Pairs
from interp.data.sources import Data
from interp.data.stream import DataSource
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.edits import Edit, Resample, Set, Zero
from interp.model.parts import KINDS, Part, PartName, as_part, axis_size
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes import needs
from interp.passes.edit_text import change_to_json
from interp.passes.metrics import LogitFunction, Metric, as_metric, followed
from interp.passes.needs import Steps
from interp.passes.observe import Model, Subject, text_of
from interp.passes.question import ByRow, Question
from interp.passes.variants import Variant
from interp.runs.functions import of_data

if TYPE_CHECKING:
    pass

AblatedKind = Literal[
    "head", "cross_head", "mlp", "mlp_before", "attn", "neuron", "neuron_before", "resid", "feature"
]
"""Parts that can be ablated one by one, in every layer; names of `model.parts.KINDS`."""


@dataclass(frozen=True, eq=False)
class Ablate(Question):
    """Effect of ablating each part: how far the metric moves when zero, a mean or another value replaces its output.

    Which parts does the answer need? The effect of a part is what it does to the metric directly, and through every
    later part that reads it.

    Args:
        data: prompts, token ids, a batch, files or a stream of any size.
        parts: parts that are ablated in turn: every "head", "mlp", "attn", "neuron" or "resid", or parts by name,
            `["L0H1", "L2.mlp", ["L0H1", "L1H2"]]`, those of an inner list ablated together. A head is its z (the bias
            of the layer's output stays), "attn" what the whole sublayer adds, biases and norm included, a neuron its
            value after the non-linearity, "resid" the stream that enters a layer. Models with cross-attention have
            "cross_head" too, and "mlp_before" and "neuron_before" are those of the MLP before attention, which
            Macaron blocks have besides the other.
        change: what replaces the part's values: `Zero()`, `Mean(...)` or `Resample(...)`.
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            data's answers. A metric that compares, such as the KL divergence, compares with the run without ablation.
        by: dims that tell cells apart: any of `layer`, `pos` and `head` or `neuron` (named parts: `part`, `pos`).
            Along the other dims everything is ablated at once. None: all but `pos`. Positions are each prompt's own
            tokens.
        layers: layers whose parts are ablated; None: all. Not for named parts.
        freeze_patterns: whether all attention patterns stay those of the run without the ablation.
        reference: prompts that means are taken over (None: the prompts themselves), or the corrupted prompt of each
            prompt for `Resample` (None: each takes another prompt of its group).
        groups: template of each prompt; means and other prompts are taken inside it.
        each: False keeps no values of single prompts, which data of any size requires.

    Returns:
        Dataset over the dims `by` (`part` for named parts), in the metric's unit:

        - `value`: metric(ablated) - metric(base), negative where the part holds the metric up: mean over prompts, with
          the ends `low` and `high` of its 95 % interval and the number of prompts `n`.
        - `each` [prompt, ...]: effect in every prompt; NaN at positions beyond a prompt's end.
        - `base` [prompt]: metric of the whole model.
        - `changed`: whether the part's value changes in any prompt and can reach the metric. Where not, the effect is
          0 because nothing was done.

        `attrs["change"]` is the change as JSON.

    Raises:
        ValueError: an unknown kind of part, or a change without the data it requires.
        KeyError: an unknown part or dim.
        IndexError: a layer, head or neuron that does not exist.

    Caveat:
        An effect near 0 does not show that a part is unused: another may stand in (McGrath et al. 2023, "The Hydra
        Effect"; hence sets of parts).

    See Also:
        `patch`: values of a chosen other prompt. `knock_out`: cuts attention from some tokens to others.

    Example:
        >>> found = ablate(model, prompt, "head", change=Zero(), metric=interp.logit_difference(" Mary", " John"))
        >>> found.value.dims
        ('layer', 'head')
    """

    parts: AblatedKind | Sequence[PartName | Sequence[PartName]] = "head"
    _: KW_ONLY
    change: StandIn
    metric: Metric | LogitFunction | None = None
    by: Sequence[str] | None = None
    layers: Sequence[int] | None = None
    freeze_patterns: bool = False
    reference: Prompts | None = None
    groups: Sequence[str] | None = None
    each: bool = True

    def with_data(
        self, model: Model, data: DataSource | Data | Pairs
    ) -> tuple[Question, DataSource | Data | Pairs]:
        """The question with its reference prompts as a batch, and the data; prompts in memory get corrupted prompts."""
        text = text_of(model)
        reference_batch = None if self.reference is None else text.batch(self.reference)
        if is_prompts(data):
            no_reference = self.reference is None
            data, reference_batch = with_required_data(
                self.change, text.batch(data), reference_batch, self.groups
            )
            reference_batch = (
                followed(reference_batch, self.metric, text)
                if no_reference and reference_batch is not None
                else reference_batch
            )
        return replace(self, reference=reference_batch), data

    def bind(self, model: Subject) -> ByRow:
        """One planned sweep per batch."""
        network, change = model.transformer, self.change
        grid = Grid.of(self.parts, network.config, self.layers, self.by)
        if problem := _unused_data(change, self.groups, has_reference=self.reference is not None):
            raise ValueError(f"{stand_in_text(change)} {problem}")
        reference = None if self.reference is None else model.text.batch(self.reference)
        fill = StandIns.of(change, network, partial(recorded, names=grid.sites), reference, self.groups)
        metric = as_metric(self.metric, model.text)
        attrs: dict[str, str | int | float] = {
            "parts": self.parts if isinstance(self.parts, str) else "named",
            "change": json.dumps(change_to_json(change)),
            "freeze_patterns": int(self.freeze_patterns),
        }
        table = EffectTable(self.name, grid.dims, grid.coords, metric, model.text, attrs)
        measure = partial(_effects, grid=grid, fill=fill, metric=metric, freeze=self.freeze_patterns)
        return causal(model, table, measure, each=self.each, pairs=isinstance(change, Resample))


def _unused_data(change: StandIn, groups: Sequence[str] | None, *, has_reference: bool) -> str | None:
    """Text that says why a change has no use for the reference prompts or groups it got; None if it uses them."""
    if has_reference and isinstance(change, Resample):
        return "takes its values from each prompt's corrupted one: reference prompts have no meaning"
    return unused_data_text(change, groups, has_reference=has_reference)


ablate = of_data(Ablate)


def _effects(
    model: Transformer, batch: Batch, grid: Grid, fill: StandIns, metric: Metric, freeze: bool
) -> Steps[MeasuredEffects]:
    """Effect of ablating every cell, in every prompt of a batch."""
    check_left(fill.change, batch)
    values = (
        (
            yield from _values_at(
                batch.pair()[1], grid.sites, [] if freeze else [needs.Ahead(batch, grid.sites)]
            )
        )
        if isinstance(fill.change, Resample)
        else fill.values(batch)
    )
    put = {site: Zero() if values is None else Set(values[site]) for site in grid.sites}
    frozen = (yield from _values_at(batch, _patterns(model.config))) if freeze else {}
    common = Variant([Edit(site, Set(pattern)) for site, pattern in frozen.items()])
    columns = batch.tokens.shape[1]
    return (yield from swept(batch, metric, grid.variants(put, batch), grid.shape(columns), common))


def _values_at(
    batch: Batch, sites: Sequence[str], ahead: Sequence[needs.Ahead] = ()
) -> Steps[Mapping[str, Tensor]]:
    """Activations [b, p, ...] at these sites on some prompts, by site; `ahead`: the sites that the next sweep edits."""
    run = yield from needs.recorded(batch, [Read(site) for site in sites], exact=True, ahead=ahead)
    return {site: run.trace[Read(site)] for site in sites}


def _patterns(config: ModelConfig) -> list[str]:
    """The sites of all attention patterns."""
    kinds = ["attn", *["cross_attn"] * config.cross_attention]
    return [f"blocks.{layer}.{kind}.hook_pattern" for layer in range(config.n_layers) for kind in kinds]


@dataclass(frozen=True)
class Grid:
    """The parts that are ablated, one by one or together, and the dims that tell the cells apart."""

    dims: tuple[str, ...]
    coords: Mapping[str, object]
    """The labels of every dim but `pos`."""
    groups: tuple[tuple[Part, ...], ...]
    """The parts that each cell ablates together; cells in the order of `dims` without `pos`, the last dim fastest."""

    @classmethod
    def of(
        cls,
        parts: AblatedKind | Sequence[PartName | Sequence[PartName]],
        config: ModelConfig,
        layers: Sequence[int] | None,
        by: Sequence[str] | None,
    ) -> Grid:
        """The cells that the arguments of `ablate` describe; raises the errors that `ablate` lists."""
        if isinstance(parts, str):
            return _grid_of_kind(parts, config, layers, by)
        return _grid_of_names(parts, config, layers, by)

    @property
    def sites(self) -> list[str]:
        """Names of the sites that hold the ablated parts, each once."""
        return list(dict.fromkeys(part.site for group in self.groups for part in group))

    def shape(self, columns: int) -> tuple[int, ...]:
        """Number of cells along every dim; along `pos` it is `columns`, the width of the batch in tokens."""
        return tuple(columns if dim == "pos" else len(self.coords[dim]) for dim in self.dims)  # type: ignore[arg-type]

    def variants(self, put: Mapping[str, Set | Zero], batch: Batch) -> list[Variant]:
        """One variant per cell, in the order of the dims."""
        if "pos" not in self.dims:
            return [Variant([Edit(part, put[part.site]) for part in group]) for group in self.groups]
        inner = 1  # number of groups along the dims after `pos`
        for dim in self.dims[self.dims.index("pos") + 1 :]:
            inner *= len(self.coords[dim])  # type: ignore[arg-type]
        outer = [self.groups[i : i + inner] for i in range(0, len(self.groups), inner)]
        return [
            Variant([Edit(part, put[part.site], {"pos": pos}) for part in group])
            for outer_groups in outer
            for pos in cells_along("pos", batch, batch.tokens.shape[1])
            for group in outer_groups
        ]


def _grid_of_kind(
    kind: str, config: ModelConfig, layers: Sequence[int] | None, by: Sequence[str] | None
) -> Grid:
    """One cell per part of a kind, dims in the order of its site's axes."""
    axis, site = KINDS[kind].axis, str(KINDS[kind].site)
    which = layers_with(site, config, layers)
    unit = kind.removesuffix("_before").removeprefix("cross_")
    possible = {"layer": which, "pos": []}
    if axis is not None:
        possible[unit] = list(range(min(axis_size(axis, config.at_layer(layer)) for layer in which)))
    dims = _dims(possible, by)
    coords: dict[str, object] = {dim: possible[dim] for dim in dims if dim != "pos"}
    groups = []
    for index in product(*(possible[dim] for dim in dims if dim != "pos")):
        at = dict(zip([dim for dim in dims if dim != "pos"], index, strict=True))
        cell_layers = [at["layer"]] if "layer" in at else which
        groups.append(tuple(_part(kind, layer, at.get(unit)) for layer in cell_layers))
    coords |= part_names([f"blocks.{layer}.{KINDS[kind].site}" for layer in which], dims, config)
    return Grid(dims, coords, tuple(groups))


def _part(kind: str, layer: int, index: int | None) -> Part:
    """The part of a kind with this layer and index; without an index, the whole site of the layer."""
    if index is None and KINDS[kind].axis is not None:
        return Part.of(f"blocks.{layer}.{KINDS[kind].site}")
    return Part(kind, layer, index)


def _grid_of_names(
    entries: Sequence[PartName | Sequence[PartName]],
    config: ModelConfig,
    layers: Sequence[int] | None,
    by: Sequence[str] | None,
) -> Grid:
    """One cell per named part, or per list of them."""
    if layers is not None:
        raise ValueError(f"parts name their layers themselves: layers={list(layers)} has no meaning")
    sets = [listed(entry) for entry in entries]
    if not sets or not all(sets):
        raise ValueError(
            f"parts by name, or lists of at least one that go together, are required, ['L0H1', ['L0H1', 'L2.mlp']], "
            f"got {entries!r}"
        )
    parts = {}
    for names in sets:
        named = tuple(as_part(name, config) for name in names)
        label = "+".join(map(str, named))
        if label in parts:
            raise ValueError(f"every set of parts is required once, got {label} twice")
        parts[label] = named
    dims = _dims({"part": list(parts), "pos": []}, by)
    if "part" not in dims:
        raise KeyError("named parts are told apart in every result: 'part' is required in `by`")
    return Grid(dims, {"part": list(parts)}, tuple(parts.values()))


def _dims(possible: Mapping[str, object], by: Sequence[str] | None) -> tuple[str, ...]:
    """The dims of the result: those in `by`, or all but `pos`, in the order of `possible`."""
    usual = [dim for dim in possible if dim != "pos"]
    return dims_asked(usual if by is None else by, list(possible), "this ablation")


def layers_with(site: str, config: ModelConfig, layers: Sequence[int] | None) -> list[int]:
    """The layers of an argument, None for all that have a site of the blocks.

    Raises:
        KeyError: a layer without the site, or no layer with it.
        IndexError: a layer that the model lacks.
        ValueError: no layer, or one twice.
    """
    if layers is None:
        return [int(name.split(".")[1]) for name in sites.of_layers(site, config)]
    which = chosen_layers(layers, config.n_layers)
    for layer in which:
        sites.find(f"blocks.{layer}.{site}", config)
    return which


def chosen_layers(layers: Sequence[int] | None, n_layers: int) -> list[int]:
    """The layers of an argument, all if None. IndexError for one that the model lacks, ValueError for none."""
    if layers is None:
        return list(range(n_layers))
    return chosen(layers, n_layers, "layer")


def chosen(indices: Sequence[int], count: int, what: str, end: int | None = None) -> list[int]:
    """The indices as numbers from 0. IndexError for one outside, ValueError for none or one that comes twice.

    Args:
        end: length that is added to negative indices; None: `count`.
    """
    end = count if end is None else end
    if bad := [i for i in indices if not -end <= i < count]:
        raise IndexError(f"{what} must be in [0, {count - 1}], got {bad[0]}")
    from_front = [i + end if i < 0 else i for i in indices]
    if not from_front or len(set(from_front)) < len(from_front):
        raise ValueError(f"at least one {what} and none twice is required, got {list(indices)}")
    return from_front
