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
from interp.model.experts import MoE
from interp.model.mounted import ERROR, FEATURES
from interp.model.parts import KINDS, Part
from interp.model.rules import kept
from interp.model.tap import Tap
from interp.model.transformer import Transformer
from interp.passes.rules import LINEAR, promises, rounding_of, under_rules

NodeName = Literal["neuron", "feature", "head", "expert", "mlp", "resid"]
"""What can be asked for as nodes: neurons, features and errors of dictionaries, what heads move to a position, what
experts and what MLPs write, and the stream that enters a block. Embeddings always are nodes.
"""
NodeKind = Literal["embedding", "error", "neuron", "feature", "head", "expert", "mlp", "resid"]
EMBEDDING = "hook_embed"
CONSTANT = ("hook_pos_embed", "hook_type_embed")
"""Sites of embeddings that belong to no token: they count as biases."""


@dataclass(frozen=True)
class NodeSite:
    """A site whose cells are nodes: single numbers, or vectors of a position, or of a head or an expert there."""

    name: str
    kind: NodeKind
    layer: int | None = None

    @property
    def by_entry(self) -> bool:
        """Whether each number is a node, such as a neuron; otherwise a whole vector is one."""
        return self.kind in ("neuron", "feature")

    @property
    def is_source(self) -> bool:
        """Whether nothing enters its nodes: they are given, as embeddings and the errors of dictionaries."""
        return self.kind in ("embedding", "error")

    @property
    def indexed(self) -> bool:
        """Whether a position has several nodes, told apart by an index."""
        return self.by_entry or self.kind in ("head", "expert")

    def per_position(self, value: Float[Tensor, "1 p *k"]) -> int:
        """How many nodes there are at each position of the site's value."""
        return value.shape[2] if self.indexed else 1


@dataclass(frozen=True, eq=False)
class Incoming:
    """What enters some targets, a row for each."""

    edges: Float[Tensor, "r n"]
    """From each node before them, by its number (`LocalModel.offsets`)."""
    bias: Float[Tensor, "r"]
    """From everything that is no node: biases, and embeddings of positions and types."""
    values: Float[Tensor, "r"]
    """The targets' values, which are the sums of both."""
    size: Float[Tensor, "r"]
    """The sum of the sizes of all products that edges and biases are sums of: rounding is relative to it."""

    def checked(self, dtype: torch.dtype) -> Float[Tensor, "r"]:
        """How far edges and bias miss each target's value, relative to the size of what they are sums of.

        Raises:
            ArithmeticError: they miss it by more than the rounding of a pass in this dtype.
        """
        found = self.edges.sum(1) + self.bias
        missed = (found - self.values).abs() / self.size.clamp_min(torch.finfo(self.size.dtype).tiny)
        if not bool((missed <= rounding_of(dtype)).all()):
            worst = int(missed.argmax())
            raise ArithmeticError(
                f"edges and biases should sum to {float(self.values[worst]):.6g}, they sum to "
                f"{float(found[worst]):.6g}"
            )
        return missed


@dataclass(frozen=True, eq=False)
class LocalModel:
    """One pass over a prompt whose gradients end at the nodes; made by `local_model`."""

    model: Transformer
    """The model under the rules."""
    sites: tuple[NodeSite, ...]
    """Where the nodes are, in the order of the pass."""
    leaves: Mapping[str, Float[Tensor, "1 p *k"]]
    """The values of the nodes, by site."""
    computed: Mapping[str, Float[Tensor, "1 p *k"]]
    """The same values, and those of the sites that were recorded, as functions of the nodes before them."""
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
            found.append(found[-1] + leaf.shape[1] * site.per_position(leaf))
        return tuple(found)

    @cached_property
    def values(self) -> Float[Tensor, "n"]:
        """The value of each node, on the host: of a vector its length."""
        each = [self.leaves[site.name].detach() for site in self.sites]
        by_site = [
            upcast(x).flatten() if site.by_entry else upcast(x).norm(dim=-1).flatten()
            for site, x in zip(self.sites, each, strict=True)
        ]
        return torch.cat([x.cpu() for x in by_site])

    @cached_property
    def inner(self) -> np.ndarray:
        """True at the nodes that something enters."""
        return np.repeat([not site.is_source for site in self.sites], np.diff(self.offsets))

    def site_of(self, nodes: np.ndarray) -> np.ndarray:
        """Index of each node's site in `sites`."""
        return np.searchsorted(self.offsets, nodes, side="right") - 1

    def place(self, node: int) -> tuple[NodeSite, int, int | None]:
        """The site, the position and the index of a node; no index where a position has one node."""
        number = int(self.site_of(np.array([node]))[0])
        site, at = self.sites[number], node - self.offsets[number]
        width = site.per_position(self.leaves[site.name])
        return site, at // width, at % width if site.indexed else None

    def number(self, kind: str, layer: int, pos: int, index: int) -> int:
        """The number of a node, by the coordinates that it has in a graph: layer -1 is outside the blocks.

        Raises:
            ValueError: a node that the model lacks.
        """
        known: list[tuple[str, int]] = [
            (site.kind, -1 if site.layer is None else site.layer) for site in self.sites
        ]
        at = known.index((kind, layer)) if (kind, layer) in known else None
        each = 0 if at is None else self.sites[at].per_position(self.leaves[self.sites[at].name])
        within = index if each > 1 else 0
        if at is None or not 0 <= within < each:
            raise ValueError(
                f"the model of the graph is required, this one has no {kind} {index} in block {layer}"
            )
        return self.offsets[at] + pos * each + within

    def name(self, node: int) -> str:
        """The name of a node, such as `L12N345@7`."""
        site, pos, index = self.place(node)
        part = "embed" if site.kind == "embedding" else str(Part(site.kind, site.layer, index))
        return f"{part}@{pos}"

    def into_nodes(
        self, number: int, nodes: Int[Tensor, "r"], slopes: Mapping[str, Tensor] | None = None
    ) -> Incoming:
        """What enters some nodes of site `number`; of nodes that are vectors, what enters along the slopes there."""
        return self.into(*self.as_outputs(number, nodes, slopes), number)

    def as_outputs(
        self, number: int, nodes: Int[Tensor, "r"], slopes: Mapping[str, Tensor] | None = None
    ) -> tuple[Float[Tensor, "r k"], Float[Tensor, "r r k"]]:
        """Nodes of site `number` as functions of those before, and for each the direction that picks it out."""
        site, at = self.sites[number], (nodes - self.offsets[number]).to(self.logits.device)
        value = self.computed[site.name]
        if site.by_entry:
            cells = value.flatten()[at, None]
            along = torch.ones_like(cells)
        else:
            assert slopes is not None
            cells, along = (x.flatten(0, -2)[at] for x in (value, slopes[site.name].to(value)))
        directions, every = along.new_zeros(len(along), *along.shape), torch.arange(len(along))
        directions[every, every] = along
        return cells, directions

    def at_end(self, values: Float[Tensor, "r"]) -> Float[Tensor, "r d"]:
        """The derivatives of functions of the logits by the final stream."""
        # one by one, as products with half-precision weights take no batch of gradients
        return torch.stack([torch.autograd.grad(value, self.end, retain_graph=True)[0] for value in values])

    def slopes(self, value: Float[Tensor, ""]) -> dict[str, Tensor]:
        """The derivatives by the leaves, by site, of one value that is a function of the logits."""
        along = self.at_end(value[None])[0]
        leaves = list(self.leaves.values())
        found = torch.autograd.grad(
            self.stream, leaves, along.to(self.stream), retain_graph=True, materialize_grads=True
        )
        return dict(zip(self.leaves, found, strict=True))

    def terms(
        self, site: NodeSite, slope: Float[Tensor, "*r 1 p *k"], at: Int[Tensor, "n"] | None = None
    ) -> Float[Tensor, "*r n"]:
        """Value times slope of the nodes of a site; at: their places there, None: all."""
        products = self._products(site, slope, at)
        return products if site.by_entry else products.sum(-1)

    def _products(
        self, site: NodeSite, slope: Float[Tensor, "*r 1 p *k"], at: Int[Tensor, "n"] | None = None
    ) -> Float[Tensor, "..."]:
        """Value times slope of every number of the nodes of a site."""
        leaf = self.leaves[site.name].detach()
        lead = slope.ndim - leaf.ndim  # dims before those of the site
        last = -1 if site.by_entry else -2
        slopes, values = slope.flatten(lead, last), leaf.flatten(0, last)
        if at is not None:
            slopes, values = slopes.index_select(lead, at), values[at]
        return upcast(slopes) * upcast(values)

    def into_logits(self, values: Float[Tensor, "r"]) -> Incoming:
        """What enters some values that are functions of the logits."""
        # the sum of what each value is read from is no smaller than the logits that it is a difference of
        largest = upcast(self.logits.detach()).abs().max()
        slopes, bias, sizes = [], [], []
        for value in values:  # one by one, as products with half-precision weights take no batch of gradients
            slope, *others = torch.autograd.grad(
                value, [self.end, *self.constants], retain_graph=True, allow_unused=True
            )
            slopes.append(slope)
            terms = [
                upcast(g) * upcast(x.detach())
                for g, x in zip(others, self.constants, strict=True)
                if g is not None
            ]
            zero = torch.zeros((), device=slope.device)
            bias.append(sum((x.sum() for x in terms), zero))
            sizes.append(sum((x.abs().sum() for x in terms), largest))
        found = self.into(self.stream, torch.stack(slopes).to(self.stream), None)
        return Incoming(
            found.edges, found.bias + torch.stack(bias).to(found.bias), upcast(values.detach()),
            found.size + torch.stack(sizes).to(found.size),
        )  # fmt: skip

    def terms_of(
        self, nodes: Int[np.ndarray, "n"], slopes: Mapping[str, Float[Tensor, "..."] | None]
    ) -> Float[Tensor, "*r n"]:
        """Value times slope of some nodes, by the slopes at their sites; 0 where there is none."""
        of_site, found = self.site_of(nodes), []
        for number in np.unique(of_site):
            site = self.sites[number]
            leaf, slope = self.leaves[site.name], slopes[site.name]
            at = torch.from_numpy(nodes[of_site == number] - self.offsets[number]).to(leaf.device)
            found.append(
                upcast(leaf.detach()).new_zeros(len(at)) if slope is None else self.terms(site, slope, at)
            )
        order = np.argsort(np.argsort(of_site, kind="stable"))
        shape = torch.broadcast_shapes(*(x.shape[:-1] for x in found))
        return torch.cat([x.expand(*shape, -1) for x in found], -1)[..., order.tolist()]

    def into(
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
        edges, bias, size = [], torch.zeros_like(values), torch.zeros_like(values)
        constants = list(zip(self.constants, slopes[len(leaves) :], strict=True))
        for site, leaf, slope in zip(before, leaves, slopes, strict=False):
            if slope is None:
                edges.append(bias.new_zeros(len(values), leaf.shape[1] * site.per_position(leaf)))
                continue
            products = self._products(site, slope)
            edges.append(products if site.by_entry else products.sum(-1))
            size = size + products.abs().flatten(1).sum(1)
            if site.kind == "error":
                constants.append((self._decoder_bias(site), slope))
        for value, slope in constants:
            if slope is not None:
                terms = (upcast(slope) * upcast(value.detach())).flatten(1)
                bias, size = bias + terms.sum(1), size + terms.abs().sum(1)
        return Incoming(torch.cat(edges, 1) if edges else bias.new_zeros(len(values), 0), bias, values, size)

    def _decoder_bias(self, error: NodeSite) -> Float[Tensor, "d"]:
        """A dictionary's b_dec, which enters where its error does."""
        assert error.layer is not None
        return self.model.dictionaries[error.layer].bias(error.layer).to(self.logits.device)


def node_sites(model: Transformer, nodes: Sequence[NodeName]) -> tuple[NodeSite, ...]:
    """The sites of the nodes: embeddings, and those of the kinds that are asked for.

    Raises:
        KeyError: a model without neurons, heads, experts or MLPs that were asked for.
        ValueError: features of a model without dictionaries, or of such that are no linear function where the same
            features are active.
    """
    found = [NodeSite(EMBEDDING, "embedding")]
    for kind in dict.fromkeys(nodes):
        if kind == "feature":
            found += _of_dictionaries(model)
            continue
        inside = KINDS[kind].site
        assert inside is not None
        if kind == "neuron" and isinstance(model.config.mlp, MoE) and model.config.mlp.dense is None:
            raise KeyError(
                "this model has no neurons but those inside experts, which are no nodes: nodes='expert'"
            )
        layers = [(name, int(name.split(".")[1])) for name in sites.of_layers(inside, model.config)]
        found += [NodeSite(name, kind, layer) for name, layer in layers if kind != "resid" or layer > 0]
    return tuple(found)


def _of_dictionaries(model: Transformer) -> list[NodeSite]:
    if not model.dictionaries:
        raise ValueError("nodes that are features require a model with dictionaries: model.with_dictionaries")
    found = []
    for layer, dictionary in sorted(model.dictionaries.items()):
        dictionary.constants(layer)  # ValueError for features that are not linear
        found += [NodeSite(f"blocks.{layer}.{FEATURES}", "feature", layer)]
        found += [NodeSite(f"blocks.{layer}.{ERROR}", "error", layer)]
    return found


def local_model(
    model: Transformer,
    batch: Batch,
    node_sites: Sequence[NodeSite],
    *,
    through: bool = False,
    recorded: Sequence[str] = (),
) -> LocalModel:
    """One pass over a batch of one prompt, with gradients that end at the nodes.

    Args:
        through: whether gradients go on through all nodes that something enters, so that slopes count all paths.
        recorded: more sites whose values are kept as functions of the nodes.

    Raises:
        ValueError: a model that the rules are not defined for, edits that add constants, or edits of dictionaries that
            are no nodes.
    """
    ruled = under_rules(model, LINEAR)
    if not promises(ruled):
        raise ValueError(
            "exact sums require edits that zero, scale or project: others add what no node wrote"
        )
    _check_edited(ruled, node_sites)
    batch = batch.to(ruled.device)
    biases = {
        name: p.detach().requires_grad_() for name, p in ruled.named_parameters() if name.endswith("bias")
    }
    computed, leaves, constants = dict[str, Tensor](), dict[str, Tensor](), list(biases.values())
    edits = [Edit(name, partial(_as_recorded, name, computed)) for name in recorded]
    first = [
        Edit(
            site.name,
            partial(_with_constants, constants, ruled.dictionaries[site.layer].constants(site.layer)),
        )
        for site in node_sites
        if site.kind == "feature" and site.layer is not None
    ]
    edits += [
        Edit(site.name, partial(_as_node, site.name, computed, leaves, through and not site.is_source))
        for site in node_sites
    ]
    known = sites.names(ruled.config)
    edits += [Edit(name, partial(_as_constant, constants)) for name in CONSTANT if name in known]
    with torch.enable_grad():
        own = ruled.with_parameters(biases)
        own.edits = (*first, *own.edits)  # before edits that scale a feature, and its constant with it
        stream = live(own(batch.tokens, Tap([], edits), stop=ruled.config.n_layers, types=batch.types))
        end = upcast(stream[0, -1].detach()).requires_grad_()
        logits = own.uncapped(end)
    order = list(leaves)  # that of the pass
    in_order = tuple(sorted(node_sites, key=lambda site: order.index(site.name)))
    return LocalModel(ruled, in_order, leaves, computed, tuple(constants), stream[0, -1], end, logits)


def live(value: Tensor) -> Tensor:
    """A value of which gradients are asked, where edits left a constant: one that depends on nothing before it."""
    return value if value.requires_grad else value.detach().requires_grad_()


def _as_recorded(name: str, computed: dict[str, Tensor], value: Tensor) -> Tensor:
    computed[name] = live(value)
    return computed[name]


def _as_node(
    name: str, computed: dict[str, Tensor], leaves: dict[str, Tensor], through: bool, value: Tensor
) -> Tensor:
    computed[name] = live(value)
    leaves[name] = computed[name].clone() if through else value.detach().requires_grad_()
    return leaves[name]


def _as_constant(constants: list[Tensor], value: Tensor) -> Tensor:
    constants.append(value.detach().requires_grad_())
    return constants[-1]


def _with_constants(constants: list[Tensor], of_features: Float[Tensor, "s"], value: Tensor) -> Tensor:
    """Features as functions of what those that are active are where nothing is read, too."""
    active = (of_features.to(value) * (value != 0)).detach().requires_grad_()
    constants.append(active)
    return kept(value, value + active)


def _check_edited(model: Transformer, nodes: Sequence[NodeSite]) -> None:
    """ValueError for edits of dictionaries that are no nodes, whose constants are not known then."""
    own, last = {site.name for site in nodes}, max(site.layer or 0 for site in nodes)
    for edit in model.edits:
        of_dictionary = edit.site.endswith((FEATURES, ERROR)) and edit.site not in own
        if of_dictionary and int(edit.site.split(".")[1]) <= last:
            raise ValueError(
                f'edits of features and errors require them as nodes, nodes="feature", got one of {edit.site}'
            )
