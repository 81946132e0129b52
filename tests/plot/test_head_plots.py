"""Maps of heads: the neutral colour is chance, labels stand in their cells, what is not there is refused."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr

import interp
from interp import plot
from interp.plot.heads import head_labels


@pytest.fixture(scope="module")
def table() -> xr.Dataset:
    return interp.heads(interp.HookedTransformer.from_pretrained("groundtruth-induction"))


def test_what_can_be_negative_is_drawn_around_its_chance(table: xr.Dataset) -> None:
    for score in ("copying", "copying_weights"):
        image = plot.heads(table, score).images[0]
        low, high = image.get_clim()
        cells = table.sel(score=score)
        chance = float(cells.null.mean())
        assert (cells.null == chance).all()
        assert (low + high) / 2 == pytest.approx(chance)
        assert high - chance == pytest.approx(float(np.abs(cells.value - chance).max()))
        assert image.colorbar is not None
        label = image.colorbar.ax.get_ylabel().replace("\n", " ")
        assert label == "copying score (neutral: chance)"


def test_every_label_but_none_stands_in_its_cell(table: xr.Dataset) -> None:
    before = dict(mpl.rcParams)
    ax = head_labels(table)
    assert {(t.get_text(), t.get_position()) for t in ax.texts} == {
        ("previous\ntoken", (1, 0)), ("induction", (2, 1)),
    }  # fmt: skip
    colours = np.asarray(ax.images[0].get_array())
    assert (colours[0, 0] == 1).all() and not (colours[1, 2] == 1).all()
    assert not np.array_equal(colours[0, 1], colours[1, 2])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("head", "layer") and ax.get_title()
    assert dict(mpl.rcParams) == before
    _, given = plt.subplots()
    assert head_labels(table, ax=given) is given


def test_a_score_or_label_that_is_not_there_is_refused(table: xr.Dataset) -> None:
    with pytest.raises(KeyError, match="no score 'label' in this result"):
        plot.heads(table, "label")
    with pytest.raises(KeyError, match=r"the table of interp\.heads is required"):
        head_labels(table.drop_vars("label"))
