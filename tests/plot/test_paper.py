"""Figures for print: every result of every analysis at the width of a column, measured by the boxes of its texts."""

from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.text import Text

import interp
from interp import plot
from interp.core.viewer import PICTURES
from interp.plot.canvas import draw_heads
from interp.views.maps import CellMap
from interp.views.scale import ColourScale
from tests.contract.cases import CASES

SMALLEST = 6.0
COLUMN, BOTH = 3.3, 6.8


def pictured() -> list[str]:
    """One case of every question and dims."""
    kinds = {
        (type(case.question_for(case.models[0])), tuple(case.dims.items())): name
        for name, case in CASES.items()
    }
    return [name for name in kinds.values() if CASES[name].undrawn is None]


def names(axis: Axis) -> list[Text]:
    """The names of an axis that are drawn: matplotlib keeps others, beyond its ends."""
    if not axis.axes.axison:
        return []
    low, high = sorted(axis.get_view_interval())
    return [
        tick.label1
        for tick in axis.get_major_ticks()
        if low <= tick.get_loc() <= high and tick.label1.get_text() and tick.label1.get_visible()
    ]


def texts(ax: Axes) -> list[Text]:
    """Everything that can be read in the figure."""
    axes = [axis for each in ax.figure.axes for axis in (each.xaxis, each.yaxis)]
    ticks = [tick for axis in axes for tick in (*axis.majorTicks, *axis.minorTicks)]
    of_ticks = {label for tick in ticks for label in (tick.label1, tick.label2)}
    every = [text for text in ax.figure.findobj(Text) if text.get_text().strip() and text.get_visible()]
    return [text for text in every if text not in of_ticks] + [name for axis in axes for name in names(axis)]


def check(ax: Axes) -> None:
    """Text of at least 6 points, in the figure; names on an axis stand apart; numbers lie in their cells."""
    figure = ax.figure
    figure.draw_without_rendering()
    renderer = figure.canvas.get_renderer()
    width, height = figure.bbox.width, figure.bbox.height
    for text in texts(ax):
        assert text.get_fontsize() >= SMALLEST, text
        box = text.get_window_extent(renderer)
        assert box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1, (text, box)
    for each in figure.axes:
        for axis in (each.xaxis, each.yaxis):
            boxes = [name.get_window_extent(renderer) for name in names(axis)]
            assert not any(a.overlaps(b) for a, b in pairwise(boxes))
        if each.images:
            rows, columns = each.images[0].get_array().shape[:2]
            for one in each.texts:
                if one.get_text() and one.get_visible():
                    box = one.get_window_extent(renderer)
                    assert box.width <= each.bbox.width / columns and box.height <= each.bbox.height / rows


@pytest.mark.slow
@pytest.mark.parametrize("case", pictured())
def test_every_picture_fits_a_column_and_two(case: str) -> None:
    model = CASES[case].models[0]
    result = CASES[case].result(model, *([] if CASES[case].alone else [CASES[case].batch(model)]))
    if PICTURES.of(result) is None:
        return
    for width in (COLUMN, BOTH):
        ax = plot.drawn(result, style="paper", width=width)
        assert ax.figure.get_size_inches()[0] == pytest.approx(width)
        check(ax)
        plt.close("all")


@pytest.fixture(scope="module")
def demo() -> interp.HookedTransformer:
    return interp.HookedTransformer.from_pretrained("demo-4l")


def test_a_prompt_is_drawn_with_its_blanks_and_lines_in_sight() -> None:
    ax = plot.paper(plot.attention(torch.eye(3), [" Mary", "\n", "went"]))
    check(ax)
    for axis in (ax.xaxis, ax.yaxis):
        assert [name.get_text() for name in names(axis)] == ["·Mary", "↵", "went"]


def test_a_long_name_is_cut_and_the_others_are_whole() -> None:
    _, ax = plt.subplots(layout="constrained")
    ax.barh(["a name that is far too long to stand beside any picture of one column", "short"], [1.0, 2.0])
    plot.paper(ax)
    check(ax)
    long, short = (name.get_text() for name in names(ax.yaxis))
    assert short == "short" and long.startswith("a name that is") and long.endswith("…")


@pytest.mark.slow
def test_numbers_stay_where_all_of_them_fit(demo: interp.HookedTransformer) -> None:
    heads = plot.paper(plot.heads(interp.heads(demo)))
    check(heads)
    assert sum(text.get_visible() for text in heads.texts) == 32
    lens = plot.paper(
        plot.logit_lens(interp.logit_lens(demo, "When Mary and John went to the store, John gave a drink"))
    )
    check(lens)
    assert not any(text.get_visible() for text in lens.texts if text.get_text())


@pytest.mark.slow
def test_a_deep_map_keeps_its_rows_apart() -> None:
    values = np.random.default_rng(0).normal(size=(80, 64))
    cells = xr.DataArray(values, dims=("layer", "head"))
    ax = plot.paper(draw_heads(None, CellMap(values, ColourScale.signed(values, "logits"), "x " * 60), cells))
    check(ax)
    assert ax.figure.get_size_inches()[1] <= 8.5
    assert ax.figure.axes[1].get_ylabel() == "logits"


@pytest.mark.slow
def test_a_file_holds_text_as_text(demo: interp.HookedTransformer, tmp_path: Path) -> None:
    prompt = "When Mary and John went to the store, John gave a drink to"
    attributed = interp.attribute(demo, prompt, " Mary", " John")
    plot.paper(plot.attribution(attributed), width=BOTH, file=tmp_path / "a.svg")
    assert "L3.mlp" in (tmp_path / "a.svg").read_text()
    plot.paper(plot.attribution(attributed), file=tmp_path / "a.pdf")
    assert b"/Type3" not in (tmp_path / "a.pdf").read_bytes()


@pytest.mark.parametrize("size", [{"width": 0.0}, {"width": -1.0}, {"height": 0.0}])
def test_a_size_that_is_none_is_refused(size: dict[str, float]) -> None:
    _, ax = plt.subplots()
    with pytest.raises(ValueError, match=f"{next(iter(size))} must be above 0 inches"):
        plot.paper(ax, **size)


@pytest.mark.kinds
def test_an_unknown_style_is_refused_by_name(demo: interp.HookedTransformer) -> None:
    with pytest.raises(ValueError, match="style must be 'screen' or 'paper', got 'poster'"):
        interp.composition(demo, "K").view.plot(style="poster")


@pytest.mark.slow
@pytest.mark.parametrize(("panels", "height"), [(3, 1.8), (2, 1.8)])
def test_a_name_of_a_colour_bar_stays_inside_when_titles_are_broken(panels: int, height: float) -> None:
    figure, row = plt.subplots(1, panels, figsize=(15, 4), layout="constrained")
    for i, ax in enumerate(row):
        image = ax.imshow(np.random.default_rng(0).normal(size=(5, 5)))
        ax.set_title(f"A rather long title of panel {i} that has to be broken into lines")
    bar = figure.colorbar(image, ax=row[-1], label="logits that it adds by itself, mean over all prompts")
    plot.paper(row[0], width=3.3, height=height)
    figure.draw_without_rendering()
    box = bar.ax.yaxis.label.get_window_extent()
    assert box.y0 >= 0 and box.y1 <= figure.bbox.height
    plt.close(figure)
