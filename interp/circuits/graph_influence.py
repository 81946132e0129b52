"""What matters in an attribution graph: influence on the logits, what to leave out, and how much is explained.

With A[t, s] = |edge from s to t| / (sum of the sizes of all edges into t), and p the probabilities of the logits, the
influence of the nodes is p A + p A^2 + ... (Ameisen et al. 2025, "Circuit Tracing"; as circuit-tracer computes it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int

from interp.core.boundary import public
from interp.core.damaged import WHOLE, label_flaw
from interp.core.kinds import Probability
from interp.core.results import check_finite, check_result

if TYPE_CHECKING:
    import xarray as xr


GIVEN = ("embedding", "error", "logit")
"""Kinds of nodes that are always in a graph; the others are its inner nodes."""
FINITE = ("weight", "value", "effect", "influence", "activation", "size", "probability")
"""Variables of a graph that have a number everywhere."""
TINY = 1e-30
"""What sizes of 0 are divided by."""


@dataclass(frozen=True, eq=False)
class Shares:
    """The edges into one node as shares of the sizes of all that enter it."""

    target: int
    sources: np.ndarray
    shares: np.ndarray


def influence_of(rows: Iterable[Shares], start: Mapping[int, float], count: int) -> np.ndarray:
    """The influence of `count` nodes, numbered so that every edge leads from a smaller number to a larger one.

    Args:
        rows: the edges, by target.
        start: the probability of each logit, by its number.
    """
    found = np.zeros(count)
    for row in sorted(rows, key=lambda row: -row.target):
        passed_on = found[row.target] + start.get(row.target, 0.0)
        np.add.at(found, row.sources, passed_on * row.shares)
    return found


def shares_of(source: np.ndarray, target: np.ndarray, share: np.ndarray) -> list[Shares]:
    """Edges by target, from columns of sources, targets and shares."""
    order = np.argsort(target, kind="stable")
    numbers, first = np.unique(target[order], return_index=True)
    groups = np.split(order, first[1:]) if len(numbers) else []
    return [
        Shares(int(number), source[group], share[group])
        for number, group in zip(numbers, groups, strict=True)
    ]


def check_graph(what: str, graph: xr.Dataset, needs: Sequence[str]) -> None:
    """ValueError that names `what`, unless it is a result of `attribution_graph` that is whole.

    Args:
        what: the argument.
        graph: what was given.
        needs: variables and coordinates that it must have; of those in `FINITE` every number must be finite.
    """
    check_result(what, graph, needs, "attribution_graph")
    if flaw := label_flaw(graph, "node"):
        raise ValueError(WHOLE.format(what, flaw))
    for name in FINITE:
        if name in needs:
            check_finite(f"{name} of {what}", graph[name])


def in_order(graph: xr.Dataset) -> xr.Dataset:
    """The graph with its nodes in the order of the pass."""
    return graph.isel(node=np.argsort(graph["number"].to_numpy(), kind="stable"))


def ends(graph: xr.Dataset) -> tuple[Int[np.ndarray, "e"], Int[np.ndarray, "e"]]:
    """The places of the source and the target of each edge among the nodes.

    Raises:
        ValueError: an end that is no node of the graph.
    """
    place = {name: i for i, name in enumerate(graph["node"].to_numpy())}
    source, target = (
        np.array([place.get(name, -1) for name in graph[end].to_numpy()], dtype=np.int64)
        for end in ("source", "target")
    )
    if (lost := np.minimum(source, target) < 0).any():
        raise ValueError(
            f"edges must join nodes of the graph (node), {str(graph['edge'].to_numpy()[lost][0])!r} does not"
        )
    return source, target


def _rows(graph: xr.Dataset, size: np.ndarray | None = None) -> list[Shares]:
    """The edges of a graph as shares of the sizes that enter their targets; None: those of the whole graph."""
    (source, target), weight = ends(graph), graph["weight"].to_numpy()
    size = graph["size"].to_numpy() if size is None else size
    return shares_of(source, target, np.abs(weight) / np.maximum(size[target], TINY))


def _start(graph: xr.Dataset) -> dict[int, float]:
    probability = graph["probability"].to_numpy()
    return {int(i): float(probability[i]) for i in np.flatnonzero(graph["kind"].to_numpy() == "logit")}


def scores_of(graph: xr.Dataset) -> dict[str, float]:
    """How much of a graph is explained without the errors of dictionaries: `replacement` and `completeness`.

    - `replacement`: of the influence that ends in embeddings or errors, the share of embeddings.
    - `completeness`: mean share of what enters a node that does not come from errors, weighted by influence.

    Both are 1 in a graph of neurons.
    """
    kind, rows, start = graph["kind"].to_numpy(), _rows(graph), _start(graph)
    influence = influence_of(rows, start, graph.sizes["node"])
    of = {name: float(influence[kind == name].sum()) for name in ("embedding", "error")}
    weight = influence + graph["probability"].to_numpy()
    from_errors = np.zeros(len(influence))
    for row in rows:
        from_errors[row.target] = row.shares[kind[row.sources] == "error"].sum()
    return {
        "replacement": share(of["embedding"], of["embedding"] + of["error"]),
        "completeness": share(float(((1 - from_errors) * weight).sum()), float(weight.sum())),
    }


def share(part: float, whole: float) -> float:
    """part / whole, 1 of nothing."""
    return part / whole if whole > 0 else 1.0


@public()
def prune_graph(graph: xr.Dataset, nodes: Probability = 0.8, edges: Probability = 0.98) -> xr.Dataset:
    """The nodes and edges of an attribution graph that carry most of the influence on its logits.

    Nodes are kept from the most influential on until they hold the share `nodes` of all influence; embeddings and
    logits always are. Then edges are, by |weight| as a share of what enters their target times the influence of the
    target, until they hold the share `edges`. Nodes that nothing leads to, or that lead nowhere, go last.

    Args:
        graph: a result of `attribution_graph`.
        nodes: share of influence that the kept nodes hold.
        edges: share of influence that the kept edges hold.

    Returns:
        The same Dataset with fewer nodes and edges. `size`, `bias` and `incoming` are those of the whole graph; what
        enters a node from nodes that were left out is in `others`. `covered` is that of the nodes that are left.

    Raises:
        ValueError: no result of `attribution_graph`, one with a node twice, with edges of nodes that it lacks, or with
            NaN among its numbers.

    Source:
        Ameisen et al. 2025, "Circuit Tracing"; the thresholds and their order as in circuit-tracer.

    Example:
        >>> graph = interp.circuits.attribution_graph(model, "one two three", most=8)
        >>> small = interp.circuits.prune_graph(graph, nodes=0.5)
        >>> small.sizes["node"] <= graph.sizes["node"]
        True
    """
    check_graph(
        "graph",
        graph,
        ("weight", "source", "target", "size", "incoming", "effect", "number", "probability"),
    )
    graph = in_order(graph)
    kind, start = graph["kind"].to_numpy(), _start(graph)
    fixed = np.isin(kind, ("embedding", "logit"))
    kept = fixed | _largest(influence_of(_rows(graph), start, len(kind)), nodes)
    source, target = ends(graph)
    small = _selected(graph, kept, kept[source] & kept[target])
    target, weight = ends(small)[1], np.abs(small["weight"].to_numpy())
    whole = np.bincount(target, weight, small.sizes["node"])
    own = influence_of(_rows(small, whole), _start(small), len(whole)) + small["probability"].to_numpy()
    score = weight / np.maximum(whole[target], TINY) * own[target]
    small = _selected(small, np.ones(len(own), bool), _largest(score, edges))
    return _without_loose_ends(small)


def _largest(score: np.ndarray, share: float) -> np.ndarray:
    """True at the fewest entries of largest score that hold a share of their sum, and at those equal to the last."""
    if not len(score) or score.sum() == 0:
        return np.zeros(len(score), bool)
    falling = np.sort(score)[::-1]
    reached = int(np.searchsorted(falling.cumsum() / falling.sum(), share))
    return score >= falling[min(reached, len(falling) - 1)]


def _without_loose_ends(graph: xr.Dataset) -> xr.Dataset:
    """Without inner nodes that have no edge in or none out, and errors that have none out."""
    while True:
        kind, count = graph["kind"].to_numpy(), graph.sizes["node"]
        source, target = ends(graph)
        has_out, has_in = (np.bincount(end, minlength=count) > 0 for end in (source, target))
        inner = ~np.isin(kind, GIVEN)
        loose = (inner & ~(has_in & has_out)) | ((kind == "error") & ~has_out)
        if not loose.any():
            return graph
        graph = _selected(graph, ~loose, ~(loose[source] | loose[target]))


def _selected(graph: xr.Dataset, nodes: np.ndarray, edges: np.ndarray) -> xr.Dataset:
    """Some nodes and edges of a graph; what enters from elsewhere is in `others`."""
    small = graph.isel(node=nodes, edge=edges)
    inside = np.bincount(ends(small)[1], small["weight"].to_numpy(), small.sizes["node"])
    left = share(_sizes_of_effects(small), _sizes_of_effects(graph))
    small = small.assign_attrs(covered=graph.attrs["covered"] * left)
    return small.assign(others=small["others"].copy(data=small["incoming"].to_numpy() - inside))


def _sizes_of_effects(graph: xr.Dataset) -> float:
    """The sum of the sizes of the effects of inner nodes."""
    inner = ~np.isin(graph["kind"].to_numpy(), GIVEN)
    return float(np.abs(graph["effect"].to_numpy()[inner]).sum())
