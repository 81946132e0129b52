"""How far an affine map gives a model's answers to a relation, and changes them, next to simpler ways."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.core.results import check_result, in_order
from interp.plot.canvas import axes, legend

WORDS = {
    "faithfulness": "faithful: W s + b",
    "faithfulness_translation": "faithful: s + b",
    "faithfulness_most_frequent": "faithful: most frequent",
    "causality": "causal: inverse of W",
    "causality_replaced": "causal: other subject's s",
    "causality_random": "causal: random direction",
}
"""The scores in words."""


@public()
def linear_relation(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """The scores of `linear_relation` by layer, with 95 % intervals over subjects; dots in black, the chance level.

    Filled marks are of the affine map, hollow ones of what is simpler.

    Args:
        result: what `interp.causal.linear_relation` returned.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> pairs = [([i], [i + 1]) for i in range(3, 12)]
        >>> linear_relation(interp.causal.linear_relation(model, pairs, examples=3, layers=[0], only_known=False))
    """
    check_result("result", result, ("value", "low", "high", "null", "score"), "interp.causal.linear_relation")
    result = in_order("result", result, {"layer": None, "score": None})
    known = [str(name) for name in result.score.values]
    names, place = sorted(known, key=[*WORDS, *known].index), np.arange(result.sizes["layer"])
    ax = axes(ax, 4.4 + 1.2 * len(place), 4.0)
    colours = plt.get_cmap("tab10")(np.arange(10))
    for i, name in enumerate(names):
        cells = result.sel(score=name)
        ends = np.abs(np.stack((cells.low, cells.high)) - cells.value.to_numpy())
        shift, colour = (
            0.12 * (i - (len(names) - 1) / 2),
            colours[0 if name.startswith("faithfulness") else 3],
        )
        ax.errorbar(
            place + shift, cells.value, yerr=ends, fmt="os^"[i % 3], color=colour, markersize=6, capsize=2,
            markerfacecolor=colour if "_" not in name else "none", label=WORDS.get(name, name),
        )  # fmt: skip
        ax.plot(place + shift, cells.null, "k.", markersize=4)
    ax.set_xticks(place, [str(layer) for layer in result.layer.values])
    ax.set_xlabel("layer of s")
    ax.set_ylabel("share of subjects")
    ax.set_ylim(-0.03, 1.03)
    ax.set_title(f"{int(result.n.max())} subjects; W from {result.attrs['examples']} others")
    legend(ax)
    return ax
