"""The backward-lens panel shows the norms it was given, the word that each side is read by, and none for no update."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.axes import Axes

import interp
from interp import plot
from interp.plot.canvas import printable
from tests.tiny import CORPUS, hooked

PROMPT = CORPUS[0].removesuffix(" Mary.")
MODEL = hooked("gpt2")


@pytest.fixture(scope="module")
def lens() -> xr.Dataset:
    return interp.backward_lens(MODEL, [PROMPT, "The cat sat on the"], [" Mary", " cat"])


def words(ax: Axes) -> dict[tuple[int, int], str]:
    return {
        (int(t.get_position()[1]), int(t.get_position()[0])): t.get_text() for t in ax.texts if t.get_text()
    }


@pytest.mark.parametrize(("matrix", "side"), [("W_out", "bottom"), ("W_in", "top")])
def test_every_cell_has_its_norm_and_the_word_that_its_side_is_read_by(
    lens: xr.Dataset, matrix: str, side: str
) -> None:
    result = lens.sel(matrix=matrix)
    ax = plot.backward_lens(lens, MODEL.text.pieces, matrix=matrix, prompt=0, threshold=0.0)
    drawn = np.ma.filled(ax.images[0].get_array(), np.nan)
    np.testing.assert_allclose(10 ** drawn[0], result.delta.values[0, 0])
    assert np.isnan(drawn[1, :-1]).all() and np.isfinite(drawn[1, -1])
    for cell, word in words(ax).items():
        token = int(result[f"{side}_token"].values[(0, *cell, 0)])
        assert word == ("no\nupdate" if token < 0 else printable(MODEL.text.pieces([token])[0]))
    assert matrix in ax.get_title() and {"bottom": "least", "top": "most"}[side] in ax.get_title()
    bar = ax.images[0].colorbar
    assert bar is not None and bar.ax.get_ylabel() == "log10 of the norm of delta"


def test_negligible_updates_keep_their_colour_and_lose_their_word(lens: xr.Dataset) -> None:
    result = lens.sel(matrix="W_out")
    shown = words(plot.backward_lens(lens, threshold=0.5))
    share = result.relative_update.values[0]
    assert {cell for cell, word in shown.items() if word != "no\nupdate"} == {
        (int(i), int(j)) for i, j in np.argwhere(share > 0.5)
    }
    assert {cell for cell, word in shown.items() if word == "no\nupdate"} == {
        (int(i), int(j)) for i, j in np.argwhere(result.delta.values[0] == 0)
    }


def test_padding_is_left_out_and_tokens_name_the_columns(lens: xr.Dataset) -> None:
    tokens = MODEL.to_str_tokens("The cat sat on the")
    ax = plot.backward_lens(lens, MODEL.text.pieces, tokens=tokens, prompt=1)
    assert [label.get_text() for label in ax.get_xticklabels()] == [printable(t) for t in tokens]
    assert np.shape(ax.images[0].get_array()) == (2, len(tokens))
    with pytest.raises(ValueError, match=rf"one token per position is required, {len(tokens)}, got \[2\]"):
        plot.backward_lens(lens, MODEL.text.pieces, tokens=["a", "b"], prompt=1)
    named = plot.backward_lens(lens, prompt=1)
    assert [label.get_text() for label in named.get_xticklabels()] == [printable(t) for t in tokens]


def test_it_draws_on_given_axes_and_changes_no_global_state(lens: xr.Dataset) -> None:
    figure, ax = plt.subplots()
    before = dict(mpl.rcParams)
    assert plot.backward_lens(lens, MODEL.text.pieces, matrix="W_Q", ax=ax) is ax
    figure.canvas.draw()
    assert dict(mpl.rcParams) == before


def test_a_result_is_drawn_by_its_most_telling_matrix_and_an_unknown_one_is_named(lens: xr.Dataset) -> None:
    assert "backward lens of W_out" in lens.view.plot().get_title()
    assert "of W_V" in lens.sel(matrix=["W_V", "W_Q"]).view.plot().get_title()
    with pytest.raises(KeyError, match="no matrix 'W_up' in this result; it has W_in, W_out"):
        plot.backward_lens(lens, matrix="W_up")
