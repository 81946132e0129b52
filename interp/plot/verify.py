"""The numerical contract as a picture: each measured error as a share of what is allowed."""

from __future__ import annotations

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.plot.canvas import COLOURS, axes
from interp.verify import Contract

HOLDS, BROKEN = (colormaps[COLOURS["signed"]](shade) for shade in (0.9, 0.1))
LEAST = 1e-4
"""Errors below this share of what is allowed end at the left edge."""
FAR = 1e4
"""Where an error ends that is no finite share of what is allowed."""


@public()
def contract(found: Contract, *, ax: Axes | None = None) -> Axes:
    """A bar per line that was measured: its error as a share of what is allowed, logarithmic; red right of 1.

    Args:
        found: what `model.verify()` returned.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        ValueError: a contract of which no line was measured.

    Example:
        >>> contract(interp.verify.contract(model.transformer, "no reference"))
    """
    lines = [(line, line.error) for line in found.lines if line.error is not None]
    if not lines:
        raise ValueError("a contract with at least one measured line is required, got none")
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.divide([error for _, error in lines], [line.allowed for line, _ in lines])
    broken = np.array([not line.passed for line, _ in lines])
    shares = np.where(np.isfinite(shares), shares, np.where(broken, FAR, LEAST))
    ax = axes(ax, 6.4, 1.2 + 0.26 * len(lines))
    colours = [HOLDS if line.passed else BROKEN for line, _ in lines]
    ax.barh(range(len(lines)), np.clip(shares, LEAST, None), color=colours, height=0.7)
    ax.axvline(1, color="black", linewidth=0.8)
    ax.set_xscale("log")
    ax.set_xlim(LEAST, max(10.0, 2 * float(shares.max())))
    ax.set_yticks(range(len(lines)), [line.claim for line, _ in lines])
    ax.invert_yaxis()
    ax.set_xlabel("error / allowed")
    ax.set_title(f"{found.model}: {'every line holds' if found.passed else 'BROKEN'}")
    return ax
