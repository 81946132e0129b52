"""Tokens that move on a sphere or an ellipsoid: their paths, and the distances between them over time."""

from __future__ import annotations

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from mpl_toolkits.mplot3d.axes3d import Axes3D

from interp.core.boundary import public
from interp.core.results import in_order
from interp.plot.canvas import axes, legend, score_of

WORDS = {
    "min_cosine": "smallest cosine of two tokens", "mean_cosine": "mean cosine of two tokens",
    "to_first_start": "mean cosine to the first token's start", "potential": "potential",
    "clusters": "groups of linked tokens",
}  # fmt: skip
OUTLINE = "#bbbbbb"
"""Colour of the surface that tokens move on."""


@public()
def trajectories(
    result: xr.Dataset, score: str = "min_cosine", *, label: str | None = None, ax: Axes | None = None
) -> Axes:
    """One score of `interp.lab.depth.trajectories` over time: angles that close, clusters that join.

    Args:
        result: what `interp.lab.depth.trajectories` returned.
        score: the score that is drawn.
        label: a name for the legend, where several share an Axes; None: no legend.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: an unknown score.

    Example:
        >>> x = torch.tensor([[1.0, 0.1], [1.0, -0.3], [0.9, 0.2]])
        >>> way = interp.lab.depth.trajectories(x, qk=torch.eye(2), ov=torch.eye(2), steps=100)
        >>> ax = trajectories(way, "potential")
    """
    cells = score_of(result, score)
    ax = axes(ax, 5.2, 3.6)
    style = "steps-post" if score == "clusters" else "default"
    ax.plot(cells.time, cells.value, linewidth=1.4, label=label, drawstyle=style)
    ax.set_xlabel("time")
    ax.set_ylabel(WORDS[score])
    ax.set_title("tokens under attention alone")
    if label is not None:
        legend(ax)
    return ax


@public()
def particles(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """The path of each token on its sphere or ellipsoid: o where it begins, x where it ends.

    Args:
        result: what `interp.lab.depth.trajectories` returned.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        ValueError: tokens of other than two or three dimensions, or for three an Axes that is not one of
            `projection="3d"`.

    Example:
        >>> x = torch.tensor([[1.0, 0.1], [1.0, -0.3], [0.9, 0.2]])
        >>> ax = particles(interp.lab.depth.trajectories(x, qk=torch.eye(2), ov=torch.eye(2), steps=100))
    """
    result = in_order("result", result, dict.fromkeys(("time", "axis", "other_axis")))
    paths = result.position.transpose("token", "axis", "time").to_numpy()
    width = paths.shape[1]
    if width not in (2, 3):
        raise ValueError(f"tokens of two or three dimensions are required, got {width}")
    if ax is None:
        ax = _new(width)
    if width == 3 and not isinstance(ax, Axes3D):
        raise ValueError(
            'an Axes of projection="3d" is required for tokens of three dimensions, got a flat one'
        )
    surface = _surface(result.ellipsoid.transpose("axis", "other_axis").to_numpy())
    if isinstance(ax, Axes3D):
        ax.plot_wireframe(*surface, color=OUTLINE, linewidth=0.3, rcount=16, ccount=16)
        ax.set_zlabel("axis 2")
    else:
        ax.plot(*surface[:, :, 0], color=OUTLINE, linewidth=0.8)
    colours = plt.get_cmap("viridis")(np.linspace(0, 0.9, len(paths)))
    for path, colour in zip(paths, colours, strict=True):
        ax.plot(*path, color=colour, linewidth=1.2)
        ax.plot(*path[:, :1], "o", color=colour, markersize=4)
        ax.plot(*path[:, -1:], "x", color=colour, markersize=6)
    ax.set_aspect("equal")
    ax.set_xlabel("axis 0")
    ax.set_ylabel("axis 1")
    ax.set_title(f"tokens from time 0 (o) to {float(result.time[-1]):.3g} (x)")
    return ax


def _new(width: int) -> Axes:
    """An Axes for paths of this many dimensions."""
    if width == 2:
        return axes(None, 4.2, 4.2)
    figure = plt.figure(figsize=(4.6, 4.6), layout="constrained")
    return figure.add_subplot(projection="3d")


def _surface(ellipsoid: Float[np.ndarray, "d d"]) -> Float[np.ndarray, "d n n"]:
    """Points with x^T W x = 1: a circle of directions, or a net of them, stretched."""
    long, across = np.meshgrid(np.linspace(0, 2 * np.pi, 49), np.linspace(0, np.pi, 49), indexing="ij")
    round_ = [np.cos(long), np.sin(long)]
    if len(ellipsoid) == 3:
        round_ = [round_[0] * np.sin(across), round_[1] * np.sin(across), np.cos(across)]
    stretch = np.linalg.inv(np.linalg.cholesky(ellipsoid)).T
    return np.einsum("ij, jab -> iab", stretch, np.stack(round_))
