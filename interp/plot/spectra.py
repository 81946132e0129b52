"""Spectra of weight matrices: singular values as curves, ranks as maps."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.factored import FactoredMatrix
from interp.core.wording import nearest
from interp.model.parts import Part
from interp.plot.canvas import annotate, axes, heat_map, legend, name_cells
from interp.views.scale import ColourScale
from interp.views.writing import numbers

NAMES = {
    "stable_rank": "stable rank", "effective_rank": "effective rank", "top_share": "share of the largest",
    "norm": "Frobenius norm",
}  # fmt: skip


@public()
def singular_values(result: xr.Dataset, kind: str | None = None, *, ax: Axes | None = None) -> Axes:
    """The singular values of every matrix of a kind, one colour per layer, one line per head or expert; logarithmic.

    Args:
        result: what `interp.weights.spectra` returned.
        kind: a kind that it holds; None: W_out if it is there, else the first.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: another kind.

    Example:
        >>> singular_values(interp.weights.spectra(model), "OV")
    """
    kinds = [str(each) for each in result.kind.values]
    kind = kind or ("W_out" if "W_out" in kinds else kinds[0])
    some = _of_kind(result, kind)
    ax = axes(ax, 5.2, 3.6)
    layers = sorted(set(some.layer.values.tolist()))
    colours = colormaps["viridis"](np.linspace(0, 0.9, len(layers)))
    named = set()
    for i in range(some.sizes["matrix"]):
        row = some.isel(matrix=i)
        layer, size = int(row.layer), int(row["size"])
        label = None if layer in named or layer < 0 else str(layer)
        named.add(layer)
        thin = _index(row.part) is not None
        ax.plot(
            row["index"].values[:size], row.singular.values[:size], color=colours[layers.index(layer)],
            linewidth=0.7 if thin else 1.4, label=label,
        )  # fmt: skip
    ax.set_yscale("log")
    ax.set_xlabel("index")
    ax.set_ylabel("singular value")
    ax.set_title(f"singular values of {kind}")
    if layers != [-1]:
        legend(ax, title="layer")
    return ax


@public()
def factored_spectrum(matrix: FactoredMatrix, *, ax: Axes | None = None) -> Axes:
    """The singular values of a product kept as factors, logarithmic; one line for each of a batch of products.

    Args:
        matrix: the product.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> factored_spectrum(interp.weights.HeadCircuits(model).ov("L1H0"))
    """
    values = matrix.svd()[1].detach().float().cpu().numpy()
    rows = values.reshape(-1, values.shape[-1])
    ax = axes(ax, 5.2, 3.6)
    ax.plot(range(values.shape[-1]), rows.T, linewidth=1.4 if len(rows) == 1 else 0.7)
    ax.set_yscale("log")
    ax.set_xlabel("index")
    ax.set_ylabel("singular value")
    ax.set_title(f"singular values of a product {shape_text(matrix.shape)}")
    return ax


@public()
def spectra_map(
    result: xr.Dataset, value: str = "stable_rank", *, kind: str | None = None, ax: Axes | None = None
) -> Axes:
    """One number per matrix as a map: matrices of a block by layer, or with `kind` "OV" or "QK" layer by head.

    Args:
        result: what `interp.weights.spectra` returned.
        value: "stable_rank", "effective_rank", "top_share" or "norm".
        kind: "OV" or "QK" for a map by head; None: all matrices of a block.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: another value or kind.

    Example:
        >>> spectra_map(interp.weights.spectra(model), "effective_rank", kind="OV")
    """
    if value not in NAMES:
        raise KeyError(f"no value {value!r} to draw; {nearest(value, NAMES)}")
    if kind is None:
        whole = [_index(part) is None for part in result.part]
        some = result.isel(matrix=(result.layer >= 0) & np.array(whole))
        rows, columns = list(dict.fromkeys(some.kind.values.tolist())), some.layer.values
        places = [(rows.index(k), int(layer)) for k, layer in zip(some.kind.values, columns, strict=True)]
        names, words = rows, ("layer", "")
    else:
        some = _of_kind(result, kind)
        if kind not in ("OV", "QK"):
            raise KeyError(f"the matrices of kind {kind!r} are not by head; OV and QK are")
        places = [(int(r), _index(part) or 0) for r, part in zip(some.layer.values, some.part, strict=True)]
        names, words = [str(r) for r in sorted({r for r, _ in places})], ("head", "layer")
    if not places:
        raise ValueError(
            f"result must have matrices of layers, got {', '.join(map(str, result.part.values)) or 'none'}"
        )
    grid = np.full((max(r for r, _ in places) + 1, max(c for _, c in places) + 1), np.nan)
    for place, number in zip(places, some[value].values, strict=True):
        grid[place] = number
    ax = axes(ax, 2.0 + 0.55 * grid.shape[1], 1.2 + 0.42 * grid.shape[0])
    top = 1.0 if value == "top_share" else float(np.nanmax(grid))
    label = f"{NAMES[value]} {result.attrs['top']}" if value == "top_share" else NAMES[value]
    image = heat_map(
        ax,
        grid,
        ColourScale.mass(label, top),
        title=f"{label}{'' if kind is None else f' of {kind}'}",
    )
    annotate(ax, image, numbers(grid, 2 if value == "top_share" else 1))
    name_cells(ax, rows=names, columns=[str(i) for i in range(grid.shape[1])])
    ax.set_xlabel(words[0])
    ax.set_ylabel(words[1])
    return ax


def _index(part: xr.DataArray) -> int | None:
    """The number of the head or expert that has a matrix; None for a matrix of a whole sublayer."""
    return Part.of(str(part.values)).index


def _of_kind(result: xr.Dataset, kind: str) -> xr.Dataset:
    known = list(dict.fromkeys(result.kind.values.tolist()))
    if kind not in known:
        raise KeyError(f"no matrix of kind {kind!r} in this result; {nearest(kind, known)}")
    return result.isel(matrix=result.kind.values == kind)


@public()
def superposition(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """The norm of every neuron's input weights against its bias, a colour for each layer.

    Large norms with negative biases, down on the right, are where neurons may be shared.

    Args:
        result: what `interp.weights.superposition` returned.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> superposition(interp.weights.superposition(model))
    """
    ax = axes(ax, 5.2, 4.0)
    layers = result.layer.values.tolist()
    colours = colormaps["viridis"](np.linspace(0.0, 0.9, len(layers)))
    for layer, colour in zip(layers, colours, strict=True):
        one = result.sel(layer=layer)
        ax.plot(
            one.neuron_norm,
            one.neuron_bias,
            ".",
            color=colour,
            markersize=3,
            alpha=0.6,
            label=f"layer {layer}",
        )
    ax.axhline(0.0, color="grey", linewidth=0.8)
    ax.set_xlabel("norm of the input weights")
    ax.set_ylabel("bias (activation)")
    ax.set_title("neurons: how strongly they read, and from where they start")
    legend(ax)
    return ax
