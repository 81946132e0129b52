"""Maps of one quantity that stand together get one scale; everything else stays as it was."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from interp import plot
from interp.plot.canvas import annotate, heat_map
from interp.views.scale import ColourScale
from tests.scales import uneven


def maps(*drawn: tuple[np.ndarray, ColourScale]) -> list[Axes]:
    _, sides = plt.subplots(1, len(drawn))
    for ax, (values, scale) in zip(sides, drawn, strict=True):
        annotate(ax, heat_map(ax, values, scale, title=""), [["x"] * values.shape[1]] * len(values))
    return list(sides)


def ends(ax: Axes) -> tuple[float, float]:
    return ax.images[0].get_clim()


def test_signed_maps_reach_the_largest_around_their_own_neutral_number() -> None:
    small, large = np.array([[0.5, -1.0]]), np.array([[4.0, 2.0]])
    sides = maps(
        (small, ColourScale.signed(small, "logits")),
        (large, ColourScale.removal(large, "logits", intact=1.0)),
    )
    assert [ends(ax) for ax in sides] == [(-1, 1), (-2, 4)]
    assert uneven(sides[0].figure) == ["'logits': [(1.0,), (3.0,)]"]
    plot.same_scale(sides)
    assert [ends(ax) for ax in sides] == [(-3, 3), (-2, 4)]
    assert uneven(sides[0].figure) == []
    assert sides[0].images[0].colorbar.mappable.get_clim() == (-3, 3)


def test_other_maps_run_from_the_smallest_to_the_largest_end() -> None:
    values = np.array([[0.0, 1.0]])
    sides = maps(
        (values, ColourScale("mass", -3.0, -1.0, "log10")),
        (values, ColourScale("mass", -2.0, 0.5, "log10")),
    )
    plot.same_scale(np.array([sides]))
    assert [ends(ax) for ax in sides] == [(-3, 0.5)] * 2


def test_maps_of_other_quantities_and_other_pictures_stay_as_they_are() -> None:
    values = np.array([[0.0, 1.0]])
    one, two, other = maps(
        (values, ColourScale.signed(values, "logits")),
        (3 * values, ColourScale.signed(3 * values, "logits")),
        (values, ColourScale.mass("attention")),
    )
    _, bars = plt.subplots()
    bars.plot([1, 2])
    plot.same_scale([one, two], other, bars)
    assert [ends(ax) for ax in (one, two, other)] == [(-3, 3), (-3, 3), (0, 1)]
    with pytest.raises(ValueError, match="two maps of one quantity are required, got 'logits', 'attention'"):
        plot.same_scale(one, other)
    with pytest.raises(ValueError, match="got no map"):
        plot.same_scale(bars)


def test_texts_stay_readable_on_cells_that_became_pale() -> None:
    values = np.array([[1.0, 0.0]])
    dark, wide = maps(
        (values, ColourScale.signed(values, "logits")), (9 * values, ColourScale.signed(9 * values, "logits"))
    )
    assert [to_rgb(text.get_color()) for text in dark.texts] == [(1, 1, 1), (0, 0, 0)]
    plot.same_scale(dark, wide)
    assert [to_rgb(text.get_color()) for text in dark.texts] == [(0, 0, 0), (0, 0, 0)]
    assert to_rgb(wide.texts[0].get_color()) == (1, 1, 1)


def test_a_label_broken_into_other_lines_is_the_same() -> None:
    label = "a name that is much too long for the side of a low picture"
    images = []
    for height in (1.5, 6.0):
        ax = plt.figure(figsize=(4, height)).subplots()
        images.append(heat_map(ax, np.eye(2), ColourScale.signed(height, label), title=""))
    low, high = (image.colorbar.ax.get_ylabel() for image in images if image.colorbar is not None)
    assert low.count("\n") > high.count("\n")
    plot.same_scale([image.axes for image in images])
    assert [image.get_clim() for image in images] == [(-6.0, 6.0)] * 2
