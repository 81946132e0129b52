"""Scores of every head as a map, layer by head, and what the heads are called."""

from __future__ import annotations

from textwrap import fill

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.transforms import ScaledTranslation

from interp.attention.labels import RULES
from interp.core.boundary import public
from interp.plot.canvas import axes, draw_heads, name_heads, score_of
from interp.views.heads import score_map

LEGEND_BELOW = 30
"""Distance of the legend from the map above it, in points: numbers and name of the axis stand between."""
WIDTH = 9
"""Letters of a label that fit on a line of its cell."""


@public()
def heads(result: xr.Dataset, score: str = "induction", *, ax: Axes | None = None) -> Axes:
    """One score of `interp.heads` as a layer x head map, each cell with its number; blank where there is none.

    Attention mass is drawn from 0 to 1; what can be negative (copying, name movers) as far above chance as below it.

    Args:
        result: what `interp.heads` returned.
        score: the score that is drawn.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: a score that the result does not hold.

    Example:
        >>> plot.heads(interp.heads(model), "previous_token")
    """
    cells = score_of(result, score).transpose("layer", "head", ...)
    values, unit = cells["value"].to_numpy(), str(cells["unit"].item())
    chance = float(cells["null"].mean())
    return draw_heads(ax, score_map(score, values, unit, chance), cells.value)


@public()
def head_labels(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """The `label` of every head of `interp.heads` as a layer x head map, one colour per label; unnamed heads white.

    Args:
        result: what `interp.heads` returned.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: a result without labels.

    Example:
        >>> head_labels(interp.heads(model))
    """
    if "label" not in result:
        raise KeyError("no variable 'label' in this result: the table of interp.heads is required")
    labels = result["label"].transpose("layer", "head")
    cells = labels.to_numpy()
    ax = axes(ax, 1.2 + 0.8 * cells.shape[1], 1.0 + 0.5 * cells.shape[0])
    colours = colormaps["Set3"]
    filled = np.ones((*cells.shape, 3))
    for i, rule in enumerate(RULES):  # a label has its colour in every picture
        filled[cells == rule.label] = colours(i % colours.N)[:3]
    ax.imshow(filled, aspect="auto", interpolation="none")
    ax.set_xticks(np.arange(cells.shape[1] + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(cells.shape[0] + 1) - 0.5, minor=True)
    ax.tick_params(which="minor", length=0)
    ax.grid(which="minor", color="#dddddd", linewidth=1)
    for (row, column), word in np.ndenumerate(cells):
        if word != "none":
            text = fill(str(word), WIDTH, break_long_words=False)
            ax.text(column, row, text, ha="center", va="center", fontsize=7)
    named = [(i, rule.label) for i, rule in enumerate(RULES) if (cells == rule.label).any()]
    keys = [Patch(color=colours(i % colours.N), label=label) for i, label in named]
    below = ScaledTranslation(0, -LEGEND_BELOW / 72, ax.figure.dpi_scale_trans)  # under the name of the axis
    ax.legend(
        handles=keys, loc="upper center", bbox_to_anchor=(0.5, 0), bbox_transform=ax.transAxes + below, ncols=3,
        fontsize="small", frameon=False,
    )  # fmt: skip
    ax.set_title("what each head does (white: no label)")
    name_heads(ax, labels)
    return ax
