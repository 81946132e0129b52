"""An attribution graph as a page of its own, on which nodes are pinned and grouped, and which saves what was made."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from interp.circuits.graph_files import (
    FEATURE,
    AttributionGraph,
    GraphNode,
    cumulative,
    graph_record,
    stated_probability,
)
from interp.circuits.graph_influence import TINY
from interp.core.boundary import public
from interp.core.kinds import PositiveCount
from interp.core.viewer import notes_of
from interp.core.visible import harmless, visible
from interp.pages.templates import environment, script, style

if TYPE_CHECKING:
    import xarray as xr

OPENS, MOST = 60, 300
"""Nodes that are drawn at first, and the most that can be."""
LISTED = 200
"""Links in the table."""
STYLES, SCRIPTS = ("report", "lattice", "graph"), ("state", "keyboard", "graph", "fade")
SHAPES = {"embedding": "square", "logit": "square", "input": "square"}
"""How kinds of nodes are drawn; errors are dashed, all others round."""
STAGES = {"resid": 0, **dict.fromkeys(("head", "attention head", "attention group", "lorsa"), 1)}
"""Kinds of nodes that stand below the others of their layer, as they come first in the pass."""
STAGE_NAMES = (" in", " attn", "")


@dataclass(frozen=True)
class Ranking:
    """The nodes besides the logits by what they matter, and what the first so many of them hold together."""

    words: str
    """What they hold shares of."""
    ranked: list[int]
    carried: list[float]


@dataclass(frozen=True)
class ShownNode:
    """A node as the page shows it."""

    node: GraphNode
    label: str
    """Its label, or its name; what could reorder other text is shown."""
    brief: str
    """A word or two, for the drawing."""
    token: str
    shape: str
    level: int
    """Its row, of those of all nodes."""


@public()
def graph_page(graph: AttributionGraph | xr.Dataset, *, most: PositiveCount = OPENS) -> str:
    """The page of an attribution graph as HTML: what matters in it drawn, with groups to make and to save.

    Tokens stand across and layers upwards. Nodes can be pinned, pinned nodes joined to supernodes that are drawn as
    one, and the graph saved with both as JSON, which `read_attribution_graph` and Neuronpedia's viewer read. It shows
    what the file says, features of transcoders included; it knows no more about them.

    Args:
        graph: a graph, from a file or of `AttributionGraph.of_result`; or the result of
            `interp.circuits.attribution_graph` or `prune_graph`.
        most: how many nodes are drawn at first, those of most influence; the page has a slider for more or fewer.

    Raises:
        ValueError: another result, or fewer than one node.

    Example:
        >>> found = interp.circuits.attribution_graph(model, "one two three", most=4)
        >>> graph_page(found).startswith("<!doctype html>")
        True
    """
    notes = notes_of(graph)
    if not isinstance(graph, AttributionGraph):
        graph = AttributionGraph.of_result(graph)
    levels = sorted({_level(node) for node in graph.nodes}, key=_height)
    shown = [_shown(graph, node, levels.index(_level(node))) for node in graph.nodes]
    rankings = _rankings(graph)
    links = graph.table().head(LISTED)
    strongest = float(links.weight.abs().max()) if len(links) else 1.0
    named = {one.node.name: one for one in shown}
    ours = graph.ours or {}
    return environment().get_template("graph.html").render(
        css=style(STYLES),
        js=script(SCRIPTS),
        notes=notes,
        graph=graph,
        kinds=Counter(node.kind for node in graph.nodes),
        named=named,
        listed=[shown[i] for i in rankings["influence"].ranked[:most]],
        rankings=rankings,
        opens=most,
        links=[
            (named[source], named[target], weight, 100 * abs(weight) / (strongest or 1.0))
            for source, target, weight in zip(links.source, links.target, links.weight.tolist(), strict=True)
        ],
        placeless=graph.ours is not None,
        weight=ours.get("weight"),
        positions=ours.get("positions"),
        payload=_payload(graph, shown, levels, rankings, most),
    )  # fmt: skip


def _payload(
    graph: AttributionGraph,
    shown: list[ShownNode],
    levels: list[tuple[str, int]],
    rankings: dict[str, Ranking],
    most: int,
) -> dict[str, Any]:
    """What the script draws from and writes: the record of the file with links in columns, and how nodes are shown."""
    record = graph_record(graph)
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    del record["links"]
    return {
        "names": [visible(token) for token in graph.tokens],
        "record": record,
        "source": [place[name] for name in graph.links.source],
        "target": [place[name] for name in graph.links.target],
        "weight": graph.links.weight.tolist(),
        "parts": list(graph.parts) or None,
        "levels": [_level_name(level) for level in levels],
        "nodes": [[one.label, one.brief, one.shape, one.level] for one in shown],
        "rankings": {by: [ranking.words, ranking.ranked, ranking.carried] for by, ranking in rankings.items()},
        "opens": most,
        "most": MOST,
        "placeless": graph.ours is not None,
    }  # fmt: skip


def _rankings(graph: AttributionGraph) -> dict[str, Ranking]:
    """The nodes by influence, and by effect where the file says it."""
    inner = [i for i, node in enumerate(graph.nodes) if node.kind != "logit"]
    stated = [share for i in inner if (share := graph.nodes[i].influence) is not None]
    if len(stated) == len(inner):
        order = np.argsort(stated, kind="stable").tolist()
        found = {"influence": Ranking("influence", [inner[i] for i in order], [stated[i] for i in order])}
    else:
        found = {"influence": _ranking("influence", inner, _influence(graph)[inner])}
    effects = [effect for i in inner if (effect := graph.nodes[i].effect) is not None]
    if inner and len(effects) == len(inner):
        found["effect"] = _ranking("sizes of all effects", inner, np.abs(np.array(effects)))
    return found


def _ranking(words: str, nodes: list[int], sizes: Float[np.ndarray, "n"]) -> Ranking:
    """Nodes in falling order of their sizes."""
    order = np.argsort(-sizes, kind="stable")
    return Ranking(words, [nodes[i] for i in order.tolist()], cumulative(sizes)[order].tolist())


def _influence(graph: AttributionGraph) -> Float[np.ndarray, "n"]:
    """The influence of each node on the logits by the links of the file, where it does not say it.

    Of the formula of `interp.circuits.graph_influence`, term by term, as files of others may have cycles.
    """
    count = len(graph.nodes)
    source, target = _ends(graph)
    size = np.abs(graph.links.weight.to_numpy(float))
    share = size / np.maximum(np.bincount(target, size, count)[target], TINY)
    stated = [stated_probability(node) if node.kind == "logit" else 0.0 for node in graph.nodes]
    start = [1.0 if probability is None else probability for probability in stated]
    found, term = np.zeros(count), np.array(start)
    for _ in range(count):
        term = np.bincount(source, term[target] * share, count)
        found += term
        if not term.any():
            break
    return found


def _ends(graph: AttributionGraph) -> tuple[Int[np.ndarray, "e"], Int[np.ndarray, "e"]]:
    """The places of the source and the target of each link among the nodes."""
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    source, target = (
        np.array([place[name] for name in ends], dtype=np.int64)
        for ends in (graph.links.source, graph.links.target)
    )
    return source, target


def _level(node: GraphNode) -> tuple[str, int]:
    """The row of a node: its layer, and what comes first in the layer."""
    return "out" if node.kind == "logit" else node.layer, STAGES.get(node.kind, 2)


def _height(level: tuple[str, int]) -> tuple[int, int, int, str]:
    """Embeddings lowest, layers by their number, logits highest; a layer that is no number below these."""
    layer, stage = level
    if layer.isdecimal():
        return 1, int(layer), stage, ""
    return {"E": 0, "out": 3}.get(layer, 2), 0, stage, layer


def _level_name(level: tuple[str, int]) -> str:
    layer, stage = level
    known = {"E": "tokens", "out": "logits"}
    return known.get(layer, f"L{layer}{STAGE_NAMES[stage]}" if layer.isdecimal() else harmless(layer))


def _shown(graph: AttributionGraph, node: GraphNode, level: int) -> ShownNode:
    token = visible(graph.tokens[node.position]) if 0 <= node.position < len(graph.tokens) else "–"
    feature = re.fullmatch(r"(\d+)_(\d+)_\d+", node.name) if node.kind == FEATURE else None
    name = f"L{feature[1]}F{feature[2]}" if feature else node.name
    label = node.label or name
    if node.label and feature:
        label = f"{node.label} ({name})"
    brief = node.label or name
    if node.kind == "embedding":
        brief, label = token, node.label or token
    elif node.kind == "logit":
        brief = re.sub(r"^Output |\s*\(p=[^)]*\)$", "", brief)
    elif "error" in node.kind:
        brief, label = "error", node.label or f"error of layer {node.layer}"
    shape = SHAPES.get(node.kind, "dashed" if "error" in node.kind else "round")
    return ShownNode(node, harmless(label), harmless(brief), token, shape, level)
