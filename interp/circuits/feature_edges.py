"""Edges between nodes of sparse feature circuits: how much of a node's effect another node carries on.

An edge u -> d is the metric's gradient at d, times the gradient of d with respect to u, times the change of u. What all
dictionaries between u and d write is held, so that an edge is the direct path alone: through the stream, and through
attention and MLPs that have no dictionary. Only kept nodes are ever paired: one backward pass for each downstream node
gives the edges out of all nodes before it, with no matrix of features by features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from interp.circuits.feature_nodes import Contrasted, LayerNodes, Linearised, linearised, sites_of
from interp.data.batch import Batch
from interp.model.edits import Detach, Edit
from interp.model.mounted import of_one_block
from interp.model.transformer import Transformer
from interp.passes.duration import announce
from interp.passes.needs import Steps, TowardSites, recorded
from interp.passes.question import Values


def edge_weights(
    model: Transformer, batch: Batch, how: Contrasted, kept: Sequence[LayerNodes]
) -> Steps[Values]:
    """The weight of every edge in each prompt, `[b node node+1]`: into each node, and in the last column the metric."""
    _announce(model, batch, kept)
    weights = []
    for rows in batch.split(how.space.rows_that_fit(model, batch.tokens.shape[1])):
        line = yield from linearised(model, rows, how)
        weights.append((yield from _weights(model, line, how, kept)))
    return {"edge": torch.cat(weights)}


def _weights(
    model: Transformer, line: Linearised, how: Contrasted, kept: Sequence[LayerNodes]
) -> Steps[Float[Tensor, "b node receiver"]]:
    """The weights of some prompts."""
    n = kept[-1].place.stop
    weights = torch.zeros(
        len(line.own), n, n + 1, device=model.device, dtype=line.slope[how.space.sites[0]].dtype
    )
    held = {layer: Edit(written(model, layer), Detach()) for layer in how.space.layers}
    reads = {nodes.layer: nodes.reads(line.change) for nodes in kept}
    every = [read for layer in reads.values() for read in layer]
    run = yield from recorded(line.own, every, edits=list(held.values()), toward=line.toward)
    for nodes in kept:
        weights[:, nodes.place, n] = torch.cat([run.trace[read] for read in reads[nodes.layer]], -1)
    for i, nodes in enumerate(kept[1:], 1):
        toward = TowardSites(sites_of(nodes.layer), _Numbers(nodes, line.slope))
        upstream = [read for before in kept[:i] for read in reads[before.layer]]
        before = [edit for layer, edit in held.items() if layer < nodes.layer]
        run = yield from recorded(line.own, upstream, edits=before, toward=toward)
        found = torch.cat([run.trace[read] for read in upstream], -1)  # [receiver b sender]
        weights[:, : found.shape[-1], nodes.place] = found.permute(1, 2, 0)
    return weights


@dataclass(frozen=True, eq=False)
class _Numbers:
    """The sums that are differentiated for the edges into a layer's nodes."""

    nodes: LayerNodes
    slope: Mapping[str, Tensor]

    def __call__(self, values: Mapping[str, Tensor]) -> Float[Tensor, "node"]:
        return self.nodes.numbers(values, self.slope)


def written(model: Transformer, layer: int) -> str:
    """The site that a block's dictionary writes."""
    site = of_one_block(model.dictionaries, "a circuit of features")[layer].writes
    assert site is not None, "a dictionary in a block knows its site"
    return site


def _announce(model: Transformer, batch: Batch, kept: Sequence[LayerNodes]) -> None:
    """Say beforehand how long the backward passes of a batch take, if that is long."""
    config = model.config
    each = sum(p.numel() for p in model.block(0).parameters())
    blocks = sum((nodes.place.stop - nodes.place.start) * nodes.layer for nodes in kept) + 3 * config.n_layers
    announce(
        f"edges between {kept[-1].place.stop} nodes in {len(batch)} prompts",
        2 * each * blocks * int(batch.host().real.sum()),
        model.device,
        "a higher node_threshold, a smaller most or fewer prompts take less",
    )
