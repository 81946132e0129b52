"""The disc and the plane show the numbers they were given and name the induction heads."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr

import interp
from interp import plot

VALUES = torch.tensor([2.0, -2.0, 0.2j, 0.002, 0.0])


def scores(**cells: list[list[float]]) -> xr.Dataset:
    """A table of these scores, as `interp.copying` and `interp.heads` give it."""
    names = [["L0H0", "L0H1"], ["L1H0", "L1H1"]]
    dims, value = ("layer", "head", "score"), np.stack(list(cells.values()), -1)
    return xr.Dataset(
        {"value": (dims, value), "null": (dims, np.zeros_like(value))},
        coords={
            "layer": [0, 1], "head": [0, 1], "score": list(cells), "part": (("layer", "head"), names),
            "unit": ("score", ["a number"] * len(cells)),
        },
    )  # fmt: skip


def table() -> xr.Dataset:
    """Head L1H0 copies and matches, L1H1 only copies; layer 0 has nothing to match."""
    return scores(eigenvalue=[[0.1, -0.2], [0.9, 0.8]], matching=[[np.nan, np.nan], [0.7, -0.5]])


def heads() -> xr.Dataset:
    return scores(previous_token=[[0.5, 0.5], [0.0, 0.0]], induction=[[0.9, 0.0], [0.6, 0.1]])


def test_largest_eigenvalue_is_on_the_circle_and_decades_step_inwards() -> None:
    ax = plot.eigenvalue_disc(VALUES, decades=3)
    shown = np.asarray(ax.collections[0].get_offsets())
    expected = [(1, 0), (-1, 0), (0, 2 / 3), (0, 0), (0, 0)]
    np.testing.assert_allclose(shown, expected, atol=1e-6)
    assert [patch.get_radius() for patch in ax.patches] == pytest.approx([1 / 3, 2 / 3, 1])  # type: ignore[attr-defined]


def test_what_copies_is_blue_and_what_does_the_opposite_red() -> None:
    ax = plot.eigenvalue_disc(VALUES[:2])
    ax.figure.canvas.draw()
    copies, opposite = ax.collections[0].get_facecolors()  # type: ignore[attr-defined]
    assert copies[2] > copies[0] and opposite[0] > opposite[2]


def test_a_circuit_of_zeros_has_its_eigenvalues_at_the_centre() -> None:
    shown = plot.eigenvalue_disc(torch.zeros(3, dtype=torch.complex64)).collections[0].get_offsets()
    assert not np.asarray(shown).any()


def test_heads_stand_where_their_scores_are_and_induction_heads_are_named() -> None:
    ax = plot.copying_plane(table(), heads())
    shown = np.ma.filled(ax.collections[0].get_offsets(), np.nan)
    np.testing.assert_array_equal(shown, [(np.nan, np.nan), (np.nan, np.nan), (0.9, 0.7), (0.8, -0.5)])
    assert [(text.get_text(), text.xy) for text in ax.texts] == [("L1H0", (0.9, 0.7))]  # type: ignore[attr-defined]
    assert ax.figure.axes[-1].get_ylabel() == "induction score (attention mass)"
    everybody = plot.copying_plane(table(), heads(), label=0.0)
    assert [text.get_text() for text in everybody.texts] == ["L1H0", "L1H1"]


def test_neighbours_share_a_text_and_others_do_not() -> None:
    close = table()
    for score, values in (("eigenvalue", (0.95, 1.0)), ("matching", (0.9, 0.95))):
        close.value.loc[{"layer": 1, "score": score}] = list(values)
    ax = plot.copying_plane(close, heads(), label=0.0)
    assert [text.get_text() for text in ax.texts] == ["L1H0, L1H1"]


def test_without_induction_scores_no_head_is_named() -> None:
    ax = plot.copying_plane(table())
    assert len(ax.texts) == 0 and len(ax.figure.axes) == 1


@pytest.mark.parametrize("draw", ["disc", "plane"])
def test_they_draw_on_the_axes_they_are_given_and_name_them(draw: str) -> None:
    before, (figure, ax) = dict(mpl.rcParams), plt.subplots()
    made = (
        plot.eigenvalue_disc(VALUES, ax=ax) if draw == "disc" else plot.copying_plane(table(), heads(), ax=ax)
    )
    assert made is ax
    assert ax.get_xlabel() and ax.get_ylabel() and ax.get_title()
    figure.canvas.draw()
    assert dict(mpl.rcParams) == before


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(KeyError, match="no score 'matching' in this result"):
        plot.copying_plane(table().sel(score=["eigenvalue"]))
    with pytest.raises(KeyError, match="no score 'induction' in this result"):
        plot.copying_plane(table(), table())
    with pytest.raises(KeyError, match="no score 'top1' in this result"):
        plot.copying_map(table(), "top1")
    with pytest.raises(ValueError, match="at least one decade is required, got 0"):
        plot.eigenvalue_disc(VALUES, decades=0)


def test_map_is_drawn_around_chance_and_shown_without_matching_scores() -> None:
    found = interp.copying(interp.HookedTransformer.from_pretrained("groundtruth-induction"))
    ranks = found.sel(score="mean_rank")
    image = plot.copying_map(found, "mean_rank").images[0]
    np.testing.assert_array_equal(np.asarray(image.get_array()), ranks.value)
    assert sum(image.get_clim()) / 2 == pytest.approx(float(ranks.null[0, 0]))
    assert image.colorbar is not None
    label = image.colorbar.ax.get_ylabel().replace("\n", " ")
    assert label == "outputs ahead of the token (neutral: chance)"
    shown = found.view.plot()
    assert shown.get_title() == "copying by the weights: eigenvalue" and (shown.get_xlabel(), shown.get_ylabel()) == (
        "head", "layer",
    )  # fmt: skip
    assert plot.copying(table()).get_title() == "copying x matching"
