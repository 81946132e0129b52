"""Attention by depth: its shares as lines over the layers, and the rank of the patterns beside untrained models'."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from interp.core.boundary import public
from interp.core.wording import nearest
from interp.plot.canvas import axes, legend

SHARES = {"first": "C0", "between": "C2", "recent": "C1"}
"""The shares that are drawn together, with their colours."""
RANKS = {
    "rank": "rank for {energy:.0%} of the squares",
    "relative_rank": "rank for {energy:.0%} of the squares / tokens",
}
CHANCE = "#777777"
"""Colour of what is drawn for comparison beside a rank."""


@public()
def attention_by_depth(result: xr.Dataset, score: str = "shares", *, ax: Axes | None = None) -> Axes:
    """The numbers of `interp.attention.attention_by_depth` by layer: means over heads, with 95 % bands over texts.

    Args:
        result: what `interp.attention.attention_by_depth` returned.
        score: "shares": attention on the first token, on recent ones and between, three lines (dashed: the mean of
            untrained models, or even attention where there are none); "rank" or "relative_rank": dots are heads (the
            grey band: all heads of the untrained models; dashed: even attention).
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: another score.

    Example:
        >>> attention_by_depth(interp.attention.attention_by_depth(model, prompt, recent=2), "rank")
    """
    if score != "shares" and score not in RANKS:
        raise KeyError(f"no score {score!r} to draw; {nearest(score, ['shares', *RANKS])}")
    ax = axes(ax, 6.4, 3.8)
    if score == "shares":
        _draw_shares(ax, result)
    else:
        _draw_rank(ax, result, score)
    ax.set_xlabel("layer")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend(ax, columns=4 if score == "shares" else 2)
    return ax


def _draw_shares(ax: Axes, result: xr.Dataset) -> None:
    names = {
        "first": "first token", "between": "between", "recent": f"last {result.attrs['recent']} tokens",
    }  # fmt: skip
    has_untrained = bool(result["untrained"].notnull().any())
    for name, colour in SHARES.items():
        one = result.sel(score=name)
        _mean(ax, one, colour, names[name])
        chance = one["untrained"].sel(range="mean") if has_untrained else one["null"].isel(head=0)
        ax.plot(result["layer"], chance, color=colour, linewidth=0.9, linestyle="--")
    what = "untrained models" if has_untrained else "even attention"
    ax.plot([], [], color=CHANCE, linewidth=0.9, linestyle="--", label=what)
    ax.set_ylim(0, 1.15)  # above 1 there is room for the legend
    ax.set_yticks(np.linspace(0, 1, 6))
    ax.set_ylabel("share of attention (attention mass)")
    ax.set_title("where attention goes, by layer")


def _draw_rank(ax: Axes, result: xr.Dataset, score: str) -> None:
    one = result.sel(score=score)
    layers = result["layer"].to_numpy()
    if bool(one["untrained"].notnull().any()):
        least, most = (one["untrained"].sel(range=end) for end in ("least", "most"))
        label = "heads of untrained models"
        ax.fill_between(layers, least, most, color=CHANCE, alpha=0.4, linewidth=0, label=label)
    ax.plot(
        layers, one["null"].isel(head=0), color=CHANCE, linewidth=0.9, linestyle="--", label="even attention"
    )
    values = one["value"].transpose("layer", "head").to_numpy()
    ax.plot(
        np.repeat(layers, values.shape[1]),
        values.ravel(),
        ".",
        color="C0",
        markersize=4,
        alpha=0.5,
        label="heads",
    )
    _mean(ax, one, "C0", "mean over heads")
    ax.set_ylim(0, 1.25 * np.nanmax(np.append(values, one["by_layer"])))  # the legend stands on top
    ax.set_ylabel(f"{RANKS[score].format(energy=result.attrs['energy'])} ({one['unit'].item()})")
    ax.set_title("rank of attention patterns, by layer")


def _mean(ax: Axes, one: xr.Dataset, colour: str, name: str) -> None:
    """The mean over heads with its band."""
    ax.plot(one["layer"], one["by_layer"].sel(end="value"), color=colour, linewidth=1.5, label=name)
    ax.fill_between(
        one["layer"],
        one["by_layer"].sel(end="low"),
        one["by_layer"].sel(end="high"),
        color=colour,
        alpha=0.2,
        linewidth=0,
    )
