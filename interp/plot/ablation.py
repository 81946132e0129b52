"""Effects of ablations, knockouts and short-circuits as maps and bars, and recall by layer as curves."""

from __future__ import annotations

import json

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from interp.causal.recall import WHOLE
from interp.core.boundary import public
from interp.core.results import in_order
from interp.model.parts import Part
from interp.plot.canvas import annotate, axes, draw, heat_map, name_cells, score_of
from interp.views.ablation import ablation_map
from interp.views.scale import ColourScale
from interp.views.writing import numbers

BAR = "#2166ac"
"""Colour of the bars."""


@public()
def ablation(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """The mean effect over prompts: a map of two dims (the first downwards), or bars with 95 % intervals of one.

    Args:
        result: that of `ablate`, `knock_out` or `short_circuit`. Blue: the metric falls, the part speaks for it.
            Cells in which nothing was changed have a dash and no colour.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        ValueError: a result of another number of dims.

    Example:
        >>> ablation(interp.ablate(model, prompt, change=interp.edits.Zero(), metric=interp.metrics.kl_divergence()))
    """
    effect = result.value
    if effect.ndim not in (1, 2):
        raise ValueError(
            f"effects over one or two dims are required, got {effect.dims}: select or name fewer in `by`"
        )
    label = f"change of {result.attrs['metric']} ({result.attrs['unit']})"
    names = [[str(x) for x in effect[dim].values] for dim in effect.dims]
    if effect.ndim == 1:
        ax = _bars(result, names[0], ax)
        ax.set_ylabel(label)
    else:
        changed = result.changed.transpose(*effect.dims).to_numpy().astype(bool)
        down, across = (str(dim) for dim in effect.dims)
        view = ablation_map(
            effect.to_numpy(), changed, label, rows=names[0], columns=names[1], axes=(down, across)
        )
        ax = draw(ax, view, cell=(0.5, 0.42))
    ax.set_xlabel(str(effect.dims[-1]))
    ax.set_title(f"{_intervention(result)}, n = {int(result.n.max())}")
    return ax


@public()
def recall_curve(
    result: xr.Dataset, score: str = "token_accuracy", *, label: str | None = None, ax: Axes | None = None
) -> Axes:
    """A score of `recall` with its 95 % interval: for the whole model, and with each single layer short-circuited.

    Args:
        result: that of `recall`.
        score: the score that is drawn.
        label: a name for the legend, where several results share an Axes.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: a score that the result does not hold.

    Example:
        >>> from interp.causal import continuations, recall
        >>> recall_curve(recall(model, *continuations(model, [("The cat sat", " on the mat")])))
    """
    some = score_of(result, score)
    layers = [name for name in map(str, result.part.values) if "+" not in name and name != WHOLE]
    names = [WHOLE, *layers]
    ax = axes(ax, 1.6 + 0.7 * len(names), 3.4)
    some = some.sel(part=names)
    value = some.value.to_numpy()
    ends = np.abs(np.stack((some.low, some.high)) - value)
    (line,) = ax.plot(range(1, len(names)), value[1:])
    ax.errorbar(range(len(names)), value, yerr=ends, fmt="o", capsize=3, label=label, color=line.get_color())
    ax.set_xticks(range(len(names)), names)
    ax.set_xlabel("short-circuited part")
    ax.set_ylabel(f"{score.replace('_', ' ')} ({some['unit'].item()})")
    ax.grid(alpha=0.3)
    return ax


@public()
def recall_map(result: xr.Dataset, score: str = "token_accuracy", *, ax: Axes | None = None) -> Axes:
    """A score of `recall` for every range of short-circuited layers, first layer downwards, last one to the right.

    Args:
        result: that of `recall`.
        score: the score that is drawn.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: a score that the result does not hold.

    Example:
        >>> from interp.causal import continuations, recall
        >>> pair = [("The cat sat", " on the mat")]
        >>> recall_map(recall(model, *continuations(model, pair), [0, 1, range(2)]), "loss")
    """
    some, found = score_of(in_order("result", result, {"part": result["part"].to_numpy()}), score), {}
    for name in (name for name in map(str, result.part.values) if name != WHOLE):
        layers = [Part.of(part).layer or 0 for part in name.split("+")]
        if layers == list(range(layers[0], layers[-1] + 1)):
            found[layers[0], layers[-1]] = float(some.value.sel(part=name))
    size = 1 + max(last for _, last in found)
    values = np.full((size, size), np.nan)
    for place, value in found.items():
        values[place] = value
    unit = str(some["unit"].item())
    label = f"{score.replace('_', ' ')} ({unit})"
    scale = ColourScale("plain", 0.0, float(np.nanmax(values)), label)
    scale = ColourScale.mass(label) if unit.startswith("share") else scale
    ax = axes(ax, 1.8 + 0.7 * size, 1.2 + 0.6 * size)
    image = heat_map(ax, values, scale, title=f"whole model: {float(some.value.sel(part=WHOLE)):.2f}")
    annotate(ax, image, numbers(values))
    name_cells(ax, rows=[str(i) for i in range(size)], columns=[str(i) for i in range(size)])
    ax.set_xlabel("last short-circuited layer")
    ax.set_ylabel("first short-circuited layer")
    return ax


def _bars(result: xr.Dataset, names: list[str], ax: Axes | None) -> Axes:
    ax = axes(ax, 1.6 + 0.5 * len(names), 3.4)
    mean = result.value.to_numpy()
    ends = np.abs(np.stack((result.low, result.high)) - mean)
    ax.bar(range(len(names)), mean, yerr=ends, color=BAR, capsize=3, ecolor="black", width=0.7)
    ax.axhline(0, color="black", linewidth=0.8)
    turned = max(map(len, names)) > 6
    ax.set_xticks(range(len(names)), names, rotation=45 if turned else 0, ha="right" if turned else "center")
    return ax


def _intervention(result: xr.Dataset) -> str:
    """The name of the intervention, in words."""
    if "change" not in result.attrs:
        return str(result.attrs["intervention"])
    parts = {"named": "named parts"}.get(result.attrs["parts"], f"every {result.attrs['parts']}")
    return f"{parts}: {json.loads(result.attrs['change'])['change']}"
