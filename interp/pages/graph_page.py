"""An attribution graph as a page of its own: nodes by token and layer, the strongest links, everything as tables."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from interp.circuits.graph_files import AttributionGraph, GraphNode
from interp.core.boundary import public
from interp.core.visible import harmless, visible
from interp.pages.templates import environment, own
from interp.views.writing import number

MOST = 200
"""Links drawn and listed."""
STEP, ROW, MARGIN = 15.0, 34.0, 40.0
"""Distance of nodes in one place, of layers, and the room at the sides, in pixels."""
SHAPES = {"embedding": "square", "logit": "square", "input": "square"}
"""How kinds of nodes are drawn; errors are diamonds, all others discs."""
WIDEST, THINNEST = 6.0, 0.6
"""Width of the strongest link and of one of no strength, in pixels."""


@dataclass(frozen=True)
class Spot:
    """A node and where it is drawn."""

    node: GraphNode
    shape: str
    x: float
    y: float
    label: str
    tip: str


@dataclass(frozen=True)
class LinkLine:
    """A link, its place, and its strength in percent of the strongest.

    Args:
        tokens: from which token to which, in words; empty where the graph's method sums over positions, as ours does.
    """

    source: Spot
    target: Spot
    weight: float
    width: float
    bar: float
    tokens: str
    tip: str


@dataclass(frozen=True)
class GraphDrawing:
    """The picture: spots, lines strongest first, names of layers with their heights, tokens with their places."""

    width: float
    height: float
    spots: list[Spot]
    lines: list[LinkLine]
    layers: list[tuple[str, float]]
    tokens: list[tuple[str, float]]


@public()
def graph_page(graph: AttributionGraph, *, most: int = MOST) -> str:
    """The page of an attribution graph as HTML: its strongest links and the nodes at their ends.

    It shows what the file says, features of transcoders included; it knows no more about them.

    Args:
        most: number of links.

    Raises:
        ValueError: a number of links below 1.
    """
    if most < 1:
        raise ValueError(f"at least one link is required, got {most}")
    template = environment().get_template("graph.html")
    return template.render(
        css=own("report.css") + own("graph.css"),
        graph=graph,
        drawn=drawing(graph, most),
        kinds=Counter(node.kind for node in graph.nodes),
        named={node.name: node for node in graph.nodes},
        weight=None if graph.ours is None else graph.ours.get("weight"),
        positions=None if graph.ours is None else graph.ours.get("positions"),
    )


def drawing(graph: AttributionGraph, most: int = MOST) -> GraphDrawing:
    """The strongest links, drawn: tokens across, layers upwards, nodes of one place side by side."""
    table = graph.table().head(most)
    ends = {*table.source, *table.target}
    places: dict[tuple[int, str], list[GraphNode]] = {}
    for node in graph.nodes:
        if node.name in ends:
            places.setdefault((node.position, _level(node)), []).append(node)
    levels = sorted({level for _, level in places}, key=_height)
    columns = _columns(places)
    width = MARGIN + sum(room for _, room in columns.values()) + STEP
    height = ROW * (len(levels) + 0.5)
    up = {level: height - ROW * (i + 0.75) for i, level in enumerate(levels)}
    spots = {
        node.name: _spot(graph, node, columns[pos][0] + STEP * (i - (len(nodes) - 1) / 2), up[level])
        for (pos, level), nodes in places.items()
        for i, node in enumerate(nodes)
    }
    strongest = float(table.weight.abs().max()) if len(table) else 1.0
    lines = [
        _line(graph, spots[source], spots[target], weight, strongest or 1.0)
        for source, target, weight in zip(table.source, table.target, table.weight.tolist(), strict=True)
    ]
    tokens = [(_token(graph, pos), x) for pos, (x, _) in columns.items()]
    return GraphDrawing(
        width, height, list(spots.values()), lines, [(name, up[name]) for name in levels], tokens
    )


def _level(node: GraphNode) -> str:
    return "out" if node.kind == "logit" else node.layer


def _height(level: str) -> tuple[int, int, str]:
    """Embeddings lowest, layers by their number, logits highest; a layer that is no number below these."""
    if level.isdecimal():
        return 1, int(level), ""
    return {"E": 0, "out": 3}.get(level, 2), 0, level


def _columns(places: dict[tuple[int, str], list[GraphNode]]) -> dict[int, tuple[float, float]]:
    """Middle and width of each column, by position."""
    found: dict[int, tuple[float, float]] = {}
    left = MARGIN
    for pos in sorted({pos for pos, _ in places}):
        most = max(len(nodes) for (at, _), nodes in places.items() if at == pos)
        room = STEP * (most + 1.5)
        found[pos] = (left + room / 2, room)
        left += room
    return found


def _token(graph: AttributionGraph, pos: int) -> str:
    return visible(graph.tokens[pos]) if 0 <= pos < len(graph.tokens) else "–"


def _spot(graph: AttributionGraph, node: GraphNode, x: float, y: float) -> Spot:
    shape = SHAPES.get(node.kind, "diamond" if "error" in node.kind else "disc")
    known = (("activation", node.activation), ("influence", node.influence))
    named = node.label or (_token(graph, node.position) if node.kind == "embedding" else node.name)
    label = harmless(named)
    lines = [
        label,
        f"{node.kind}, layer {node.layer}, at {_token(graph, node.position)} ({node.position})",
        *(f"{what} {number(value, 3)}" for what, value in known if value is not None),
        *(f"group {group[0]}" for group in graph.supernodes if node.name in group[1:]),
    ]
    return Spot(node, shape, x, y, label, harmless("\n".join(lines)))


def _line(graph: AttributionGraph, source: Spot, target: Spot, weight: float, strongest: float) -> LinkLine:
    size = abs(weight) / strongest
    tokens = "" if _placeless(graph) else f"{_where(graph, source)} → {_where(graph, target)}"
    words = [f"{source.label} → {target.label}", tokens, f"weight {number(weight, 4, sign=True)}"]
    tip = "\n".join(filter(None, words))
    return LinkLine(source, target, weight, THINNEST + (WIDEST - THINNEST) * size, 100 * size, tokens, tip)


def _placeless(graph: AttributionGraph) -> bool:
    """Whether the places of nodes have no meaning, in files of this package with edges summed over positions."""
    return graph.ours is not None


def _where(graph: AttributionGraph, spot: Spot) -> str:
    return f"{_token(graph, spot.node.position)} ({spot.node.position})"
