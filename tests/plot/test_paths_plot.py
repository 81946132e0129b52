"""The bars of `loss_by_order` are the losses of the result, its whiskers the intervals."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr

import interp
from interp import plot
from interp.residual import paths, term_importance


@pytest.fixture(scope="module")
def result() -> xr.Dataset:
    model = interp.HookedTransformer.from_pretrained("groundtruth-induction")
    return term_importance(model, ["abcdabcdabcd", "xyzwxyzwxyzw", "qwerqwerqwer"])


def test_bars_are_the_guess_and_the_loss_of_every_order(result: xr.Dataset) -> None:
    figure, ax = plt.subplots()
    assert plot.loss_by_order(result, ax=ax) is ax
    figure.canvas.draw()
    bars = ax.containers[-1]
    heights = [bar.get_height() for bar in bars]
    assert heights == pytest.approx([np.log(64), *result.value.sel(score="loss").values[:3]])
    names = [label.get_text() for label in ax.get_xticklabels()]
    assert names == [
        "uniform\nguess", "direct path", "+ 8 terms\nof order 1", "+ 16 terms\nof order 2\n= the model",
    ]  # fmt: skip
    assert ax.get_ylabel() == "loss (nats per token)" and ax.get_xlabel() and ax.get_title()
    assert [text.get_text() for text in ax.texts] == [f"{height:.2f}" for height in heights]


def test_whiskers_are_the_intervals(result: xr.Dataset) -> None:
    ax = plot.loss_by_order(result)
    (lines,) = ax.collections
    ends = np.array([segment[:, 1] for segment in lines.get_segments()])
    np.testing.assert_allclose(ends[1:, 0], result.low.sel(score="loss")[:3])
    np.testing.assert_allclose(ends[1:, 1], result.high.sel(score="loss")[:3])
    assert ends[0, 0] == ends[0, 1], "a guess has no spread"


def test_one_row_without_an_interval_is_drawn_and_nothing_global_changes(result: xr.Dataset) -> None:
    before = dict(mpl.rcParams)
    bare = result.assign(low=result.low * np.nan, high=result.high * np.nan)
    ax = plot.loss_by_order(bare)
    ax.figure.canvas.draw()
    assert len(ax.texts) == 4
    assert dict(mpl.rcParams) == before


def test_paths_are_drawn_by_the_waterfall_of_attribution() -> None:
    model = interp.HookedTransformer.from_pretrained("groundtruth-induction")
    ax = plot.attribution(paths(model, "abcdefabc", "d", "e"), top=3)
    assert ax.get_yticklabels()[0].get_text() == "L1H2"
