"""The composition map shows the numbers it was given, in the place of their pair, and makes the strongest one plain."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.axes import Axes

import interp
from interp import plot
from interp.model import ModelConfig, Transformer
from interp.weights import composition


@pytest.fixture(scope="module")
def planted() -> xr.Dataset:
    return composition(interp.HookedTransformer.from_pretrained("groundtruth-induction"), "K")


def scores(n_layers: int, n_heads: int) -> xr.Dataset:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(n_layers, 4 * n_heads, n_heads, 8, 11)).requires_grad_(False)
    return composition(model, "Q")


def drawn(ax: Axes) -> np.ndarray:
    return np.ma.filled(ax.images[0].get_array(), np.nan)


def names(labels: list) -> list[str]:  # type: ignore[type-arg]
    return [label.get_text() for label in labels]


@pytest.mark.parametrize("value", ["excess", "value", "relative"])
def test_every_pair_has_its_cell(value: str) -> None:
    result = scores(3, 4)
    ax = plot.composition(result, value)
    cells = drawn(ax)
    assert cells.shape == (8, 8)
    rows, columns = names(ax.get_yticklabels()), names(ax.get_xticklabels())
    assert rows == [f"L{layer}H{head}" for layer in (0, 1) for head in range(4)]
    assert columns == [f"L{layer}H{head}" for layer in (1, 2) for head in range(4)]
    for row, column in [(0, 0), (3, 6), (5, 7)]:
        assert cells[row, column] == float(result[value].sel(src=rows[row], dst=columns[column]))
    assert np.isnan(cells[4:, :4]).all()
    assert np.isfinite(cells[:4]).all() and np.isfinite(cells[4:, 4:]).all()


def test_the_planted_pair_is_framed_and_named(planted: xr.Dataset) -> None:
    ax = plot.composition(planted)
    (frame,) = ax.patches
    assert (frame.get_x(), frame.get_y()) == (1.5, 0.5)  # type: ignore[attr-defined]
    assert ax.get_title() == "K-composition of heads: excess\nL0H1 → L1H2"
    assert drawn(ax)[1, 2] == float(planted.excess.max())
    other = planted.assign(
        excess=planted.excess.fillna(0).where(planted.excess.notnull()).transpose("dst", ...)
    )
    np.testing.assert_array_equal(drawn(plot.composition(other)), drawn(ax))


def test_maps_can_share_the_ends_of_their_colours(planted: xr.Dataset) -> None:
    assert plot.composition(planted, limit=7.5).images[0].get_clim() == (-7.5, 7.5)
    assert plot.composition(planted, "value", limit=0.5).images[0].get_clim() == (0.0, 0.5)


def test_frames_are_those_of_the_largest_numbers() -> None:
    result = scores(3, 4)
    ax = plot.composition(result, mark=5)
    places = [(int(p.get_y() + 0.5), int(p.get_x() + 0.5)) for p in ax.patches]  # type: ignore[attr-defined]
    cells = drawn(ax)
    assert sorted(cells[p] for p in places) == sorted(cells[np.isfinite(cells)])[-5:]
    assert ax.get_title().count("→") == 5
    assert not plot.composition(result, mark=0).patches


def test_signed_colours_are_centred_and_the_bar_names_the_unit(planted: xr.Dataset) -> None:
    image = plot.composition(planted, "excess").images[0]
    low, high = image.get_clim()
    assert low == -high == -float(np.abs(planted.excess).max())
    assert image.colorbar is not None and image.colorbar.ax.get_ylabel() == "ratio above the null"
    assert plot.composition(planted, "value").images[0].get_clim() == (0, float(planted.value.max()))


def test_many_heads_are_named_by_their_layer() -> None:
    ax = plot.composition(scores(4, 10))
    assert names(ax.get_yticklabels()) == ["0", "1", "2"]
    assert names(ax.get_xticklabels()) == ["1", "2", "3"]
    assert ax.get_yticks().tolist() == [4.5, 14.5, 24.5]
    assert "layer" in ax.get_ylabel()


def test_it_draws_on_given_axes_and_changes_no_global_state(planted: xr.Dataset) -> None:
    figure, ax = plt.subplots()
    before = dict(mpl.rcParams)
    assert plot.composition(planted, ax=ax) is ax
    figure.canvas.draw()
    assert dict(mpl.rcParams) == before
    assert ax.get_xlabel() == "destination head (reads)"


def test_errors_say_what_was_required(planted: xr.Dataset) -> None:
    with pytest.raises(
        KeyError, match=r"value must be one of excess, value, relative, got 'exces'; nearest: excess"
    ):
        plot.composition(planted, "exces")
    with pytest.raises(ValueError, match="at least 0 marked pairs are required, got -1"):
        plot.composition(planted, mark=-1)
