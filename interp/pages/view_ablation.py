"""Ablation made ready for the template: maps of direct and total effect in common colours, one against the other.

Numbers are with the part replaced minus without. The colour is for or against the answer, as everywhere on the page:
where replacing a part lowers the metric, the part speaks for the answer, and the cell is blue (a positive level).
"""

from dataclasses import dataclass

import pandas as pd

from interp.pages.views import CellRows, array, by_layer, cells, records
from interp.views.ablation import ablation_map
from interp.views.writing import number

CHANGES = {
    "zero": (
        "zero",
        "The part says nothing: its output is 0 at every position, which the model may never have seen.",
    ),
    "resample": (
        "resample",
        "The part says what it says after the corrupted prompt, so only what differs between the prompts counts.",
    ),
}
"""Name on the page of each change, and the replacement of the part."""
LARGEST = 12
"""Parts listed with their numbers."""
MOST_DOTS = 150
"""Parts drawn as dots: the largest, all others lie about the middle."""
SIDE, ROOM = 260.0, 50.0
"""Of the drawing of total against direct effect: its square and the room for its scales, in pixels."""


@dataclass(frozen=True)
class Replaced:
    """One part, and what replacing it changes: directly, and in all."""

    part: str
    layer: int
    head: int | None
    direct: float
    value: float
    changed: bool

    @property
    def rest(self) -> float:
        """The indirect effect: through later parts, and the final norm's scale, which the direct effect keeps fixed."""
        return self.value - self.direct


@dataclass(frozen=True)
class Dot:
    """A part by its direct (across) and total effect (up), in pixels."""

    part: Replaced
    x: float
    y: float
    tip: str


@dataclass(frozen=True)
class Ablation:
    """One change: maps of direct and total effect, the parts that matter most, all parts as dots."""

    label: str
    meaning: str
    direct: CellRows
    total: CellRows
    reach: float
    """Largest absolute effect of both maps, where the colour is full."""
    largest: list[Replaced]
    dots: list[Dot]


def ablation(table: pd.DataFrame) -> dict[str, Ablation]:
    """The drawing of the ablation table, by change."""
    reach = float(table[["direct", "value"]].abs().to_numpy().max(initial=0.0)) or 1.0
    return {str(name): _one(str(name), part, reach) for name, part in table.groupby("change", sort=False)}


def place(value: float, reach: float) -> float:
    """Where a value stands in the drawing, in pixels from the left (or the bottom) of its square."""
    return SIDE * (value + reach) / (2 * reach)


def _one(change: str, table: pd.DataFrame, reach: float) -> Ablation:
    parts = records(Replaced, table)
    rows = by_layer(parts)
    direct = ablation_map(array(rows, "direct"), None, "", reach=reach)
    total = ablation_map(array(rows, "value"), array(rows, "changed", bool), "", reach=reach)
    order = sorted(parts, key=lambda part: -max(abs(part.value), abs(part.direct)))
    dots = [
        Dot(part, place(part.direct, reach), SIDE - place(part.value, reach), _tip(part))
        for part in reversed(order[:MOST_DOTS])  # the largest are drawn last, above the others
    ]
    label, meaning = CHANGES[change]
    return Ablation(
        label, meaning, cells(direct, rows, _tip), cells(total, rows, _tip), reach, order[:LARGEST], dots
    )


def _tip(one: Replaced) -> str:
    total = f"total {_signed(one.value)}" if one.changed else "total 0: nothing was changed here"
    return f"{one.part}\ndirect {_signed(one.direct)} logits\n{total}\nrest {_signed(one.rest)}"


def _signed(logits: float) -> str:
    return number(logits, 3, sign=True)
