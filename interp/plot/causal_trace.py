"""Causal traces: the layer and token whose restoring brings a fact back, as a map and as curves with intervals."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.image import AxesImage

from interp.core.boundary import public
from interp.core.wording import nearest
from interp.plot.canvas import annotate, axes, curve, heat_map, legend, name_cells, printable
from interp.views.scale import ColourScale
from interp.views.writing import number

ANNOTATED = 12
"""Up to this many layers the cells of a map by roles say their number and interval."""
PARTS = {"state": "block output", "mlp": "MLP outputs", "attn": "attention outputs"}


@public()
def causal_trace(
    result: xr.Dataset,
    *,
    prompt: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """The indirect effect of restoring each layer at each token: of one prompt, or by role over all prompts.

    Args:
        result: that of `causal_trace`. Cells by role show the half-width of their 95 % interval where there is room
            (curves show it always), and a dash where restoring can change nothing.
        prompt: place among the prompts of the result; its subject's tokens bear a star. None: by role.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> best = int(model.transformer(model.to_tokens(prompt))[0, -1].argmax())
        >>> found = interp.causal_trace(model, prompt, "Mary", best, samples=2)
        >>> drawn = causal_trace(found), causal_trace(found, prompt=0)
    """
    if prompt is not None:
        return _of_one(result.isel(prompt=prompt), ax)
    ax = axes(ax, 3.2 + 0.62 * min(result.sizes["layer"], 20), 1.5 + 0.5 * result.sizes["role"])
    values = result.value.transpose("role", "layer").to_numpy()
    half = (result.high - result.value).transpose("role", "layer").to_numpy()
    of, counts = int(result.n.max()), result.n.max("layer").to_numpy()
    names = [
        f"{role} ({count} of {of})" if count < of else str(role)
        for role, count in zip(result.role.values, counts, strict=True)
    ]
    image = _map(ax, result, values, names, f"mean over {of} prompts, total effect {_total(result):.2f}")
    if result.sizes["layer"] <= ANNOTATED:
        rows = zip(values, half, result.changed.transpose("role", "layer").to_numpy(), strict=True)
        annotate(ax, image, [_texts(*row) for row in rows], size=7.0)
    ax.set_ylabel("token role (-: nothing can change)")
    return ax


@public()
def causal_trace_curves(
    result: xr.Dataset, roles: Sequence[str] | None = None, *, ax: Axes | None = None
) -> Axes:
    """The indirect effect by role against the layer, each with its 95 % band over prompts.

    Args:
        result: that of `causal_trace`.
        roles: the roles to draw; None: all that any prompt has.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: an unknown role.

    Example:
        >>> best = int(model.transformer(model.to_tokens(prompt))[0, -1].argmax())
        >>> found = interp.causal_trace(model, prompt, "Mary", best, samples=2)
        >>> drawn = causal_trace_curves(found, ["last subject", "last token"])
    """
    known = [str(role) for role in result.role.values]
    if unknown := [role for role in roles or () if role not in known]:
        raise KeyError(f"no role {unknown[0]!r} in a causal trace; {nearest(unknown[0], known)}")
    ax = axes(ax, 6.4, 3.8)
    layers = result.layer.to_numpy()
    for role in known:
        cell = result.sel(role=role)
        if (roles is not None and role not in roles) or not int(cell.n.max()):
            continue
        curve(ax, layers, cell, marker="o", markersize=4, label=role)
    ax.axhline(_total(result), color="black", linewidth=0.8, linestyle="--", label="total effect")
    ax.axhline(0, color="grey", linewidth=0.8)
    ax.set_xticks(layers if len(layers) <= 2 * ANNOTATED else layers[:: len(layers) // ANNOTATED])
    ax.set_xlabel(_restored(result))
    ax.set_ylabel(f"indirect effect ({result.attrs['unit']})")
    ax.set_title(_title(result, f"mean and 95 % over {int(result.n.max())} prompts"))
    legend(ax)
    return ax


def _total(result: xr.Dataset) -> float:
    return float(result.total.sel(estimate="value"))


def _of_one(cell: xr.Dataset, ax: Axes | None) -> Axes:
    cell = cell.isel(pos=np.flatnonzero(cell.each.isel(layer=0).notnull()))
    words = [printable(str(word)) for word in cell.token.values]
    names = [f"{word}*" if mine else word for word, mine in zip(words, cell.subject.values, strict=True)]
    ax = axes(ax, 3.2 + 0.62 * min(cell.sizes["layer"], 20), 1.5 + 0.3 * len(names))
    between = f"{float(cell.corrupt):.2f} corrupted, {float(cell.clean):.2f} clean"
    _map(ax, cell, cell.each.transpose("pos", "layer").to_numpy(), names, between)
    ax.set_ylabel("token (* subject)")
    return ax


def _map(ax: Axes, result: xr.Dataset, values: np.ndarray, names: Sequence[str], about: str) -> AxesImage:
    """Tokens from top to bottom, layers from left to right."""
    scale = ColourScale.signed(values, f"indirect effect ({result.attrs['unit']})")
    image = heat_map(ax, values, scale, title=_title(result, about))
    layers = [str(layer) for layer in result.layer.values]
    name_cells(ax, rows=names, columns=layers)
    if len(layers) > 2 * ANNOTATED:
        shown = range(0, len(layers), len(layers) // ANNOTATED)
        ax.set_xticks(list(shown), [layers[i] for i in shown])
    ax.set_xlabel(_restored(result))
    return image


def _texts(values: np.ndarray, halves: np.ndarray, changed: np.ndarray) -> list[str]:
    """The number of each cell over the half-width of its interval."""
    found = []
    for value, half, any_change in zip(values, halves, changed, strict=True):
        text = number(value)
        known = text if np.isnan(half) else f"{text}\n±{half:.2f}"
        found.append("" if np.isnan(value) else known if any_change else "-")
    return found


def _restored(result: xr.Dataset) -> str:
    """The axis of layers, and what it means."""
    if result.attrs["window"] == 1:
        return "layer restored"
    return f"centre of the {result.attrs['window']} layers restored"


def _title(result: xr.Dataset, about: str) -> str:
    severed = result.attrs["severed"]
    without = "" if severed == "nothing" else f"\nlater {PARTS[severed]} kept corrupted"
    return f"restoring {PARTS[result.attrs['kind']]}{without}\n{about}"
