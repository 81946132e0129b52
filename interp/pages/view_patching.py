"""Patching made ready for the template: maps of what each activation brings back or takes away, and the largest."""

from dataclasses import dataclass

import pandas as pd

from interp.causal.contrast import Direction
from interp.core.visible import visible
from interp.pages.views import CellRows, array, by_layer, cells, records
from interp.views.patching import patching_map, patching_scale
from interp.views.scale import ColourScale
from interp.views.writing import number

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
LARGEST = 10
"""Cells listed with their numbers."""


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
        scale = patching_scale("normalised", direction, "", 1.0)
        patches = records(PatchCell, table[table.direction == direction])
        drawn = {
            site: _map(by_layer(patch for patch in patches if patch.site == site), scale)
            for site in dict.fromkeys(patch.site for patch in patches)
        }
        order = sorted((p for p in patches if p.changed), key=lambda patch: -abs(patch.value))
        against, speaks = (number(end - scale.neutral, 0, sign=True) for end in scale.ends)
        found[str(direction)] = Patching(drawn, drawn.pop("z"), order[:LARGEST], (against, speaks))
    return found


def _map(rows: list[list[PatchCell]], scale: ColourScale) -> CellRows:
    """Coloured by how far the prompt's value in the cell speaks for the answer: brings it back, or takes it along."""
    view = patching_map(array(rows, "normalised"), array(rows, "changed", bool), "normalised", scale)
    return cells(view, rows, _tip)


def _tip(patch: PatchCell) -> str:
    # the script names cells by token, from their row and column
    place = "" if patch.head is None else f"{patch.part}\n"
    if not patch.changed:
        return f"{place}nothing was changed here"
    return f"{place}{number(patch.value, 3, sign=True)} logits\nnormalised {number(patch.normalised, 3)}"
