"""Direct logit attribution: the parts that add most, and a map of what heads and MLPs add."""

from collections.abc import Sequence

import numpy as np
import xarray as xr
from jaxtyping import Float

from interp.passes.answer_tokens import TOKEN
from interp.views.maps import CellMap
from interp.views.scale import ColourScale

MOST_STEPS = 16
"""Parts with a bar of their own in a waterfall; all others are one bar."""


def contribution_map(values: Float[np.ndarray, "layers parts"], unit: str) -> CellMap:
    """What each head adds to the logit (difference), signed: blue for the answer."""
    scale = ColourScale.signed(values, f"contribution ({unit})")
    return CellMap(values, scale, "direct logit attribution", sign=True)


def summed_over_answer(result: xr.Dataset) -> xr.Dataset:
    """The result with its numbers summed over the tokens of each answer; itself for answers of one token."""
    if TOKEN not in result.dims:
        return result
    summed = result[["value", "total"]].sum(TOKEN, keep_attrs=True)
    for values in summed.values():
        values.attrs["unit"] = f"{values.attrs['unit']}, summed over the answer's tokens"
    return summed


def largest(values: Sequence[float], most: int) -> tuple[list[int], list[int]]:
    """The places of so many values by size, and those of all others, which are shown as one.

    A single other is shown by itself.
    """
    order = sorted(range(len(values)), key=lambda i: -abs(values[i]))
    return (order, []) if len(order) <= most + 1 else (order[:most], order[most:])
