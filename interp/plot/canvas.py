"""Shared parts of pictures: an Axes to draw on, a heat map with a named colour bar, readable text on its cells."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from interp.core.axes import shape_text
from interp.core.visible import visible
from interp.core.wording import nearest

MASS = "Blues"
"""Colour map of probabilities and attention."""
SIGNED = "RdBu"
"""Colour map of signed numbers: red below 0, blue above."""
ON_CELL = "on a cell"
"""Marker of the texts on the cells of a map."""
CROWDED = 400
"""Cells above which the texts of a small picture could not be read; drawing them takes 5 ms each."""


@dataclass(frozen=True)
class ColourScale:
    """How numbers become colours: the map's name, its ends, and what the colour bar says."""

    cmap: str
    low: float
    high: float
    label: str

    @classmethod
    def mass(cls, label: str) -> "ColourScale":
        """The scale of numbers in [0, 1]."""
        return cls(MASS, 0.0, 1.0, label)

    @classmethod
    def signed(cls, values: Float[np.ndarray, "..."], label: str) -> "ColourScale":
        """The scale of signed numbers, which reaches as far below 0 as above."""
        reach = float(np.nanmax(np.abs(values), initial=0.0)) or 1.0
        return cls(SIGNED, -reach, reach, label)

    @classmethod
    def removal(cls, values: Float[np.ndarray, "..."], label: str, intact: float = 0.0) -> "ColourScale":
        """The scale of a metric with something taken away: blue where it falls, so where that speaks for the metric.

        Args:
            intact: the number where nothing is taken away, the neutral colour.
        """
        signed = cls.signed(values - intact, label)
        return replace(signed, cmap=f"{SIGNED}_r", low=intact + signed.low, high=intact + signed.high)

    @classmethod
    def around(cls, chance: float, values: Float[np.ndarray, "..."], label: str) -> "ColourScale":
        """The scale of scores on both sides of chance, the neutral colour; of 0 where no chance level is known."""
        chance = 0.0 if np.isnan(chance) else chance
        signed = cls.signed(values - chance, label if chance == 0 else f"{label} (neutral: chance)")
        return replace(signed, low=chance + signed.low, high=chance + signed.high)


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
    image = ax.imshow(
        values, cmap=scale.cmap, vmin=scale.low, vmax=scale.high, aspect="auto", interpolation="none"
    )
    bar = ax.figure.colorbar(image, ax=ax, pad=0.02)
    bar.set_label(scale.label)
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
    colours = image.to_rgba(np.asarray(image.get_array()))[..., :3]
    light = colours @ np.array([0.299, 0.587, 0.114]) > 0.55
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


def head_map(
    ax: Axes | None,
    values: Float[np.ndarray, "layers heads"],
    scale: ColourScale,
    *,
    title: str,
    form: str = "{:.2f}",
) -> Axes:
    """A layer x head map, each cell with its number; blank where there is none."""
    layers, heads = values.shape
    ax = axes(ax, 1.8 + 0.55 * heads, 1.2 + 0.42 * layers)
    image = heat_map(ax, values, scale, title=title)
    annotate(ax, image, numbers(values, form))
    name_heads(ax, layers, heads)
    return ax


def name_heads(ax: Axes, layers: int, heads: int) -> None:
    """Label a layer x head map."""
    name_cells(ax, rows=[str(i) for i in range(layers)], columns=[str(i) for i in range(heads)])
    ax.set_xlabel("head")
    ax.set_ylabel("layer")


def numbers(values: Float[np.ndarray, "rows columns"], form: str = "{:.2f}") -> list[list[str]]:
    """The values as the texts of their cells, empty where there is none."""
    return [
        ["" if np.isnan(value) else _without_minus_zero(form.format(value)) for value in row]
        for row in values
    ]


def _without_minus_zero(text: str) -> str:
    """A written number, without the sign of a zero."""
    return text if text.strip("+-0.") else text.lstrip("+-")


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


def legend(ax: Axes, *, title: str | None = None, columns: int = 1) -> None:
    """A small legend through which the lines can be seen."""
    ax.legend(title=title, ncols=columns, fontsize="small", framealpha=0.85, edgecolor="none")
