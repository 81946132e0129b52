"""Attribution made ready for the template: the waterfall along the stream, the bars by size, the map of heads."""

import math
from dataclasses import dataclass, fields
from itertools import groupby

import numpy as np
import pandas as pd
from jaxtyping import Float

from interp.pages.views import Cell
from interp.pages.wording import number

EMBEDDINGS = {
    "embed": ("token embedding", "token"),
    "pos_embed": ("position embedding", "pos"),
    "type_embed": ("token type embedding", "type"),
    "embed_bias": ("bias of the embeddings' norm", "bias"),
    "final_bias": ("final bias", "bias"),
}
"""Components outside the layers, in words and in short."""
MLP_WORDS = {"mlp": "MLP", "first mlp": "first MLP"}
"""Kinds of MLP in words; a block with two has the first before attention."""
GRAINS = {
    "sublayer": "every sublayer, its heads and biases together",
    "head": "every head, MLP, embedding and bias by itself",
}
"""The grains of the waterfall in the order of the page."""
MOST_TICKS = 6
NAMED = 3
"""Heads named in the explanation of an attention sublayer."""


@dataclass(frozen=True)
class Part:
    """One component of the attribution, in the order of the stream."""

    component: str
    kind: str
    layer: int | None
    head: int | None
    logits: float
    share: float
    order: int
    """Place in the forward pass."""

    @property
    def name(self) -> str:
        """The component in words."""
        if self.kind == "head":
            return f"head {self.layer}.{self.head}"
        if self.component in EMBEDDINGS:
            return EMBEDDINGS[self.component][0]
        return f"{MLP_WORDS.get(self.kind, self.kind)} {self.layer}"


@dataclass(frozen=True)
class Bar:
    """A component by size and its place among the bars above, in percent of the drawing's width."""

    part: Part
    left: float
    width: float


@dataclass(frozen=True)
class Step:
    """One step of the waterfall; places in percent of the drawing's height."""

    name: str
    short: str
    layer: int | None
    head: int | None
    logits: float
    bottom: float
    height: float
    tip: str


@dataclass(frozen=True)
class Band:
    """The steps of one layer, or those before or behind all layers."""

    name: str
    steps: list[Step]


@dataclass(frozen=True)
class Waterfall:
    """The steps at one grain, from 0 to the total, with the heights of the scale's ticks."""

    bands: list[Band]
    count: int
    total: Step
    """The sum of all steps, as a bar of its own."""
    ticks: list[tuple[str, float]]
    zero: float
    goal: float


@dataclass(frozen=True)
class Attribution:
    """Attribution made ready: waterfalls by grain, bars by size, the map, and where 0 and the total stand."""

    waterfalls: dict[str, Waterfall]
    bars: list[Bar]
    cells: list[list[Cell]]
    reach: float
    """Largest absolute cell of the map, where the colour is full."""
    unplaced: float
    """Sum of the components that are not in the map: embeddings and biases."""
    zero: float
    goal: float


def attribution(table: pd.DataFrame) -> Attribution:
    """Everything that the page draws of the attribution table."""
    parts = _parts(table)
    logits = table.logits.to_numpy(dtype=float)
    order = np.argsort(-np.abs(logits), kind="stable")
    starts, ends, low, span = _falls(logits[order])
    left, width = 100 * (np.minimum(starts, ends) - low) / span, 100 * np.abs(ends - starts) / span
    bars = [Bar(parts[i], float(x), float(w)) for i, x, w in zip(order, left, width, strict=True)]
    placed = [part for part in parts if part.kind in ("head", *MLP_WORDS)]
    reach = max(abs(part.logits) for part in placed) or 1.0
    cells: dict[int | None, list[Cell]] = {}
    for part in sorted(placed, key=lambda part: part.kind != "head"):
        cells.setdefault(part.layer, []).append(_cell(part, reach))
    unplaced = sum(part.logits for part in parts if part.kind not in ("head", *MLP_WORDS))
    falls = {"sublayer": _waterfall(_sublayers(parts)), "head": _waterfall([[part] for part in parts])}
    goal = 100 * (float(ends[-1]) - low) / span
    return Attribution(falls, bars, list(cells.values()), reach, unplaced, -100 * low / span, goal)


def _parts(table: pd.DataFrame) -> list[Part]:
    """The components in the order of the stream."""
    layer, head = _optional(table.layer), _optional(table["head"])
    whole = table.assign(layer=layer, head=head, order=range(len(table)))
    columns = (whole[field.name].tolist() for field in fields(Part))
    return [Part(*row) for row in zip(*columns, strict=True)]


def _optional(column: pd.Series) -> pd.Series:
    """Integers as Python's own, None where there is none."""
    return column.astype(object).where(column.notna(), None)


def _falls(
    logits: Float[np.ndarray, "c"],
) -> tuple[Float[np.ndarray, "c"], Float[np.ndarray, "c"], float, float]:
    """Where each step starts and ends, the lowest of these and 0, and the range of all; a range of 0 counts as 1."""
    ends = logits.cumsum()
    low, high = min(0.0, float(ends.min())), max(0.0, float(ends.max()))
    return ends - logits, ends, low, (high - low) or 1.0


def _cell(part: Part, reach: float) -> Cell:
    tip = f"{part.name}\n{_amount(part.logits)} logits\n{_share(part.share)} of the total"
    return Cell(number(part.logits, 2, sign=True), part.logits / reach, tip)


def _amount(logits: float) -> str:
    return number(logits, 3, sign=True)


def _share(share: float) -> str:
    return f"{number(100 * share, 1)} %"


# --- the waterfall --------------------------------------------------------------------------------------------------


def _sublayers(parts: list[Part]) -> list[list[Part]]:
    """The heads of each layer together with their bias; every other component by itself."""

    def of(part: Part) -> tuple[int | None, str]:
        return part.layer, "attention" if part.kind in ("head", "attention bias") else part.component

    return [list(group) for _, group in groupby(parts, key=of)]


def _waterfall(groups: list[list[Part]]) -> Waterfall:
    """One step per group, each starting where the one before it ended."""
    logits = np.array([math.fsum(part.logits for part in group) for group in groups])
    starts, ends, low, span = _falls(logits)

    def place(value: float) -> float:
        return 100 * (value - low) / span

    def step(group: list[Part], start: float, end: float) -> Step:
        name, short = _named(group)
        first, amount = group[0], end - start
        head = first.head if len(group) == 1 else None
        bottom = place(min(start, end))
        return Step(
            name, short, first.layer, head, amount, bottom, place(max(start, end)) - bottom,
            f"{name}\n{_explained(group)}\nsum so far {_amount(start)} → {_amount(end)}",
        )  # fmt: skip

    steps = [step(*each) for each in zip(groups, starts.tolist(), ends.tolist(), strict=True)]
    total = float(ends[-1])
    tip = f"total\n{_amount(total)} logits, the sum of {len(steps)} steps"
    bottom = place(min(0.0, total))
    whole = Step("total", "total", None, None, total, bottom, place(max(0.0, total)) - bottom, tip)
    ticks = [(text, place(value)) for text, value in round_ticks(low, low + span)]
    return Waterfall(_bands(steps), len(steps) + 1, whole, ticks, place(0.0), place(total))


def _bands(steps: list[Step]) -> list[Band]:
    """Neighbours of one layer together: before all layers the embeddings, behind them what is left."""
    bands: list[Band] = []
    for layer, group in groupby(steps, key=lambda step: step.layer):
        outside = "final" if bands else "embed"
        bands.append(Band(outside if layer is None else str(layer), list(group)))
    return bands


def _named(group: list[Part]) -> tuple[str, str]:
    """A group of components in words, and in short."""
    first = group[0]
    if first.kind == "head" and len(group) > 1:
        return f"attention {first.layer}", "attn"
    if first.component in EMBEDDINGS:
        return EMBEDDINGS[first.component]
    short = {**MLP_WORDS, "head": f"{first.layer}.{first.head}"}
    return first.name, short.get(first.kind, "bias")


def _explained(group: list[Part]) -> str:
    """The logits of a group and, of several heads, the largest."""
    amount = math.fsum(part.logits for part in group)
    text = f"{_amount(amount)} logits, {_share(math.fsum(part.share for part in group))} of the total"
    if len(group) == 1:
        return text
    largest = sorted(group, key=lambda part: -abs(part.logits))[:NAMED]
    return f"{text}\nlargest: {', '.join(f'{part.name} {_amount(part.logits)}' for part in largest)}"


def round_ticks(low: float, high: float) -> list[tuple[str, float]]:
    """Round numbers that cover the range, 0 among them, and how each is written."""
    coarse = (high - low) / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(coarse))
    width = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= coarse)
    digits = max(0, -math.floor(math.log10(width)))
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    return [(number(i * width, digits), i * width) for i in range(first, last + 1)]


# --- what links attribution with the other views ----------------------------------------------------------------------


def speaker(table: pd.DataFrame) -> list[int]:
    """Layer and head of the head that adds most to the answer: the one that the page opens on."""
    heads = table[table.kind == "head"].reset_index(drop=True)
    first = heads.loc[[heads.logits.argmax()]]
    return [int(first.layer.iloc[0]), int(first["head"].iloc[0])]


def moved(table: pd.DataFrame) -> list[list[list[float]]]:
    """Logits that each head moves to the last position, by layer, head and source position."""
    sizes = [1 + int(table[name].max()) for name in ("layer", "head", "source")]
    values: list[list[list[float]]] = table.logits.to_numpy(dtype=float).round(6).reshape(sizes).tolist()
    return values
