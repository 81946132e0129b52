"""The backward lens as a panel: how strongly each layer and token would be changed, and towards which word."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.plot.canvas import MASS, Scale, annotate, axes, heat_map, name_cells, printable, token_names

EMPTY = "#999999"
"""Ink of "no update" on a cell without a colour."""


@public()
def backward_lens(
    result: xr.Dataset,
    pieces: Callable[[Sequence[int]], Sequence[str]] | None = None,
    *,
    matrix: str | None = None,
    tokens: Sequence[str] | None = None,
    prompt: int = 0,
    threshold: float = 0.01,
    ax: Axes | None = None,
) -> Axes:
    """The norm of delta at every layer and token of a matrix (log colour), with one word where the update is large.

    result: what `interp.backward_lens` returned. matrix: one of the result's; None = W_out if it is there, else the
    first. The word is the least probable token of delta for W_out and W_O, the most probable of x for the others; it
    stands where the update exceeds `threshold` times the prompt's largest. A delta of exactly zero has no colour and
    says "no update". pieces: ids to their texts, tokens: the prompt's own; None = those that the result brings along.
    Errors: KeyError for a matrix that the result does not hold, ValueError if `tokens` do not fit it.

    Example:
        >>> found = interp.backward_lens(model, prompt, " Mary", matrices=["W_out"])
        >>> plot.backward_lens(found)
    """
    known = [str(each) for each in result.matrix.values]
    which = matrix or ("W_out" if "W_out" in known else known[0])
    if which not in known:
        raise KeyError(f"no matrix {which!r} in this result; it has {', '.join(known)}")
    cells = result.isel(prompt=prompt).sel(matrix=which)
    real = ~np.isnan(cells.delta.transpose("layer", "pos").to_numpy()[0])
    cells = cells.isel(pos=np.flatnonzero(real))
    norms = cells.delta.transpose("layer", "pos").to_numpy()
    n_layers, n = norms.shape
    names = token_names(cells, tokens)
    ax = axes(ax, 2.0 + 0.8 * n, 1.8 + 0.4 * n_layers)
    logs = np.log10(np.where(norms > 0, norms, np.nan))
    side = str(cells.side.values)
    read, word = ("bottom", "least") if side == "delta" else ("top", "most")
    title = f"backward lens of {which}: {word} probable token of {side}"
    low, high = (float(f(logs[np.isfinite(logs)], initial=0.0)) for f in (np.min, np.max))
    pale = low - 0.15 * (high - low)  # white is left to cells without an update
    image = heat_map(ax, logs, Scale(MASS, pale, high, "log10 of the norm of delta"), title=title)
    best = cells.isel(rank=0).transpose("layer", "pos")
    ids = best[f"{read}_token"].where(best.relative_update > threshold, -1).to_numpy().astype(int)
    texts = best[f"{read}_word"].to_numpy()
    said = np.where(
        ids < 0, "", texts if pieces is None else np.vectorize(lambda i: pieces([int(i)])[0])(ids.clip(0))
    )
    words = [[printable(str(word)) for word in row] for row in said]
    annotate(ax, image, words, size=7.0)
    for layer, pos in np.argwhere(norms == 0):
        ax.text(pos, layer, "no\nupdate", ha="center", va="center", color=EMPTY, fontsize=6)
    rows = [str(layer) for layer in cells["layer"].values]
    name_cells(ax, rows=rows, columns=names or [str(i) for i in range(n)], turned=True)
    ax.set_xlabel("position" if names is None else "token")
    ax.set_ylabel("layer")
    return ax
