"""Ablation made ready for the template: maps of direct and total effect in common colours, one against the other."""

from dataclasses import dataclass, fields

import pandas as pd

from interp.pages.views import Cell
from interp.pages.wording import number

PROTOCOLS = {
    "zero": (
        "zero",
        "The part says nothing: a head's output z, an MLP's output with its bias, is 0 at every position. That can "
        "leave a stream that the model never sees. Direct is what the part adds by itself to the logits, as above.",
    ),
    "resample": (
        "by the twin",
        "The part says at every position what it says in the twin's run (resampling), so only what differs between the "
        "prompts counts. Direct is, for the same reason, what it adds by itself after the prompt minus what it adds "
        "after the twin, each at its own norm's scale.",
    ),
}
"""By protocol its name on the page, and what stands in for the part."""
UNCHANGED = "–"
"""What a cell shows where nothing was changed."""
MLPS = {"mlp_before": "first MLP", "mlp": "MLP"}
"""Kinds of MLP in words; a block with two has the first before attention."""
LARGEST = 12
"""Parts listed with their numbers."""
SIDE, ROOM = 260.0, 36.0
"""Of the drawing of total against direct effect: its square and the room for its scales, in pixels."""


@dataclass(frozen=True)
class Removed:
    """One part, and what the answer loses without it."""

    kind: str
    layer: int
    head: int | None
    direct_logits: float
    effect_logits: float
    changed: bool

    @property
    def name(self) -> str:
        """The part in words."""
        return f"{MLPS.get(self.kind, 'head')} {self.layer}" + ("" if self.head is None else f".{self.head}")

    @property
    def node(self) -> str:
        """The part as graphs of edges call it."""
        letter = "b" if self.kind == "mlp_before" else "m"
        return f"{letter}{self.layer}" if self.head is None else f"a{self.layer}.h{self.head}"

    @property
    def total(self) -> float:
        """What the answer loses without the part: signed as the direct effect is."""
        return 0.0 - self.effect_logits

    @property
    def rest(self) -> float:
        """What is not direct: through later parts, and the final norm's scale, which the direct effect holds."""
        return self.total - self.direct_logits


@dataclass(frozen=True)
class Dot:
    """A part by its direct (across) and total effect (up), in pixels."""

    part: Removed
    x: float
    y: float
    tip: str


@dataclass(frozen=True)
class Ablation:
    """One protocol: maps of direct and total effect, the parts that matter most, all parts as dots."""

    label: str
    meaning: str
    direct: list[list[Cell]]
    total: list[list[Cell]]
    reach: float
    """Largest absolute effect of both maps, where the colour is full."""
    largest: list[Removed]
    dots: list[Dot]


def ablation(table: pd.DataFrame) -> dict[str, Ablation]:
    """What the page draws of the ablation table, by protocol."""
    return {str(name): _one(str(name), part) for name, part in table.groupby("protocol", sort=False)}


def place(value: float, reach: float) -> float:
    """Where a value stands in the drawing, in pixels from the left (or the bottom) of its square."""
    return SIDE * (value + reach) / (2 * reach)


def _one(protocol: str, table: pd.DataFrame) -> Ablation:
    whole = table.astype({"head": object})
    whole["head"] = whole["head"].where(whole["head"].notna(), None)
    parts = [
        Removed(*row) for row in zip(*(whole[field.name].tolist() for field in fields(Removed)), strict=True)
    ]
    reach = max(max(abs(part.direct_logits), abs(part.total)) for part in parts) or 1.0
    direct: dict[int, list[Cell]] = {}
    total: dict[int, list[Cell]] = {}
    for part in parts:
        direct.setdefault(part.layer, []).append(_cell(part, part.direct_logits, reach))
        total.setdefault(part.layer, []).append(_cell(part, part.total, reach, idle=not part.changed))
    order = sorted(parts, key=lambda part: -max(abs(part.total), abs(part.direct_logits)))
    dots = [
        Dot(part, place(part.direct_logits, reach), SIDE - place(part.total, reach), _tip(part))
        for part in reversed(order)  # the largest are drawn last, above the others
    ]
    label, meaning = PROTOCOLS[protocol]
    return Ablation(label, meaning, list(direct.values()), list(total.values()), reach, order[:LARGEST], dots)


def _tip(part: Removed) -> str:
    total = f"total {_signed(part.total)}" if part.changed else "total 0: nothing was changed here"
    return f"{part.name}\ndirect {_signed(part.direct_logits)} logits\n{total}\nrest {_signed(part.rest)}"


def _cell(part: Removed, value: float, reach: float, *, idle: bool = False) -> Cell:
    text = UNCHANGED if idle else number(value, 2, sign=True)
    return Cell(text, 0.0 if idle else value / reach, _tip(part), idle=idle)


def _signed(logits: float) -> str:
    return number(logits, 3, sign=True)
