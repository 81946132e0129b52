"""The backward lens as a panel of layers and tokens, as a grid of matrices, and as curves by depth.

Ranks and cosines of gradients are maps. Of an answer of several tokens the first one is shown; another is selected with
`result.sel(answer_token=1)`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import xarray as xr
from jaxtyping import Bool
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.core.results import in_order
from interp.core.visible import visible
from interp.lenses.backward_lens import NO_UPDATE
from interp.passes.answer_tokens import TOKEN
from interp.plot.canvas import (
    annotate,
    axes,
    draw,
    heat_map,
    legend,
    name_cells,
    names_along,
    printable,
    token_names,
)
from interp.views.lenses import MOST_DEPTHS, backward_map, telling_layers, word_of
from interp.views.scale import ColourScale
from interp.views.writing import numbers

_VALUES = {
    "delta": "norm of delta", "x": "norm of x", "relative_update": "share of the largest update",
    "target_rank": "rank of the target (0 = most probable)",
}  # fmt: skip
_SEGMENTS: Mapping[str, Sequence[int] | slice] = {"first": (0,), "between": slice(1, -1), "last": (-1,)}
_FEW = 32
"""Prompts up to which each has a line of its own."""


@public()
def backward_lens(
    result: xr.Dataset,
    pieces: Callable[[Sequence[int]], Sequence[str]] | None = None,
    *,
    matrix: str | None = None,
    tokens: Sequence[str] | None = None,
    prompt: int = 0,
    threshold: float = 0.0,
    most: int = MOST_DEPTHS,
    ax: Axes | None = None,
) -> Axes:
    """The norm of delta at every layer and token of a matrix, with the word that it writes.

    A frame marks cells that name the answer first. Cells without words in the result say "no update".

    Args:
        result: what `interp.backward_lens` returned.
        pieces: function from ids to their texts; None: the texts that the result brings along.
        matrix: one of the result's matrices; None: W_out if it is there, else the first. The word is the least
            probable token of delta for W_out and W_O, the most probable of x for the others; where the answer is
            not the first of these, a whole word if there is one.
        tokens: the prompt's tokens; None: those that the result brings along.
        prompt: place among the prompts of the result.
        threshold: share of the prompt's largest update above which a word is written; 0: wherever the result has
            words, as on the page.
        most: of more layers so many are drawn, those with the largest norms and those that name the answer.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: a matrix that the result does not hold.
        ValueError: `tokens` that do not fit it.

    Example:
        >>> found = interp.backward_lens(model, prompt, " Mary", matrices=["W_out"])
        >>> plot.backward_lens(found)
    """
    result, which = _of_first_token(_in_order(result)), _chosen(result, matrix)
    cells = result.isel(prompt=prompt).sel(matrix=which)
    real = ~np.isnan(cells.delta.transpose("layer", "pos").to_numpy()[0])
    cells = cells.isel(pos=np.flatnonzero(real))
    norms = cells.delta.transpose("layer", "pos").to_numpy()
    names = token_names(cells, tokens)
    writes = str(cells.side.values) == "delta"
    words, marked = _words(result, cells, "bottom" if writes else "top", pieces, threshold)
    layers = sorted(telling_layers(norms, marked)[:most])
    title = f"backward lens of {which}: {'least' if writes else 'most'} probable token of {'δ' if writes else 'x'}"
    view = backward_map(
        [words[i] for i in layers], norms[layers], marked[layers], [int(cells["layer"][i]) for i in layers],
        names or (), title,
    )  # fmt: skip
    ax = draw(ax, view, cell=(0.8, 0.4), room=(2.0, 1.8), turned=True, size=7.0)
    if names is None:
        ax.set_xlabel("position")
    return ax


def _words(
    result: xr.Dataset,
    cells: xr.Dataset,
    end: str,
    pieces: Callable[[Sequence[int]], Sequence[str]] | None,
    threshold: float,
) -> tuple[list[list[str]], Bool[np.ndarray, "layers pos"]]:
    """What stands on each cell, and where the target is the token at that end of all."""
    ranked = cells.transpose("layer", "pos", "rank")
    ids = ranked[f"{end}_token"].to_numpy()
    texts = ranked[f"{end}_word"].to_numpy()
    update, target = (ranked[name].to_numpy() for name in ("relative_update", "target_rank"))
    extreme = 0 if end == "top" else result.attrs["n_vocab"] - 1
    marked = target == extreme

    def word(layer: int, pos: int) -> str:
        if ids[layer, pos, 0] < 0:
            return NO_UPDATE.replace(" ", "\n")
        if not update[layer, pos] > threshold:
            return ""
        own = texts[layer, pos].tolist() if pieces is None else pieces(ids[layer, pos].tolist())
        return visible(word_of(own, names_answer=bool(marked[layer, pos])))

    n_layers, n = update.shape
    return [[word(layer, pos) for pos in range(n)] for layer in range(n_layers)], marked


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
    cells = _of_first_token(_in_order(result)).isel(prompt=prompt).transpose("matrix", "layer", "pos", ...)
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
    scale = ColourScale("mass", low - 0.15 * (high - low), high, "log10 of |x| |delta|")
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
    result, which = _of_first_token(_in_order(result)), _chosen(result, matrix)
    cells = result[value].sel(matrix=which).transpose("prompt", "layer", "pos")
    numbers_bld = cells.where(result[value].sel(matrix=which) >= 0).to_numpy()
    lengths = (~np.isnan(result.delta.sel(matrix=which).isel(layer=0))).sum("pos").to_numpy()
    ax = axes(ax, 5.2, 3.4)
    layers = result["layer"].values
    for name, places in (segments or _SEGMENTS).items():
        rows = np.stack([_mean_of(row, places, int(n)) for row, n in zip(numbers_bld, lengths, strict=True)])
        if np.isnan(rows).all():
            raise ValueError(f"no prompt has an update in the segment {name!r}: all are NaN")
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
    result = _of_first_token(result)
    mean = result.value.mean("prompt").transpose("matrix", "layer").to_numpy()
    ax = axes(ax, 2.4 + 0.6 * mean.shape[1], 1.6 + 0.42 * mean.shape[0])
    most = float(result.tokens.mean())
    image = heat_map(
        ax, mean, ColourScale.mass("rank, of the number of tokens", most), title="rank of the gradient"
    )
    annotate(ax, image, numbers(mean, 1 if result.sizes["prompt"] > 1 else 0))
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
    result, which = _of_first_token(result), _chosen(result, matrix)
    cells = result.value.sel(matrix=which).mean("prompt").transpose("layer", "other_layer")
    mean = cells.to_numpy()
    n = len(mean)
    ax = axes(ax, 2.2 + 0.5 * n, 1.6 + 0.42 * n)
    image = heat_map(
        ax, mean, ColourScale.signed(1.0, "cosine"), title=f"gradients of {which} at the last token"
    )
    annotate(ax, image, numbers(mean))
    name_cells(ax, rows=names_along(cells, "layer"), columns=names_along(cells, "other_layer"))
    ax.set_xlabel("layer")
    ax.set_ylabel("layer")
    return ax


def _in_order(result: xr.Dataset) -> xr.Dataset:
    """The result with positions and ranks ascending, as they are counted here."""
    return in_order("result", result, dict.fromkeys(("pos", "rank")))


def _of_first_token(result: xr.Dataset) -> xr.Dataset:
    """The result of the first token of answers of several."""
    return result.isel({TOKEN: 0}) if TOKEN in result.dims else result


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
