"""Nodes of sparse feature circuits: features and errors of a model's dictionaries, and their effects by a gradient.

The state of a dictionary is its features f and the error e of what it writes, y = decode(f) + e, so that nothing of the
model is lost. The effect of giving a node another value is, to first order, its change times the gradient of the metric
there; an error is a vector and one node, whose effect is the sum over its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor

from interp.causal.contrast import Contrast, Direction
from interp.causal.stand_ins import StandIns, check_left
from interp.circuits.edge_attribution import Between, GradientLine
from interp.circuits.interchange import Replacement
from interp.core.memory import check_memory
from interp.core.stats import upcast
from interp.core.transfers import to_device
from interp.data.batch import Batch
from interp.model.config import ModelConfig
from interp.model.edits import Edit
from interp.model.mounted import ERROR, FEATURES
from interp.model.parts import Part
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.memory import that_fit
from interp.passes.metrics import Metric
from interp.passes.needs import Steps, TowardMetric, recorded
from interp.passes.question import Values

COPIES = 8
"""Times the features of a row that a differentiated pass holds: values of two runs, gradients, and what it keeps."""


@dataclass(frozen=True, order=True)
class FeatureNode:
    """A feature of a block's dictionary, or its error, at one position or at all; written `L5F123`, `L5.error@7`."""

    layer: int
    is_error: bool
    feature: int = 0
    pos: int = -1
    """Position of the token in its row; -1 for all positions together."""

    @classmethod
    def of(cls, name: str) -> FeatureNode:
        """The node of this name. ValueError for a name that no feature and no error has."""
        match = re.fullmatch(r"(L\d+(?:F\d+|\.error))(?:@(\d+))?", name)
        if match is None:
            raise ValueError(
                f"a feature or an error is required, L5F123 or L5.error, or L5F123@7, got {name!r}"
            )
        part, pos = Part.of(match[1]), -1 if match[2] is None else int(match[2])
        assert part.layer is not None
        return cls(part.layer, part.kind == "error", part.index or 0, pos)

    @property
    def part(self) -> str:
        """The name of the feature or error, whatever the position."""
        return str(Part("error", self.layer) if self.is_error else Part("feature", self.layer, self.feature))

    def __str__(self) -> str:
        return self.part if self.pos < 0 else f"{self.part}@{self.pos}"


@dataclass(frozen=True)
class FeatureSpace:
    """Every feature and error of a model's dictionaries, in one row: layer by layer, a layer's error at its end."""

    layers: tuple[int, ...]
    counts: tuple[int, ...]
    """Number of features in each of these layers."""

    @classmethod
    def of(cls, config: ModelConfig) -> FeatureSpace:
        """The space of a model. ValueError for a model without dictionaries."""
        by_layer = () if config.features is None else config.features.by_layer
        if not any(by_layer):
            raise ValueError(
                "a circuit of features requires a model with dictionaries: model.with_dictionaries([...])"
            )
        return cls(tuple(i for i, n in enumerate(by_layer) if n), tuple(n for n in by_layer if n))

    def __len__(self) -> int:
        return sum(self.counts) + len(self.counts)

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites of all features and errors."""
        return tuple(site for layer in self.layers for site in sites_of(layer))

    @cached_property
    def parts(self) -> dict[int, slice]:
        """The place of every layer's features and error in the row."""
        starts = [0, *torch.tensor([n + 1 for n in self.counts]).cumsum(0).tolist()]
        return {layer: slice(*starts[i : i + 2]) for i, layer in enumerate(self.layers)}

    def node(self, place: int, pos: int = -1) -> FeatureNode:
        """The node at a place of the row."""
        layer = next(layer for layer, part in self.parts.items() if place < part.stop)
        part = self.parts[layer]
        is_error = place == part.stop - 1
        return FeatureNode(layer, is_error, 0 if is_error else place - part.start, pos)

    def place(self, node: FeatureNode) -> int:
        """The place of a node in the row. KeyError or IndexError for a node that the model lacks."""
        if node.layer not in self.parts:
            raise KeyError(
                f"{node}: block {node.layer} has no dictionary; those of {list(self.layers)} have one"
            )
        part = self.parts[node.layer]
        if node.is_error:
            return part.stop - 1
        if not node.feature < part.stop - 1 - part.start:
            raise IndexError(f"{node}: features are 0 to {part.stop - part.start - 2} in block {node.layer}")
        return part.start + node.feature

    def rows_that_fit(self, model: Transformer, columns: int) -> int:
        """Rows of a differentiated pass. ValueError where one of so many columns takes more memory than is free."""
        each = COPIES * columns * sum(self.counts) * max(4, model.dtype.itemsize)
        what = (
            f"a pass over {sum(self.counts)} features of {len(self.layers)} dictionaries at {columns} tokens"
        )
        check_memory(what, each, model.device, "shorter prompts take less, and fewer or smaller dictionaries")
        return that_fit(model, each)


def sites_of(layer: int) -> tuple[str, str]:
    """The sites of the features and of the error of a layer's dictionary."""
    return f"blocks.{layer}.{FEATURES}", f"blocks.{layer}.{ERROR}"


@dataclass(frozen=True, eq=False)
class Contrasted:
    """How values and gradients of the features are compared: between which runs, and where gradients are taken."""

    space: FeatureSpace
    metric: Metric
    line: GradientLine
    direction: Direction
    replacement: Replacement
    fill: StandIns
    """Values in place of those of features and errors, where these are not those of another run."""
    by_position: bool

    def replaced(self, batch: Batch) -> Steps[Mapping[str, Tensor]]:
        """The values that stand for those of features and errors on these prompts, by site."""
        if self.replacement == "resample":
            run = yield from recorded(batch.pair()[1], [Read(site) for site in self.space.sites], exact=True)
            return {read.site: value for read, value in run.trace.items()}
        check_left(self.fill.change, batch)
        values = self.fill.values(batch)
        if values is None:
            return dict.fromkeys(self.space.sites, torch.zeros((), device=batch.tokens.device))
        return {site: value.to(batch.tokens.device) for site, value in values.items()}


@dataclass(frozen=True, eq=False)
class Linearised:
    """What the metric is to first order around a run: change and gradient of every feature and error, by site."""

    own: Batch
    """The prompts of the run."""
    change: Mapping[str, Float[Tensor, "b p c"]]
    """Other value minus own value."""
    slope: Mapping[str, Float[Tensor, "b p c"]]
    toward: TowardMetric


def linearised(model: Transformer, batch: Batch, how: Contrasted) -> Steps[Linearised]:
    """The changes and gradients of all features and errors on some prompts."""
    sites, reads = how.space.sites, [Read(site) for site in how.space.sites]
    if how.replacement == "resample":
        pair = Contrast.of(batch, how.direction)
        own = pair.own
        other_run = yield from recorded(pair.other, reads, final=how.metric.compares, exact=True)
        other: Mapping[str, Tensor] = {site: other_run.trace[Read(site)] for site in sites}
        toward = TowardMetric(how.metric, other_run.reference(how.metric))
    else:
        own = batch if batch.corrupt is None else batch.pair()[0]
        other, toward = (yield from how.replaced(batch)), TowardMetric(how.metric)
    at_own = how.line.method == "eap"
    slopes = [Read(site, grad=True) for site in sites] if at_own else []
    run = yield from recorded(own, [*reads, *slopes], toward=toward if at_own else None, exact=True)
    values = {site: run.trace[Read(site)] for site in sites}
    if at_own:
        slope: dict[str, Tensor] = {site: upcast(run.trace[Read(site, grad=True)]) for site in sites}
    else:
        slope = yield from _mean_slopes(own, values, other, toward, how)
    return Linearised(
        own, {site: upcast(other[site]) - upcast(values[site]) for site in sites}, slope, toward
    )


def _mean_slopes(
    own: Batch,
    values: Mapping[str, Tensor],
    other: Mapping[str, Tensor],
    toward: TowardMetric,
    how: Contrasted,
) -> Steps[dict[str, Tensor]]:
    """The mean gradients of runs in which one dictionary's features and error move from one run's to the other's."""
    points, weights = how.line.points()
    example = torch.arange(len(own)).repeat_interleave(len(points))
    along, slope = replace(toward, example=example), {}
    for layer in how.space.layers:
        edits = []
        for site in sites_of(layer):
            ends = (values[site], other[site].expand_as(values[site]))
            clean, corrupt = ends if how.direction == "noise" else ends[::-1]
            edits.append(Edit(site, Between(corrupt, clean, points)))
        reads = [Read(site, grad=True) for site in sites_of(layer)]
        run = yield from recorded(own.rows(example), reads, edits=edits, toward=along)
        for read in reads:
            each = rearrange(upcast(run.trace[read]), "(b k) ... -> b k ...", k=len(points))
            slope[read.site] = torch.einsum("bk...,k->b...", each, to_device(weights, each.device).to(each))
    return slope


def node_effects(model: Transformer, batch: Batch, how: Contrasted) -> Steps[Values]:
    """The effect of every node in each prompt, `[b (p) node]`, layer by layer."""
    effects = []
    for rows in batch.split(how.space.rows_that_fit(model, batch.tokens.shape[1])):
        line = yield from linearised(model, rows, how)
        real = line.own.real.to(model.device)[..., None]
        effect = torch.cat([_of_layer(line, layer) for layer in how.space.layers], -1)
        effects.append(effect.masked_fill(~real, torch.nan) if how.by_position else effect.sum(1))
    return {"effect": torch.cat(effects)}


def _of_layer(line: Linearised, layer: int) -> Float[Tensor, "b p c"]:
    """Change times gradient of the features and the error of a layer."""
    features, error = sites_of(layer)
    of_error = (line.change[error] * line.slope[error]).sum(-1, keepdim=True)
    return torch.cat((line.change[features] * line.slope[features], of_error), -1)


# nodes that are kept


@dataclass(frozen=True, eq=False)
class LayerNodes:
    """The kept nodes of one layer: which features they are of, and where they stand among all kept nodes."""

    layer: int
    features: Int[Tensor, "f"]
    """The features of the nodes, one for each node."""
    pos: Int[Tensor, "f"] | None
    """Their positions; None: all together."""
    error_pos: Int[Tensor, "e"] | None
    has_error: bool
    place: slice
    """Their place among all kept nodes: features, then errors."""

    def reduced(self, product: Float[Tensor, "b p c"], pos: Int[Tensor, "n"] | None) -> Float[Tensor, "b n"]:
        """The product of every node: summed over positions, or at the node's own (0 beyond the prompt's end).

        All errors of a layer share one column.
        """
        if pos is None:
            return product.sum(1)
        inside = to_device(pos < product.shape[1], product.device)
        at = to_device(pos.clamp(max=product.shape[1] - 1), product.device)
        column = torch.arange(len(pos), device=product.device)
        return product[:, at, column % product.shape[2]] * inside

    def columns(self, values: Float[Tensor, "b p s"]) -> Float[Tensor, "b p f"]:
        """The values at the features of the nodes."""
        return values.index_select(-1, to_device(self.features, values.device))

    def reads(self, change: Mapping[str, Tensor]) -> list[Read]:
        """Reads of the gradients at these nodes, times their changes: `[b node]` each."""
        features, error = sites_of(self.layer)
        reads = []
        if len(self.features):
            via = partial(self._along_features, change=self.columns(change[features]))
            reads.append(Read(features, via=via, grad=True))
        if self.has_error:
            reads.append(Read(error, via=partial(self.of_error, other=change[error]), grad=True))
        return reads

    def _along_features(
        self, gradient: Float[Tensor, "b p s"], change: Float[Tensor, "b p c"]
    ) -> Float[Tensor, "b c"]:
        return self.reduced(self.columns(upcast(gradient)) * change, self.pos)

    def of_error(self, value: Float[Tensor, "b p d"], other: Float[Tensor, "b p d"]) -> Float[Tensor, "b e"]:
        """The products of an error with another vector, one for each node."""
        return self.reduced((upcast(value) * other).sum(-1, keepdim=True), self.error_pos)

    def numbers(self, values: Mapping[str, Tensor], slope: Mapping[str, Tensor]) -> Float[Tensor, "c"]:
        """The sum over the prompts of every node's value times the metric's gradient there."""
        features, error = sites_of(self.layer)
        found = []
        if len(self.features):
            product = self.columns(upcast(values[features])) * self.columns(slope[features])
            found.append(self.reduced(product, self.pos))
        if self.has_error:
            found.append(self.of_error(values[error], slope[error]))
        return torch.cat(found, -1).sum(0)


def nodes_by_layer(nodes: Sequence[FeatureNode], *, by_position: bool) -> list[LayerNodes]:
    """The kept nodes, which are in order, layer by layer."""
    found, start = [], 0
    for layer in sorted({node.layer for node in nodes}):
        of_layer = [node for node in nodes if node.layer == layer]
        features, errors = ([n for n in of_layer if n.is_error == kind] for kind in (False, True))
        pos, error_pos = (
            torch.tensor([node.pos for node in some], dtype=torch.long) if by_position else None
            for some in (features, errors)
        )
        index = torch.tensor([node.feature for node in features], dtype=torch.long)
        place = slice(start, start := start + len(of_layer))
        found.append(LayerNodes(layer, index, pos, error_pos, bool(errors), place))
    return found
