"""A model made linear around one prompt: exactly what every node adds to another one.

Under the backward rules of `interp.passes.rules.LINEAR` (norm scales, attention patterns and the slopes of neurons are
constants) every value of a pass is a constant plus a linear function of the values of the nodes before it. Nodes are
cells of sites at which gradients end, the leaves of the graph of derivatives, so that (value of a node) x (gradient)
counts the paths that meet no other node on their way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.stats import upcast
from interp.data.batch import Batch
from interp.model import sites
from interp.model.edits import Edit
from interp.model.mounted import ERROR, FEATURES
from interp.model.tap import Tap
from interp.model.transformer import Transformer
from interp.passes.rules import AT_MOST, LINEAR, ROUNDING, promises, under_rules

NodeKind = Literal["embedding", "neuron", "feature", "error"]
EMBEDDING, NEURONS = "hook_embed", "mlp.hook_post"
CONSTANT = ("hook_pos_embed", "hook_type_embed")
"""Sites of embeddings that belong to no token: they count as biases."""


@dataclass(frozen=True)
class NodeSite:
    """A site whose cells are nodes."""

    name: str
    kind: NodeKind
    layer: int | None = None

    @property
    def by_entry(self) -> bool:
        """Whether each number is a node, such as a neuron; otherwise each position's whole vector is one."""
        return self.kind in ("neuron", "feature")


@dataclass(frozen=True, eq=False)
class Incoming:
    """What enters some targets, a row for each."""

    edges: Float[Tensor, "r n"]
    """From each node before them, by its number (`LocalModel.offsets`)."""
    bias: Float[Tensor, "r"]
    """From everything that is no node: biases, and embeddings of positions and types."""
    values: Float[Tensor, "r"]
    """The targets' values, which are the sums of both."""

    def checked(self, dtype: torch.dtype) -> Float[Tensor, "r"]:
        """How far edges and bias miss each target's value, relative to the sum of their sizes.

        Raises:
            ArithmeticError: they miss it by more than the rounding of a pass in this dtype.
        """
        size = self.edges.abs().sum(1) + self.bias.abs()
        missed, values = (self.edges.sum(1) + self.bias - self.values).abs(), self.values
        # terms that cancel within a node leave rounding of the size of the values that are read
        most = min(ROUNDING * torch.finfo(dtype).eps, AT_MOST)
        if not bool((missed <= most * torch.maximum(size, values.abs())).all()):
            worst = int((missed / size.clamp_min(torch.finfo(size.dtype).tiny)).argmax())
            raise ArithmeticError(
                f"edges and biases should sum to {float(values[worst]):.6g}, they sum to "
                f"{float(self.edges[worst].sum() + self.bias[worst]):.6g}"
            )
        return missed / size.clamp_min(torch.finfo(size.dtype).tiny)


@dataclass(frozen=True, eq=False)
class LocalModel:
    """One pass over a prompt whose gradients end at the nodes; made by `local_model`."""

    model: Transformer
    """The model under the rules."""
    sites: tuple[NodeSite, ...]
    """Where the nodes are, in the order of the pass."""
    leaves: Mapping[str, Float[Tensor, "1 p k"]]
    """The values of the nodes, by site."""
    computed: Mapping[str, Float[Tensor, "1 p k"]]
    """The same values as functions of the nodes before them."""
    constants: tuple[Tensor, ...]
    """Parameters and embeddings that are no nodes."""
    stream: Float[Tensor, "d"]
    """The final stream at the last token, as a function of the nodes."""
    end: Float[Tensor, "d"]
    """Its value, at which the gradient of the logits ends."""
    logits: Float[Tensor, "v"]
    """Logits after the last token, before a soft cap, as functions of `end`."""

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """The number of the first node of each site, and last how many nodes there are."""
        found = [0]
        for site in self.sites:
            leaf = self.leaves[site.name]
            found.append(found[-1] + (leaf.numel() if site.by_entry else leaf.shape[1]))
        return tuple(found)

    @cached_property
    def values(self) -> Float[Tensor, "n"]:
        """The value of each node, on the host: of an embedding or an error the length of its vector."""
        each = [self.leaves[site.name].detach() for site in self.sites]
        by_site = [
            upcast(x).flatten() if site.by_entry else upcast(x).norm(dim=-1).flatten()
            for site, x in zip(self.sites, each, strict=True)
        ]
        return torch.cat([x.cpu() for x in by_site])

    @cached_property
    def by_entry(self) -> np.ndarray:
        """True at the nodes that are single numbers."""
        sizes = np.diff(self.offsets)
        return np.repeat([site.by_entry for site in self.sites], sizes)

    def site_of(self, nodes: np.ndarray) -> np.ndarray:
        """Index of each node's site in `sites`."""
        return np.searchsorted(self.offsets, nodes, side="right") - 1

    def place(self, node: int) -> tuple[NodeSite, int, int | None]:
        """The site, the position and the index of a node; no index where a whole vector is one."""
        number = int(self.site_of(np.array([node]))[0])
        site, at = self.sites[number], node - self.offsets[number]
        width = self.leaves[site.name].shape[-1] if site.by_entry else 1
        return site, at // width, at % width if site.by_entry else None

    def into_nodes(self, number: int, nodes: Int[Tensor, "r"]) -> Incoming:
        """What enters some nodes of site `number`."""
        site, at = self.sites[number], nodes - self.offsets[number]
        cells = self.computed[site.name].flatten()[at.to(self.logits.device)]
        own = torch.zeros(len(nodes))
        if site.kind == "feature":
            assert site.layer is not None
            constants = upcast(self.model.dictionaries[site.layer].constants()).cpu()
            own = constants[at % self.leaves[site.name].shape[-1]]
        found = self._into(cells, torch.eye(len(cells)).to(cells), number)
        return Incoming(found.edges, found.bias + own.to(found.bias), found.values)

    def into_logits(self, values: Float[Tensor, "r"]) -> Incoming:
        """What enters some values that are functions of the logits."""
        slopes, bias = [], []
        for value in values:  # one by one, as products with half-precision weights take no batch of gradients
            slope, *others = torch.autograd.grad(
                value, [self.end, *self.constants], retain_graph=True, allow_unused=True
            )
            slopes.append(slope)
            terms = [
                (upcast(g) * upcast(x.detach())).sum()
                for g, x in zip(others, self.constants, strict=True)
                if g is not None
            ]
            bias.append(sum(terms, torch.zeros((), device=slope.device)))
        found = self._into(self.stream, torch.stack(slopes).to(self.stream), None)
        return Incoming(found.edges, found.bias + torch.stack(bias).to(found.bias), upcast(values.detach()))

    def _into(
        self, outputs: Float[Tensor, "*n"], directions: Float[Tensor, "r *n"], number: int | None
    ) -> Incoming:
        """What enters outputs along directions, as functions of the nodes of the first `number` sites; None: of all."""
        before = self.sites[:number]
        leaves = [self.leaves[site.name] for site in before]
        slopes = torch.autograd.grad(
            outputs, [*leaves, *self.constants], directions, retain_graph=True, allow_unused=True,
            is_grads_batched=True,
        )  # fmt: skip
        values = (upcast(directions) * upcast(outputs.detach())).flatten(1).sum(1)
        edges, bias = [], torch.zeros_like(values)
        for site, leaf, slope in zip(before, leaves, slopes, strict=False):
            if slope is None:
                shape = leaf.shape if site.by_entry else leaf.shape[:2]
                edges.append(bias.new_zeros(len(values), shape.numel()))
                continue
            terms = upcast(slope) * upcast(leaf.detach())
            edges.append((terms if site.by_entry else terms.sum(-1)).flatten(1))
            if site.kind == "error":
                bias = bias + self._decoder_bias(site, slope)
        for value, slope in zip(self.constants, slopes[len(leaves) :], strict=True):
            if slope is not None:
                bias = bias + (upcast(slope) * upcast(value.detach())).flatten(1).sum(1)
        return Incoming(torch.cat(edges, 1) if edges else bias.new_zeros(len(values), 0), bias, values)

    def _decoder_bias(self, error: NodeSite, slope: Float[Tensor, "r 1 p d"]) -> Float[Tensor, "r"]:
        """What a dictionary's b_dec adds, which enters where its error does."""
        assert error.layer is not None
        b_dec = upcast(self.model.dictionaries[error.layer].b_dec.detach())
        return torch.einsum("r...d, d -> r...", upcast(slope), b_dec.to(slope.device)).flatten(1).sum(1)


def node_sites(model: Transformer, nodes: Literal["neuron", "feature"]) -> tuple[NodeSite, ...]:
    """The sites of the nodes: embeddings first, then neurons, or the features and errors of each dictionary.

    Raises:
        KeyError: a model without neurons.
        ValueError: features of a model without dictionaries, or of such that are no linear function where the same
            features are active.
    """
    found = [NodeSite(EMBEDDING, "embedding")]
    if nodes == "neuron":
        names = sites.of_layers(NEURONS, model.config)
        return (*found, *(NodeSite(name, "neuron", int(name.split(".")[1])) for name in names))
    if not model.dictionaries:
        raise ValueError("nodes that are features require a model with dictionaries: model.with_dictionaries")
    for layer, dictionary in sorted(model.dictionaries.items()):
        dictionary.constants()  # ValueError for features that are not linear
        found += [NodeSite(f"blocks.{layer}.{FEATURES}", "feature", layer)]
        found += [NodeSite(f"blocks.{layer}.{ERROR}", "error", layer)]
    return tuple(found)


def local_model(
    model: Transformer, batch: Batch, node_sites: Sequence[NodeSite], *, through: bool = False
) -> LocalModel:
    """One pass over a batch of one prompt, with gradients that end at the nodes.

    Args:
        through: whether gradients go on through neurons and features, so that `into_logits` gives what each node adds
            along all paths.

    Raises:
        ValueError: a model that the rules are not defined for, or edits that add constants.
    """
    ruled = under_rules(model, LINEAR)
    if not promises(ruled):
        raise ValueError(
            "exact sums require edits that zero, scale or project: others add what no node wrote"
        )
    batch = batch.to(ruled.device)
    biases = {
        name: p.detach().requires_grad_() for name, p in ruled.named_parameters() if name.endswith("bias")
    }
    computed, leaves, constants = dict[str, Tensor](), dict[str, Tensor](), list(biases.values())
    edits = [
        Edit(site.name, partial(_as_node, site.name, computed, leaves, through and site.by_entry))
        for site in node_sites
    ]
    known = sites.names(ruled.config)
    edits += [Edit(name, partial(_as_constant, constants)) for name in CONSTANT if name in known]
    with torch.enable_grad():
        own = ruled.with_parameters(biases)
        stream = own(batch.tokens, Tap([], edits), stop=ruled.config.n_layers, types=batch.types)
        end = upcast(stream[0, -1].detach()).requires_grad_()
        logits = own.uncapped(end)
    return LocalModel(
        ruled, tuple(node_sites), leaves, computed, tuple(constants), stream[0, -1], end, logits
    )  # fmt: skip


def _as_node(
    name: str, computed: dict[str, Tensor], leaves: dict[str, Tensor], through: bool, value: Tensor
) -> Tensor:
    computed[name], leaves[name] = value, value.clone() if through else value.detach().requires_grad_()
    return leaves[name]


def _as_constant(constants: list[Tensor], value: Tensor) -> Tensor:
    constants.append(value.detach().requires_grad_())
    return constants[-1]
