"""Scores of heads: those of attention patterns, those of weights, and what heads add to the logits."""

import numpy as np
from jaxtyping import Bool, Float

from interp.views.maps import CellMap
from interp.views.scale import ColourScale

MASS_UNIT = "attention mass"
EIGENVALUES = ("eigenvalue", "matching")
"""The scores of circuits by their eigenvalues, from -1 to 1."""


def score_map(
    score: str,
    values: Float[np.ndarray, "layers heads"],
    unit: str,
    chance: float,
    marked: Bool[np.ndarray, "layers heads"] | None = None,
) -> CellMap:
    """One score of every head.

    Attention mass is coloured from 0 to 1, a score of eigenvalues from -1 to 1, and any other as far above chance as
    below it.

    Args:
        chance: the level of heads that do nothing of the kind; NaN = not known.
        marked: heads that stand out.
    """
    title, idle = f"{score.replace('_', ' ')} score", np.isnan(values)
    if unit == MASS_UNIT:
        return CellMap(values, ColourScale.mass(unit), title, idle=idle, marked=marked)
    scale = (
        ColourScale.signed(1.0, unit) if score in EIGENVALUES else ColourScale.around(chance, values, unit)
    )
    return CellMap(values, scale, title, sign=score in EIGENVALUES, idle=idle, marked=marked)
