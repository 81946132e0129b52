"""Average indirect effects: what each head brings of a task into lists that do not show it."""

import numpy as np
from jaxtyping import Bool, Float

from interp.views.maps import CellMap
from interp.views.scale import ColourScale


def effect_map(
    values: Float[np.ndarray, "layers heads"],
    marked: Bool[np.ndarray, "layers heads"] | None,
    label: str,
    title: str,
) -> CellMap:
    """The effect of every head: blue where it brings the answer back; marked: heads that do more than the null."""
    return CellMap(values, ColourScale.signed(values, label), title, marked=marked)
