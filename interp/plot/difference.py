"""Differences of two models: the share of the whole change that each part brings about, by weights and activations."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.core.results import check_result
from interp.plot.canvas import axes, legend, score_of

COLOURS = {"weights": "#2166ac", "activations": "#f4a582"}
NO_CHANGE = "nothing changed"


@public()
def diff(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """Bars of the share of the whole change, part by part, weights next to activations, with 95 % intervals.

    The line at 1 is the whole change. Parts in which nothing changed are left out; a result in which nothing did says
    so.

    Args:
        result: that of `diff` or `diff_interactions`.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        ValueError: another result.

    Example:
        >>> import copy
        >>> tuned = copy.deepcopy(model.transformer)
        >>> with torch.no_grad():
        ...     _ = tuned.blocks[1].mlp.out.weight.mul_(1.5)
        >>> diff(interp.editing.diff(model, [prompt], tuned))
    """
    check_result("result", result, ("what", "score", "changed"), "interp.editing.diff")
    dim = "part" if "part" in result.dims else "pair"
    shown = result.isel({dim: np.flatnonzero(result.changed.any("what"))})
    share, names = score_of(shown, "share"), [str(name) for name in shown[dim].values]
    ax = axes(ax, 1.8 + 0.4 * len(names), 3.6)
    width = 0.8 / share.sizes["what"]
    for i, what in enumerate(map(str, share.what.values)):
        cell = share.sel(what=what)
        value = cell.value.to_numpy()
        ends = np.abs(np.stack((cell.low, cell.high)) - value)
        place = np.arange(len(names)) + (i - (share.sizes["what"] - 1) / 2) * width
        ax.bar(place, value, width, yerr=ends, color=COLOURS[what], capsize=2, ecolor="black", label=what)
    for level in (0.0, 1.0):
        ax.axhline(level, color="black", linewidth=0.8, linestyle="-" if level == 0 else "--")
    ax.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor")
    what = "interaction of the two parts" if dim == "pair" else "part of the tuned model in the base"
    if result.attrs["direction"] == "noise" and dim == "part":
        what = "part of the base in the tuned model"
    ax.set_xlabel(what if names else NO_CHANGE)
    ax.set_ylabel(f"share of the change of {result.attrs['metric']}")
    ax.set_title(f"n = {int(result.n.max())}")
    if names:
        legend(ax)
    return ax
