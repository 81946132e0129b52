"""The backward lens as a panel: how strongly each layer and token would be changed, and towards which word."""

from collections.abc import Callable, Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from interp.core.shapes import shape_text
from interp.plot.canvas import MASS, Scale, annotate, axes, heat_map, name_cells, printable

EMPTY = "#999999"
"""Ink of "no update" on a cell without a colour."""


def backward_lens(
    result: xr.Dataset,
    pieces: Callable[[Sequence[int]], Sequence[str]] | None = None,
    *,
    tokens: Sequence[str] | None = None,
    prompt: int = 0,
    ax: Axes | None = None,
) -> Axes:
    """The norm of delta at every layer and token (log colour), with one word where the update is not negligible.

    result: `BackwardLens.project`, at most as fine as its `threshold` (0.01 keeps a picture readable). The word is the
    least probable token of delta for W_out and W_O, the most probable of x for the others. A delta of exactly zero has
    no colour and says "no update". pieces: ids to their texts, tokens: the prompt's own; None = those that the result
    brings along. Errors: ValueError if `tokens` do not fit the result.

    Example:
        >>> lens = interp.lenses.backward_lens.backward_lens(model, prompt, " Mary", matrices=["W_out"])
        >>> plot.backward_lens(lens.project(threshold=0.01))
    """
    cells = result.isel(prompt=prompt)
    real = ~np.isnan(cells.delta.transpose("layer", "pos").to_numpy()[0])
    cells = cells.isel(pos=np.flatnonzero(real))
    norms = cells.delta.transpose("layer", "pos").to_numpy()
    n_layers, n = norms.shape
    if tokens is not None and len(tokens) != n:
        raise ValueError(f"one token per position is required, {n}, got {shape_text([len(tokens)])}")
    ax = axes(ax, 2.0 + 0.8 * n, 1.8 + 0.4 * n_layers)
    logs = np.log10(np.where(norms > 0, norms, np.nan))
    read = str(result.attrs["read"])
    matrix, word = result.attrs["matrix"], {"bottom": "least", "top": "most"}[read]
    title = f"backward lens of {matrix}: {word} probable token of {result.attrs['side']}"
    low, high = (float(f(logs[np.isfinite(logs)], initial=0.0)) for f in (np.min, np.max))
    pale = low - 0.15 * (high - low)  # white is left to cells without an update
    image = heat_map(ax, logs, Scale(MASS, pale, high, "log10 of the norm of delta"), title=title)
    best = cells.isel(rank=0).transpose("layer", "pos")
    if pieces is None:
        words = [[printable(str(word)) for word in row] for row in best[f"{read}_word"].to_numpy()]
    else:
        words = [[_word(int(i), pieces) for i in row] for row in best[f"{read}_token"].to_numpy()]
    annotate(ax, image, words, size=7.0)
    if tokens is None and "token" in cells.coords:
        tokens = [str(token) for token in cells.token.to_numpy()]
    for layer, pos in np.argwhere(norms == 0):
        ax.text(pos, layer, "no\nupdate", ha="center", va="center", color=EMPTY, fontsize=6)
    columns = [str(i) for i in range(n)] if tokens is None else [printable(token) for token in tokens]
    name_cells(ax, rows=[str(i) for i in cells["layer"].values], columns=columns, turned=True)
    ax.set_xlabel("position" if tokens is None else "token")
    ax.set_ylabel("layer")
    return ax


def _word(token: int, pieces: Callable[[Sequence[int]], Sequence[str]]) -> str:
    return "" if token < 0 else printable(pieces([token])[0])
