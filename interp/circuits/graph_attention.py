"""Attention in attribution graphs: which heads an edge passes, and which nodes make a head look where it does."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.attention.score_parts import as_head, position_term, product_site
from interp.circuits.attribution_graph import (
    Effects,
    Goals,
    as_nodes,
    at_once,
    check_prompt,
    nodes_of,
    one_prompt,
)
from interp.circuits.graph_influence import check_graph
from interp.circuits.local_model import LocalModel, NodeName, NodeSite, live, local_model, node_sites
from interp.core.boundary import public
from interp.core.kinds import FromZero, PositiveCount
from interp.core.results import labelled
from interp.core.stats import upcast
from interp.data.batch import Batch, Prompts
from interp.model.edits import Edit
from interp.model.parts import Part, PartName
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.observe import Model, as_model
from interp.passes.rules import rounding_of
from interp.residual.attribution import places_of
from interp.runs.provenance import with_origin

if TYPE_CHECKING:
    import xarray as xr

OTHERS, BIAS = "others", "bias"


@public()
@torch.enable_grad()
def edge_heads(
    model: Model,
    prompt: Prompts,
    graph: xr.Dataset,
    *,
    edges: Sequence[str] | None = None,
    most: PositiveCount = 64,
    edits: Sequence[Edit] = (),
    prepend_bos: bool | None = None,
) -> xr.Dataset:
    """Splits edges of an attribution graph by the head that brings them to the position of their target.

    An edge sums over all paths that meet no other node. Every path has one last head, which writes at the position of
    the target, or passes no head at all. So the heads and what is `direct` sum to the weight of the edge, and that is
    checked.

    Args:
        model: the model of the graph.
        prompt: the prompt of the graph.
        graph: what `attribution_graph` or `prune_graph` returned, of nodes that are not heads.
        edges: names of edges, such as `L0N5@2 -> L3N7@4`; None: the `most` that carry most of the logits.
        most: how many edges, where none are named.
        edits, prepend_bos: as for the graph.

    Returns:
        Dataset over `edge` and `part`, the heads, in the unit of each edge's target.

        - `value`: what passes last through this head.
        - `direct` [edge]: what passes no head; nothing between two positions.
        - `weight` [edge]: the weight of the edge, the sum of both.

    Raises:
        ValueError: another result, a graph of heads, another prompt than the graph's, or edges that it lacks.
        KeyError: a model without heads.
        ArithmeticError: heads that do not sum to an edge.

    Caveats:
        Patterns are taken as given. Why a head looked there: `qk_attribution`.

    See Also:
        `attribution_graph` with `nodes=["head", "neuron"]`: heads as nodes, with the edges into and out of them.

    Example:
        >>> graph = interp.circuits.attribution_graph(model, "one two three", most=8)
        >>> split = interp.circuits.edge_heads(model, "one two three", graph, most=5)
        >>> bool(abs(split.value.sum("part") + split.direct - split.weight).max() < 1e-4)
        True
    """
    needs = ("weight", "source", "target", "value", "probability", "size", "kind", "layer", "pos", "index")
    check_graph("graph", graph, needs)
    subject = as_model(model, edits)
    network = subject.transformer
    batch = one_prompt(subject.text.batch(prompt, prepend_bos=prepend_bos)).to(network.device)
    check_prompt(batch, graph)
    kinds = nodes_of(graph)
    if "head" in kinds:
        raise ValueError(
            "a graph whose nodes are no heads is required; edges of this one pass no head but those it has"
        )
    chosen = _chosen_edges(graph, edges, most)
    split = _Split.of(network, batch, graph, kinds)
    value, direct, size = split.edges(chosen)
    weight = torch.from_numpy(chosen["weight"].to_numpy())
    entering = torch.from_numpy(graph["size"].sel(node=chosen["target"].to_numpy()).to_numpy())
    _check_sum(value.sum(1) + direct, weight, torch.maximum(size, entering), network.dtype)
    heads = [str(Part("head", site.layer, i)) for site in split.heads for i in range(split.width(site))]
    result = labelled(
        "edge_heads",
        {"value": (("edge", "part"), value), "direct": (("edge",), direct), "weight": (("edge",), weight)},
        coords={
            "edge": chosen["edge"].to_numpy().tolist(),
            "source": ("edge", chosen["source"].to_numpy().tolist()),
            "target": ("edge", chosen["target"].to_numpy().tolist()),
            "part": heads,
        },
    )
    return with_origin(result, network)


def _chosen_edges(graph: xr.Dataset, edges: Sequence[str] | None, most: int) -> xr.Dataset:
    """The named edges, or those that carry most."""
    table = graph[["weight", "value"]]
    if edges is None:
        falling = np.argsort(-np.abs(table["value"].to_numpy()), kind="stable")
        return table.isel(edge=np.sort(falling[:most]))
    place = {name: i for i, name in enumerate(graph["edge"].to_numpy())}
    if missing := [name for name in edges if name not in place]:
        raise ValueError(f"edges of the graph are required, it has no {missing[0]!r}")
    if not edges:
        raise ValueError("at least one edge is required, got none")
    return table.isel(edge=[place[name] for name in edges])


def _check_sum(
    found: Float[Tensor, "e"], expected: Float[Tensor, "e"], size: Float[Tensor, "e"], dtype: torch.dtype
) -> None:
    """ArithmeticError where sums miss by more than the rounding of a pass, relative to the size of what enters."""
    missed = (found - expected).abs()
    if not bool((missed <= rounding_of(dtype) * size).all()):
        worst = int((missed / size).argmax())
        raise ArithmeticError(
            f"heads should sum to {float(expected[worst]):.6g}, they sum to {float(found[worst]):.6g}: the model and "
            "the edits of the graph are required"
        )


@dataclass(frozen=True, eq=False)
class _Split:
    """Two local models of one prompt: gradients end at heads in the one, and go on through them in the other."""

    graph: xr.Dataset
    cut: LocalModel
    whole: LocalModel
    heads: tuple[NodeSite, ...]
    goals: Goals
    slopes: Mapping[str, Tensor]
    """Of nodes that are vectors."""

    @classmethod
    def of(cls, network: Transformer, batch: Batch, graph: xr.Dataset, kinds: Sequence[NodeName]) -> _Split:
        where, goals = node_sites(network, kinds), Goals.of_graph(graph)
        (_, *heads) = node_sites(network, ["head"])
        cut = local_model(network, batch, [*where, *heads])
        # observed patterns keep attention a product with a derivative of its derivative, which fused kernels lack
        kept = [name for site in heads for name in (site.name, site.name.replace("hook_z", "hook_pattern"))]
        whole = local_model(network, batch, where, recorded=kept)
        slopes: Mapping[str, Tensor] = {}
        if not all(site.by_entry or site.is_source for site in where):
            slopes = Effects.of(local_model(network, batch, where, through=True), goals).slopes
        return cls(graph, cut, whole, tuple(heads), goals, slopes)

    def width(self, site: NodeSite) -> int:
        """How many heads a site has."""
        return self.cut.leaves[site.name].shape[2]

    def edges(
        self, chosen: xr.Dataset
    ) -> tuple[Float[Tensor, "e n"], Float[Tensor, "e"], Float[Tensor, "e"]]:
        """What each edge has from every head and from none, and the size that rounding is relative to; on the host."""
        names = chosen["source"].to_numpy(), chosen["target"].to_numpy()
        (sources, source), (targets, target) = (np.unique(each, return_inverse=True) for each in names)
        direct, along = self._into(targets, self.numbers(self.cut, sources))
        positions = self.graph["pos"].sel(node=targets).to_numpy()
        moved, size = self._moved(self.numbers(self.whole, sources), positions, along)
        found = (moved[source, target], direct[target, source], size[source, target])
        by_head, from_none, sizes = (x.double().cpu() for x in found)
        return by_head, from_none, sizes

    def numbers(self, local: LocalModel, names: np.ndarray) -> Int[np.ndarray, "n"]:
        """The numbers of inner nodes, embeddings and errors in a local model."""
        nodes = self.graph[["kind", "layer", "pos", "index"]].sel(node=names)
        columns = (nodes[name].to_numpy().tolist() for name in ("kind", "layer", "pos", "index"))
        return np.array([local.number(*each) for each in zip(*columns, strict=True)], dtype=np.int64)

    def _into(
        self, targets: np.ndarray, sources: Int[np.ndarray, "s"]
    ) -> tuple[Float[Tensor, "t s"], dict[str, Float[Tensor, "t h e"]]]:
        """What sources add to targets without heads, and the slopes of the targets at each head's output there."""
        like = upcast(self.cut.logits.detach())
        direct = like.new_zeros(len(targets), len(sources))
        leaves = list(self.cut.leaves.values())
        along = {
            site.name: like.new_zeros(len(targets), *self.cut.leaves[site.name].shape[2:])
            for site in self.heads
        }
        position = self.graph["pos"].sel(node=targets).to_numpy()
        for rows, outputs, directions in self._outputs(targets):
            slopes = torch.autograd.grad(
                outputs, leaves, directions, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
            by_leaf = dict(zip(self.cut.leaves, slopes, strict=True))
            direct[rows] = self.cut.terms_of(sources, by_leaf).to(direct)
            for site in self.heads:
                if (slope := by_leaf[site.name]) is not None:
                    along[site.name][rows] = upcast(slope[range(len(rows)), 0, position[rows].tolist()])
        return direct, along

    def _outputs(self, targets: np.ndarray) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Rows of the targets, as functions of the nodes of the cut model, with the directions that pick them out."""
        kind = self.graph["kind"].sel(node=targets).to_numpy()
        if len(logits := np.flatnonzero(kind == "logit")):
            names = self.graph["node"].to_numpy()[self.graph["kind"].to_numpy() == "logit"].tolist()
            values = self.goals.values(self.cut)[[names.index(name) for name in targets[logits]]]
            yield logits.tolist(), self.cut.stream, self.cut.at_end(values).to(self.cut.stream)
        inner = np.flatnonzero(kind != "logit")
        numbers = self.numbers(self.cut, targets[inner])
        of_site = self.cut.site_of(numbers)
        for site in np.unique(of_site):
            here = np.flatnonzero(of_site == site)
            for part in torch.from_numpy(here).split(at_once(self.cut)):
                nodes = torch.from_numpy(numbers)[part]
                yield inner[part.numpy()].tolist(), *self.cut.as_outputs(int(site), nodes, self.slopes)

    def _moved(
        self,
        sources: Int[np.ndarray, "s"],
        positions: np.ndarray,
        along: Mapping[str, Float[Tensor, "t h e"]],
    ) -> tuple[Float[Tensor, "s t n"], Float[Tensor, "s t"]]:
        """What each source moves through every head as the last one to each target, and the sizes of these products.

        The outputs of heads are linear in the sources. The derivative of a sum of (slopes by the sources, one unknown
        factor for each output) by these factors gives what one source adds to all outputs.
        """
        columns, column = np.unique(positions, return_inverse=True)
        outputs = [self.whole.computed[site.name][0, columns.tolist()] for site in self.heads]
        factors = [torch.zeros_like(x).requires_grad_() for x in outputs]
        slopes = torch.autograd.grad(
            outputs, list(self.whole.leaves.values()), factors, retain_graph=True, create_graph=True,
            materialize_grads=True,
        )  # fmt: skip
        chosen = live(self.whole.terms_of(sources, dict(zip(self.whole.leaves, slopes, strict=True))))
        found, sizes = [], []
        for rows in torch.eye(len(chosen)).to(chosen).split(at_once(self.whole)):
            changes = torch.autograd.grad(
                chosen, factors, rows, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
            by_head, size = [], chosen.new_zeros(len(rows), len(column))
            for site, change in zip(self.heads, changes, strict=True):
                slope = along[site.name]
                moved = (
                    slope.new_zeros(len(rows), *slope.shape) if change is None else upcast(change[:, column])
                )
                by_head.append((moved * slope).sum(-1))
                size += (moved.norm(dim=-1) * slope.norm(dim=-1)).sum(-1)
            found.append(torch.cat(by_head, -1))
            sizes.append(size)
        return torch.cat(found), torch.cat(sizes)


@public()
@torch.enable_grad()
def qk_attribution(
    model: Model,
    prompt: Prompts,
    head: PartName,
    *,
    query: int = -1,
    key: int,
    against: int | None = None,
    nodes: NodeName | Sequence[NodeName] | None = None,
    most: FromZero = 32,
    edits: Sequence[Edit] = (),
    prepend_bos: bool | None = None,
) -> xr.Dataset:
    """Splits one attention score by pairs of nodes: what one adds to the query, times what another adds to the key.

    In the local model of `attribution_graph` a head's query and its key are sums over nodes, each along all paths that
    meet no other node. Their product, the score before the softmax, is a sum over pairs.

    Args:
        model: a decoder, with dictionaries where nodes are features.
        prompt: one prompt: a text, token ids or a batch of one row.
        head: a head of softmax attention, such as `L3H5`.
        query: the position that looks, from the prompt's start, or from its end if negative.
        key: the position that is looked at; the query must see it.
        against: another such position: by how much its score is smaller is split, which is what the softmax goes by;
            None: the score itself.
        nodes: kinds of nodes, as in `attribution_graph`; None: heads, and features where the model has dictionaries,
            else neurons.
        most: how many nodes have rows of their own, on each side those of largest share in the score.
        edits, prepend_bos: as in `attribution_graph`.

    Returns:
        Dataset over `query_part` and `key_part`, names of nodes such as `L0H3@5`, then `others`, the sum of all other
        nodes, and `bias`.

        - `value`: term of the score, in its unit: queries . keys / sqrt(d_head) for most models.

        Attributes: `prompt`, `head`, `query`, `key`; `content`, the sum of all terms; `position`, what the score has
        from ALiBi or relative positions; `score`, what the softmax gets, after a soft cap of scores where the model
        has one; `key_pattern`, the weight that comes of it. With `against`, `content`, `position` and `score` are
        differences.

    Raises:
        ValueError: several prompts, a key that the query does not see, the same key twice, a part that is no head, or
            scores that are not one product of queries and keys.
        IndexError: a position that the prompt lacks.
        ArithmeticError: terms that do not sum to the score.

    Caveats:
        A score alone says little: what all keys share cancels in the softmax. `against` leaves it out.

    Cost:
        A backward pass for each number of the query and of the key, some at a time: in block 29 of SmolLM2-135M, 200
        tokens, 28 s on one core and 1.7 GB (bfloat16).

    Source:
        Kamath et al. 2025, "Tracing Attention Computation Through Feature Interactions"
        (transformer-circuits.pub/2025/attention-qk).

    See Also:
        `interp.attention.attention_attribution`: by whole parts of the stream at both positions. `edge_heads`: heads
        of an edge. `AttributionGraph.of_result` with `qk`: such scores in the file of a graph.

    Example:
        >>> found = interp.circuits.qk_attribution(model, "one two three", "L1H0", key=1, most=4)
        >>> found.value.shape
        (6, 6)
    """
    subject = as_model(model, edits)
    network = subject.transformer
    layer, index = as_head(head, network.config)
    batch = one_prompt(subject.text.batch(prompt, prepend_bos=prepend_bos)).to(network.device)
    at, seen, *other = (int(places_of(batch, pos)) for pos in (query, key, against) if pos is not None)
    if other == [seen]:
        raise ValueError(f"against must be another position than key, got {seen} for both")
    kinds = ["head", *as_nodes(None, network)] if nodes is None else as_nodes(nodes, network)
    looking = _Looking.of(network, batch, kinds, (layer, index), at)
    looked, at_key = looking.query, looking.key(seen, *other)
    sides = [_Side.of(looking.local, *ends, most) for ends in ((looked, at_key), (at_key, looked))]
    names = [[*map(looking.local.name, side.nodes.tolist()), OTHERS, BIAS] for side in sides]
    value = looking.factor * sides[0].entering.T @ sides[1].entering
    text = subject.text.pieces(batch.tokens[0].tolist())
    keys = {"key": seen, **({"against": other[0]} if other else {})}
    result = labelled(
        "qk_attribution",
        {"value": (("query_part", "key_part"), value)},
        coords={"query_part": names[0], "key_part": names[1]},
        units={"value": "score"},
        attrs={
            "prompt": "".join(text), "head": str(Part("head", layer, index)), "query": at,
            "query_token": text[at], **keys,
            **{f"{name}_token": text[pos] for name, pos in keys.items()},
            **{f"{name}_pattern": float(looking.pattern[pos]) for name, pos in keys.items()},
            "content": float(value.sum()), "position": looking.difference(looking.positions, seen, *other),
            "score": looking.difference(looking.scores, seen, *other),
        },
    )  # fmt: skip
    return with_origin(result, network)


@dataclass(frozen=True, eq=False)
class _Looking:
    """One query of a head in a local model, and all keys that it may see."""

    local: LocalModel
    query: Float[Tensor, "e"]
    """As a function of the nodes."""
    keys: Float[Tensor, "p e"]
    """As functions of the nodes."""
    factor: float
    """From the product of query and key to the score."""
    scores: Float[Tensor, "p"]
    """Those of the pass; -inf where the query does not see."""
    positions: Float[Tensor, "p"]
    """What each score has from relative positions."""
    pattern: Float[Tensor, "p"]

    @classmethod
    def of(
        cls, network: Transformer, batch: Batch, kinds: Sequence[NodeName], head: tuple[int, int], at: int
    ) -> _Looking:
        layer, index = head
        where = [site for site in node_sites(network, kinds) if site.layer is None or site.layer <= layer]
        products = [product_site(network, layer, side) for side in ("q", "k")]
        weights = [f"blocks.{layer}.attn.{name}" for name in ("hook_attn_scores", "hook_pattern")]
        local = local_model(network, batch, where, recorded=[*products, *weights])
        queries, keys = (local.computed[site][0] for site in products)
        scores, pattern = (upcast(local.computed[site].detach()[0, index, at]) for site in weights)
        seen = (scores > -torch.inf).sum()[None, None]
        count = len(scores)
        places = torch.tensor([[at, key] for key in range(count)], device=scores.device)
        bias = position_term(network, torch.tensor([index]), places, scores[None])[0]
        factor = float(network.block(layer).attn.score_factor(seen, scores))
        group = int(Weights(network).kv_head()[index])
        return cls(local, queries[at, index], keys[:count, group], factor, scores, bias, pattern)

    def key(self, seen: int, other: int | None = None) -> Float[Tensor, "e"]:
        """The key at a position, or its difference from another one.

        Raises:
            ValueError: a position that the query does not see.
            ArithmeticError: scores of the pass that are no products of queries and keys.
        """
        for pos in (seen,) if other is None else (seen, other):
            self._check(pos)
        return self.keys[seen] if other is None else self.keys[seen] - self.keys[other]

    def difference(self, values: Float[Tensor, "p"], seen: int, other: int | None = None) -> float:
        """A number of one key, or how much it is more than that of another."""
        return float(values[seen]) - (0.0 if other is None else float(values[other]))

    def _check(self, pos: int) -> None:
        score, position = float(self.scores[pos]), float(self.positions[pos])
        if score == -math.inf:
            raise ValueError(f"a key that the query sees is required, it does not see position {pos}")
        query, key = (upcast(x.detach()) for x in (self.query, self.keys[pos]))
        found, cap = self.factor * float(query @ key), self.local.model.config.attn_softcap
        found = position + (found if cap is None else cap * math.tanh(found / cap))
        size = abs(self.factor) * float(query.norm() * key.norm()) + abs(position)
        if abs(found - score) > rounding_of(self.query.dtype) * size:
            raise ArithmeticError(f"query times key should be the score {score:.6g}, it is {found:.6g}")


@dataclass(frozen=True, eq=False)
class _Side:
    """What enters a query or a key: nodes with columns of their own, the sum of all others, and the bias."""

    nodes: Int[Tensor, "m"]
    """Numbers of those of largest share in the score, in order."""
    entering: Float[Tensor, "e m+2"]
    """By number of the query or key; in float64, on the host."""

    @classmethod
    def of(cls, local: LocalModel, value: Float[Tensor, "e"], other: Float[Tensor, "e"], most: int) -> _Side:
        """Of a value that is a function of the nodes and is multiplied by another one.

        Raises:
            ArithmeticError: edges that do not sum to it.
        """
        shares = local.into(value, other.detach()[None], None).edges[0]
        best = shares.abs().topk(min(most, len(shares))).indices
        nodes = best[shares[best] != 0].sort().values
        found = []
        for rows in torch.eye(len(value)).to(value).split(at_once(local)):
            incoming = local.into(value, rows, None)
            incoming.checked(local.model.dtype)
            own = incoming.edges[:, nodes].double()
            others = incoming.edges.sum(1, dtype=torch.float64) - own.sum(1)
            found.append(torch.cat((own, others[:, None], incoming.bias.double()[:, None]), 1).cpu())
        return cls(nodes, torch.cat(found))
