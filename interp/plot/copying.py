"""Copying and matching of heads: the eigenvalues of a circuit on a disc, all heads in the copying x matching plane."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import xarray as xr
from jaxtyping import Complex, Float
from matplotlib.axes import Axes
from matplotlib.patches import Circle
from torch import Tensor

from interp.core.boundary import public
from interp.core.results import in_order
from interp.plot.canvas import COLOURS, axes, draw_heads, score_of
from interp.views.heads import score_map
from interp.views.scale import ColourScale

CLOSE, PER_LINE = 0.15, 3
"""Points that share a text, in units of the axes, and names on a line of it."""
GREY = "#777777"
"""Colour of guides, and of heads without an induction score."""


@public()
def eigenvalue_disc(
    eigenvalues: Complex[Tensor, "e"], *, decades: int = 3, title: str = "", ax: Axes | None = None
) -> Axes:
    """The eigenvalues of one circuit on the unit disc: the angle is theirs, the largest has radius 1.

    The radius is logarithmic, one inner circle per factor of ten. Right (blue) copies, left (red) does the opposite.
    Elhage et al. 2021, "Summarizing OV/QK Matrices".

    Args:
        eigenvalues: complex numbers.
        decades: factors of ten shown; what is further below the largest is at the centre.
        title: title of the picture.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        ValueError: less than one decade.

    Example:
        >>> plot.eigenvalue_disc(interp.weights.HeadCircuits(model).full_ov("L1H0").eigenvalues())
    """
    if decades < 1:
        raise ValueError(f"at least one decade is required, got {decades}")
    values = eigenvalues.detach().cpu().numpy()
    size = np.abs(values)
    ratio = size / (size.max(initial=0.0) or 1.0)
    radius = np.clip(1 + np.log10(np.maximum(ratio, 10.0**-decades)) / decades, 0, 1)
    angle = np.angle(values)
    ax = axes(ax, 4.4, 4.4)
    for step in range(1, decades + 1):
        outer = step == decades
        ax.add_patch(Circle((0, 0), step / decades, fill=False, color=GREY, linewidth=1.0 if outer else 0.4))
    ax.axhline(0, color=GREY, linewidth=0.4)
    ax.axvline(0, color=GREY, linewidth=0.4)
    ax.scatter(
        radius * np.cos(angle), radius * np.sin(angle), c=np.cos(angle), s=18, zorder=3,
        cmap=COLOURS["signed"], vmin=-1, vmax=1, edgecolors=GREY, linewidths=0.4,
    )  # fmt: skip
    ax.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal", xticks=[], yticks=[])
    ax.set_xlabel(f"real part (log radius, {decades} decades)")
    ax.set_ylabel("imaginary part")
    ax.set_title(title or "eigenvalues, largest at radius 1")
    return ax


@public()
def copying(table: xr.Dataset, *, ax: Axes | None = None, **options: object) -> Axes:
    """The plane of `copying_plane` if `interp.copying` matched heads, else the map of `copying_map`.

    Args:
        table: what `interp.copying` returned.
        ax: the Axes to draw on; None: a new figure.
        options: those of the picture that is drawn.

    Example:
        >>> plot.copying(interp.copying(model, ranks=False))
    """
    both = {"eigenvalue", "matching"} <= set(table.score.values.tolist())
    draw: Callable[..., Axes] = copying_plane if both else copying_map
    return draw(table, ax=ax, **options)


@public()
def copying_map(table: xr.Dataset, score: str = "eigenvalue", *, ax: Axes | None = None) -> Axes:
    """One score of `interp.copying` as a layer x head map, each cell with its number; the neutral colour is chance.

    Args:
        table: what `interp.copying` returned.
        score: the score that is drawn.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: a score that the table does not hold.

    Example:
        >>> copying_map(interp.copying(model), "mean_rank")
    """
    cells = _score(table, score)
    values, unit = cells.value.to_numpy(), str(cells["unit"].values)
    view = score_map(score, values, unit, float(cells["null"].mean()))
    title = f"copying by the weights: {score.replace('_', ' ')}"
    return draw_heads(ax, replace(view, title=title), cells.value)


@public()
def copying_plane(
    table: xr.Dataset, heads: xr.Dataset | None = None, *, label: float = 0.3, ax: Axes | None = None
) -> Axes:
    """Every head by its eigenvalue scores: copying (OV) across, matching (QK) up; induction heads top right.

    Heads without a score (layer 0 has nothing to match) are not shown. Induction heads are in the (+, +) corner
    (Elhage et al. 2021).

    Args:
        table: scores `eigenvalue` and `matching` of `interp.copying(model, previous=...)`.
        heads: the table of `interp.heads`, whose induction scores colour the heads; None: one colour.
        label: induction score from which heads are named, neighbours together.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: tables without these scores.

    Example:
        >>> heads = interp.heads(model)
        >>> table = interp.copying(model, ranks=False, previous=heads.value.sel(score="previous_token"))
        >>> plot.copying_plane(table, heads)
    """
    both = [_score(table, name) for name in ("eigenvalue", "matching")]
    across, up = (each.value.to_numpy().ravel() for each in both)
    ax = axes(ax, 5.4, 4.6)
    for line in (ax.axhline, ax.axvline):
        line(0, color=GREY, linewidth=0.6)
    if heads is not None:
        same = {dim: table[dim].to_numpy() for dim in ("layer", "head")}
        shown = in_order("heads", _score(heads, "induction").value, same).to_numpy().ravel()
        shade = ColourScale.mass("induction score (attention mass)")
        dots = ax.scatter(
            across, up, c=shown, cmap=COLOURS[shade.kind], vmin=shade.low, vmax=shade.high, edgecolors=GREY
        )
        ax.figure.colorbar(dots, ax=ax, pad=0.02).set_label(shade.label)
        named = np.isfinite(across + up) & (shown >= label)
        names = both[0].part.to_numpy().ravel()[named].tolist()
        _name_groups(ax, np.stack((across, up), 1)[named], names)
    else:
        ax.scatter(across, up, color=GREY)
    ticks = (-1, -0.5, 0, 0.5, 1)
    ax.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.15), xticks=ticks, yticks=ticks)
    ax.set_xlabel("copying: eigenvalue score of OV (-1 to 1)")
    ax.set_ylabel("matching: eigenvalue score of QK (-1 to 1)")
    ax.set_title("copying x matching")
    return ax


def _score(table: xr.Dataset, name: str) -> xr.Dataset:
    """One score of every head, layer by head. KeyError if the table does not hold it."""
    return score_of(table, name).transpose("layer", "head", ...)


def _name_groups(ax: Axes, places: Float[np.ndarray, "n 2"], names: Sequence[str]) -> None:
    """One text below all points that lie close to the first of them, towards the middle."""
    groups: list[list[int]] = []
    for i, place in enumerate(places):
        near = (g for g in groups if np.abs(places[g[0]] - place).max() < CLOSE)
        found = next(near, None)
        groups.append([i]) if found is None else found.append(i)
    for group in groups:
        right = places[group[0], 0] > 0
        x = places[group, 0].max() if right else places[group, 0].min()
        lines = [", ".join(names[i] for i in group[k : k + PER_LINE]) for k in range(0, len(group), PER_LINE)]
        ax.annotate(
            "\n".join(lines), (x, places[group, 1].min()), textcoords="offset points", fontsize=8, va="top",
            xytext=(6 if right else -6, -7), ha="right" if right else "left",
        )  # fmt: skip
