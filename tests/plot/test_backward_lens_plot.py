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
from interp.views.lenses import word_of
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
    ax = plot.backward_lens(lens, MODEL.text.pieces, matrix=matrix, prompt=0)
    drawn = np.ma.filled(ax.images[0].get_array(), np.nan)
    np.testing.assert_array_equal(drawn, result.delta.values[0])
    assert (drawn[1, :-1] == 0).all() and drawn[1, -1] > 0
    for cell, word in words(ax).items():
        tokens = result[f"{side}_token"].values[(0, *cell)].tolist()
        pieces = [] if tokens[0] < 0 else MODEL.text.pieces(tokens)
        named = int(result.target_rank.values[(0, *cell)]) == (0 if side == "top" else MODEL.cfg.d_vocab - 1)
        assert word == ("no\nupdate" if not pieces else printable(pieces[0] if named else word_of(pieces)))
    assert matrix in ax.get_title() and {"bottom": "least", "top": "most"}[side] in ax.get_title()
    bar = ax.images[0].colorbar
    assert bar is not None and bar.ax.get_ylabel() == "norm of δ"


def test_negligible_updates_keep_their_colour_and_lose_their_word(lens: xr.Dataset) -> None:
    result = lens.sel(matrix="W_out")
    shown = words(plot.backward_lens(lens, threshold=0.5))
    share = result.relative_update.values[0]
    assert {cell for cell, word in shown.items() if word != "no\nupdate"} == {
        (int(i), int(j)) for i, j in np.argwhere(share > 0.5)
    }
    assert {cell for cell, word in shown.items() if word == "no\nupdate"} == {
        (int(i), int(j)) for i, j in np.argwhere(result.bottom_token.values[0, ..., 0] < 0)
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


def test_result_is_drawn_by_its_most_telling_matrix_and_unknown_ones_named(lens: xr.Dataset) -> None:
    assert "backward lens of W_out" in lens.view.plot().get_title()
    assert "of W_V" in lens.sel(matrix=["W_V", "W_Q"]).view.plot().get_title()
    with pytest.raises(KeyError, match="no matrix 'W_up' in this result; it has W_in, W_out"):
        plot.backward_lens(lens, matrix="W_up")


def test_the_grid_has_every_matrix_of_every_layer_at_one_token(lens: xr.Dataset) -> None:
    ax = plot.backward_lens_grid(lens, pos=-1, threshold=0.2)
    last = lens.isel(prompt=0, pos=int((~np.isnan(lens.delta.values[0, 0, 0])).sum()) - 1)
    drawn = np.ma.filled(np.ma.asarray(ax.images[0].get_array()), np.nan)
    np.testing.assert_allclose(10**drawn, (last.x * last.delta).transpose("layer", "matrix").values)
    large = (last.relative_update > 0.2).transpose("layer", "matrix").values
    expected = np.where(large, last.word.transpose("layer", "matrix").values, "")
    assert words(ax) == {
        (int(i), int(j)): printable(str(expected[i, j])) for i, j in np.argwhere(expected != "")
    }
    assert [label.get_text() for label in ax.get_xticklabels()] == lens.matrix.values.tolist()
    with pytest.raises(IndexError, match="this prompt has"):
        plot.backward_lens_grid(lens, pos=99)


def test_curves_are_means_over_the_tokens_of_a_segment_and_the_prompts(lens: xr.Dataset) -> None:
    ax = plot.backward_lens_curves(
        lens, "target_rank", segments={"two": (-2, -1), "first": [0]}, matrix="W_in"
    )
    ranks = lens.target_rank.sel(matrix="W_in")
    found = {
        line.get_label(): line.get_ydata() for line in ax.lines if not str(line.get_label()).startswith("_")
    }
    for name, places in {"two": (-2, -1), "first": (0,)}.items():
        rows = []
        for prompt in range(2):
            n = int((~np.isnan(lens.delta.values[prompt, 0, 0])).sum())
            some = ranks[prompt, :, [i % n for i in places]].astype(float)
            rows.append(some.where(some >= 0).mean("pos").values)
        masked = np.ma.masked_invalid(rows)
        np.testing.assert_allclose(np.asarray(found[name]), masked.mean(0).filled(np.nan))
    assert len(ax.lines) == 6, "a thin line for each of both prompts"
    assert [t.get_text() for t in ax.get_legend().get_texts()] == ["two", "first"]  # type: ignore[union-attr]
    assert len(plot.backward_lens_curves(lens).lines) == 9
    with pytest.raises(KeyError, match="no number 'ranks'"):
        plot.backward_lens_curves(lens, "ranks")
    with pytest.raises(ValueError, match="no prompt has an update in the segment 'none'"):
        plot.backward_lens_curves(lens, segments={"none": (99,)})


def test_ranks_and_cosines_are_maps_of_means_over_prompts() -> None:
    asked = ([PROMPT, "The cat sat on the"], [" Mary", " cat"])
    ranks, cosines = (f(MODEL, *asked) for f in (interp.lenses.gradient_rank, interp.lenses.gradient_cosines))
    drawn = ranks.view.plot().images[0]
    np.testing.assert_allclose(np.asarray(drawn.get_array()), ranks.value.mean("prompt").values)
    assert drawn.get_clim() == (0, float(ranks.tokens.mean()))
    ax = plot.gradient_cosines(cosines, matrix="W_in")
    np.testing.assert_allclose(
        ax.images[0].get_array(), cosines.value.mean("prompt").sel(matrix="W_in").values
    )
    assert "W_in" in ax.get_title() and "W_out" in cosines.view.plot().get_title()
    with pytest.raises(KeyError, match="no matrix 'W_up'"):
        plot.gradient_cosines(cosines, matrix="W_up")
