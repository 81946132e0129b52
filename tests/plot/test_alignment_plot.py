"""The map of an alignment shows the scores of what was found and of the best null; by layer alone there are curves."""

import functools

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr

from interp.causal import Descent, align
from interp.plot.alignment import alignment
from interp.views.writing import number
from tests.configs import build, some_tokens


@functools.cache
def result() -> xr.Dataset:
    answer, wrong = [3, 4, 5, 6], [7] * 4
    tokens = some_tokens(4), some_tokens(4, seed=1)
    return align(
        build("gpt2", torch.float32), *tokens, answer=answer, wrong=wrong, pos=[1, 8], descent=Descent(1)
    )


@pytest.mark.parametrize("score", ["iia", "loss", "logit difference"])
def test_a_map_holds_the_scores_and_the_best_nulls(score: str) -> None:
    ax = alignment(result(), score, tokens=["a", "$b"])
    table = result().value.sel(score=score)
    (image,) = ax.get_images()
    np.testing.assert_array_equal(image.get_array(), table.sel(swapped="found"))
    nulls = table.sel(swapped=["random subspace", "permuted variable", "re-initialised model"])
    best = (nulls.min if score == "loss" else nulls.max)("swapped").values
    assert [text.get_text().split("\n")[1] for text in ax.texts] == [
        f"({number(null)})" for null in best.flatten()
    ]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["a", "\\$b"]
    plt.close("all")


def test_one_position_is_a_line_for_all_that_was_exchanged() -> None:
    _, given = plt.subplots()
    ax = alignment(result().sel(pos=8), ax=given)
    assert ax is given
    for line, name in zip(ax.get_lines(), result().swapped.values, strict=True):
        values = result().value.sel(pos=8, score="iia", swapped=name)
        np.testing.assert_array_equal(line.get_ydata(), values)
        assert line.get_label() == name
    plt.close("all")


def test_what_cannot_be_drawn_is_refused() -> None:
    with pytest.raises(KeyError, match="no score 'acc'"):
        alignment(result(), "acc")
    with pytest.raises(ValueError, match="one token per column is required, 2, got 1"):
        alignment(result(), tokens=["a"])
    with pytest.raises(ValueError, match="a map has two dims"):
        alignment(result().expand_dims(head=[0], axis=2))
