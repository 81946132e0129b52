"""Direct logit attribution: a waterfall of components, and a map of the heads."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from interp.plot.canvas import Scale, annotate, axes, heat_map, name_cells

FOR, AGAINST, REST = "#2166ac", "#b2182b", "#777777"
"""Colours of a part that raises the logit (difference), of one that lowers it, and of everything not shown singly."""


def attribution(result: xr.Dataset, *, prompt: int = 0, top: int = 20, ax: Axes | None = None) -> Axes:
    """The largest components as a waterfall that ends at the total: each bar starts where the one above stopped.

    result: what `interp.attribute` returned, at any grain. The components after the first `top` are one bar.
    Errors: IndexError for a prompt that the result does not hold.

    Example:
        >>> plot.attribution(interp.attribute(model, prompt, " Mary", " John", by="head"))
    """
    logits = result.logits.transpose("prompt", "component").to_numpy()[prompt]
    order = np.argsort(-np.abs(logits), kind="stable")
    names = [str(result.component.values[i]) for i in order[:top]]
    steps = logits[order[:top]]
    if len(order) > top:
        names.append(f"{len(order) - top} others")
        steps = np.append(steps, logits[order[top:]].sum())
    ax = axes(ax, 6.4, 1.2 + 0.24 * len(names))
    colours = [FOR if step >= 0 else AGAINST for step in steps]
    if len(order) > top:
        colours[-1] = REST
    ax.barh(names, steps, left=np.cumsum(steps) - steps, color=colours, height=0.7)
    total = float(result.total[prompt])
    ax.axvline(0, color=REST, linewidth=0.8)
    ax.axvline(total, color=REST, linewidth=0.8, linestyle="--")
    ax.invert_yaxis()
    ax.set_xlabel("sum so far (logits)")
    ax.set_ylabel("component")
    ax.set_title(f"direct logit attribution, total {total:+.2f} logits")
    return ax


def attribution_map(result: xr.Dataset, *, prompt: int = 0, ax: Axes | None = None) -> Axes:
    """What each head adds directly to the logit (difference), layer x head, signed, in logits.

    Errors: ValueError unless the result is by head (or by source).

    Example:
        >>> plot.attribution_map(interp.attribute(model, prompt, " Mary", " John", by="head"))
    """
    if result.attrs.get("by") not in ("head", "source"):
        raise ValueError(
            f"attribution by='head' is required for a map of heads, got by={result.attrs.get('by')!r}"
        )
    logits = result.logits.transpose("prompt", "component").to_numpy()[prompt]
    places = [str(name) for name in result.component.values]
    found = [
        (*map(int, name[1:].split("H")), value)
        for name, value in zip(places, logits, strict=True)
        if "H" in name
    ]
    n_layers, n_heads = (1 + max(place[axis] for place in found) for axis in (0, 1))
    values = np.array([value for _, _, value in sorted(found)]).reshape(n_layers, n_heads)
    ax = axes(ax, 1.8 + 0.55 * n_heads, 1.2 + 0.42 * n_layers)
    image = heat_map(
        ax, values, Scale.signed(values, "contribution (logits)"), title="direct logit attribution"
    )
    annotate(ax, image, [[f"{v:+.2f}" for v in row] for row in values])
    name_cells(ax, rows=[str(i) for i in range(n_layers)], columns=[str(i) for i in range(n_heads)])
    ax.set_xlabel("head")
    ax.set_ylabel("layer")
    return ax
