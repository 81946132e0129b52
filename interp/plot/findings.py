"""The table of claims as one picture: how far inside its region each number lies."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.core.results import check_result
from interp.plot.canvas import axes
from interp.views.writing import short

COLOURS = {"holds": "C0", "does not hold": "C3", "cannot be told": "0.55"}
"""Of each verdict."""
FARTHEST = 4.0
"""Numbers that lie farther out are drawn here, as arrows."""


@public()
def findings(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """A row for each claim: its number and interval beside the bound of its region.

    Units differ between claims, so the axis counts bounds: 0 is the bound, 1 is one bound's size further inside the
    region. What lies farther than 4 is an arrow. The text beside a row is the number itself.

    Args:
        result: that of `interp.findings.findings`.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> demo = interp.HookedTransformer.from_pretrained("demo-attn-2l")
        >>> ax = findings(interp.findings.findings(demo, ["induction-heads"], prompts=12))
    """
    check_result("result", result, ("value", "low", "high", "lowest", "highest", "verdict"), "findings")
    rows = result.sizes["claim"]
    ax = axes(ax, 8.0, 0.9 + 0.24 * rows)
    for row in range(rows):
        one = result.isel(claim=row)
        colour = COLOURS[str(one.verdict.item())]
        value, low, high = (_inside(float(one[name]), one) for name in ("value", "low", "high"))
        y = rows - 1 - row
        if np.isfinite(value):
            ends = np.clip([low, high], -FARTHEST, FARTHEST)
            if np.isfinite(ends).all():
                ax.plot(ends, [y, y], color=colour, linewidth=2, solid_capstyle="butt")
            marker = "o" if abs(value) <= FARTHEST else ">" if value > 0 else "<"
            ax.plot(np.clip(value, -FARTHEST, FARTHEST), y, marker, color=colour, markersize=5, clip_on=False)
            text = f"{short(float(one['value']), 2)} {one.unit.item()}"
        else:
            text = "cannot be asked"
        ax.text(1.01, y, text, transform=ax.get_yaxis_transform(), va="center", fontsize=8, color=colour)
    ax.axvline(0.0, color="0.5", linestyle="--", linewidth=0.8, zorder=0)
    ax.set_yticks(
        range(rows), [str(name).replace("-", " ") for name in result.claim.values[::-1]], fontsize=8
    )
    ax.set_ylim(-0.6, rows - 0.4)
    ax.set_xlim(-FARTHEST - 0.2, FARTHEST + 0.2)
    ax.set_xlabel("outside of the region  -  in units of its bound  -  inside")
    counts = ", ".join(f"{int((result.verdict == name).sum())} {name}" for name in COLOURS)
    ax.set_title(counts, fontsize=9)
    return ax


def _inside(value: float, claim: xr.Dataset) -> float:
    """How far a number lies inside the region, in units of the bound's size."""
    lowest, highest = float(claim.lowest), float(claim.highest)
    bound, sign = (lowest, 1.0) if np.isfinite(lowest) else (highest, -1.0)
    return sign * (value - bound) / (abs(bound) or 1.0)
