"""What depth does to the tokens of a text: rank collapse and consensus as curves over blocks."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from interp.core.boundary import nearest, public
from interp.plot.canvas import axes, curve, legend

REST = "#999999"
"""Colour of what is drawn for comparison."""
COSINES = ("min_cosine", "mean_cosine", "to_first", "to_first_start")
LABELS = {
    "min_cosine": "smallest cosine of two tokens", "mean_cosine": "mean cosine of two tokens",
    "to_first": "mean cosine to the first token", "to_first_start": "mean cosine to the first token's start",
    "distance_to_first": "mean distance to the first token", "norm": "mean length of a token",
}  # fmt: skip


@public()
def rank_collapse(result: xr.Dataset, *, title: str = "rank collapse", ax: Axes | None = None) -> Axes:
    """The relative residual by depth, one line for each choice of parts, with 95 % bands; logarithmic.

    result: what `dynamics.rank_collapse` returned. A line ends where the residual reaches the rounding
    floor of the model's dtype: its last point is a triangle on the floor, which is dotted.

    Example:
        >>> ax = rank_collapse(interp.dynamics.rank_collapse(model, prompt))
    """
    ax = axes(ax, 5.6, 3.8)
    floor, reached = float(result.attrs["floor"]), False
    for line in result.line.values:
        values = result.sel(line=line)
        mean = values.value.to_numpy()
        below = np.flatnonzero(mean <= floor)
        shown = slice(int(below[0]) + 1 if len(below) else None)
        depth, mean = values.depth.to_numpy()[shown], mean[shown].clip(floor)
        (drawn,) = ax.plot(depth, mean, marker="o", markersize=3.5, linewidth=1.4, label=str(line))
        low, high = (values[end].to_numpy()[shown].clip(floor) for end in ("low", "high"))
        ax.fill_between(depth, low, high, color=drawn.get_color(), alpha=0.2, linewidth=0)
        if len(below):
            reached = True
            ax.plot(depth[-1], floor, marker="v", markersize=8, color=drawn.get_color())
    if reached:
        ax.axhline(floor, color=REST, linewidth=0.8, linestyle=":", label="rounding floor")
    ax.set_yscale("log")
    _blocks(ax)
    ax.set_ylabel("relative residual (0: all tokens alike)")
    ax.set_title(title)
    legend(ax)
    return ax


@public()
def consensus(
    result: xr.Dataset,
    score: str = "min_cosine",
    *,
    label: str | None = None,
    title: str = "token consensus",
    ax: Axes | None = None,
) -> Axes:
    """One score of `dynamics.consensus` by depth with its 95 % band.

    label: a name for the legend, where several share an Axes; None: no legend. Errors: KeyError for an unknown score.

    Example:
        >>> ax = consensus(interp.dynamics.consensus(model, prompt, repeats=4))
    """
    if score not in LABELS:
        raise KeyError(f"no score {score!r} in this result; {nearest(score, LABELS)}")
    ax = axes(ax, 5.6, 3.8)
    depth, cells = result.depth.to_numpy(), result.sel(score=score)
    curve(ax, depth, cells, linewidth=1.4, label=label)
    if score in COSINES:
        ax.axhline(1.0, color=REST, linewidth=0.8, linestyle=":")
    _blocks(ax)
    ax.set_ylabel(f"{LABELS[score]} ({cells.unit.item()})")
    ax.set_title(title)
    if label is not None:
        legend(ax)
    return ax


def _blocks(ax: Axes) -> None:
    ax.set_xlabel("blocks applied")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
