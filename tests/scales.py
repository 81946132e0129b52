"""Whether maps of one figure that show one quantity have one colour scale."""

from collections import defaultdict

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

FOUND: list[str] = []
"""What `watch` has seen in a notebook."""


def uneven(figure: Figure) -> list[str]:
    """Every quantity (text of a colour bar, else the colour map) whose maps reach differently far, with the ends."""
    ends: dict[str, set[tuple[float, ...]]] = defaultdict(set)
    bars = {id(ax) for ax in figure.axes if ax.get_label() == "<colorbar>"}
    for ax in figure.axes:
        for image in (*ax.images, *ax.collections):
            low, high = image.get_clim()
            if id(ax) in bars or image.get_array() is None or low is None or image.get_array().ndim == 3:
                continue
            label = image.colorbar.ax.get_ylabel() if image.colorbar else f"no bar, {image.get_cmap().name}"
            signed = image.get_cmap().name.startswith("RdBu")
            size = (round((high - low) / 2, 6),) if signed else (round(low, 6), round(high, 6))
            ends[label].add(size)
    return [f"{label!r}: {sorted(each)}" for label, each in ends.items() if len(each) > 1]


def watch() -> None:
    """In a notebook: look at the open figures after every cell, before they are shown and closed."""
    from IPython import get_ipython

    def look() -> None:
        for number in plt.get_fignums():
            FOUND.extend(uneven(plt.figure(number)))

    get_ipython().events.register("post_execute", look)
