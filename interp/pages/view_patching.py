"""Patching made ready for the template: maps of what each activation brings back or takes away, and the largest."""

from dataclasses import dataclass

import pandas as pd

from interp.causal.contrast import Direction
from interp.pages.views import CellRows, MapCell, by_layer, records
from interp.pages.wording import number, visible

DIRECTIONS: dict[Direction, str] = {
    "denoise": (
        "Clean into corrupted: what of the prompt's run brings the answer back in the corrupted run? Cells near 1 "
        "suffice by themselves"
    ),
    "noise": (
        "Corrupted into clean: what of the corrupted run takes the answer away in the prompt's run? Cells near 0 are "
        "needed"
    ),
}
"""The directions of the page, and how to read them."""
SITES = {
    "resid_pre": "the stream before each layer",
    "mlp_before_out": "what the MLP before attention adds to the stream",
    "attn_out": "what attention adds to the stream",
    "mlp_out": "what the MLP adds to the stream",
    "z": "each head's output, at all positions at once",
}
"""Names of the patched sites, in words."""
ENDS: dict[Direction, tuple[str, str]] = {"denoise": ("−1", "+1"), "noise": ("+1", "−1")}
"""Change of the normalised metric at the red and the blue end of the scale."""
UNCHANGED = "–"
"""Text of a cell in which nothing was changed."""
LARGEST = 10
"""Cells listed with their numbers."""
WIDE = 10
"""From this size on a normalised value is written without digits."""


@dataclass(frozen=True)
class PatchCell:
    """One cell of one map; value: the change of the metric, in logits."""

    part: str
    site: str
    layer: int
    pos: int | None
    token: str | None
    head: int | None
    value: float
    normalised: float
    changed: bool

    @property
    def place(self) -> str:
        """Where it is, in words."""
        if self.head is not None:
            return self.part
        return f"{self.part} at {visible(self.token or '')} ({self.pos})"


@dataclass(frozen=True)
class Patching:
    """One direction: maps by layer and token, the map by layer and head, the largest effects."""

    maps: dict[str, CellRows]
    heads: CellRows
    largest: list[PatchCell]
    ends: tuple[str, str]
    """Values at the ends of the colour scale, against the answer and for it."""


def patching(table: pd.DataFrame) -> dict[str, Patching]:
    """The drawing of the patching table, by direction."""
    found = {}
    for direction in DIRECTIONS:
        patches = records(PatchCell, table[table.direction == direction])
        back = direction == "denoise"
        drawn = {
            site: by_layer((patch.layer, _cell(patch, back=back)) for patch in patches if patch.site == site)
            for site in dict.fromkeys(patch.site for patch in patches)
        }
        order = sorted((p for p in patches if p.changed), key=lambda patch: -abs(patch.value))
        found[str(direction)] = Patching(drawn, drawn.pop("z"), order[:LARGEST], ENDS[direction])
    return found


def _cell(patch: PatchCell, *, back: bool) -> MapCell:
    """Coloured by how far the prompt's value in the cell speaks for the answer: brings it back, or takes it along."""
    place = (
        "" if patch.head is None else f"{patch.part}\n"
    )  # the script names cells by token, from their row and column
    if not patch.changed:
        return MapCell(UNCHANGED, 0.0, f"{place}nothing was changed here", idle=True)
    tip = f"{place}{number(patch.value, 3, sign=True)} logits\nnormalised {number(patch.normalised, 3)}"
    level = max(-1.0, min(1.0, patch.normalised if back else 1.0 - patch.normalised))
    text = number(patch.normalised, 2 if abs(patch.normalised) < WIDE else 0)
    return MapCell(text, level, tip, value=patch.normalised)
