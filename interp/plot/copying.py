"""What heads copy and match: the eigenvalues of a circuit on a disc, all heads in the copying x matching plane."""

from collections.abc import Sequence

import numpy as np
import xarray as xr
from jaxtyping import Complex, Float
from matplotlib.axes import Axes
from matplotlib.patches import Circle
from torch import Tensor

from interp.core.shapes import nearest
from interp.plot.canvas import Scale, axes

CLOSE, PER_LINE = 0.15, 3
"""Points that share a text, in units of the axes, and names on a line of it."""
GREY = "#777777"
"""Colour of guides, and of heads without an induction score."""


def eigenvalue_disc(
    eigenvalues: Complex[Tensor, "e"], *, decades: int = 3, title: str = "", ax: Axes | None = None
) -> Axes:
    """The eigenvalues of one circuit on the unit disc: the angle is theirs, the largest has radius 1.

    The radius is logarithmic, one inner circle per factor of ten; what is more than `decades` below the largest is at
    the centre. Right (blue) copies, left (red) does the opposite. Elhage et al. 2021, "Summarizing OV/QK Matrices".
    Errors: ValueError for less than one decade.

    Example:
        >>> plot.eigenvalue_disc(interp.Circuits(model.transformer).full_ov(1, 0).eigenvalues())
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
    shade = Scale.signed(np.cos(angle), "")
    ax.scatter(
        radius * np.cos(angle), radius * np.sin(angle), c=np.cos(angle), s=18, zorder=3,
        cmap=shade.cmap, vmin=-1, vmax=1, edgecolors=GREY, linewidths=0.4,
    )  # fmt: skip
    ax.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.1), aspect="equal", xticks=[], yticks=[])
    ax.set_xlabel(f"real part (log radius, {decades} decades)")
    ax.set_ylabel("imaginary part")
    ax.set_title(title or "eigenvalues, largest at radius 1")
    return ax


def copying_plane(table: xr.Dataset, *, label: float = 0.3, ax: Axes | None = None) -> Axes:
    """Every head by its eigenvalue scores: copying (OV) across, matching (QK) up; induction heads top right.

    table: `eigenvalue` and `matching` `[layer, head]`, as of `interp.copying(model, previous=...)`, and optionally
    `induction`, which colours the heads; those of at least `label` are named layer.head, neighbours together. Heads
    without a score (layer 0 has nothing to match) are not shown. Induction heads are in the (+, +) corner (Elhage et
    al. 2021).
    Errors: KeyError for a table without both scores.

    Example:
        >>> heads = interp.heads(model)
        >>> from interp.weights.copying import copying
        >>> table = copying(model, ranks=False, previous=heads.previous_token)
        >>> plot.copying_plane(table.assign(induction=heads.induction))
    """
    for name in ("eigenvalue", "matching"):
        if name not in table:
            raise KeyError(f"no {name!r} in this table; {nearest(name, map(str, table))}")
    stacked = table.stack(place=("layer", "head")).transpose("place", ...)
    across, up = stacked.eigenvalue.to_numpy(), stacked.matching.to_numpy()
    ax = axes(ax, 5.4, 4.6)
    for line in (ax.axhline, ax.axvline):
        line(0, color=GREY, linewidth=0.6)
    if "induction" in table:
        shown, shade = stacked.induction.to_numpy(), Scale.mass("induction score (attention mass)")
        dots = ax.scatter(
            across, up, c=shown, cmap=shade.cmap, vmin=shade.low, vmax=shade.high, edgecolors=GREY
        )
        ax.figure.colorbar(dots, ax=ax, pad=0.02).set_label(shade.label)
        named = np.isfinite(across + up) & (shown >= label)
        names = [f"{layer}.{head}" for layer, head in stacked.place.values[named]]
        _name_groups(ax, np.stack((across, up), 1)[named], names)
    else:
        ax.scatter(across, up, color=GREY)
    ticks = (-1, -0.5, 0, 0.5, 1)
    ax.set(xlim=(-1.1, 1.1), ylim=(-1.1, 1.15), xticks=ticks, yticks=ticks)
    ax.set_xlabel("copying: eigenvalue score of OV (-1 to 1)")
    ax.set_ylabel("matching: eigenvalue score of QK (-1 to 1)")
    ax.set_title("copying x matching")
    return ax


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
