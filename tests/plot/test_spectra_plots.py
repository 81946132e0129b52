"""Spectra as curves and maps: the numbers of the result in their places, axes that say what they are."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr

from interp import HookedTransformer
from interp.plot import drawn, factored_spectrum, singular_values, spectra_map
from interp.weights import HeadCircuits, spectra
from tests.configs import build


@pytest.fixture(scope="module")
def result() -> xr.Dataset:
    return spectra(HookedTransformer(build("llama-gqa")), top=3)


def test_curves_are_the_singular_values_one_colour_per_layer(result: xr.Dataset) -> None:
    ax = singular_values(result, "OV")
    assert len(ax.lines) == 8 and ax.get_yscale() == "log"
    for line, matrix in zip(
        ax.lines, [f"blocks.{i}.attn.OV.{h}" for i in range(2) for h in range(4)], strict=True
    ):
        np.testing.assert_array_equal(line.get_ydata(), result.singular.sel(matrix=matrix).dropna("index"))
        assert line.get_linewidth() == 0.7
    assert len({tuple(line.get_color()) for line in ax.lines}) == 2
    assert [line.get_linewidth() for line in singular_values(result, "W_out").lines] == [1.4, 1.4]


def test_experts_are_thin_lines_and_no_row_of_the_map() -> None:
    found = spectra(build("granite-moe"))
    assert {line.get_linewidth() for line in singular_values(found, "W_in").lines} == {0.7}
    rows = [text.get_text() for text in spectra_map(found).get_yticklabels()]
    assert "W_router" in rows and "W_in" not in rows


def test_maps_hold_every_matrix_in_its_place(result: xr.Dataset) -> None:
    ax = spectra_map(result, "norm")
    (image,) = ax.images
    kinds = [text.get_text() for text in ax.get_yticklabels()]
    assert kinds == ["W_Q", "W_K", "W_V", "W_O", "W_gate", "W_in", "W_out"]
    for r, kind in enumerate(kinds):
        for layer in range(2):
            part = "mlp" if kind in ("W_gate", "W_in", "W_out") else "attn"
            expected = float(result.norm.sel(matrix=f"blocks.{layer}.{part}.{kind}"))
            assert float(np.asarray(image.get_array())[r, layer]) == expected
    (heads,) = spectra_map(result, kind="QK").images
    expected = float(result.stable_rank.sel(matrix="blocks.1.attn.QK.3"))
    assert float(np.asarray(heads.get_array())[1, 3]) == expected


def test_they_draw_where_they_are_told_and_change_no_global_state(result: xr.Dataset) -> None:
    before = dict(mpl.rcParams)
    _, mine = plt.subplots()
    assert singular_values(result, "QK", ax=mine) is mine
    _, other = plt.subplots()
    assert spectra_map(result, "top_share", kind="OV", ax=other) is other
    circuit = HeadCircuits(build("llama-gqa")).ov("L1H2")
    for ax in (drawn(result), spectra_map(result), factored_spectrum(circuit), drawn(circuit)):
        assert ax.get_xlabel() and ax.get_title()
    assert dict(mpl.rcParams) == before


def test_what_a_result_does_not_hold_is_refused_by_name(result: xr.Dataset) -> None:
    with pytest.raises(KeyError, match="no matrix of kind 'W_ou' in this result; nearest: "):
        singular_values(result, "W_ou")
    with pytest.raises(KeyError, match="not by head"):
        spectra_map(result, kind="W_in")
    with pytest.raises(KeyError, match="no value 'rank'"):
        spectra_map(result, "rank")
