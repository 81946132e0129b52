"""Patching maps: the effect on the metric of putting each cell of one run into the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.core.results import in_order
from interp.model.parts import Part
from interp.plot.canvas import draw, names_along, printable
from interp.views.patching import HOW, Effect, patching_map, patching_scale

_COLUMNS = ("pos", "query", "key", "source")


@public()
def patching(
    result: xr.Dataset,
    value: Effect = "normalised",
    *,
    tokens: Sequence[str] | None = None,
    numbers: bool | None = None,
    reach: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A map of two dims, blue where the clean cell speaks for the metric; a dash marks cells without a change.

    Args:
        result: that of `patch`, `attribution_patch` or another causal question; select from a third dim first,
            `result.sel(layer=3)`. The senders of `path_patch` are laid out by layer: their heads, then the other
            parts.
        value: "normalised" (0 = like the corrupted run, 1 = like the clean one) or "value", in the metric's unit.
        tokens: the prompt's tokens, to name the positions.
        numbers: whether values are written on the cells; None: where they fit.
        reach: how far from no effect the colours end; None: at 1 if normalised, which is the whole difference between
            the runs, else at the largest effect.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: a value that the result lacks.
        ValueError: any other value, another number of dims, or of tokens.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> plot.patching(interp.patch(model, *pairs, metric=interp.logit_difference(3, 4)))
    """
    if value not in result:
        raise KeyError(f"this result has {', '.join(str(name) for name in result)}, not {value!r}")
    result = _by_layer(result) if result[value].dims == ("part",) and "kind" in result.coords else result
    table = result[value]
    if table.ndim != 2:
        raise ValueError(f"a map has two dims, select from the others: got {', '.join(map(str, table.dims))}")
    rows, columns = (str(dim) for dim in table.dims)
    values = table.to_numpy()
    if tokens is not None and (columns not in _COLUMNS or len(tokens) != values.shape[1]):
        raise ValueError(
            f"one token per position is required, got {len(tokens)} for {values.shape[1]} of {columns!r}"
        )
    direction = str(result.attrs.get("direction"))
    ends = 1.0 if value == "normalised" else values
    scale = patching_scale(value, direction, _label(result, value), ends if reach is None else reach)
    changed = (
        result["changed"].transpose(rows, columns).to_numpy().astype(bool) if "changed" in result else None
    )
    shown = [printable(token) for token in tokens] if tokens is not None else names_along(table, columns)
    view = patching_map(
        values, changed, value, scale, rows=names_along(table, rows), columns=shown,
        title=f"{result.attrs.get('site', 'patching')}: {HOW.get(direction, '')}".rstrip(": "),
        axes=(rows, "token" if tokens is not None else columns),
    )  # fmt: skip
    turned = tokens is not None or len(shown) > 20
    return draw(ax, view, cell=(0.52, 0.36), room=(2.2, 1.8), turned=turned, numbers=numbers, size=7.0)


def _by_layer(result: xr.Dataset) -> xr.Dataset:
    """Senders by layer: the heads by their numbers, then the other kinds of parts; NaN for missing ones."""
    result = in_order("result", result, {"part": result["part"].to_numpy()})
    parts = [Part.of(str(name)) for name in result.part.values]
    labels = [part.index if part.kind == "head" else part.kind for part in parts]
    columns = [
        *sorted(i for i in set(labels) if isinstance(i, int)),
        *dict.fromkeys(k for k in labels if isinstance(k, str)),
    ]
    layers = sorted({part.layer or 0 for part in parts})
    found = {}
    for name in ("value", "normalised", "changed"):
        cells = np.full((len(layers), len(columns)), np.nan)
        for part, which, number in zip(parts, labels, result[name].to_numpy(), strict=True):
            cells[layers.index(part.layer or 0), columns.index(which)] = number
        found[name] = (("layer", "part"), cells)
    coords = {"layer": layers, "part": [str(each) for each in columns]}
    laid_out = xr.Dataset(
        found, coords=coords, attrs={**result.attrs, "site": f"to {result.attrs['receivers']}"}
    )
    return laid_out.assign(changed=laid_out.changed != 0)


def _label(result: xr.Dataset, value: str) -> str:
    if value == "normalised":
        return f"{result.attrs['metric']} (0 = corrupted, 1 = clean)"
    return f"change of {result.attrs['metric']}\n({result.attrs['unit']})"
