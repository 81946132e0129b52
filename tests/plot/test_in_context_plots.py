"""Plots of loss by index and of training: they show the numbers they were given and their units, and no others."""

from collections.abc import Callable

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh

from interp import Batch, HookedTransformer, plot
from interp.attention import Heads
from interp.core.viewer import PICTURES
from interp.dynamics import in_context, loss_map, over_checkpoints
from interp.tasks import RepeatedTokens
from interp.views.writing import number
from tests.configs import build, some_tokens

MODELS = {"step4": "gpt2", "step30": "mqa", "step200": "bloom"}


def load(revision: str) -> HookedTransformer:
    return HookedTransformer(build(MODELS[revision]))


@pytest.fixture(scope="module")
def curve() -> xr.Dataset:
    return in_context(
        load("step4"), some_tokens(rows=1024), early=2, late=7
    )  # as many as a mean loss asks for


@pytest.fixture(scope="module")
def over_training() -> xr.Dataset:
    return loss_map(load, list(MODELS), Batch(some_tokens(rows=5)), early=2, late=7)


@pytest.fixture(scope="module")
def scores() -> xr.Dataset:
    data = RepeatedTokens(period=6, repeats=3, rows=3)
    return over_checkpoints(load, list(MODELS), Heads(repeats=data, sentences=None))


@pytest.fixture(scope="module")
def pictures(
    curve: xr.Dataset, over_training: xr.Dataset, scores: xr.Dataset
) -> dict[str, Callable[..., Axes]]:
    return {
        "loss_by_index": lambda ax=None: plot.loss_by_index(curve, ax=ax),
        "loss_map": lambda ax=None: plot.loss_map(over_training, ax=ax),
        "slope_map": lambda ax=None: plot.loss_map(over_training, "slope", ax=ax),
        "heads_over_training": lambda ax=None: plot.heads_over_training(scores, ax=ax),
    }


NAMES = ("loss_by_index", "loss_map", "slope_map", "heads_over_training")


def mesh_of(ax: Axes) -> QuadMesh:
    (mesh,) = [part for part in ax.collections if isinstance(part, QuadMesh)]
    return mesh


def legend(ax: Axes) -> list[str]:
    box = ax.get_legend()
    assert box is not None
    return [text.get_text() for text in box.get_texts()]


@pytest.mark.parametrize("name", NAMES)
def test_plot_draws_where_told_names_its_axes_and_leaves_global_state(
    pictures: dict[str, Callable[..., Axes]], name: str
) -> None:
    figure, ax = plt.subplots()
    before = dict(mpl.rcParams)
    assert pictures[name](ax=ax) is ax
    assert ax.get_xlabel() and ax.get_ylabel() and ax.get_title()
    figure.canvas.draw()
    assert pictures[name]().figure in map(plt.figure, plt.get_fignums())
    assert dict(mpl.rcParams) == before


def test_the_curve_its_band_and_the_compared_indices_are_drawn(curve: xr.Dataset) -> None:
    ax = plot.loss_by_index(curve)
    line, *marks = ax.lines
    np.testing.assert_array_equal(line.get_xdata(), curve["index"])
    loss = curve.sel(score="loss")
    np.testing.assert_array_equal(line.get_ydata(), loss.value)
    assert [mark.get_xdata()[0] for mark in marks] == [2, 7]
    corners = ax.collections[0].get_paths()[0].vertices
    assert {*loss.low.values, *loss.high.values} <= set(corners[:, 1])
    assert ax.get_ylabel() == "loss (nats)"


def test_the_legend_says_the_score_with_its_interval_and_whose_it_is(curve: xr.Dataset) -> None:
    late = curve.sel(score="in_context", index=7)
    value, low, high = (float(late[name]) for name in ("value", "low", "high"))
    numbers = (number(x, sign=True) for x in (value, low, high))
    text = "loss(7) - loss(2) = {} [{}, {}]".format(*numbers)
    assert legend(plot.loss_by_index(curve)) == [text]
    ax = plot.loss_by_index(curve, label="a")
    assert legend(plot.loss_by_index(curve, label="b", ax=ax)) == [f"a: {text}", f"b: {text}"]


@pytest.mark.parametrize("value", ["loss", "slope"])
def test_a_map_has_a_row_per_checkpoint_and_cells_around_their_index(
    over_training: xr.Dataset, value: str
) -> None:
    ax = plot.loss_map(over_training, value)
    mesh = mesh_of(ax)
    cells = over_training.value.sel(score="loss") if value == "loss" else over_training.slope
    np.testing.assert_array_equal(np.asarray(mesh.get_array()), cells)
    corners = mesh.get_coordinates()
    np.testing.assert_array_equal(corners[0, :, 0], np.arange(9) + 0.5)
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["4", "30", "200"]
    assert ax.get_xscale() == "log" and ax.yaxis_inverted()


def test_the_slope_is_centred_on_zero_and_the_loss_is_not(over_training: xr.Dataset) -> None:
    slope, loss = (mesh_of(plot.loss_map(over_training, value)) for value in ("slope", "loss"))
    reach = float(abs(over_training.slope).max())
    assert slope.get_clim() == (-reach, reach)
    own = over_training.value.sel(score="loss")
    assert loss.get_clim() == (float(own.min()), float(own.max()))
    units = [mesh.colorbar.ax.get_ylabel() for mesh in (slope, loss) if mesh.colorbar is not None]
    assert units == ["d loss / d log index (nats)", "loss (nats)"]


def test_results_over_training_know_their_pictures(
    curve: xr.Dataset, over_training: xr.Dataset, scores: xr.Dataset
) -> None:
    assert PICTURES.of(over_training) is plot.loss_map
    assert PICTURES.of(scores) is plot.heads_over_training
    assert PICTURES.of(curve) is plot.loss_by_index


def test_many_checkpoints_get_few_tick_labels(over_training: xr.Dataset) -> None:
    many = xr.concat([over_training.isel(step=0)] * 60, "step").assign_coords(step=range(60))
    ticks = [tick.get_text() for tick in plot.loss_map(many).get_yticklabels()]
    assert len(ticks) == 12 and (ticks[0], ticks[-1]) == ("0", "59")


def test_the_best_heads_of_the_last_checkpoint_are_named_with_their_bands(scores: xr.Dataset) -> None:
    ax = plot.heads_over_training(scores, "previous_token", top=2)
    last = scores.value.sel(score="previous_token").isel(step=-1)
    best = sorted(((float(last[i, j]), i, j) for i in range(2) for j in range(4)), reverse=True)[:2]
    assert legend(ax) == [*(f"L{layer}H{head}" for _, layer, head in best), "chance"]
    assert len(ax.lines) == 8 + 1 and len(ax.collections) == 2
    drawn = {line.get_label(): line for line in ax.lines}
    for _, layer, head in best:
        values = scores.value.sel(score="previous_token", layer=layer, head=head)
        np.testing.assert_array_equal(drawn[f"L{layer}H{head}"].get_ydata(), values)
        np.testing.assert_array_equal(drawn[f"L{layer}H{head}"].get_xdata(), [4, 30, 200])
    assert ax.get_ylabel() == "previous token (attention mass)"


def test_scores_without_intervals_and_chance_are_drawn_as_lines(scores: xr.Dataset) -> None:
    ax = plot.heads_over_training(scores[["value"]], top=100)
    assert len(ax.lines) == 8 and not ax.collections


def test_errors_name_the_nearest_valid_thing(over_training: xr.Dataset, scores: xr.Dataset) -> None:
    with pytest.raises(KeyError, match=r"no score 'inductoin'.*nearest: induction"):
        plot.heads_over_training(scores, "inductoin")
    with pytest.raises(KeyError, match="no score 'loss'"):
        plot.heads_over_training(over_training, "loss")
    with pytest.raises(KeyError, match="no value 'slop' in a loss map; nearest: slope"):
        plot.loss_map(over_training, "slop")
