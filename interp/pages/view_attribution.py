"""Attribution made ready for the template: the waterfall along the stream, the bars by size, the map of heads."""

import math
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import pandas as pd
from jaxtyping import Float

from interp.model.parts import Part
from interp.pages.views import CellRows, array, by_layer, cells, records
from interp.views.attribution import MOST_STEPS, contribution_map, largest
from interp.views.writing import number

MEANINGS = {
    "embed": "token embedding",
    "pos_embed": "position embedding",
    "type_embed": "token type embedding",
    "embed_bias": "bias of the embeddings' norm",
    "final_bias": "β·W_U + b_U",
    "rounding": "what the pass rounded off where it added the parts up",
}
"""The parts outside the layers, in words."""
MLPS = ("mlp", "mlp_before")
"""Kinds of MLP; a block with two has `mlp_before` before attention."""
GRAINS = {
    "part": "the parts that add most, in the order of the stream; all others are one bar",
    "sublayer": "every sublayer, its heads and biases together",
}
"""The grains of the waterfall in the order of the page."""
OTHERS = "others"
"""Kind of the bar of all parts that have none of their own."""
MOST_LISTED = 60
"""Parts with a row of their own in the table."""
MOST_TICKS = 6
MOVED_DIGITS = 4
"""Decimals of what heads move in the data of the page, which writes three."""
NAMED = 3
"""Heads named in the explanation of an attention sublayer."""


@dataclass(frozen=True)
class Added:
    """One part of the model and the logits that it adds, in the order of the stream."""

    part: str
    kind: str
    layer: int | None
    head: int | None
    value: float
    share: float
    order: int
    """Place in the forward pass."""

    @property
    def meaning(self) -> str:
        """The part's name, and what it is where the name does not say it."""
        return f"{self.part}, {MEANINGS[self.part]}" if self.part in MEANINGS else self.part


@dataclass(frozen=True)
class Bar:
    """A part by size and its place among the bars above, in percent of the drawing's width."""

    added: Added
    left: float
    width: float


@dataclass(frozen=True)
class WaterfallStep:
    """One step of the waterfall; places in percent of the drawing's height."""

    part: str
    kind: str
    layer: int | None
    head: int | None
    value: float
    bottom: float
    height: float
    tip: str


@dataclass(frozen=True)
class Band:
    """The steps of one layer, or those before or after all layers."""

    name: str
    steps: list[WaterfallStep]


@dataclass(frozen=True)
class Waterfall:
    """The steps at one grain, from 0 to the total, with the heights of the scale's ticks."""

    bands: list[Band]
    count: int
    narrow: bool
    """Whether there are too many bars for a name under each."""
    total: WaterfallStep
    """The sum of all steps, as a bar of its own."""
    ticks: list[tuple[str, float]]
    zero: float
    goal: float


@dataclass(frozen=True)
class Attribution:
    """Attribution made ready: waterfalls by grain, bars by size, the map, and where 0 and the total stand."""

    waterfalls: dict[str, Waterfall]
    count: int
    """Number of parts."""
    bars: list[Bar]
    """The largest parts, and all others as one."""
    cells: CellRows
    reach: float
    """Largest absolute cell of the map, where the colour is full."""
    unplaced: float
    """Sum of the parts that are not in the map: embeddings and biases."""
    zero: float
    goal: float


def attribution(table: pd.DataFrame) -> Attribution:
    """Everything that the page draws of the attribution table."""
    parts = records(Added, table.assign(order=range(len(table))))  # in the order of the stream
    listed = _largest(parts, MOST_LISTED)
    starts, ends, low, span = _falls(np.array([one.value for one in listed]))
    left, width = 100 * (np.minimum(starts, ends) - low) / span, 100 * np.abs(ends - starts) / span
    bars = [Bar(one, float(x), float(w)) for one, x, w in zip(listed, left, width, strict=True)]
    placed = [part for part in parts if part.kind in ("head", *MLPS)]
    heads_first = sorted(placed, key=lambda part: part.kind != "head")
    rows = by_layer(heads_first)
    view = contribution_map(array(rows, "value"), "logits")
    unplaced = sum((part.value for part in parts if part.kind not in ("head", *MLPS)), 0.0)
    by_part = sorted(_largest(parts, MOST_STEPS), key=lambda part: part.order)
    falls = {"part": _waterfall([[part] for part in by_part]), "sublayer": _waterfall(_sublayers(parts))}
    goal = 100 * (float(ends[-1]) - low) / span
    maps = cells(view, rows, _tip)
    return Attribution(falls, len(parts), bars, maps, view.scale.high, unplaced, -100 * low / span, goal)


def _largest(parts: list[Added], most: int) -> list[Added]:
    """So many parts by size, and all others as one behind them."""
    shown, others = largest([part.value for part in parts], most)
    if not others:
        return [parts[i] for i in shown]
    value, share = (math.fsum(getattr(parts[i], name) for i in others) for name in ("value", "share"))
    rest = Added(f"{len(others)} {OTHERS}", OTHERS, None, None, value, share, len(parts))
    return [*(parts[i] for i in shown), rest]


def _falls(
    values: Float[np.ndarray, "c"],
) -> tuple[Float[np.ndarray, "c"], Float[np.ndarray, "c"], float, float]:
    """Where each step starts and ends, the lowest of these and 0, and the range of all; a range of 0 counts as 1."""
    ends = values.cumsum()
    low, high = min(0.0, float(ends.min())), max(0.0, float(ends.max()))
    return ends - values, ends, low, (high - low) or 1.0


def _tip(one: Added) -> str:
    return f"{one.part}\n{_amount(one.value)} logits\n{_share(one.share)} of the total"


def _amount(value: float) -> str:
    return number(value, 3, sign=True)


def _share(share: float) -> str:
    return f"{number(100 * share, 1)} %"


# --- the waterfall --------------------------------------------------------------------------------------------------


def _sublayers(parts: list[Added]) -> list[list[Added]]:
    """The heads of each layer together with their bias; every other part by itself."""

    def of(one: Added) -> tuple[int | None, str]:
        return one.layer, "attn" if one.kind in ("head", "attn_bias") else one.part

    return [list(group) for _, group in groupby(parts, key=of)]


def _waterfall(groups: list[list[Added]]) -> Waterfall:
    """One step per group, each starting where the one before it ended."""
    values = np.array([math.fsum(one.value for one in group) for group in groups])
    starts, ends, low, span = _falls(values)

    def place(value: float) -> float:
        return 100 * (value - low) / span

    def step(group: list[Added], start: float, end: float) -> WaterfallStep:
        name, first, amount = _named(group), group[0], end - start
        single = len(group) == 1
        bottom = place(min(start, end))
        sums = f"sum so far {_amount(start)} → {_amount(end)}"
        tip = f"{first.meaning if single else name}\n{_explained(group)}\n{sums}"
        head = first.head if single else None
        height = place(max(start, end)) - bottom
        return WaterfallStep(name, first.kind, first.layer, head, amount, bottom, height, tip)

    steps = [step(*each) for each in zip(groups, starts.tolist(), ends.tolist(), strict=True)]
    total = float(ends[-1])
    tip = f"total\n{_amount(total)} logits, the sum of {len(steps)} steps"
    bottom = place(min(0.0, total))
    whole = WaterfallStep("total", "total", None, None, total, bottom, place(max(0.0, total)) - bottom, tip)
    ticks = [(text, place(value)) for text, value in round_ticks(low, low + span)]
    narrow = len(steps) > MOST_STEPS + 1
    return Waterfall(_bands(steps), len(steps) + 1, narrow, whole, ticks, place(0.0), place(total))


def _bands(steps: list[WaterfallStep]) -> list[Band]:
    """Neighbours of one layer together: before all layers the embeddings, after them what is left."""
    bands: list[Band] = []
    for (layer, is_rest), group in groupby(steps, key=lambda step: (step.layer, step.kind == OTHERS)):
        outside = "rest" if is_rest else "final" if bands else "embed"
        bands.append(Band(outside if layer is None else str(Part("block", layer)), list(group)))
    return bands


def _named(group: list[Added]) -> str:
    """The name of a group: a part's own, or that of the attention sublayer with its heads and bias."""
    first = group[0]
    return str(Part("attn", first.layer)) if first.kind == "head" and len(group) > 1 else first.part


def _explained(group: list[Added]) -> str:
    """The logits of a group and, of several heads, the largest."""
    amount = math.fsum(one.value for one in group)
    text = f"{_amount(amount)} logits, {_share(math.fsum(one.share for one in group))} of the total"
    if len(group) == 1:
        return text
    largest = sorted(group, key=lambda one: -abs(one.value))[:NAMED]
    return f"{text}\nlargest: {', '.join(f'{one.part} {_amount(one.value)}' for one in largest)}"


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
    """Layer and head of the head that adds most to the answer: the one that the page opens on; 0, 0 without heads."""
    heads = table[table.kind == "head"].reset_index(drop=True)
    if heads.empty:
        return [0, 0]
    first = heads.loc[[heads.value.argmax()]]
    return [int(first.layer.iloc[0]), int(first["head"].iloc[0])]


def moved(table: pd.DataFrame) -> list[list[list[float]] | None]:
    """Logits that each head moves to the last position, by layer, head and source position.

    None for a layer whose heads do not move single tokens.
    """
    sizes = [1 + int(table[name].max()) for name in ("layer", "head", "source")]
    values = table.value.to_numpy(dtype=float).round(MOVED_DIGITS).reshape(sizes)
    return [None if np.isnan(layer).any() else layer.tolist() for layer in values]
