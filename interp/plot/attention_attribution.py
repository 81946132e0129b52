"""Attention scores by pairs of parts, as a map."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.plot.canvas import annotate, axes, heat_map, name_cells
from interp.views.scale import ColourScale
from interp.views.writing import number, numbers


@public()
def attention_attribution(
    result: xr.Dataset, *, prompt: int = 0, top: int = 10, ax: Axes | None = None
) -> Axes:
    """The pairs of parts that make one score: parts at the query as rows, at the key as columns, signed.

    Args:
        result: what `interp.attention.attention_attribution` returned.
        prompt: place among the prompts of the result.
        top: the most rows and columns, those of the largest values; the others are not drawn.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        IndexError: a prompt that the result does not hold.

    Example:
        >>> plot.attention_attribution(interp.attention.attention_attribution(model, prompt, "L1H2", key=2))
    """
    one = result.isel(prompt=prompt)
    where = f"{result.attrs['part']} from {int(one['query'])} to {int(one['key'])}"
    return _pairs(one["value"], f"{where}: score {number(float(one['total']), sign=True)}", top, ax)


@public()
def qk_attribution(result: xr.Dataset, *, top: int = 10, ax: Axes | None = None) -> Axes:
    """The pairs of nodes that make one score: nodes of the query as rows, of the key as columns, signed.

    Args:
        result: what `interp.circuits.qk_attribution` returned.
        top: the most rows and columns, those of the largest values; the others are not drawn.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> plot.qk_attribution(interp.circuits.qk_attribution(model, "one two three", "L1H2", key=1))
    """
    about = result.attrs
    against = f" and not to {about['against']}" if "against" in about else ""
    where = f"{about['head']} from {about['query']} to {about['key']}{against}"
    return _pairs(result["value"], f"{where}: score {number(about['score'], sign=True)}", top, ax)


def _pairs(value: xr.DataArray, title: str, top: int, ax: Axes | None) -> Axes:
    """A score by pairs, the largest rows and columns in their order."""
    values = value.transpose("query_part", "key_part").to_numpy()
    rows, columns = (np.sort(np.argsort(-np.abs(values).max(axis), kind="stable")[:top]) for axis in (1, 0))
    shown = values[np.ix_(rows, columns)]
    ax = axes(ax, 2.6 + 0.55 * len(columns), 1.8 + 0.34 * len(rows))
    image = heat_map(ax, shown, ColourScale.signed(shown, "part of the score"), title=title)
    annotate(ax, image, numbers(shown, sign=True), size=7.0)
    names = [value[dim].to_numpy()[kept] for dim, kept in (("query_part", rows), ("key_part", columns))]
    name_cells(ax, rows=[str(x) for x in names[0]], columns=[str(x) for x in names[1]], turned=True)
    ax.set_ylabel("part at the query")
    ax.set_xlabel("part at the key")
    return ax
