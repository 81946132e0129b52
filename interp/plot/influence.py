"""Effects of leaving training rows out, against predicted ones."""

from __future__ import annotations

import xarray as xr
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.core.results import check_result
from interp.plot.canvas import axes
from interp.views.writing import number


@public()
def influence(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """Exact against predicted effects, a dot per group and query; the title has their score.

    Dashed: prediction and truth are equal, where both have one unit.

    Args:
        result: that of `interp.dynamics.lds`.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> exact = xr.Dataset({"value": (("group", "query"), np.random.rand(4, 2), {"unit": "nats"}),
        ...                     "left_out": (("group", "row"), np.eye(4) > 0)},
        ...                    coords={"group": range(4), "row": range(4), "query": range(2)})
        >>> guess = xr.Dataset({"value": (("row", "query"), np.random.rand(4, 2), {"unit": "nats"})},
        ...                    coords={"row": range(4), "query": range(2)})
        >>> ax = influence(interp.dynamics.lds(exact, guess))
    """
    check_result("result", result, ("predicted", "exact", "value", "low", "high"), "lds")
    ax = axes(ax, 4.6, 4.2)
    units = [str(result[name].attrs["unit"]) for name in ("predicted", "exact")]
    ax.scatter(result.predicted, result.exact, s=8, alpha=0.5, linewidths=0)
    if units[0] == units[1]:
        ax.axline((0.0, 0.0), slope=1.0, color="0.5", linestyle="--", linewidth=0.8)
    ax.axhline(0.0, color="0.8", linewidth=0.8, zorder=0)
    ax.axvline(0.0, color="0.8", linewidth=0.8, zorder=0)
    ax.set_xlabel(f"predicted effect of a group ({units[0]})")
    ax.set_ylabel(f"exact effect ({units[1]})")
    score, low, high = (float(result[name]) for name in ("value", "low", "high"))
    ax.set_title(f"{result.attrs['method']}: LDS {number(score)} [{number(low)}, {number(high)}]")
    return ax
