"""How sharp attention is: a map of the heads, and curves over the number of keys."""

from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from interp.core.shapes import nearest
from interp.plot.canvas import Scale, annotate, axes, heat_map, name_cells

REST = "#bbbbbb"
"""Colour of heads that are not named."""
VALUES = {
    "max_weight": "largest weight (attention mass)",
    "entropy": "entropy (nats)",
    "gap": "score gap (score)",
}


def attention_entropy(result: xr.Dataset, score: str = "relative", *, ax: Axes | None = None) -> Axes:
    """A layer x head map of `attention.attention_rows.attention_entropy`, each cell with its number.

    score: "relative" (H / log n, from 0 to 1), "entropy" (nats) or "max_weight". Errors: KeyError for another.

    Example:
        >>> from interp.attention.attention_rows import attention_entropy as measured
        >>> attention_entropy(measured(model, prompt))
    """
    known = {
        "relative": "entropy / log(keys)",
        "entropy": VALUES["entropy"],
        "max_weight": VALUES["max_weight"],
    }
    if score not in known:
        raise KeyError(f"no score {score!r} in this result; {nearest(score, known)}")
    values = result[score].transpose("layer", "head").to_numpy()
    ax = axes(ax, 1.8 + 0.55 * values.shape[1], 1.2 + 0.42 * values.shape[0])
    top = float(values.max()) if score == "entropy" else 1.0
    image = heat_map(ax, values, Scale("Blues", 0.0, top, known[score]), title="attention entropy by head")
    annotate(ax, image, [[f"{v:.2f}" for v in row] for row in values])
    name_cells(
        ax, rows=[str(x) for x in result.layer.values], columns=[str(x) for x in result["head"].values]
    )
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    return ax


def dispersion(
    result: xr.Dataset,
    value: str = "max_weight",
    *,
    heads: Sequence[tuple[int, int]] = (),
    label: str = "",
    ax: Axes | None = None,
) -> Axes:
    """One number of `attention.attention_rows.dispersion` against the number of keys: named heads in colour, all grey.

    value: "max_weight" (both axes logarithmic; dashed: 1 / n, even attention), "entropy" (dashed: log n) or "gap".
    heads: (layer, head) of those with a name and a 95 % band. label: what is added to the names, where several results
    share an Axes (select the named heads in all but the first). Errors: KeyError for another value or head.

    Example:
        >>> from interp.attention.attention_rows import dispersion as measured
        >>> dispersion(measured(model, prompt), "entropy", heads=[(0, 1)])
    """
    if value not in VALUES:
        raise KeyError(f"no value {value!r} to draw; {nearest(value, VALUES)}")
    ax = axes(ax, 5.6, 3.8)
    n = result["n_keys"].to_numpy()
    every = [(int(layer), int(head)) for layer in result.layer.values for head in result["head"].values]
    if missing := [head for head in heads if head not in every]:
        raise KeyError(f"no head {missing[0]} in this result, layers and heads go to {every[-1]}")
    for layer, head in every:
        if (layer, head) not in heads:
            ax.plot(n, result[value].sel(layer=layer, head=head), color=REST, linewidth=0.6, zorder=1)
    for layer, head in heads:
        cell = result.sel(layer=layer, head=head)
        (line,) = ax.plot(n, cell[value], linewidth=1.4, label=f"{layer}.{head}{label}")
        ends = (cell[f"{value}_low"], cell[f"{value}_high"])
        ax.fill_between(n, *ends, color=line.get_color(), alpha=0.2, linewidth=0)
    _even(ax, result, value)
    ax.set_xlabel("visible keys n")
    ax.set_ylabel(VALUES[value])
    ax.set_title(f"{value.replace('_', ' ')} by number of keys")
    if heads:
        ax.legend(title="head (layer.head)", fontsize="small", framealpha=0.85, edgecolor="none")
    return ax


def _even(ax: Axes, result: xr.Dataset, value: str) -> None:
    """Even attention, once per Axes, and the scales that make it a straight line."""
    ax.set_xscale("log")
    if value == "max_weight":
        ax.set_yscale("log")
    name = "even attention"
    if value == "gap" or any(line.get_label() == name for line in ax.lines):
        return
    n = result["n_keys"].to_numpy()
    ax.plot(
        n,
        1 / n if value == "max_weight" else np.log(n),
        color="black",
        linewidth=0.9,
        linestyle="--",
        label=name,
    )
