"""Scores of every head as a map, layer by head, and what the heads are called."""

from __future__ import annotations

from dataclasses import replace
from textwrap import fill

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from interp.attention.labels import RULES
from interp.core.boundary import public
from interp.core.shapes import nearest
from interp.plot.canvas import Scale, annotate, axes, heat_map, name_cells

MASS_UNIT = "attention mass"
WIDTH = 9
"""Letters of a label that fit on a line of its cell."""


@public()
def heads(result: xr.Dataset, score: str = "induction", *, ax: Axes | None = None) -> Axes:
    """One score of `interp.heads` as a layer x head map, each cell with its number; blank where there is none.

    Attention mass is drawn from 0 to 1; what can be negative (copying, name movers) as far above chance as below it.
    Errors: KeyError for a score that the result does not hold.

    Example:
        >>> plot.heads(interp.heads(model), "previous_token")
    """
    known = [str(name) for name in result["score"].values]
    if score not in known:
        raise KeyError(f"no score {score!r} in this result; {nearest(score, known)}")
    cells = result.sel(score=score).transpose("layer", "head")
    values, unit = cells["value"].to_numpy(), str(cells["unit"].item())
    ax = axes(ax, 1.8 + 0.55 * values.shape[1], 1.2 + 0.42 * values.shape[0])
    scale = Scale.mass(unit) if unit == MASS_UNIT else _around(float(cells["null"].mean()), values, unit)
    image = heat_map(ax, values, scale, title=f"{score.replace('_', ' ')} score")
    annotate(ax, image, [["" if np.isnan(v) else f"{v:.2f}" for v in row] for row in values])
    _name_axes(ax, values.shape)
    return ax


@public()
def head_labels(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """The `label` of every head of `interp.heads` as a layer x head map, one colour per label, heads without one white.

    Errors: KeyError for a result without labels.

    Example:
        >>> head_labels(interp.heads(model))
    """
    from matplotlib import colormaps

    if "label" not in result:
        raise KeyError("no labels in this result: the table of interp.heads is required")
    cells = result["label"].transpose("layer", "head").to_numpy()
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
    ax.set_title("what each head does (white: no label)")
    _name_axes(ax, cells.shape)
    return ax


def _around(chance: float, values: np.ndarray, unit: str) -> Scale:
    """Colours for scores on both sides of chance, which is the neutral colour; of 0 where no chance level is known."""
    chance = 0.0 if np.isnan(chance) else chance
    signed = Scale.signed(values - chance, unit if chance == 0 else f"{unit} (neutral: chance)")
    return replace(signed, low=chance + signed.low, high=chance + signed.high)


def _name_axes(ax: Axes, shape: tuple[int, ...]) -> None:
    name_cells(ax, rows=[str(i) for i in range(shape[0])], columns=[str(i) for i in range(shape[1])])
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
