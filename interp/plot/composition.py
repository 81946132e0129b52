"""Composition of all pairs of heads as one map: sources down, destinations across."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.core.wording import nearest
from interp.plot.canvas import axes, frame_cells, heat_map, name_cells
from interp.views.scale import ColourScale

UNITS = {
    "excess": "ratio above the null",
    "value": "ratio of Frobenius norms",
    "relative": "times the medians of the two layers",
}
ABSENT = "0.88"
"""Grey of pairs that do not exist or have no number."""
MOST_NAMED = 24
"""Up to so many heads a side, each is named; beyond, only its layer."""


@public()
def composition(
    result: xr.Dataset,
    value: str = "excess",
    *,
    mark: int = 1,
    limit: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """`excess`, `value` or `relative` of `composition` for every pair of heads, by layer; grey where there is none.

    Args:
        result: what `interp.composition` returned.
        value: "excess", "value" or "relative".
        mark: number of largest pairs that are framed, and named in the title.
        limit: the number where the colours end, equal for several maps side by side; None: the largest.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: another value.
        ValueError: a negative number of marks.

    Example:
        >>> plot.composition(interp.composition(model, "K"), mark=3)
    """
    if value not in UNITS:
        raise KeyError(f"value must be one of {', '.join(UNITS)}, got {value!r}; {nearest(value, UNITS)}")
    if mark < 0:
        raise ValueError(f"at least 0 marked pairs are required, got {mark}")
    shown = _grouped(result[[value]])
    cells = shown[value].to_numpy()
    named = max(cells.shape) <= MOST_NAMED
    inch = max(0.34, 2.4 / max(cells.shape)) if named else 7.0 / max(cells.shape)
    ax = axes(ax, 2.2 + inch * cells.shape[1], 1.4 + inch * cells.shape[0])
    scale = _scale(cells if limit is None else np.array([[limit]]), value)
    framed = _frame_largest(ax, cells, mark)
    pairs = [f"{shown.src.values[row]} → {shown.dst.values[column]}" for row, column in framed]
    heat_map(ax, cells, scale, title=_title(str(result.attrs["kind"]), value, pairs))
    ax.set_facecolor(ABSENT)
    _name(ax, shown, named=named)
    ax.set_ylabel("source head (writes)" if named else "layer of the source head (writes)")
    ax.set_xlabel("destination head (reads)" if named else "layer of the destination head (reads)")
    return ax


def _scale(cells: Float[np.ndarray, "sources destinations"], value: str) -> ColourScale:
    if value == "excess":
        return ColourScale.signed(cells, UNITS[value])
    return ColourScale.mass(UNITS[value], float(np.nanmax(cells, initial=0.0)) or 1.0)


def _title(kind: str, value: str, pairs: Sequence[str]) -> str:
    """The name of what is shown, and the framed pairs by name."""
    width = 3
    lines = [", ".join(pairs[i : i + width]) for i in range(0, len(pairs), width)]
    words = "ratio" if value == "value" else value
    return "\n".join([f"{kind}-composition of heads: {words}", *lines])


def _grouped(result: xr.Dataset) -> xr.Dataset:
    """Sources of all layers but the last, destinations of all but the first: no row or column without a pair."""
    result = result.transpose("src", "dst")
    return result.isel(
        src=result.src_layer < result.src_layer.max(), dst=result.dst_layer > result.dst_layer.min()
    )


def _name(ax: Axes, shown: xr.Dataset, *, named: bool) -> None:
    """Names of heads, or of layers at the middle of their heads, and lines between layers."""
    sides = shown.src_layer.to_numpy(), shown.dst_layer.to_numpy()
    if named:
        rows, columns = (shown[side].values.tolist() for side in ("src", "dst"))
        name_cells(ax, rows=rows, columns=columns, turned=True)
    else:
        for side, ticks in zip(sides, (ax.set_yticks, ax.set_xticks), strict=True):
            layers = sorted(set(side.tolist()))
            ticks([float(np.flatnonzero(side == layer).mean()) for layer in layers], [str(n) for n in layers])
        ax.tick_params(length=0)
    for side, line in zip(sides, (ax.axhline, ax.axvline), strict=True):
        for border in np.flatnonzero(np.diff(side)) + 0.5:
            line(border, color="0.5", linewidth=0.8)


def _frame_largest(
    ax: Axes, cells: Float[np.ndarray, "sources destinations"], count: int
) -> list[tuple[int, int]]:
    """A frame around each of the largest numbers; their rows and columns."""
    known = np.flatnonzero(np.isfinite(cells))
    largest = known[np.argsort(cells.ravel()[known])[::-1][:count]]
    places = [divmod(int(place), cells.shape[1]) for place in largest]
    frame_cells(ax, places)
    return places
