"""Scores of sparse probes by the number of neurons they read."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.core.wording import nearest
from interp.plot.canvas import axes, legend

WORDS = {
    "f1": "F1", "precision": "precision", "recall": "recall", "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy", "mcc": "Matthews' correlation",
}  # fmt: skip


@public()
def probing(result: xr.Dataset, score: str = "f1", *, ax: Axes | None = None) -> Axes:
    """A score of sparse probes by the neurons they read, with its 95 % interval; dashed, that with shuffled labels.

    Points of several layers at one size stand a little apart, so that their intervals can be told.

    Args:
        result: what `probe_neurons` (one line per layer) or `probe` returned.
        score: the score that is drawn.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: an unknown score.

    Example:
        >>> texts = ["The cat sat on the mat", prompt] * 8
        >>> found = interp.features.probe_neurons(model, texts, [True, False] * 8, sizes=(1, 2, 4))
        >>> ax = probing(found, "balanced_accuracy")
    """
    if score not in WORDS:
        raise KeyError(f"no score {score!r} of a probe; {nearest(score, WORDS)}")
    cells = result[["value", "low", "high", "null"]].sel(score=score)
    if others := {str(dim) for dim in cells.value.dims} - {"layer", "n_neurons"}:
        raise ValueError(f"result must be over layer and n_neurons, got also {', '.join(sorted(others))}")
    layered = cells if "layer" in cells.dims else cells.expand_dims(layer=[-1])
    layers = layered.layer.values.tolist()
    ax = axes(ax, 6.4, 3.8)
    colours = plt.get_cmap("viridis")(np.linspace(0.0, 0.9, len(layers)))
    for i, (layer, colour) in enumerate(zip(layers, colours, strict=True)):
        line = layered.sel(layer=layer)
        size = line.n_neurons.to_numpy() * 2 ** (0.06 * (i - (len(layers) - 1) / 2))
        value = line.value.to_numpy()
        ends = np.abs(np.stack([line.low - value, line.high - value]))
        name = f"layer {layer}" if layer >= 0 else "probe"
        ax.errorbar(size, value, ends, color=colour, marker=".", linewidth=1.2, elinewidth=0.8, label=name)
        if bool(line.null.notnull().all()):
            last = i == len(layers) - 1
            shuffled = "labels shuffled" if last else None
            ax.plot(size, line.null, color=colour, linewidth=0.8, linestyle="--", label=shuffled)
    ax.set_xscale("log", base=2)
    ax.set_xticks(layered.n_neurons.to_numpy(), [str(size) for size in layered.n_neurons.values])
    ax.minorticks_off()
    ax.set_ylim(-1.02 if score == "mcc" and float(layered.low.min()) < 0 else -0.02, 1.02)
    ax.set_xlabel("neurons read")
    ax.set_ylabel(f"{WORDS[score]} of the test examples")
    ax.set_title(f"sparse probes, neurons by {result.attrs['select'].replace('_', ' ')}")
    legend(ax, columns=1 + len(layers) // 8)
    return ax
