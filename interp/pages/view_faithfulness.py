"""The faithfulness curve made ready for the template: how much of the answer a few strong edges bring back."""

import math
from dataclasses import dataclass

import pandas as pd

from interp.views.writing import count, number

WIDTH, HEIGHT = 420.0, 190.0
"""Of the drawing without its scales, in pixels."""
TICK_ROOM = 60.0
"""Room for the text of a tick across, in pixels."""
NEAR = 0.05
"""How far the curve may leave 0 to 1 before the scale says where it ends."""


@dataclass(frozen=True)
class CurvePoint:
    """One circuit: edges kept by rank, those of them on a path, and how much of the metric they bring back."""

    edges: int
    connected: int
    faithfulness: float
    logits: float
    x: float
    y: float
    tip: str


@dataclass(frozen=True)
class Curve:
    """The points from few edges to all, and where the ticks of both scales stand."""

    points: list[CurvePoint]
    path: str
    across: list[tuple[str, float]]
    up: list[tuple[str, float]]


def curve(table: pd.DataFrame, total: float, corrupted: float) -> Curve:
    """The curve; across: edges kept, by their logarithm, up: faithfulness, 0 the corrupted prompt's and 1 the prompt's.

    Args:
        total, corrupted: the metric after the prompt and after the corrupted one, in logits.
    """
    rows = list(zip(table.edges.tolist(), table.connected.tolist(), table.value.tolist(), strict=True))
    low, high = min(0.0, *(f for *_, f in rows)), max(1.0, *(f for *_, f in rows))
    widest = math.log(rows[-1][0]) or 1.0

    def across(edges: int) -> float:
        return WIDTH * math.log(edges) / widest

    def up(share: float) -> float:
        return HEIGHT * (high - share) / (high - low)

    points = []
    for edges, connected, share in rows:
        logits = corrupted + share * (total - corrupted)
        tip = (
            f"the {count(edges)} strongest edges, {count(connected)} of them on a path from the input to the logits\n"
            f"faithfulness {number(share, 3)}\n{number(logits, 3, sign=True)} logits"
        )
        points.append(CurvePoint(edges, connected, share, logits, across(edges), up(share), tip))
    line = "M" + "L".join(f"{point.x:.1f} {point.y:.1f}" for point in points)
    digits = len(str(rows[-1][0]))
    powers = [10**i for i in range(0, digits, math.ceil(TICK_ROOM * digits / WIDTH))]
    marks = {"0": 0.0, "1": 1.0}
    marks |= {number(at): at for at in (low, high) if not -NEAR <= at <= 1 + NEAR}
    ticks = [(count(edges), across(edges)) for edges in powers]
    return Curve(points, line, ticks, [(text, up(at)) for text, at in marks.items()])
