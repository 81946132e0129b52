"""The strongest edges made ready for the template: a layered graph, from the input at the bottom to the logits."""

import math
from dataclasses import dataclass

import pandas as pd

from interp.causal import EdgeGraph
from interp.causal.graph import INPUT, LOGITS
from interp.model.config import ModelConfig
from interp.model.parts import Part
from interp.pages.wording import count, number

STEPS = (10, 25, 50, 100)
"""How many edges a page can show; the first is where it opens."""
PORTS = {"q": -11.0, "k": 0.0, "v": 11.0}
"""Where queries, keys and values enter a head, in pixels from its middle."""
COLUMN, ROW, MARGIN = 60.0, 60.0, 30.0
"""Distance of nodes across and of rows, and the room at the sides, in pixels."""
HALF = 10.0
"""Half the height of a node, in pixels."""
WIDEST, THINNEST = 8.0, 0.7
"""Width of the strongest edge and of one of no strength, in pixels."""

BOW = 0.2
"""How far a line bows sideways per pixel that it rises beyond the next row."""


@dataclass(frozen=True)
class Node:
    """One part of the model and where it is drawn."""

    part: str
    layer: int | None
    head: int | None
    x: float
    y: float


@dataclass(frozen=True)
class End:
    """One end of an edge: its name, and the node and head it is; none where heads share keys and values."""

    name: str
    part: str | None
    layer: int | None
    head: int | None


@dataclass(frozen=True)
class Edge:
    """One edge: what it joins, its score, and the line it is drawn as."""

    rank: int
    source: End
    target: End
    ends: str
    """The nodes it touches; several where heads share keys and values."""
    score: float
    bar: float
    """Strength in percent of the strongest."""
    width: float
    path: str
    tip: str


@dataclass(frozen=True)
class Drawing:
    """The nodes that the strongest edges touch, and these edges, strongest first."""

    width: float
    height: float
    nodes: list[Node]
    rows: list[tuple[str, float]]
    """Names of the layers and their heights."""
    edges: list[Edge]
    steps: list[int]
    total: int
    """How many edges the whole graph has."""


def drawing(table: pd.DataFrame, config: ModelConfig) -> Drawing:
    """The strongest edges of the table as a graph."""
    graph, shown = EdgeGraph.of(config), table.head(STEPS[-1])
    places = {name: i for i, name in enumerate(graph.receivers)}
    pairs = list(zip(shown.sender, shown.receiver, shown.value.tolist(), strict=True))
    targets = {receiver: graph.nodes_of(places[receiver]) for _, receiver, _ in pairs}
    names = {INPUT, LOGITS, *(s for s, _, _ in pairs), *(n for nodes in targets.values() for n in nodes)}
    nodes, rows, width, height = _layout(names)
    strongest = max((abs(score) for _, _, score in pairs), default=0.0) or 1.0
    edges = [
        _edge(
            rank, sender, receiver, score, strongest, [nodes[sender], *(nodes[n] for n in targets[receiver])]
        )
        for rank, (sender, receiver, score) in enumerate(pairs)
    ]
    steps = sorted({min(step, len(edges)) for step in STEPS})
    return Drawing(width, height, list(nodes.values()), rows, edges, steps, len(table))


def _parsed(name: str) -> tuple[int | None, int | None]:
    """Layer and head of a node's name."""
    if name in (INPUT, LOGITS):
        return None, None
    part = Part.of(name)
    return part.layer, part.index


def _level(name: str) -> tuple[float, float]:
    """Where a node's row stands: layer by layer heads, then the MLP; the input first and the logits last."""
    if name in (INPUT, LOGITS):
        return (-1.0 if name == INPUT else float("inf")), 0.0
    layer, head = _parsed(name)
    assert layer is not None
    return float(layer), 0.0 if head is not None else 1.0


def _layout(names: set[str]) -> tuple[dict[str, Node], list[tuple[str, float]], float, float]:
    """Every node in its row, each row in the middle; the names of layers beside them, and the size of it all."""
    levels: dict[tuple[float, float], list[str]] = {}
    for name in sorted(names, key=lambda name: (_level(name), _parsed(name)[1] or 0)):
        levels.setdefault(_level(name), []).append(name)
    width = 2 * MARGIN + COLUMN * max(4, *map(len, levels.values()))
    height = ROW * (len(levels) - 1) + 4 * HALF
    nodes: dict[str, Node] = {}
    rows: list[tuple[str, float]] = []
    for i, level in enumerate(sorted(levels)):
        y, row = height - 2 * HALF - ROW * i, levels[level]
        for k, name in enumerate(row):
            x = width / 2 + COLUMN * (k - (len(row) - 1) / 2)
            nodes[name] = Node(name, *_parsed(name), x, y)
        if level[1] == 0 and row[0] not in (INPUT, LOGITS):
            rows.append((str(Part("block", int(level[0]))), y))
    return nodes, rows, width, height


def _edge(rank: int, sender: str, receiver: str, score: float, strongest: float, ends: list[Node]) -> Edge:
    source, *targets = ends
    size = abs(score) / strongest
    shared = f", which {targets[0].part} to {targets[-1].part} share" if len(targets) > 1 else ""
    tip = (
        f"{sender} → {receiver}{shared}\n{number(score, 3, sign=True)} logits if it alone carries the prompt's value "
        f"(estimate)\nnumber {count(rank + 1)} by size"
    )
    return Edge(
        rank=rank,
        source=End(sender, source.part, source.layer, source.head),
        target=_target(receiver, targets),
        ends=" ".join(dict.fromkeys(node.part for node in ends)),
        score=score,
        bar=100 * size,
        width=THINNEST + (WIDEST - THINNEST) * size,
        path=" ".join(_curve(source, node, PORTS.get(receiver[-1], 0.0), rank) for node in targets),
        tip=tip,
    )


def _target(receiver: str, nodes: list[Node]) -> End:
    """The receiving end: a part, and of a head what enters there."""
    first = nodes[0]
    if len(nodes) > 1:
        return End(receiver, None, None, None)
    return End(receiver, first.part, first.layer, first.head)


def _curve(source: Node, target: Node, port: float, rank: int) -> str:
    """A line upwards; a long one bows outwards, a vertical one to either side, to pass beside the rows between."""
    x0, y0, x1, y1 = source.x, source.y - HALF, target.x + port, target.y + HALF
    rise = y0 - y1
    side = math.copysign(1.0, x1 - x0 or rank % 2 - 0.5)
    bow = side * min(BOW * (rise - ROW + 2 * HALF), COLUMN)
    bend = 0.45 * rise
    points = (x0 + bow, y0 - bend, x1 + bow, y1 + bend, x1, y1)
    return f"M{x0:.1f} {y0:.1f}C" + " ".join(f"{value:.1f}" for value in points)
