"""Scores of every head as a map, layer by head."""

import xarray as xr
from matplotlib.axes import Axes

from interp.core.shapes import nearest
from interp.plot.canvas import Scale, annotate, axes, heat_map, name_cells


def heads(result: xr.Dataset, score: str = "induction", *, ax: Axes | None = None) -> Axes:
    """One score of `interp.heads` as a layer x head map, each cell with its number (attention mass, 0 to 1).

    Errors: KeyError for a score that the result does not hold.

    Example:
        >>> plot.heads(interp.heads(model), "previous_token")
    """
    known = [str(name) for name, values in result.items() if values.dims == ("layer", "head")]
    if score not in known:
        raise KeyError(f"no score {score!r} in this result; {nearest(score, known)}")
    values = result[score].transpose("layer", "head").to_numpy()
    n_layers, n_heads = values.shape
    ax = axes(ax, 1.8 + 0.55 * n_heads, 1.2 + 0.42 * n_layers)
    words = score.replace("_", " ")
    image = heat_map(ax, values, Scale.mass("attention mass"), title=f"{words} score")
    annotate(ax, image, [[f"{v:.2f}" for v in row] for row in values])
    name_cells(ax, rows=[str(i) for i in range(n_layers)], columns=[str(i) for i in range(n_heads)])
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    return ax
