"""How well exchanging directions exchanges a variable, by cell, next to what chance finds there."""

from __future__ import annotations

from collections.abc import Sequence

import xarray as xr
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.plot.canvas import (
    annotate,
    axes,
    curve,
    heat_map,
    legend,
    name_cells,
    printable,
    score_of,
)
from interp.views.scale import ColourScale
from interp.views.writing import number

CEILING = ("found", "whole state")
"""The line that is no null."""


@public()
def alignment(
    result: xr.Dataset, score: str = "iia", *, tokens: Sequence[str] | None = None, ax: Axes | None = None
) -> Axes:
    """A map of a score of the directions found, by layer and position, each number with its best null in brackets.

    Args:
        result: what `interp.causal.align` returned; cells by layer alone become curves, one with its 95 % band for
            all that was exchanged.
        score: "iia", "loss", and "logit difference" or "logit". The best null is the largest (of a loss the
            smallest).
        tokens: the prompt's tokens, to name the positions.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: another score.
        ValueError: more than two dims of cells, or another number of tokens.

    Example:
        >>> base, source = torch.tensor([[5, 6, 7], [4, 6, 7]]), torch.tensor([[5, 9, 7], [4, 8, 7]])
        >>> plot.alignment(interp.causal.align(model, base, source, answer=[9, 8], rank=2))
    """
    cells = score_of(result, score).transpose("layer", ..., "swapped", missing_dims="ignore")
    dims = [str(dim) for dim in cells.value.dims if dim != "swapped"]
    label = f"{score} ({cells['unit'].item()})"
    title = f"{result.attrs['site']}, rank {result.attrs['rank']}, {result.attrs['method']}"
    if len(dims) == 1:
        return _curves(cells, label, title, ax)
    if len(dims) != 2:
        raise ValueError(f"a map has two dims, select from the others: got {', '.join(dims)}")
    found = cells.value.sel(swapped="found")
    columns = [str(i) for i in found[dims[1]].values]
    if tokens is not None:
        if len(tokens) != len(columns):
            raise ValueError(f"one token per column is required, {len(columns)}, got {len(tokens)}")
        columns = [printable(token) for token in tokens]
    values = found.to_numpy()
    ax = axes(ax, 2.2 + 0.6 * values.shape[1], 1.8 + 0.5 * values.shape[0])
    scale = ColourScale.mass(label) if score == "iia" else ColourScale.signed(values, label)
    image = heat_map(ax, values, scale, title=title)
    annotate(ax, image, _texts(cells, score), size=7.0)
    name_cells(ax, rows=[str(i) for i in found[dims[0]].values], columns=columns, turned=tokens is not None)
    ax.set_xlabel("token" if tokens is not None else dims[1].replace("_", " "))
    ax.set_ylabel(dims[0])
    return ax


def _texts(cells: xr.Dataset, score: str) -> list[list[str]]:
    """The number of every cell, and below it the best null."""
    nulls = cells.value.sel(swapped=[name for name in cells.swapped.values if name not in CEILING])
    found = [[number(value) for value in row] for row in cells.value.sel(swapped="found").values]
    if not nulls.sizes["swapped"]:
        return found
    best = nulls.min("swapped") if score == "loss" else nulls.max("swapped")
    return [
        [f"{text}\n({number(null)})" for text, null in zip(*rows, strict=True)]
        for rows in zip(found, best.values, strict=True)
    ]


def _curves(cells: xr.Dataset, label: str, title: str, ax: Axes | None) -> Axes:
    """One line by layer for all that was exchanged."""
    ax, place = axes(ax, 5.6, 3.8), range(cells.sizes["layer"])
    for name in cells.swapped.values:
        style = "-" if name in CEILING else "--"
        curve(ax, place, cells.sel(swapped=name), style, marker="o", markersize=4, label=str(name))
    ax.set_xticks(list(place), [str(layer) for layer in cells.layer.values])
    ax.set_xlabel("layer")
    ax.set_ylabel(label)
    ax.set_title(title)
    legend(ax)
    return ax
