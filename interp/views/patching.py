"""Patching: what putting each cell of one run into the other brings back, or takes away."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float

from interp.views.maps import CellMap
from interp.views.scale import ColourScale

HOW: Mapping[str, str] = {"denoise": "clean into corrupted", "noise": "corrupted into clean"}
"""The directions in words."""
WIDE = 10.0
"""From this size on a normalised value is written without decimals."""
Effect = Literal["normalised", "value"]
"""0 = like the corrupted run, 1 = like the clean one; or the change of the metric, in its unit."""


def patching_map(
    values: Float[np.ndarray, "rows columns"],
    changed: Bool[np.ndarray, "rows columns"] | None,
    effect: Effect,
    scale: ColourScale,
    *,
    title: str = "",
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    axes: tuple[str, str] = ("layer", "pos"),
) -> CellMap:
    """One site's cells: blue where the clean cell speaks for the metric; `changed`: where the two runs differ."""
    wide = WIDE if effect == "normalised" else np.inf
    idle = None if changed is None else ~changed
    return CellMap(values, scale, title, rows, columns, axes, idle=idle, wide=wide)


def patching_scale(
    effect: Effect, direction: str, label: str, values: Float[np.ndarray, "..."] | float
) -> ColourScale:
    """The scale of effects: clean cells add to the corrupted run, corrupted cells take away from the clean one.

    Args:
        values: the effects, or how far from no effect the colours end.
    """
    if direction != "noise":
        return ColourScale.signed(values, label)
    intact = float(effect == "normalised")
    return ColourScale.removal(values if isinstance(values, np.ndarray) else intact + values, label, intact)
