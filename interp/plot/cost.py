"""Operations of models against the length of what they read."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.core.results import numbers
from interp.plot.canvas import axes

DASHES = ("-", "--", ":", "-.")
COLOURS = 10
"""Colours of the usual cycle; the eleventh line has the first colour and another dash."""


@public()
def costs(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """Operations of one pass against its length, both logarithmic, a line for each model, the dearest named first.

    A line of slope 1 costs equally much for every token, one of slope 2 as much more as the text is longer; the
    dotted grey lines have these slopes.

    Args:
        result: what `interp.lab.costs` returned.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> of = interp.lab.training.attention_only
        >>> ax = plot.costs(interp.lab.costs({"one layer": of(1, 100, 64)}, [16, 32, 64]))
    """
    flops = result.flops.sortby("length")
    values = numbers("flops of result", flops, ("model", "length")).numpy()
    length = flops["length"].to_numpy().astype(float)
    ax = axes(ax, 7.6, 1.6 + max(3.0, 0.19 * len(values)))
    for slope in (1, 2):
        guide = 1.3 * values[:, 0].max() * (length / length[0]) ** slope
        ax.plot(length, guide, color="#bbbbbb", linewidth=0.8, linestyle=":", zorder=0)
        ax.annotate(f"slope {slope}", (length[-1], guide[-1]), fontsize=7, color="#888888", ha="right")
    for rank, row in enumerate(np.argsort(-values[:, -1], kind="stable")):
        name = str(result.model.values[row])
        dash = DASHES[rank // COLOURS % len(DASHES)]
        ax.plot(length, values[row], dash, color=f"C{rank % COLOURS}", linewidth=1.3, label=name)
    ax.set(xscale="log", yscale="log", xlabel="tokens of one text", ylabel="operations of one pass")
    ax.set_title("cost against length")
    ax.set_xticks(length, [f"{n:g}" for n in length])
    ax.minorticks_off()
    ax.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), fontsize=7.5, frameon=False)
    return ax
