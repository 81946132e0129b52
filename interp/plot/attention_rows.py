"""How sharp attention is: a map of the heads, and curves over the number of keys."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.core.wording import nearest
from interp.model.parts import Part, PartName
from interp.plot.canvas import axes, curve, draw_heads, legend
from interp.views.maps import CellMap
from interp.views.scale import ColourScale

REST = "#bbbbbb"
"""Colour of heads that are not named."""
VALUES = {
    "max_weight": "largest weight (attention mass)",
    "entropy": "entropy (nats)",
    "gap": "score gap (score)",
}
HALVES = {
    "entropy_same": "same signs", "entropy_opposite": "opposite signs", "entropy_halves": "mean of both halves",
}  # fmt: skip
"""Words for the entropies of polar attention."""


@public()
def attention_entropy(result: xr.Dataset, score: str = "relative", *, ax: Axes | None = None) -> Axes:
    """A layer x head map of `interp.attention.attention_entropy`, each cell with its number.

    Args:
        result: what `interp.attention.attention_entropy` returned.
        score: "relative" (H / log n, from 0 to 1), "entropy" (nats) or "max_weight"; with polar layers also
            "entropy_same", "entropy_opposite" and "entropy_halves" (nats).
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: another score.

    Example:
        >>> attention_entropy(interp.attention.attention_entropy(model, prompt))
    """
    known = {
        "relative": "entropy / log(keys)",
        "entropy": VALUES["entropy"],
        "max_weight": VALUES["max_weight"],
        **{name: f"{VALUES['entropy']}, {words}" for name, words in HALVES.items()},
    }
    known = {name: label for name, label in known.items() if name in result.score.to_numpy()}
    if score not in known:
        raise KeyError(f"no score {score!r} in this result; {nearest(score, known)}")
    cells = result["value"].sel(score=score).transpose("layer", "head")
    top = float(cells.max()) if score.startswith("entropy") else 1.0
    view = CellMap(cells.to_numpy(), ColourScale.mass(known[score], top), "attention entropy by head")
    return draw_heads(ax, view, cells)


@public()
def dispersion(
    result: xr.Dataset,
    score: str = "max_weight",
    *,
    heads: Sequence[PartName] = (),
    label: str = "",
    ax: Axes | None = None,
) -> Axes:
    """One score of `interp.attention.dispersion` against the number of keys: named heads in colour, all others grey.

    Args:
        result: what `interp.attention.dispersion` returned.
        score: "max_weight" (both axes logarithmic; dashed: 1 / n, even attention), "entropy" (dashed: log n) or
            "gap".
        heads: the heads with a name and a 95 % band, `"L0H1"` or (0, 1).
        label: text added to the names, where several results share an Axes (select the named heads in all but the
            first).
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: another score or head.

    Example:
        >>> dispersion(interp.attention.dispersion(model, prompt), "entropy", heads=["L0H1"])
    """
    if score not in VALUES:
        raise KeyError(f"no score {score!r} to draw; {nearest(score, VALUES)}")
    ax = axes(ax, 5.6, 3.8)
    n, one = result["n_keys"].to_numpy(), result.sel(score=score)
    lines = {str(each["part"].item()): each for each in _heads(one)}
    named = [str(Part.of(head)) for head in heads]
    if missing := [head for head in named if head not in lines]:
        raise KeyError(f"no head {missing[0]} in this result; it has {', '.join(lines)}")
    for head, cell in lines.items():
        if head not in named:
            ax.plot(n, cell["value"], color=REST, linewidth=0.6, zorder=1)
    for head in named:
        curve(ax, n, lines[head], linewidth=1.4, label=f"{head}{label}")
    _even(ax, result, score)
    ax.set_xlabel("visible keys n")
    ax.set_ylabel(VALUES[score])
    ax.set_title(f"{score.replace('_', ' ')} by number of keys")
    if named:
        legend(ax, title="head")
    return ax


def _heads(result: xr.Dataset) -> Iterator[xr.Dataset]:
    """The curves of every head."""
    for layer in result["layer"].values:
        for head in result["head"].values:
            yield result.sel(layer=layer, head=head)


def _even(ax: Axes, result: xr.Dataset, score: str) -> None:
    """Draw even attention, once per Axes, and set the scales that make it a straight line."""
    ax.set_xscale("log")
    if score == "max_weight":
        ax.set_yscale("log")
    name = "even attention"
    if score == "gap" or any(line.get_label() == name for line in ax.lines):
        return
    n = result["n_keys"].to_numpy()
    even = 1 / n if score == "max_weight" else np.log(n)
    ax.plot(n, even, color="black", linewidth=0.9, linestyle="--", label=name)
