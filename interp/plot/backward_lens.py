"""The backward lens as a panel of layers and tokens, as a grid of matrices, and as curves by depth.

Ranks and cosines of gradients are maps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.plot.canvas import (
    MASS,
    SIGNED,
    ColourScale,
    annotate,
    axes,
    heat_map,
    legend,
    name_cells,
    numbers,
    printable,
    token_names,
)

_VALUES = {
    "delta": "norm of delta", "x": "norm of x", "relative_update": "share of the largest update",
    "target_rank": "rank of the target (0 = most probable)",
}  # fmt: skip
_SEGMENTS: Mapping[str, Sequence[int] | slice] = {"first": (0,), "between": slice(1, -1), "last": (-1,)}
_FEW = 32
"""Prompts up to which each has a line of its own."""
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

    A delta of exactly zero has no colour and says "no update".

    Args:
        result: what `interp.backward_lens` returned.
        pieces: function from ids to their texts; None: the texts that the result brings along.
        matrix: one of the result's matrices; None: W_out if it is there, else the first. The word is the least
            probable token of delta for W_out and W_O, the most probable of x for the others.
        tokens: the prompt's tokens; None: those that the result brings along.
        prompt: place among the prompts of the result.
        threshold: share of the prompt's largest update above which a word is written.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: a matrix that the result does not hold.
        ValueError: `tokens` that do not fit it.

    Example:
        >>> found = interp.backward_lens(model, prompt, " Mary", matrices=["W_out"])
        >>> plot.backward_lens(found)
    """
    which = _chosen(result, matrix)
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
    image = heat_map(ax, logs, ColourScale(MASS, pale, high, "log10 of the norm of delta"), title=title)
    best = cells.isel(rank=0).transpose("layer", "pos")
    ids = best[f"{read}_token"].where(best.relative_update > threshold, -1).to_numpy().astype(int)
    texts = best[f"{read}_word"].to_numpy()
    labels = np.where(
        ids < 0, "", texts if pieces is None else np.vectorize(lambda i: pieces([int(i)])[0])(ids.clip(0))
    )
    words = [[printable(str(word)) for word in row] for row in labels]
    annotate(ax, image, words, size=7.0)
    for layer, pos in np.argwhere(norms == 0):
        ax.text(pos, layer, "no\nupdate", ha="center", va="center", color=EMPTY, fontsize=6)
    rows = [str(layer) for layer in cells["layer"].values]
    name_cells(ax, rows=rows, columns=names or [str(i) for i in range(n)], turned=True)
    ax.set_xlabel("position" if names is None else "token")
    ax.set_ylabel("layer")
    return ax


@public()
def backward_lens_grid(
    result: xr.Dataset, *, pos: int = -1, prompt: int = 0, threshold: float = 0.01, ax: Axes | None = None
) -> Axes:
    """The size of the update of every matrix of every layer at one token (log colour), and the word it is read by.

    Args:
        result: what `interp.backward_lens` returned.
        pos: number of the prompt's token, negative from its end.
        prompt: place among the prompts of the result.
        threshold: share of the prompt's largest update of that matrix above which a word is written.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        IndexError: a token that the prompt does not have.

    Example:
        >>> plot.backward_lens_grid(interp.backward_lens(model, prompt, " Mary"))
    """
    cells = result.isel(prompt=prompt).transpose("matrix", "layer", "pos", ...)
    real = np.flatnonzero(~np.isnan(cells.delta.to_numpy()[0, 0]))
    if not -len(real) <= pos < len(real):
        raise IndexError(f"this prompt has {len(real)} tokens, got pos {pos}")
    cells = cells.isel(pos=real[pos])
    sizes = (cells.x * cells.delta).transpose("layer", "matrix").to_numpy()
    logs = np.log10(np.where(sizes > 0, sizes, np.nan))
    shown = (cells.relative_update > threshold).transpose("layer", "matrix").to_numpy()
    labels = cells.word.transpose("layer", "matrix").to_numpy()
    n_layers, n = logs.shape
    ax = axes(ax, 2.2 + 1.05 * n, 1.8 + 0.4 * n_layers)
    token = str(cells.token.values) if "token" in cells.coords else str(pos)
    low, high = (float(f(logs[np.isfinite(logs)], initial=0.0)) for f in (np.min, np.max))
    scale = ColourScale(MASS, low - 0.15 * (high - low), high, "log10 of |x| |delta|")
    image = heat_map(ax, logs, scale, title=f"backward lens at {printable(token)!r}")
    words = np.where(shown, np.vectorize(lambda word: printable(str(word)), otypes=[object])(labels), "")
    annotate(ax, image, words.tolist(), size=7.0)
    name_cells(
        ax, rows=[str(i) for i in cells["layer"].values], columns=[str(m) for m in cells.matrix.values]
    )
    ax.set_ylabel("layer")
    return ax


@public()
def backward_lens_curves(
    result: xr.Dataset,
    value: str = "delta",
    *,
    matrix: str | None = None,
    segments: Mapping[str, Sequence[int]] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """One number by depth, a line per segment of the prompts: the mean over prompts; up to 32 prompts as thin lines.

    Args:
        result: what `interp.backward_lens` returned.
        value: "delta", "x", "relative_update" or "target_rank"; of several tokens of a segment the mean, of those
            with an update.
        matrix: one of the result's matrices; None: W_out if it is there, else the first.
        segments: positions of every prompt by name, negative ones from its end, such as the tokens of a subject (Katz
            et al. 2024, figures 4 and 5); None: the first token, those between, and the last.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: a value or matrix that the result does not hold.
        ValueError: a segment that no prompt has.

    Example:
        >>> plot.backward_lens_curves(interp.backward_lens(model, prompt, " Mary"), "target_rank")
    """
    if value not in _VALUES:
        raise KeyError(f"no number {value!r} of a backward lens; there are {', '.join(_VALUES)}")
    which = _chosen(result, matrix)
    cells = result[value].sel(matrix=which).transpose("prompt", "layer", "pos")
    numbers_bld = cells.where(result[value].sel(matrix=which) >= 0).to_numpy()
    lengths = (~np.isnan(result.delta.sel(matrix=which).isel(layer=0))).sum("pos").to_numpy()
    ax = axes(ax, 5.2, 3.4)
    layers = result["layer"].values
    for name, places in (segments or _SEGMENTS).items():
        rows = np.stack([_mean_of(row, places, int(n)) for row, n in zip(numbers_bld, lengths, strict=True)])
        if np.isnan(rows).all():
            raise ValueError(f"no prompt has an update in the segment {name!r}")
        (drawn,) = ax.plot(layers, _mean_of_known(rows, 0), "o-", markersize=3, label=name)
        if 1 < len(rows) <= _FEW:
            ax.plot(layers, rows.T, color=drawn.get_color(), linewidth=0.6, alpha=0.3)
    ax.set_xlabel("layer")
    ax.set_ylabel(_VALUES[value])
    ax.set_xticks(layers)
    ax.set_title(f"backward lens of {which}")
    legend(ax)
    return ax


@public()
def gradient_rank(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """The rank of the gradient of every matrix and layer, mean over prompts.

    Args:
        result: what `interp.lenses.gradient_rank` returned.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> plot.gradient_rank(interp.lenses.gradient_rank(model, prompt, " Mary"))
    """
    mean = result.value.mean("prompt").transpose("matrix", "layer").to_numpy()
    ax = axes(ax, 2.4 + 0.6 * mean.shape[1], 1.6 + 0.42 * mean.shape[0])
    most = float(result.tokens.mean())
    image = heat_map(
        ax, mean, ColourScale(MASS, 0.0, most, "rank, of the number of tokens"), title="rank of the gradient"
    )
    annotate(ax, image, numbers(mean, "{:.1f}" if result.sizes["prompt"] > 1 else "{:.0f}"))
    name_cells(
        ax, rows=[str(m) for m in result.matrix.values], columns=[str(i) for i in result["layer"].values]
    )
    ax.set_xlabel("layer")
    return ax


@public()
def gradient_cosines(result: xr.Dataset, *, matrix: str | None = None, ax: Axes | None = None) -> Axes:
    """The cosines of all pairs of layers at the last token, mean over prompts, for one matrix.

    Args:
        result: what `interp.lenses.gradient_cosines` returned.
        matrix: one of the result's matrices; None: W_out if it is there, else the first.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: a matrix that the result does not hold.

    Example:
        >>> plot.gradient_cosines(interp.lenses.gradient_cosines(model, prompt, " Mary"))
    """
    which = _chosen(result, matrix)
    mean = result.value.sel(matrix=which).mean("prompt").transpose("layer", "other_layer").to_numpy()
    n = len(mean)
    ax = axes(ax, 2.2 + 0.5 * n, 1.6 + 0.42 * n)
    image = heat_map(
        ax, mean, ColourScale(SIGNED, -1.0, 1.0, "cosine"), title=f"gradients of {which} at the last token"
    )
    annotate(ax, image, numbers(mean))
    layers = [str(i) for i in result["layer"].values]
    name_cells(ax, rows=layers, columns=layers)
    ax.set_xlabel("layer")
    ax.set_ylabel("layer")
    return ax


def _chosen(result: xr.Dataset, matrix: str | None) -> str:
    """The matrix that is shown; KeyError for one that the result does not hold."""
    known = [str(each) for each in result.matrix.values]
    which = matrix or ("W_out" if "W_out" in known else known[0])
    if which not in known:
        raise KeyError(f"no matrix {which!r} in this result; it has {', '.join(known)}")
    return which


def _mean_of(row_lp: np.ndarray, places: Sequence[int] | slice, n: int) -> np.ndarray:
    """The mean over some of a prompt's n tokens in every layer, of those that have a number."""
    every = np.arange(n)
    picked = every[places] if isinstance(places, slice) else every[[i for i in places if -n <= i < n]]
    return _mean_of_known(row_lp[:, picked], 1)


def _mean_of_known(values: np.ndarray, axis: int) -> np.ndarray:
    """The mean along an axis over the entries that are numbers; NaN where there are none."""
    known = ~np.isnan(values)
    total, count = np.where(known, values, 0).sum(axis), known.sum(axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)
