"""The strongest edges made ready for the template: a layered graph, from the input at the bottom to the logits.

It is drawn three times: with a box for every part, for the heads of a layer, and for a layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import pandas as pd
import torch

from interp.causal import EdgeGraph
from interp.causal.graph import INPUT, LOGITS
from interp.circuits.edge_circuit import connected
from interp.model.config import ModelConfig
from interp.model.parts import Part
from interp.pages.findings import enough, in_words
from interp.views.writing import count, number

STEPS = (10, 25, 50, 100)
"""How many edges a page can show; it opens on the first that carries enough of the answer."""
PORTS = {"q": -15.0, "k": 0.0, "v": 15.0}
"""Where queries, keys and values enter a head, in pixels from its middle."""
COLUMN, ROW, MARGIN = 96.0, 64.0, 40.0
"""Distance of nodes across and of rows, and the room at the sides, in pixels."""
HALF, SIDE = 10.0, 36.0
"""Half the height and half the width of a node, in pixels."""
WIDEST, THINNEST = 8.0, 0.7
"""Width of the strongest edge and of one of no strength, in pixels."""
LANES, APART = 5, 4.0
"""Lines side by side in the gap between two nodes, and how far apart, in pixels."""
TOGETHER = {
    "part": ("parts", ""),
    "heads": (
        "heads together",
        "One box holds a layer's heads. A line carries the sum of the lines that it stands for.",
    ),
    "layer": (
        "layers",
        "One box holds a layer's heads and MLP. A line carries the sum of the lines that it stands for; lines within "
        "a layer are not drawn.",
    ),
}
"""The ways to put parts into one box: the name of each, and what it shows."""
NO_RANKS: Mapping[tuple[str, str], Sequence[int]] = MappingProxyType({})


@dataclass(frozen=True)
class Node:
    """One part of the model and where it is drawn."""

    part: str
    label: str
    meaning: str
    """Description of the node, in a sentence's words."""
    layer: int | None
    head: int | None
    x: float
    y: float
    members: str
    """The parts that it stands for: itself, or those of a group that the edges touch."""
    inside: str = ""
    """The ranks of the edges between its own members."""


@dataclass(frozen=True)
class End:
    """One end of an edge: its name, and the node and head it is; none where heads share keys and values."""

    name: str
    part: str | None
    layer: int | None
    head: int | None


@dataclass(frozen=True)
class DrawnEdge:
    """One edge: what it joins, its score, and the line it is drawn as."""

    rank: int
    drawn: int | None
    """The number of edges from which on it lies on a path from the input to the logits; None = at no number drawn."""
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
class Bundle:
    """All edges from one box to another as one line; how many there are at a step, and their sum, the page adds up."""

    ends: str
    """The two boxes."""
    name: str
    ranks: str
    """The ranks of the edges."""
    path: str


@dataclass(frozen=True)
class Grouped:
    """The edges of a circuit with several parts in one box."""

    width: float
    height: float
    nodes: list[Node]
    rows: list[tuple[str, float]]
    bundles: list[Bundle]


@dataclass(frozen=True)
class CircuitDrawing:
    """The nodes that the strongest edges touch, and these edges, strongest first."""

    width: float
    height: float
    nodes: list[Node]
    rows: list[tuple[str, float]]
    """Names of the layers and their heights."""
    edges: list[DrawnEdge]
    steps: list[int]
    opens: int
    """The step that the page opens on."""
    carried: dict[int, str]
    """Share of the answer that the edges of each step carry, in words."""
    total: int
    """How many edges the whole graph has."""
    grouped: dict[str, Grouped]
    """The edges by each way of `TOGETHER` to put parts into one box."""


def drawing(table: pd.DataFrame, faithfulness: pd.DataFrame, config: ModelConfig) -> CircuitDrawing:
    """The strongest edges of the table as a graph; faithfulness: how much of the answer so many of them carry."""
    graph, shown = EdgeGraph.of(config), table.head(STEPS[-1])
    places = {name: i for i, name in enumerate(graph.receivers)}
    pairs = list(zip(shown.sender, shown.receiver, shown.value.tolist(), strict=True))
    steps = sorted({min(step, len(pairs)) for step in STEPS})
    drawn = _drawn(graph, [(sender, receiver) for sender, receiver, _ in pairs], steps)
    targets = {receiver: graph.nodes_of(places[receiver]) for _, receiver, _ in pairs}
    on_a_path = [pair for pair, step in zip(pairs, drawn, strict=True) if step is not None]
    senders, receivers = {s for s, _, _ in on_a_path}, {n for _, r, _ in on_a_path for n in targets[r]}
    layout = _Layout({name: [name] for name in {INPUT, LOGITS, *senders, *receivers}})
    strongest = max((abs(score) for _, _, score in pairs), default=0.0) or 1.0
    edges = [
        _edge(rank, drawn[rank], pair, targets[pair[1]], strongest, layout) for rank, pair in enumerate(pairs)
    ]
    least = enough(faithfulness)
    opens = next((step for step in steps if step >= least), steps[-1])
    known = dict(zip(faithfulness.edges.tolist(), faithfulness.value.tolist(), strict=True))
    carried = {step: f"Alone they carry {number(known[step], 2)} of the answer." for step in steps}
    nodes = list(layout.nodes.values())
    grouped = {how: _grouped(how, nodes, edges) for how in TOGETHER if how != "part"}
    size, total = (layout.width, layout.height), table.attrs["of"]
    return CircuitDrawing(*size, nodes, layout.rows, edges, steps, opens, carried, total, grouped)


def _grouped(how: str, nodes: Sequence[Node], edges: Sequence[DrawnEdge]) -> Grouped:
    """The drawing with one box for several parts: every line once, in the order of its strongest edge."""
    boxes: dict[str, list[str]] = {}
    for node in nodes:
        boxes.setdefault(_group(node.part, how), []).append(node.part)
    bundles: dict[tuple[str, str], list[int]] = {}
    for edge in edges:
        if edge.drawn is not None:
            sender, *receivers = (_group(end, how) for end in edge.ends.split())
            bundles.setdefault((sender, receivers[0]), []).append(edge.rank)
    layout = _Layout(boxes, bundles)
    drawn = [
        Bundle(
            f"{sender} {receiver}",
            f"{layout.nodes[sender].label} → {layout.nodes[receiver].label}",
            " ".join(map(str, ranks)),
            layout.path(layout.nodes[sender], layout.nodes[receiver], 0.0, i),
        )
        for i, ((sender, receiver), ranks) in enumerate(bundles.items())
        if sender != receiver
    ]
    return Grouped(layout.width, layout.height, list(layout.nodes.values()), layout.rows, drawn)


def _group(name: str, how: str) -> str:
    """The box that a part stands in."""
    layer, head = _parsed(name)
    if layer is None or (how == "heads" and head is None):
        return name
    return f"L{layer}.attn" if how == "heads" else f"L{layer}"


def _drawn(graph: EdgeGraph, pairs: Sequence[tuple[str, str]], steps: Sequence[int]) -> list[int | None]:
    """For each edge, strongest first, the smallest step at which it is connected to the input and the logits."""
    senders, receivers = (
        {name: i for i, name in enumerate(names)} for names in (graph.senders, graph.receivers)
    )
    cells = [(senders[sender], receivers[receiver]) for sender, receiver in pairs]
    found: list[int | None] = [None] * len(cells)
    for step in reversed(steps):
        kept = torch.zeros(len(senders), len(receivers), dtype=torch.bool)
        for cell in cells[:step]:
            kept[cell] = True
        linked = connected(graph, kept)
        found = [step if i < step and linked[cell] else found[i] for i, cell in enumerate(cells)]
    return found


def _parsed(name: str) -> tuple[int | None, int | None]:
    """Layer and head of a node's name."""
    if name in (INPUT, LOGITS):
        return None, None
    if _whole(name):
        return int(name[1:]), None
    part = Part.of(name)
    return part.layer, part.index


def _whole(name: str) -> bool:
    """Whether a name is that of a layer as one box: `L3`."""
    return name[1:].isdecimal()


def _level(name: str) -> tuple[float, float]:
    """Where a node's row stands: by layer an MLP before heads, heads, the MLP; the input first and the logits last."""
    if name in (INPUT, LOGITS):
        return (-1.0 if name == INPUT else float("inf")), 0.0
    layer, head = _parsed(name)
    assert layer is not None
    if name.endswith(".mlp_before"):
        return float(layer), -1.0
    return float(layer), 0.0 if head is not None or name.endswith(".attn") else 1.0


class _Layout:
    """The layout of all nodes: each in its row, each row in the middle; the names of layers, and the size.

    Args:
        boxes: the nodes, each with the parts that stand in it.
        ranks: by ends the edges of a line; those from a box to itself are inside it.
    """

    def __init__(
        self, boxes: Mapping[str, Sequence[str]], ranks: Mapping[tuple[str, str], Sequence[int]] = NO_RANKS
    ) -> None:
        levels: dict[tuple[float, float], list[str]] = {}
        for name in sorted(boxes, key=lambda name: (_level(name), _parsed(name)[1] or 0)):
            levels.setdefault(_level(name), []).append(name)
        self.width = 2 * MARGIN + COLUMN * max(4, *map(len, levels.values()))
        self.height = ROW * (len(levels) - 1) + 4 * HALF
        self.nodes: dict[str, Node] = {}
        self.rows: list[tuple[str, float]] = []
        self.lines: list[tuple[float, list[float]]] = []
        """The rows from the input on: height, and where nodes stand in it."""
        for i, level in enumerate(sorted(levels)):
            y, row = self.height - 2 * HALF - ROW * i, levels[level]
            across = [self.width / 2 + COLUMN * (k - (len(row) - 1) / 2) for k in range(len(row))]
            for name, x in zip(row, across, strict=True):
                inside = " ".join(map(str, ranks.get((name, name), ())))
                meaning, members = _meaning(name, boxes[name]), " ".join(boxes[name])
                self.nodes[name] = Node(name, _label(name), meaning, *_parsed(name), x, y, members, inside)
            self.lines.append((y, across))
            if level[1] == 0 and row[0] not in (INPUT, LOGITS):
                self.rows.append((f"layer {int(level[0])}", y))

    def path(self, source: Node, target: Node, port: float, rank: int) -> str:
        """A line upwards that passes the rows between through the gaps next to their nodes."""
        x0, y0, x1, y1 = source.x, source.y - HALF, target.x + port, target.y + HALF
        lane = APART * (rank % LANES - LANES // 2)
        points, x, y = f"M{x0:.0f} {y0:.0f}", x0, y0
        for row, across in self.lines:
            if not target.y < row < source.y:
                continue
            side = 0.01 if rank % 2 else -0.01  # where both gaps are as near, lines part
            gap = _gap(x + side + (x1 - x) * (y - row) / (y - y1), across, self.width) + lane
            points += f"{_bend(x, y, gap, row + HALF)}V{row - HALF:.0f}"
            x, y = gap, row - HALF
        return points + _bend(x, y, x1, y1)


def _label(name: str) -> str:
    """The text in a node's box."""
    if name in (INPUT, LOGITS):
        return "embedding" if name == INPUT else "logits"
    if _whole(name):
        return f"layer {name[1:]}"
    part = Part.of(name)
    words = {"attn": "heads", "mlp_before": "MLP before"}
    return name if part.kind == "head" else f"{words.get(part.kind, 'MLP')} {part.layer}"


def _meaning(name: str, members: Sequence[str]) -> str:
    """The contents of a box, in a sentence's words."""
    if members == [name]:
        return in_words(name)
    members_text = ", ".join(_label(member) for member in members)
    return f"layer {_parsed(name)[0]}: {members_text}"


def _gap(wanted: float, across: Sequence[float], width: float) -> float:
    """The free place of a row nearest to where a line would cross it: between two nodes, or where there are none."""
    if all(abs(wanted - x) >= COLUMN / 2 for x in across):
        return wanted
    gaps = [x + side * COLUMN / 2 for x in across for side in (-1, 1)]
    return min((gap for gap in gaps if SIDE <= gap <= width - SIDE), key=lambda gap: abs(gap - wanted))


def _bend(x0: float, y0: float, x1: float, y1: float) -> str:
    """A curve upwards that begins and ends upright."""
    bend = 0.5 * (y0 - y1)
    return f"C{x0:.0f} {y0 - bend:.0f} {x1:.0f} {y1 + bend:.0f} {x1:.0f} {y1:.0f}"


def _edge(
    rank: int,
    drawn: int | None,
    pair: tuple[str, str, float],
    targets: Sequence[str],
    strongest: float,
    layout: _Layout,
) -> DrawnEdge:
    sender, receiver, score = pair
    size = abs(score) / strongest
    shared = f", which {targets[0]} to {targets[-1]} share" if len(targets) > 1 else ""
    nowhere = "" if drawn is not None else "\non no path from the embedding to the logits"
    tip = (
        f"{sender} → {receiver}{shared}\n{number(score, 3, sign=True)} logits if it alone carries the prompt's value "
        f"(estimate)\nnumber {count(rank + 1)} by size{nowhere}"
    )
    port = PORTS.get(receiver[-1], 0.0)
    ends = [] if drawn is None else [layout.nodes[name] for name in targets]
    return DrawnEdge(
        rank=rank,
        drawn=drawn,
        source=End(_end(sender), sender, *_parsed(sender)),
        target=End(
            _end(receiver), *((None, None, None) if len(targets) > 1 else (targets[0], *_parsed(targets[0])))
        ),
        ends=" ".join(dict.fromkeys((sender, *targets))),
        score=score,
        bar=100 * size,
        width=THINNEST + (WIDEST - THINNEST) * size,
        path=" ".join(layout.path(layout.nodes[sender], node, port, rank) for node in ends),
        tip=tip,
    )


def _end(name: str) -> str:
    """One end of an edge in the table: the part as in its box, and what enters a head there."""
    node, _, port = name.rpartition(".")
    reads = {"q": "queries", "k": "keys", "v": "values"}
    return f"{node} {reads[port]}" if port in reads else _label(name)
