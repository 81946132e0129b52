"""Direct logit attribution: a waterfall of parts (or paths), and a map of the heads."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.model.parts import Part
from interp.plot.canvas import axes, draw_heads
from interp.views.attribution import MOST_STEPS, contribution_map, largest, summed_over_answer
from interp.views.writing import number

FOR, AGAINST, REST = "#2166ac", "#b2182b", "#777777"
"""Colours of a part that raises the logit (difference), of one that lowers it, and of everything not shown singly."""
LEFT_OUT = 1e-4
"""Share of the largest number by which parts miss the total at least where some of them are not in the result."""


@public()
def attribution(
    result: xr.Dataset, *, prompt: int = 0, top: int = MOST_STEPS, ax: Axes | None = None
) -> Axes:
    """The largest parts as a waterfall that ends at the total: each bar starts where the one above stopped.

    Numbers are summed over the tokens of an answer; of one token alone: `result.sel(answer_token=0)`.

    Args:
        result: what `interp.attribute` returned, at any grain, or `interp.residual.paths`.
        prompt: place among the prompts of the result.
        top: number of parts with a bar of their own; all others, if there are several, are one bar.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        IndexError: a prompt that the result does not hold.

    Example:
        >>> plot.attribution(interp.attribute(model, prompt, " Mary", " John", parts="head"))
    """
    result = summed_over_answer(result)
    dim = "path" if "path" in result.dims else "part"
    unit = str(result.value.attrs.get("unit", "logits"))
    values = result.value.transpose("prompt", dim).to_numpy()[prompt]
    shown, others = largest(values.tolist(), top)
    names = [str(result[dim].values[i]) for i in shown]
    steps = values[shown]
    if others:
        names.append(f"{len(others)} others")
        steps = np.append(steps, values[others].sum())
    total = float(result.total[prompt])
    missing = total - values.sum()
    size = max(abs(total), np.abs(values).max(initial=0.0))
    left_out = bool(abs(missing) > size * max(LEFT_OUT, 2 * result.attrs.get("completeness_error", 0.0)))
    if left_out:
        names.append(f"{dim}s not in this result")
        steps = np.append(steps, missing)
    ax = axes(ax, 6.4, 1.2 + 0.24 * len(names))
    colours = [FOR if step >= 0 else AGAINST for step in steps]
    rest = bool(others) + left_out
    colours[len(colours) - rest :] = [REST] * rest
    ax.barh(names, steps, left=np.cumsum(steps) - steps, color=colours, height=0.7)
    ax.axvline(0, color=REST, linewidth=0.8)
    ax.axvline(total, color=REST, linewidth=0.8, linestyle="--")
    ax.invert_yaxis()
    ax.set_xlabel(f"sum so far ({unit})")
    ax.set_ylabel(dim)
    ax.set_title(f"direct logit attribution, total {number(total, sign=True)} {unit}")
    return ax


@public()
def attribution_map(result: xr.Dataset, *, prompt: int = 0, ax: Axes | None = None) -> Axes:
    """Each head's direct contribution to the logit (difference), layer x head, signed, in logits.

    Numbers are summed over the tokens of an answer; of one token alone: `result.sel(answer_token=0)`.

    Args:
        result: what `interp.attribute` returned by head (or by source).
        prompt: place among the prompts of the result.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        ValueError: a result that is not by head.

    Example:
        >>> plot.attribution_map(interp.attribute(model, prompt, " Mary", " John", parts="head"))
    """
    if result.attrs.get("parts") not in ("head", "source"):
        raise ValueError(
            f"attribution with parts='head' is required for a map of heads, got parts={result.attrs.get('parts')!r}"
        )
    result = summed_over_answer(result)
    every = [Part.of(str(name)) for name in result.part.values]
    heads = {i: (part.layer, part.index) for i, part in enumerate(every) if part.kind == "head"}
    if not heads:
        raise ValueError("a map of heads requires parts that are heads, this result holds none")
    row = result.value.transpose("prompt", "part").to_numpy()[prompt]
    added = pd.Series(row[list(heads)], pd.MultiIndex.from_tuples(heads.values(), names=["layer", "head"]))
    cells = xr.DataArray.from_series(added).sortby(["layer", "head"])
    view = contribution_map(cells.to_numpy(), str(result.value.attrs.get("unit", "logits")))
    return draw_heads(ax, view, cells)
