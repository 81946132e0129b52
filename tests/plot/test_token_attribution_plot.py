"""The strips of `token_attribution` hold the scores, one row per method, each relative to its own largest."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr

from interp import Batch, HookedTransformer, plot
from interp.tokens.token_attribution import token_attribution
from tests.configs import build

ROWS = Batch.of([[3, 1, 4, 1, 5], [9, 2, 6]])


@pytest.fixture(scope="module")
def results() -> dict[str, xr.Dataset]:
    model = HookedTransformer(build("gpt2"))
    return {name: token_attribution(model, ROWS, 3, method=name) for name in ("alti", "gradient_x_input")}


@pytest.mark.parametrize("prompt", [0, 1])
def test_cells_are_scores_relative_to_the_largest_of_their_row(
    results: dict[str, xr.Dataset], prompt: int
) -> None:
    _, ax = plt.subplots()
    assert plot.token_attribution(results, prompt=prompt, ax=ax) is ax
    shown, n = np.asarray(ax.images[0].get_array()), (5, 3)[prompt]
    scores = np.stack([result.value.values[prompt, :n] for result in results.values()])
    np.testing.assert_allclose(shown, scores / np.abs(scores).max(1, keepdims=True))
    assert [text.get_text() for text in ax.texts] == [f"{score:.2f}" for score in scores.flatten()]
    assert ax.images[0].get_clim() == (-1, 1)


def test_rows_are_methods_and_columns_the_tokens_without_padding(results: dict[str, xr.Dataset]) -> None:
    ax = plot.token_attribution(results, prompt=1)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["alti", "gradient_x_input"]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["<9>", "<2>", "<6>"]
    assert ax.get_xlabel() and ax.get_ylabel() and ax.get_title()
    assert ax.images[0].colorbar.ax.get_ylabel() == "value / largest of its row"


def test_a_row_of_zeros_stays_blank_and_nothing_global_changes(results: dict[str, xr.Dataset]) -> None:
    before = dict(mpl.rcParams)
    ax = plot.token_attribution({"nothing": results["alti"] * 0})
    assert (np.asarray(ax.images[0].get_array()) == 0).all()
    assert dict(mpl.rcParams) == before


def test_what_does_not_belong_together_is_refused(results: dict[str, xr.Dataset]) -> None:
    with pytest.raises(ValueError, match="at least one attribution is required"):
        plot.token_attribution({})
    other = token_attribution(HookedTransformer(build("gpt2")), torch.tensor([[1, 2, 3]]))
    with pytest.raises(ValueError, match="of the same tokens are required, 'other' has others"):
        plot.token_attribution({**results, "other": other})
    with pytest.raises(IndexError):
        plot.token_attribution(results, prompt=2)
