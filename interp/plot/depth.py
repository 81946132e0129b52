"""Effects of depth: rank collapse and consensus as curves over blocks, the last layer part by part."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from interp.core.boundary import public
from interp.core.wording import nearest
from interp.plot.canvas import axes, curve, legend, score_of

REST = "#999999"
"""Colour of what is drawn for comparison."""
COSINES = ("min_cosine", "mean_cosine", "to_first", "to_first_start")
LABELS = {
    "min_cosine": "smallest cosine of two tokens", "mean_cosine": "mean cosine of two tokens",
    "to_first": "mean cosine to the first token", "to_first_start": "mean cosine to the first token's start",
    "distance_to_first": "mean distance to the first token", "norm": "mean length of a token",
}  # fmt: skip

LATE = {
    "attribution": "attribution to the answer", "cosine": "cosine with the average token",
    "log_prob_change": "change of log p(answer) without it", "rank_change": "change of the answer's rank without it",
    "first_attention": "attention to the first token", "log_prob": "log p(answer) by the lens",
    "rank": "rank of the answer by the lens",
}  # fmt: skip


@public()
def rank_collapse(result: xr.Dataset, *, title: str = "rank collapse", ax: Axes | None = None) -> Axes:
    """The relative residual by depth, one line for each choice of parts, with 95 % bands; logarithmic.

    A line ends where the residual reaches the rounding floor of the model's dtype: its last point is a triangle on
    the floor, which is dotted.

    Args:
        result: what `interp.lab.depth.rank_collapse` returned.
        title: title of the picture.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> ax = rank_collapse(interp.lab.depth.rank_collapse(model, prompt))
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
    """One score of `interp.lab.depth.consensus` by depth with its 95 % band.

    Args:
        result: what `interp.lab.depth.consensus` returned.
        score: the score that is drawn.
        label: a name for the legend, where several share an Axes; None: no legend.
        title: title of the picture.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: an unknown score.

    Example:
        >>> ax = consensus(interp.lab.depth.consensus(model, prompt, repeats=4))
    """
    if score not in LABELS:
        raise KeyError(f"no score {score!r} in this result; {nearest(score, LABELS)}")
    ax = axes(ax, 5.6, 3.8)
    depth, cells = result.depth.to_numpy(), result.sel(score=score)
    curve(ax, depth, cells, linewidth=1.4, label=label)
    if score in COSINES:
        ax.axhline(1.0, color=REST, linewidth=0.8, linestyle=":")
    _blocks(ax)
    ax.set_ylabel(f"{LABELS[score]} ({cells['unit'].item()})")
    ax.set_title(title)
    if label is not None:
        legend(ax)
    return ax


@public()
def late_layers(result: xr.Dataset, score: str = "log_prob_change", *, ax: Axes | None = None) -> Axes:
    """One score of `interp.lenses.late_layers`, part by part, with its 95 % interval where it has one; grey: chance.

    Args:
        result: what `interp.lenses.late_layers` returned.
        score: the score that is drawn.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: an unknown score.

    Example:
        >>> found = interp.lenses.late_layers(model, [prompt, "The cat sat on"], [" Mary", " the"])
        >>> ax = late_layers(found, "attribution")
    """
    cells = score_of(result, score)
    cells = cells.isel(part=cells.value.notnull().to_numpy())
    names, value = [str(part) for part in cells.part.values], cells.value.to_numpy()
    ax = axes(ax, 5.6, 1.2 + 0.28 * len(names))
    rows = np.arange(len(names))
    ends = np.abs(np.stack([cells.low.to_numpy() - value, cells.high.to_numpy() - value]))
    ax.errorbar(value, rows, xerr=ends, fmt="o", capsize=3, markersize=4)
    ax.plot(cells["null"], rows, "|", color=REST, markersize=12)
    ax.set_yticks(rows, names)
    ax.invert_yaxis()
    ax.set_xlabel(f"{LATE[score]} ({cells['unit'].item()})")
    ax.set_ylabel("part")
    ax.set_title(f"the last layer and the answer, n = {int(cells.n.max())}")
    return ax


@public()
def refinement(
    result: xr.Dataset, score: str = "kl", *, label: str | None = None, ax: Axes | None = None
) -> Axes:
    """One score of `interp.lab.depth.refinement` by the steps that each block is cut into, with its 95 % band.

    Args:
        result: what `interp.lab.depth.refinement` returned.
        score: the score that is drawn.
        label: a name for the legend, where several share an Axes; None: no legend.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: an unknown score.

    Example:
        >>> ax = refinement(interp.lab.depth.refinement(model, prompt, times=(1, 2)))
    """
    cells = score_of(result, score)
    ax = axes(ax, 5.2, 3.6)
    curve(ax, cells.times, cells, marker="o", markersize=4, linewidth=1.4, label=label)
    _steps(ax, result.times.to_numpy(), "steps per block")
    words = {
        "kl": "KL from the model",
        "distance": "distance from the finest cut",
    }
    ax.set_ylabel(f"{words[score]} ({cells['unit'].item()})")
    ax.set_title("each block cut into shorter steps")
    if label is not None:
        legend(ax)
    return ax


@public()
def splitting(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """The error of every splitting scheme by steps, both logarithmic: slope -1 is order 1, -2 order 2.

    The dotted line is the error that the reference itself has.

    Args:
        result: what `interp.lab.depth.splitting` returned.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> ax = splitting(interp.lab.depth.splitting(model, prompt, 1, steps=(1, 2), fine=4))
    """
    ax = axes(ax, 5.2, 3.6)
    for scheme in result.scheme.values:
        curve(
            ax,
            result.steps,
            result.sel(scheme=scheme),
            marker="o",
            markersize=4,
            linewidth=1.4,
            label=str(scheme),
        )
    ax.axhline(
        result.attrs["floor"], color=REST, linewidth=0.8, linestyle=":", label="floor of the reference"
    )
    ax.set_yscale("log")
    _steps(ax, result.steps.to_numpy(), "steps of the block")
    ax.set_ylabel("distance from the flow (relative)")
    ax.set_title("attention and MLP in turn, or at once")
    legend(ax)
    return ax


def _steps(ax: Axes, steps: np.ndarray, label: str) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(steps, [str(each) for each in steps])
    ax.minorticks_off()
    ax.set_xlabel(label)


def _blocks(ax: Axes) -> None:
    ax.set_xlabel("blocks applied")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
