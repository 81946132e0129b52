"""The loss with all orders of V-composition up to each one, as bars."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.plot.canvas import axes

BAR, GUESS = "#2166ac", "#777777"
"""Colours of the model's loss, and of a uniform guess."""


@public()
def loss_by_order(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """Mean loss of a uniform guess, of the direct path, and with the terms of each further order, in nats per token.

    Whiskers are its intervals, the last bar is the model.

    Args:
        result: that of `interp.residual.term_importance`.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> from interp.residual import term_importance
        >>> small = interp.HookedTransformer.from_pretrained("groundtruth-induction")
        >>> plot.loss_by_order(term_importance(small, ["abcabcabc", "xyxyxyxy"]))
    """
    whole = [str(term).startswith("order") for term in result.term.values]
    loss = result.isel(term=whole).sel(score="loss").sortby("order")
    losses = [float(loss["null"][0]), *loss.value.values]
    last = int(loss.order[-1])
    names = ["uniform\nguess"]
    for order, terms in zip(loss.order.values, loss.terms.values, strict=True):
        added = "direct path" if order == 0 else f"+ {terms:.0f} terms\nof order {order}"
        names.append(f"{added}\n= the model" if order == last else added)
    ax = axes(ax, 1.4 + 1.2 * len(names), 3.4)
    whiskers = np.stack((loss.value - loss.low, loss.high - loss.value))
    colours = [GUESS, *[BAR] * (len(names) - 1)]
    errors = np.concatenate((np.zeros((2, 1)), whiskers), 1)
    ax.bar(names, losses, color=colours, width=0.65, yerr=errors, capsize=3, ecolor="black")
    for place, (height, above) in enumerate(zip(losses, errors[1], strict=True)):
        top = height + (0.0 if np.isnan(above) else above)
        ax.annotate(
            f"{height:.2f}", (place, top), (0, 3), textcoords="offset points", ha="center", fontsize=8
        )
    ax.margins(y=0.12)
    ax.set_xlabel("terms added, patterns frozen")
    ax.set_ylabel("loss (nats per token)")
    ax.set_title("loss by order of V-composition")
    return ax
