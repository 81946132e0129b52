"""Shared parts of pictures: an Axes to draw on, a heat map with a named colour bar, readable text on its cells."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from textwrap import fill

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from interp.core.axes import shape_text
from interp.core.damaged import REAL
from interp.core.visible import visible
from interp.core.wording import nearest
from interp.views.maps import MOST_IN_FIGURE, CellMap
from interp.views.scale import ColourScale, Kind

COLOURS: dict[Kind, str] = {"mass": "Blues", "signed": "RdBu", "removal": "RdBu_r", "plain": "viridis"}
"""matplotlib's colour map of each kind of scale."""
ON_CELL = "on a cell"
"""Marker of the texts on the cells of a map."""
LETTERS_PER_INCH = 12
"""Letters of the text beside a colour bar that stand on an inch of it."""
CROWDED = 400
"""Cells above which the texts of a small picture could not be read; drawing them takes 5 ms each."""


class Sheet(Figure):
    """A figure outside of windows and pyplot's list, which takes the size of what is drawn on it."""


def axes(ax: Axes | None, width: float, height: float) -> Axes:
    """The Axes given, or those of a new figure of this size in inches."""
    if ax is not None:
        if isinstance(ax.figure, Sheet):
            ax.figure.set_size_inches(width, height)
        return ax
    _, new = plt.subplots(figsize=(width, height), layout="constrained")
    return new


def heat_map(
    ax: Axes, values: Float[np.ndarray, "rows columns"], scale: ColourScale, *, title: str
) -> AxesImage:
    """The values as coloured cells, row 0 on top, with a colour bar that names the number and its unit."""
    if values.dtype.kind not in REAL:
        raise ValueError(f"{title or 'a map'}: real numbers are required to be drawn, got {values.dtype}")
    image = ax.imshow(
        values, cmap=COLOURS[scale.kind], vmin=scale.low, vmax=scale.high, aspect="auto", interpolation="none"
    )
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02)
    width = max(20, round(LETTERS_PER_INCH * ax.figure.bbox.height / ax.figure.dpi))
    bar.set_label("\n".join(fill(line, width, break_long_words=False) for line in scale.label.split("\n")))
    ax.set_title(title)
    return image


def annotate(ax: Axes, image: AxesImage, texts: Sequence[Sequence[str]], *, size: float = 8.0) -> None:
    """One text per cell of a heat map, dark or light by the cell's colour; none on a sheet that they would crowd."""
    values = np.asarray(image.get_array())
    if isinstance(ax.figure, Sheet) and values.size > CROWDED:
        return
    if values.shape != (len(texts), len(texts[0])):
        got = shape_text((len(texts), len(texts[0])))
        raise ValueError(f"one text per cell is required, {shape_text(values.shape)}, got {got}")
    for row, column in np.ndindex(values.shape):
        text = texts[row][column]
        ax.text(column, row, text, ha="center", va="center", fontsize=size, gid=ON_CELL)
    ink(image)


def ink(image: AxesImage) -> None:
    """Make the texts that `annotate` wrote on the cells of a map dark or light by the cell's colour."""
    values: np.ndarray = np.ma.filled(np.ma.asarray(image.get_array(), dtype=float), np.nan)
    light = (image.to_rgba(values)[..., :3] @ np.array([0.299, 0.587, 0.114]) > 0.55) | np.isnan(values)
    for text in image.axes.texts:
        if text.get_gid() == ON_CELL:
            column, row = (int(place) for place in text.get_position())
            text.set_color("black" if light[row, column] else "white")


def printable(token: str) -> str:
    """A token's text as the pages write it, every blank in sight and no dollar sign read as a formula; "" stays ""."""
    return visible(token).replace("$", r"\$") if token else ""


def name_cells(ax: Axes, *, rows: Sequence[str], columns: Sequence[str], turned: bool = False) -> None:
    """Label every row and column of a heat map."""
    ax.set_xticks(range(len(columns)), list(columns), rotation=90 if turned else 0)
    ax.set_yticks(range(len(rows)), list(rows))
    ax.tick_params(length=0)


def frame_cells(ax: Axes, places: Iterable[tuple[int, int]]) -> None:
    """Draw a frame around cells of a heat map, by row and column."""
    for row, column in places:
        ax.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="black", linewidth=1.5))


def draw(
    ax: Axes | None,
    view: CellMap,
    *,
    cell: tuple[float, float],
    room: tuple[float, float] = (1.8, 1.2),
    turned: bool = False,
    numbers: bool | None = None,
    size: float = 8.0,
) -> Axes:
    """A map as its spec says: frames around marked cells, and a text on each cell where they fit.

    Args:
        cell: width and height of a cell on a new figure, in inches.
        room: width and height of what stands around the cells, in inches.
        turned: whether names of the columns stand upright.
        numbers: whether texts are written on the cells; None: if these are at most `MOST_IN_FIGURE`.
        size: of the texts, in points.
    """
    rows, columns = view.values.shape
    ax = axes(ax, room[0] + cell[0] * columns, room[1] + cell[1] * rows)
    values = view.values if view.idle is None else np.where(view.idle, np.nan, view.values)
    image = heat_map(ax, values, view.scale, title=view.title)
    if view.marked is not None:
        frame_cells(ax, zip(*np.nonzero(view.marked), strict=True))
    if values.size <= MOST_IN_FIGURE if numbers is None else numbers:
        annotate(ax, image, [[text.replace("$", r"\$") for text in row] for row in view.texts], size=size)
    row_names, column_names = view.names
    name_cells(ax, rows=row_names, columns=column_names, turned=turned)
    ax.set_ylabel(view.axes[0].replace("_", " "))
    ax.set_xlabel(view.axes[1].replace("_", " "))
    return ax


def draw_heads(ax: Axes | None, view: CellMap, cells: xr.DataArray) -> Axes:
    """A map of the layers and heads that the cells have, which may be a selection."""
    view = replace(view, rows=names_along(cells, "layer"), columns=names_along(cells, "head"))
    return draw(ax, view, cell=(0.55, 0.42))


def names_along(cells: xr.DataArray | xr.Dataset, dim: str) -> list[str]:
    """The coordinates of a dimension as names; the places along it where it has none."""
    return [str(i) for i in (cells[dim].to_numpy() if dim in cells.coords else range(cells.sizes[dim]))]


def name_heads(ax: Axes, cells: xr.DataArray) -> None:
    """Label a layer x head map."""
    name_cells(ax, rows=names_along(cells, "layer"), columns=names_along(cells, "head"))
    ax.set_xlabel("head")
    ax.set_ylabel("layer")


def score_of(result: xr.Dataset, name: str) -> xr.Dataset:
    """One score of a result; KeyError naming the nearest for one that it does not hold."""
    known = [str(each) for each in result.score.values] if "score" in result.coords else []
    if name not in known:
        raise KeyError(
            f"no score {name!r} in this result; {nearest(name, known) if known else 'it has none'}"
        )
    return result.sel(score=name)


def token_names(result: xr.Dataset, tokens: Sequence[str] | None) -> list[str] | None:
    """Names of the columns of a map by position: the tokens given, else those of the result, if it has any.

    Raises:
        ValueError: another number of tokens.
    """
    n = result.sizes["pos"]
    if tokens is not None and len(tokens) != n:
        raise ValueError(f"one token per position is required, {n}, got {shape_text([len(tokens)])}")
    if tokens is None and "token" in result.coords:
        tokens = [str(token) for token in result.token.to_numpy()]
    return None if tokens is None else [printable(token) for token in tokens]


def curve(ax: Axes, x: object, cells: xr.Dataset, *style: str, alpha: float = 0.2, **line: object) -> None:
    """A line through `value` with a band from `low` to `high`, where there are such; `line` as matplotlib takes it."""
    (drawn,) = ax.plot(x, cells.value, *style, **line)  # type: ignore[arg-type]
    if "low" in cells and "high" in cells:
        ax.fill_between(x, cells.low, cells.high, color=drawn.get_color(), alpha=alpha, linewidth=0)  # type: ignore[arg-type]


def legend(ax: Axes, *entries: Sequence[object], title: str | None = None, columns: int = 1) -> None:
    """A small legend through which the lines can be seen; of what has a label, or of entries: artists, then labels."""
    ax.legend(*entries, title=title, ncols=columns, fontsize="small", framealpha=0.85, edgecolor="none")
