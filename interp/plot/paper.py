"""Figures for print: any picture at the width of a column, with text that can be read and nothing that overlaps."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from textwrap import fill
from typing import cast

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from interp.core.boundary import public
from interp.plot.canvas import legend

TITLE, LABEL, TICK, CELL = 8.0, 7.0, 6.5, 6.0
"""Sizes of text in print, in points: of titles, of the names of axes, of ticks and legends, of numbers on cells."""
LOWEST, HIGHEST = 1.2, 8.5
"""Heights of a figure, in inches: the lowest, and what a page has room for."""
ROW = 9.0
"""Height that the name of a row takes, in points."""
STEP, MOST_STEPS = 1.15, 12
"""Factor by which a figure grows until its text fits, and how often."""
TITLE_PART, NAME_PART = 0.94, 0.35
"""Shares of the figure's width that a title, and a name on an axis, may take."""
CELL_PART = 0.9
"""Share of a cell's width that its text may take."""


@public()
def paper(
    ax: Axes,
    *,
    width: float = 3.3,
    height: float | None = None,
    file: str | os.PathLike[str] | None = None,
) -> Axes:
    """Make a figure fit to be printed, whatever function of `interp.plot` drew it.

    Text becomes 6 to 8 points, numbers stay on cells only where all of them fit, titles are broken into lines, names on
    axes are turned and thinned until none overlaps another. Colours stay: signed maps run from red to blue, which the
    colour-blind tell apart, and each has a colour bar with its unit.

    Args:
        ax: an Axes of the figure, which may hold several.
        width: in inches: 3.3 is a column of most conferences, 6.8 both of them.
        height: in inches; None: in proportion, and room for the name of every row of a map, up to 8.5.
        file: where to write the figure too, in the format that the name ends in (`.pdf`, `.svg`, `.png`).

    Returns:
        The Axes.

    Raises:
        ValueError: a width or a height that is not above 0, or an unknown format.

    Example:
        >>> ax = plot.paper(plot.heads(interp.heads(model)), width=3.3)
    """
    for name, size in (("width", width), ("height", height)):
        if size is not None and not size > 0:
            raise ValueError(f"paper: {name} must be above 0 inches, got {size:g}")
    figure = cast(Figure, ax.figure)
    with warnings.catch_warnings():  # on the way to a size that holds everything
        warnings.filterwarnings("ignore", message="constrained_layout not applied")
        _fit(figure, width, height)
    if file is not None:  # text stays text: TrueType in PDF, which journals ask for, fonts by name in SVG
        with mpl.rc_context({"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "none"}):
            figure.savefig(file)
    return ax


def _fit(figure: Figure, width: float, height: float | None) -> None:
    """Set the figure's size, and make its texts fit: each step measures what the one before it left."""
    before = figure.get_size_inches()
    figure.set_size_inches(width, height or max(LOWEST, min(HIGHEST, before[1] * width / before[0])))
    _set_text_sizes(figure)
    for text in (text for each in figure.axes if each.images for text in each.texts):
        text.set_visible(False)  # no layout depends on the numbers of a map
    for each in figure.axes:
        if (found := _inner_legend(each)) is not None:
            found.set_in_layout(False)  # one that is too wide would make the axes narrower still
    _each_axes(figure, _fold_legend)
    _each_axes(figure, _shorten_names)
    _each_axes(figure, _turn_names)
    if height is None:
        _make_room_for_rows(figure)
    _each_axes(figure, _break_title)
    _each_axes(figure, _break_title)  # a broken title leaves the name of a colour bar less room
    if height is None:
        _make_room_for_text(figure)
    _each_axes(figure, _thin_names)
    _each_axes(figure, _fit_cells)


def _each_axes(figure: Figure, step: Callable[[Figure, Axes], None]) -> None:
    """A step of `_fit` for every axes of the figure as it is laid out now."""
    figure.draw_without_rendering()
    for each in figure.axes:
        step(figure, each)


def _set_text_sizes(figure: Figure) -> None:
    """Give every text its size in print."""
    for text in figure.findobj(Text):
        text.set_fontsize(LABEL)
    for each in figure.axes:
        for text in each.texts if each.images else ():
            text.set_fontsize(CELL)
        each.title.set_fontsize(TITLE)
        each.tick_params(which="both", labelsize=TICK)
        _set_legend_sizes(each)


def _set_legend_sizes(ax: Axes) -> None:
    """Give the legend's texts their size in print."""
    found = ax.get_legend()
    for text in (found.get_title(), *found.get_texts()) if found is not None else ():
        text.set_fontsize(TICK)


def _fold_legend(figure: Figure, ax: Axes) -> None:
    """Give a legend that is wider than its axes fewer columns."""
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    found = _inner_legend(ax)
    for columns in range(len(found.get_texts()) - 1 if found is not None else 0, 0, -1):
        if found is None or found.get_window_extent(renderer).width <= ax.bbox.width:
            return
        entries = found.legend_handles, [text.get_text() for text in found.get_texts()]
        legend(ax, *entries, title=found.get_title().get_text() or None, columns=columns)
        _set_legend_sizes(ax)
        found = _inner_legend(ax)


def _inner_legend(ax: Axes) -> Legend | None:
    """The legend that stands on the axes, not beside or below."""
    found = ax.get_legend()
    return found if found is not None and found.get_bbox_to_anchor() is ax.bbox else None


def _make_room_for_rows(figure: Figure) -> None:
    """Make the figure higher by what the rows of its maps lack, as far as a page goes."""
    figure.draw_without_rendering()
    width, height = figure.get_size_inches()
    maps = [each for each in figure.axes if each.images]
    lacks = [len(_shown(each.yaxis)) * ROW / 72 - each.bbox.height / figure.dpi for each in maps]
    figure.set_size_inches(width, min(HIGHEST, height + max([0.0, *lacks])))


def _make_room_for_text(figure: Figure) -> None:
    """Make the figure higher until no name stands above or below it, as far as a page goes."""
    for _ in range(MOST_STEPS):
        figure.draw_without_rendering()
        names = [text for each in figure.axes for text in (each.title, each.xaxis.label, each.yaxis.label)]
        boxes = [_box(figure, text) for text in names if text.get_text()]
        width, height = figure.get_size_inches()
        if height >= HIGHEST or all(box.y0 >= 0 and box.y1 <= figure.bbox.height for box in boxes):
            return
        figure.set_size_inches(width, min(HIGHEST, STEP * height))


def _box(figure: Figure, text: Text) -> Bbox:
    """Where a text stands, in pixels."""
    return text.get_window_extent(figure.canvas.get_renderer())  # type: ignore[attr-defined]


def _break_title(figure: Figure, ax: Axes) -> None:
    """Break the title, and the name of a colour bar, into lines that fit."""
    middle = (ax.bbox.x0 + ax.bbox.x1) / 2
    alone = sum(bool(each.get_title()) for each in figure.axes) == 1
    whole = 2 * min(middle, figure.bbox.width - middle) if alone else ax.bbox.width
    rooms = ((ax.title, TITLE_PART * whole), (ax.yaxis.label, ax.bbox.height), (ax.xaxis.label, whole))
    for text, room in rooms:
        box = _box(figure, text)
        length = max(box.width, box.height)
        if text.get_text() and length > room:
            letters = max(len(line) for line in text.get_text().splitlines())
            text.set_text(
                fill(text.get_text(), max(12, int(letters * room / length)), break_long_words=False)
            )


def _shorten_names(figure: Figure, ax: Axes) -> None:
    """Cut names on an axis that would take more than their part of the figure's width."""
    room = NAME_PART * figure.bbox.width
    for axis in (ax.xaxis, ax.yaxis):
        shown = _shown(axis)
        widths = [_box(figure, label).width for label in shown]
        if max(widths, default=0.0) <= room:
            continue
        names = [
            text if width <= room else f"{text[: max(1, int(len(text) * room / width) - 1)]}…"
            for text, width in zip((label.get_text() for label in shown), widths, strict=True)
        ]
        axis.set_ticks([label.get_position()[axis is ax.yaxis] for label in shown], names)
        ax.tick_params(which="both", labelsize=TICK)


def _turn_names(figure: Figure, ax: Axes) -> None:
    """Turn the names below where they overlap."""
    if _overlap([_box(figure, label) for label in _shown(ax.xaxis)]):
        ax.tick_params(axis="x", labelrotation=90)


def _thin_names(figure: Figure, ax: Axes) -> None:
    """Leave names of ticks out, evenly, until none overlaps its neighbour."""
    for axis in (ax.xaxis, ax.yaxis):
        shown, every = _shown(axis), 1
        boxes = [_box(figure, label) for label in shown]
        while every < len(shown) and _overlap(boxes[::every]):
            every += 1
        for i, label in enumerate(shown):
            label.set_visible(i % every == 0)


def _shown(axis: Axis) -> list[Text]:
    """The names of ticks that are drawn: matplotlib keeps others, beyond the ends of the axis."""
    if not axis.axes.axison:
        return []
    low, high = sorted(axis.get_view_interval())
    ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
    return [tick.label1 for tick in ticks if tick.label1.get_text() and tick.label1.get_visible()]


def _overlap(boxes: Sequence[Bbox]) -> bool:
    """Whether any text stands on its neighbour."""
    return any(a.overlaps(b) for a, b in pairwise(boxes))


def _fit_cells(figure: Figure, ax: Axes) -> None:
    """Put the texts back on a map's cells if every one of them fits its cell."""
    texts = [text for text in ax.texts if text.get_text()]
    if not texts or not ax.images:
        return
    rows, columns = ax.images[0].get_array().shape[:2]  # type: ignore[union-attr]
    room = CELL_PART * ax.bbox.width / columns, ax.bbox.height / rows
    for text in texts:
        text.set_visible(True)
    boxes = (_box(figure, text) for text in texts)
    if any(box.width > room[0] or box.height > room[1] for box in boxes):
        for text in texts:
            text.set_visible(False)
