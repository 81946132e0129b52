"""The logit lens as a table of words, depth by position, and as curves over depth."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import xarray as xr
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.core.results import in_order, numbers
from interp.core.wording import nearest
from interp.model.parts import Part
from interp.plot.canvas import (
    annotate,
    axes,
    curve,
    draw,
    heat_map,
    legend,
    name_cells,
    token_names,
)
from interp.views.lenses import MOST_DEPTHS, depth_labels, lens_map, shown_depths
from interp.views.scale import ColourScale


@public()
def logit_lens(
    result: xr.Dataset,
    pieces: Callable[[Sequence[int]], Sequence[str]] | None = None,
    *,
    tokens: Sequence[str] | None = None,
    prompt: int = 0,
    most: int = MOST_DEPTHS,
    ax: Axes | None = None,
) -> Axes:
    """The most probable token at every depth and position, coloured by its probability.

    Args:
        result: what `interp.logit_lens` or another lens returned.
        pieces: function from ids to their texts, `model.text.pieces`, for a result without its own (that of a run);
            else tokens are named by their ids.
        tokens: the prompt's tokens, to name the columns of a result that does not know them.
        prompt: place among the prompts of the result.
        most: of more depths so many are drawn, evenly apart, the first and the last among them; at least 2.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        ValueError: `tokens` that do not fit the result, or fewer than 2 depths.

    Example:
        >>> plot.logit_lens(interp.logit_lens(model, prompt))
    """
    if most < 2:
        raise ValueError(f"most must be 2 or more depths, got {most}")
    ordered = in_order("result", result, {"rank": None, "depth": result["depth"].to_numpy()})
    best = ordered.isel(prompt=prompt, rank=0).transpose("depth", "pos")
    labels = depth_labels([str(depth) for depth in best.depth.values])
    shown = shown_depths(best.sizes["depth"], most)
    best = best.isel(depth=shown)
    names = token_names(best, tokens)
    words = [[str(word) for word in row] for row in _words(best, pieces)]
    view = lens_map(words, best.top_prob.to_numpy(), [labels[i] for i in shown], names or ())
    ax = draw(ax, view, cell=(0.7, 0.36), room=(2.4, 1.6), turned=True)
    if names is None:
        ax.set_xlabel("position")
    return ax


def _words(
    best: xr.Dataset, pieces: Callable[[Sequence[int]], Sequence[str]] | None
) -> Sequence[Sequence[object]]:
    """The text of every cell: by `pieces`, else the result's own, else the id."""
    ids = best.top_token.to_numpy()
    if pieces is not None:
        return [pieces([int(i) for i in row]) for row in ids]
    return best.word.to_numpy().tolist() if "word" in best else ids.tolist()


@public()
def patchscope(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """The share of prompts whose answer comes first, by the depth a state is taken at and the depth it is put at.

    Args:
        result: what `interp.lenses.patchscope` returned.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> plot.patchscope(interp.lenses.patchscope(model, [prompt], prompt))
    """
    along = {dim: result[dim].to_numpy() for dim in ("depth", "target_depth")}
    values = numbers("value of result", result.value, along).numpy()
    rows, columns = ([str(name) for name in result[dim].values] for dim in ("depth", "target_depth"))
    columns = ["logit lens" if Part.of(name).kind == "hook_resid_post" else name for name in columns]
    ax = axes(ax, 2.6 + 0.62 * len(columns), 1.7 + 0.36 * len(rows))
    scale = ColourScale.mass("share: answer comes first")
    image = heat_map(ax, values, scale, title=f"patchscope: states of {result.sizes['prompt']} prompts")
    annotate(ax, image, [[f"{value:.2f}" for value in row] for row in values])
    name_cells(ax, rows=rows, columns=columns, turned=True)
    ax.set_xlabel("put at, in the target prompt")
    ax.set_ylabel("taken at")
    return ax


COMPARED = {
    "kl": "KL(final || lens) (nats)",
    "cross_entropy": "cross-entropy to the model's answer (nats)",
    "top_agreement": "share of tokens with the model's top token",
    "stability": "share of tokens with the other fit's top token",
}
"""Scores of several lenses, and their names on the axis."""
UNITS = {
    "kl": "KL(final || lens) (nats)",
    "entropy": "entropy (nats)",
    "target_prob": "probability of the target",
}
"""Variables that a curve may show, and their names on the axis."""


@public()
def lens_comparison(result: xr.Dataset, value: str = "cross_entropy", *, ax: Axes | None = None) -> Axes:
    """One score of several lenses against depth: a line with its 95 % band for each.

    Args:
        result: what `interp.lenses.compare_lenses` returned.
        value: "cross_entropy", "kl", "top_agreement" or "stability"; lenses without that score are left out.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: another score.

    Example:
        >>> found = interp.lenses.compare_lenses(model, [prompt, "The cat sat on the"], {"logit lens": None})
        >>> lens_comparison(found, "top_agreement")
    """
    if value not in COMPARED:
        raise KeyError(f"no score {value!r} of lenses; {nearest(value, COMPARED)}")
    ax, place, cells = axes(ax, 5.6, 3.8), range(result.sizes["depth"]), result.sel(score=value)
    for lens in cells.lens.values:
        if bool(cells.value.sel(lens=lens).notnull().any()):
            curve(ax, place, cells.sel(lens=lens), alpha=0.25, marker="o", markersize=4, label=str(lens))
    ax.set_xticks(list(place), [str(depth) for depth in result.depth.values])
    ax.set_xlabel("depth")
    ax.set_ylabel(COMPARED[value])
    ax.set_ylim(bottom=0.0)
    ax.set_title(f"lenses by depth: mean and 95 % over {int(cells.n.max())} prompts")
    legend(ax)
    return ax


@public()
def lens_curve(
    result: xr.Dataset, value: str = "kl", *, label: str | None = None, ax: Axes | None = None
) -> Axes:
    """One number of the lens against depth, the mean over prompts with its 95 % band.

    Args:
        result: what `interp.lenses.by_depth` returned.
        value: "kl", "entropy" or "target_prob".
        label: a name for the legend, where several lenses share an Axes.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: another value.

    Example:
        >>> found = interp.logit_lens(model, [prompt, "The cat sat on the"])
        >>> lens_curve(interp.lenses.by_depth(found), label="logit lens")
    """
    if value not in UNITS:
        raise KeyError(f"no value {value!r} in a lens; {nearest(value, UNITS)}")
    ax = axes(ax, 6.4, 3.8)
    place = range(result.sizes["depth"])
    cells = result.sel(score=value)
    curve(ax, place, cells, alpha=0.25, marker="o", markersize=4, label=label)
    ax.set_xticks(list(place), [str(depth) for depth in result.depth.values])
    ax.set_xlabel("depth")
    ax.set_ylabel(UNITS[value])
    ax.set_ylim(bottom=0.0)
    ax.set_title(f"the lens by depth: mean and 95 % over {int(cells.n.max())} prompts")
    if label is not None:
        legend(ax)
    return ax
