"""One colour scale for several maps, so that equal colours are equal numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.image import AxesImage

from interp.core.boundary import public
from interp.plot.canvas import COLOURS, ink


@public()
def same_scale(*axes: Axes | Sequence[Axes] | np.ndarray) -> None:
    """Give all maps of one quantity, so of one text on the colour bar, the widest of their colour scales.

    A signed map keeps its neutral number (0, or that of the intact run) and reaches as far on both sides as the
    largest of its group; others run from the smallest to the largest end. Texts on cells turn dark or light with
    their cells.

    Args:
        axes: Axes of pictures that were drawn with plots of this package; those without a map, and maps of a quantity
            that no other one shows, stay as they are.

    Raises:
        ValueError: no two maps of one quantity.
        TypeError: what holds no axes.

    Example:
        >>> from matplotlib import pyplot as plt
        >>> _, sides = plt.subplots(1, 2)
        >>> for ax, metric in zip(sides, (3, 4), strict=True):
        ...     ax = plot.attribution_map(interp.attribute(model, prompt, metric, 5, parts="head"), ax=ax)
        >>> plot.same_scale(sides)
    """
    groups: dict[str, list[ScalarMappable]] = {}
    for ax in _each(axes, "same_scale"):
        for image in (*ax.images, *ax.collections):
            if image.colorbar is not None:
                # broken into lines by each map's height
                label = " ".join(image.colorbar.ax.get_ylabel().split())
                groups.setdefault(label, []).append(image)
    if all(len(group) < 2 for group in groups.values()):
        found = ", ".join(repr(label) for label in groups) or "no map"
        raise ValueError(f"two maps of one quantity are required, got {found}")
    for group in groups.values():
        _share(group)


def _each(axes: object, name: str) -> list[Axes]:
    """All axes, also those of an array of any shape. TypeError for anything else."""
    if isinstance(axes, Axes):
        return [axes]
    problem = f"{name}: axes must be axes of pictures, or lists or arrays of them, got {axes!r}"
    if not isinstance(axes, Sequence | np.ndarray) or isinstance(axes, str):
        raise TypeError(problem)
    if not len(axes):
        raise ValueError(problem)
    return [ax for one in axes for ax in _each(one, name)]


def _share(group: list[ScalarMappable]) -> None:
    ends = [image.get_clim() for image in group]
    known = [(low, high) for low, high in ends if low is not None and high is not None]
    reach = max((high - low) / 2 for low, high in known)
    lowest, highest = min(low for low, _ in known), max(high for _, high in known)
    for image, (low, high) in zip(group, known, strict=True):
        middle = (low + high) / 2
        signed = image.get_cmap().name.startswith(COLOURS["signed"])
        image.set_clim(*((middle - reach, middle + reach) if signed else (lowest, highest)))
        if isinstance(image, AxesImage):
            ink(image)
