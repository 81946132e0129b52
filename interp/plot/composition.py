"""Composition of all pairs of heads as one map: sources down, destinations across."""

from collections.abc import Sequence
from itertools import product

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from interp.core.shapes import nearest
from interp.plot.canvas import MASS, Scale, axes, heat_map, name_cells

UNITS = {
    "z": "sd above the null",
    "excess": "ratio above the null",
    "raw": "ratio of Frobenius norms",
}
SIGNED = ("z", "excess")
ABSENT = "0.88"
"""Grey of pairs that do not exist or have no number."""
MOST_NAMED = 24
"""Up to so many heads a side, each is named (layer.head); beyond, only its layer."""


def composition(
    result: xr.Dataset, value: str = "z", *, mark: int = 1, limit: float | None = None, ax: Axes | None = None
) -> Axes:
    """`z`, `excess` or `raw` of `composition` for every pair of heads, grouped by layer; grey where there is no number.

    The `mark` largest pairs are framed, and named in the title. limit: where the colours end, the same for several maps
    side by side; None = at the largest number.
    Errors: KeyError for another value, ValueError for a negative number of marks.

    Example:
        >>> from interp.weights.composition import composition as scores
        >>> plot.composition(scores(model, "K"), mark=3)
    """
    if value not in UNITS:
        raise KeyError(f"value must be one of {', '.join(UNITS)}, got {value!r}; {nearest(value, UNITS)}")
    if mark < 0:
        raise ValueError(f"at least 0 marked pairs are required, got {mark}")
    cells = _map(result, value)
    named = max(cells.shape) <= MOST_NAMED
    inch = max(0.34, 2.4 / max(cells.shape)) if named else 7.0 / max(cells.shape)
    ax = axes(ax, 2.2 + inch * cells.shape[1], 1.4 + inch * cells.shape[0])
    scale = _scale(cells if limit is None else np.array([[limit]]), value)
    framed = _frame_largest(ax, cells, mark)
    heat_map(ax, cells, scale, title=_title(result, value, framed))
    ax.set_facecolor(ABSENT)
    _name(ax, result, named=named)
    ax.set_ylabel("source head (writes)" if named else "layer of the source head (writes)")
    ax.set_xlabel("destination head (reads)" if named else "layer of the destination head (reads)")
    return ax


def _scale(cells: Float[np.ndarray, "sources destinations"], value: str) -> Scale:
    if value in SIGNED:
        return Scale.signed(cells, UNITS[value])
    return Scale(MASS, 0.0, float(np.nanmax(cells, initial=0.0)) or 1.0, UNITS[value])


def _title(result: xr.Dataset, value: str, framed: Sequence[tuple[int, int]]) -> str:
    """What is shown, and the framed pairs by name."""
    heads, width = result.sizes["src_head"], 3
    pairs = [f"{r // heads}.{r % heads} → {c // heads + 1}.{c % heads}" for r, c in framed]
    lines = [", ".join(pairs[i : i + width]) for i in range(0, len(pairs), width)]
    words = "ratio" if value == "raw" else value
    return "\n".join([f"{result.attrs['kind']}-composition of heads: {words}", *lines])


def _map(result: xr.Dataset, value: str) -> Float[np.ndarray, "sources destinations"]:
    """Sources of all layers but the last, destinations of all but the first: no row or column without a pair."""
    first = {"src_layer": slice(None, -1), "dst_layer": slice(1, None)}
    order = ("src_layer", "src_head", "dst_layer", "dst_head")
    cells = result[value].isel(first).transpose(*order).to_numpy()
    return cells.reshape(cells.shape[0] * cells.shape[1], -1)


def _name(ax: Axes, result: xr.Dataset, *, named: bool) -> None:
    """Names of heads, or of layers at the middle of their heads, and lines between layers."""
    heads = result.sizes["src_head"]
    sources, destinations = result.src_layer.values.tolist()[:-1], result.dst_layer.values.tolist()[1:]
    if named:
        rows, columns = (_heads(layers, heads) for layers in (sources, destinations))
        name_cells(ax, rows=rows, columns=columns, turned=True)
    else:
        middles = np.arange(len(sources)) * heads + (heads - 1) / 2
        ax.set_yticks(middles, [str(n) for n in sources])
        ax.set_xticks(middles, [str(n) for n in destinations])
        ax.tick_params(length=0)
    for border in np.arange(1, len(sources)) * heads - 0.5:
        ax.axhline(border, color="0.5", linewidth=0.8)
        ax.axvline(border, color="0.5", linewidth=0.8)


def _heads(layers: Sequence[int], heads: int) -> list[str]:
    return [f"{layer}.{head}" for layer, head in product(layers, range(heads))]


def _frame_largest(
    ax: Axes, cells: Float[np.ndarray, "sources destinations"], count: int
) -> list[tuple[int, int]]:
    """A frame around each of the largest numbers; their rows and columns."""
    known = np.flatnonzero(np.isfinite(cells))
    largest = known[np.argsort(cells.ravel()[known])[::-1][:count]]
    places = [divmod(int(place), cells.shape[1]) for place in largest]
    for row, column in places:
        ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="black", linewidth=1.5))
    return places
