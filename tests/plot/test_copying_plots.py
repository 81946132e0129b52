"""The disc and the plane show the numbers they were given and name the induction heads."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr

from interp import plot

VALUES = torch.tensor([2.0, -2.0, 0.2j, 0.002, 0.0])


def table() -> xr.Dataset:
    """Head 1.0 copies and matches, 1.1 only copies; layer 0 has nothing to match."""
    cells = {
        "eigenvalue": [[0.1, -0.2], [0.9, 0.8]],
        "matching": [[np.nan, np.nan], [0.7, -0.5]],
        "induction": [[0.9, 0.0], [0.6, 0.1]],
    }
    return xr.Dataset(
        {name: (("layer", "head"), np.array(v)) for name, v in cells.items()},
        coords={"layer": [0, 1], "head": [0, 1]},
    )


def test_the_largest_eigenvalue_is_on_the_circle_and_each_decade_a_step_inwards() -> None:
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
    ax = plot.copying_plane(table())
    shown = np.ma.filled(ax.collections[0].get_offsets(), np.nan)
    np.testing.assert_array_equal(shown, [(np.nan, np.nan), (np.nan, np.nan), (0.9, 0.7), (0.8, -0.5)])
    assert [(text.get_text(), text.xy) for text in ax.texts] == [("1.0", (0.9, 0.7))]  # type: ignore[attr-defined]
    assert ax.figure.axes[-1].get_ylabel() == "induction score (attention mass)"
    everybody = plot.copying_plane(table(), label=0.0)
    assert [text.get_text() for text in everybody.texts] == ["1.0", "1.1"]


def test_neighbours_share_a_text_and_others_do_not() -> None:
    close = table()
    for score, values in (("eigenvalue", (0.95, 1.0)), ("matching", (0.9, 0.95))):
        close[score].values[1] = values
    assert [text.get_text() for text in plot.copying_plane(close, label=0.0).texts] == ["1.0, 1.1"]


def test_without_induction_scores_no_head_is_named() -> None:
    ax = plot.copying_plane(table().drop_vars("induction"))
    assert len(ax.texts) == 0 and len(ax.figure.axes) == 1


@pytest.mark.parametrize("draw", ["disc", "plane"])
def test_they_draw_on_the_axes_they_are_given_and_name_them(draw: str) -> None:
    before, (figure, ax) = dict(mpl.rcParams), plt.subplots()
    made = plot.eigenvalue_disc(VALUES, ax=ax) if draw == "disc" else plot.copying_plane(table(), ax=ax)
    assert made is ax
    assert ax.get_xlabel() and ax.get_ylabel() and ax.get_title()
    figure.canvas.draw()
    assert dict(mpl.rcParams) == before


def test_what_cannot_be_shown_is_refused() -> None:
    with pytest.raises(KeyError, match="no 'matching' in this table"):
        plot.copying_plane(table().drop_vars("matching"))
    with pytest.raises(ValueError, match="at least one decade is required, got 0"):
        plot.eigenvalue_disc(VALUES, decades=0)
