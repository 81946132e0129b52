"""The sampling chains of a learning coefficient: whether they have settled."""

from __future__ import annotations

import xarray as xr
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.core.results import check_result
from interp.plot.canvas import axes


@public()
def learning_coefficient(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """How far above w* each chain is, draw by draw: a line that still rises or falls has not settled.

    Args:
        result: that of `learning_coefficient` or `learning_coefficient_of`; its value and the spread over chains
            stand in the title.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> bowl = lambda point: point["w"].square().sum() / 2
        >>> at, sampler = {"w": torch.zeros(3)}, interp.dynamics.Langevin(chains=2, steps=50, burn_in=0)
        >>> ax = learning_coefficient(interp.dynamics.learning_coefficient_of(bowl, at, 1000, sampler))
    """
    check_result("result", result, ("loss", "value", "spread"), "learning_coefficient")
    ax = axes(ax, 5.6, 3.4)
    ax.plot(result.draw, result.loss.transpose("draw", "chain"), linewidth=0.7)
    ax.axhline(0.0, color="0.6", linewidth=0.8, linestyle="--", zorder=0)
    ax.set_xlabel("draw after the burn-in")
    ax.set_ylabel("L(w) − L(w*) (nats per row)")
    ax.set_title(
        f"learning coefficient {float(result.value):.1f}, spread over chains {float(result.spread):.1f}"
    )
    return ax
