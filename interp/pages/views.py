"""Tables made ready for the template: cells with their colour, bars with their place, explanations in words.

What the views share stands first: rows of a table as records, cells by layer, numbers packed for the script.
"""

import base64
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
import pandas as pd
from jaxtyping import Float, Shaped
from numpy.typing import NDArray

from interp.core.visible import visible
from interp.model.parts import Part
from interp.views.heads import MASS_UNIT, score_map
from interp.views.maps import MOST_ON_PAGE, CellMap
from interp.views.writing import count, number

SCORES = {
    "induction": "attention to the tokens that followed earlier copies of the current one",
    "previous_token": "attention to the token just before the current one",
    "duplicate_token": "attention to earlier copies of the current token",
    "current_token": "attention to the current token itself",
    "first_token": "attention to the start token, where heads rest",
    "local": "attention to the last five tokens, the current one included",
}
"""The head scores of the page and what each measures."""
CIRCUITS = {
    "eigenvalue": (
        "copying",
        "eigenvalues of the full OV circuit, source token to output token: +1 raises the logit of the very token it "
        "attends to, −1 lowers it",
    ),
    "matching": (
        "matching",
        "eigenvalues of the full QK circuit through what earlier heads wrote about the token before: near +1 for "
        "induction heads, which look for what followed",
    ),
}
"""The scores of circuits, what the page calls them, and what each measures."""
KINDS = {
    "K": "what the source writes serves as the destination's keys",
    "Q": "what the source writes serves as the destination's queries",
    "V": "what the source writes is what the destination moves on",
}
"""The kinds of composition in the order of the page."""
NO_PATTERN = "no attention pattern: this layer mixes positions otherwise"
"""Explanation of the cell of a head that attends to nothing."""
BEST = 8
"""Heads listed with their intervals."""


@dataclass(frozen=True)
class MapCell:
    """One coloured cell of a map."""

    text: str
    level: float
    """Strength of the colour, in [-1, 1]; negative = the colour of negative numbers."""
    tip: str
    """Explanation of the cell when pointed at."""
    marked: bool = False
    idle: bool = False
    """Whether nothing was measured there, so that a number would mislead."""
    value: float = math.nan
    """The number itself: what a map that is painted says of the cell; NaN where it has none."""


R = TypeVar("R")
CellRows = list[list[MapCell]]
"""A map: its cells, row by row."""


def cells(view: CellMap, rows: Sequence[Sequence[R]], tip: Callable[[R], str]) -> CellRows:
    """The cells of a map for the template, each with the explanation of its record."""
    n_rows, n_columns = view.values.shape
    none = np.zeros((n_rows, n_columns), dtype=bool)
    marked, idle = (none if mask is None else mask for mask in (view.marked, view.idle))
    levels, marks, idles, values = (x.tolist() for x in (view.levels, marked, idle, view.values))
    tips = [[tip(record) for record in row] for row in rows]
    columns = zip(view.texts, levels, tips, marks, idles, values, strict=True)
    return [[MapCell(*cell) for cell in zip(*row, strict=True)] for row in columns]


def is_painted(cells: CellRows) -> bool:
    """Whether a map has too many cells for a number in each."""
    return sum(map(len, cells)) > MOST_ON_PAGE


def painted(cells: CellRows) -> dict[str, str]:
    """The numbers of a map for the script that paints it: row by row, as base64 of their bytes.

    Returns:
        - `levels`: int8, 127 = full colour, negative = that of negative numbers, -128 = nothing was measured.
        - `values`: thousandths, as they are shown, in little-endian integers; the smallest where there is no number.
        - `bytes`: of each of them, 2 or 4.
        - `marked`: the numbers of the marked cells, counted row by row from 0, with spaces between.
    """
    every = [cell for row in cells for cell in row]
    levels = np.array([-128 if cell.idle else round(127 * max(-1.0, min(1.0, cell.level))) for cell in every])
    shown = [math.nan if math.isnan(cell.value) else 1000 * float(f"{cell.value:.3f}") for cell in every]
    size = 2 if np.nanmax(np.abs(shown), initial=0.0) < 2**15 - 1 else 4
    nothing = -(2 ** (8 * size - 1))
    values = np.rint(np.nan_to_num(shown, nan=nothing)).astype(f"<i{size}")
    return {
        "levels": packed(levels.astype(np.int8)),
        "values": packed(values),
        "bytes": str(size),
        "marked": " ".join(str(i) for i, cell in enumerate(every) if cell.marked),
    }


def records(kind: type[R], table: pd.DataFrame) -> list[R]:
    """The rows of a table as records, each field from the column of its name; integers that are not there are None."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    columns = (_whole(table[name]).tolist() for name in names)
    return [kind(*row) for row in zip(*columns, strict=True)]


def _whole(column: pd.Series) -> pd.Series:
    absent = column.dtype == object or pd.api.types.is_extension_array_dtype(column.dtype)
    return column.astype(object).where(column.notna(), None) if absent else column


@runtime_checkable
class HasLayer(Protocol):
    """A record of something in a layer."""

    @property
    def layer(self) -> int | None:
        """The layer."""


L = TypeVar("L", bound=HasLayer)


def by_layer(parts: Iterable[L]) -> list[list[L]]:
    """The records of each layer together, layers in the order of their first records."""
    rows: dict[int | None, list[L]] = {}
    for part in parts:
        rows.setdefault(part.layer, []).append(part)
    return list(rows.values())


def array(
    rows: Sequence[Sequence[object]], name: str, kind: type = float
) -> Shaped[np.ndarray, "rows columns"]:
    """One field of the records of a map as an array; of no rows `[0 0]`."""
    every = [[getattr(record, name) for record in row] for row in rows]
    return np.array(every, dtype=kind).reshape(len(every), len(every[0]) if every else 0)


def packed(values: NDArray[np.generic]) -> str:
    """Numbers as base64 of their bytes."""
    return base64.b64encode(np.ascontiguousarray(values).tobytes()).decode()


def fractions(
    share: "pd.Series[float] | Float[np.ndarray, '*n']", size: int = 2
) -> NDArray[np.unsignedinteger]:
    """Numbers in [0, 1] as little-endian fractions of so many bytes, the largest integer for 1."""
    return np.rint(np.asarray(share, dtype=float).clip(0, 1) * (256**size - 1)).astype(f"<u{size}")


@dataclass(frozen=True)
class Scored:
    """One head's score with its interval."""

    part: str
    layer: int
    head: int
    value: float
    low: float
    high: float
    null: float
    is_induction_head: bool
    label: str
    """Label of the head in `interp.heads`."""


def scored(table: pd.DataFrame, score: str) -> list[Scored]:
    """Every head's value of one score, in the order of the table."""
    return records(Scored, table[table.score == score])


def best(table: pd.DataFrame, score: str) -> list[Scored]:
    """The heads that score highest, best first."""
    return sorted(scored(table.dropna(subset="value"), score), key=lambda head: -head.value)[:BEST]


def head_map(table: pd.DataFrame, score: str) -> CellRows:
    """Rows of cells, layer by head, of one score; induction heads are marked on the map of induction scores."""
    words = score.replace("_", " ")
    rows = by_layer(scored(table, score))

    def tip(one: Scored) -> str:
        if math.isnan(one.value):
            return f"{one.part}\n{NO_PATTERN}"
        return (
            f"{one.part}\n{words} score {one.value:.3f}\n"
            f"95 % interval {one.low:.3f} – {one.high:.3f}\nnull {one.null:.3f}"
        )

    marked = array(rows, "is_induction_head", bool) if score == "induction" else None
    return cells(score_map(score, array(rows, "value"), MASS_UNIT, math.nan, marked), rows, tip)


@dataclass(frozen=True)
class _OfCircuit:
    """One head's score of its weights."""

    part: str
    layer: int
    value: float


def circuit_map(table: pd.DataFrame, score: str) -> CellRows:
    """Rows of cells, layer by head, of the eigenvalue or the matching score: signed, a dash where there is no score."""
    name = CIRCUITS[score][0]
    rows = by_layer(records(_OfCircuit, table[table.score == score]))

    def tip(one: _OfCircuit) -> str:
        return f"{one.part}\n{name} {'not defined' if math.isnan(one.value) else number(one.value, 3, sign=True)}"

    return cells(score_map(score, array(rows, "value"), "", math.nan), rows, tip)


@dataclass(frozen=True)
class Link:
    """Two heads that compose, and how strongly."""

    src: str
    dst: str
    value: float
    null: float
    excess: float
    relative: float
    width: float
    """Width of the bar, in percent: the excess over the largest of the page."""

    @property
    def ends(self) -> tuple[Part, Part]:
        """The two heads."""
        return Part.of(self.src), Part.of(self.dst)


def strongest(table: pd.DataFrame) -> dict[str, list[Link]]:
    """The strongest pairs of each kind of composition, best first."""
    known = table.sort_values("excess", ascending=False, kind="stable")
    most = max(1e-9, float(known.excess.max())) if len(known) else 1.0
    found: dict[str, list[Link]] = {}
    for kind, group in known.groupby("kind", sort=False):
        best_of = group.head(BEST).assign(width=lambda rows: (100 * rows.excess / most).clip(lower=0))
        found[str(kind)] = records(Link, best_of)
    return {kind: found[kind] for kind in KINDS if kind in found}


def profiles(heads: pd.DataFrame, parts: pd.DataFrame | None) -> list[list[str]]:
    """Facts about each head, a line each: its scores, and its direct effect on the answer, if there is one."""
    count_of = int((heads.score == next(iter(SCORES))).sum())
    direct = [None] * count_of if parts is None else parts[parts.kind == "head"].value.tolist()
    lines: dict[int, list[str]] = {}
    for added, *scores in zip(direct, *(scored(heads, name) for name in SCORES), strict=True):
        words = [] if scores[0].label == "none" else [f"called: {scores[0].label}"]
        if math.isnan(scores[0].value):
            words.append(NO_PATTERN)
        else:
            words += [
                f"{name.replace('_', ' ')} {one.value:.2f}" for name, one in zip(SCORES, scores, strict=True)
            ]
        if added is not None:
            words.append(f"adds {number(added, 2, sign=True)} logits by itself")
        lines.setdefault(scores[0].layer, []).append("\n".join(words))
    return list(lines.values())


def next_tokens(table: pd.DataFrame) -> list[list[tuple[str, float, float]]]:
    """For each position its most probable next tokens: text, probability, logit."""
    rows: dict[int, list[tuple[str, float, float]]] = {}
    columns = (table[name].tolist() for name in ("pos", "token", "prob", "logit"))
    for pos, token, prob, logit in zip(*columns, strict=True):
        rows.setdefault(pos, []).append((visible(token), round(prob, 6), round(logit, 4)))
    return list(rows.values())


@dataclass(frozen=True)
class MeasuredNumber:
    """One number of a model's card."""

    name: str
    value: str
    definition: str


def measured(card: object) -> list[MeasuredNumber]:
    """The numbers of a model's card; none for a model without one."""
    entries = []
    for name, entry in card.items() if isinstance(card, dict) else ():
        head = f" ({Part.of(str(entry['head']))})" if "head" in entry else ""
        definition = f"{entry['definition']}, n = {count(entry['n'])}"
        entries.append(MeasuredNumber(name.replace("_", " "), number(entry["value"], 3) + head, definition))
    return entries
