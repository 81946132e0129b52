"""Bars show the shares of the parts that changed, weights beside activations, with their intervals."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr

from interp.editing import diff, diff_interactions
from interp.plot import diff as drawn
from tests.configs import build, some_tokens
from tests.editing.test_difference import entries, other, with_entries


def some(**how: object) -> xr.Dataset:
    base = build("gpt2")
    names = [name for part in ("L0.mlp", "L1.attn", "unembed") for name in entries(base, part)]
    return diff(base, some_tokens(64, 4), with_entries(base, other("gpt2"), names), **how)  # type: ignore[arg-type]


def test_bars_are_the_shares_of_what_changed_with_their_intervals() -> None:
    result = some()
    figure, ax = plt.subplots()
    assert drawn(result, ax=ax) is ax
    figure.canvas.draw()
    names = [label.get_text() for label in ax.get_xticklabels()]
    assert names == ["L0.mlp", "L1.attn", "L1.mlp", "unembed"], (
        "what L1.mlp writes has changed, its weights have not"
    )
    shown = result.sel(part=names, score="share")
    heights = [[bar.get_height() for bar in group] for group in ax.containers if hasattr(group, "patches")]
    np.testing.assert_allclose(heights, shown.value)
    ends = [(low, high) for (_, low), (_, high) in ax.collections[0].get_segments()]
    np.testing.assert_allclose(ends, np.stack((shown.low[0], shown.high[0]), 1))
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["weights", "activations"]
    assert ax.get_ylabel() == "share of the change of KL divergence" and ax.get_title() == "n = 64"
    assert ax.get_xlabel() == "part of the tuned model in the base"
    plt.close(figure)


def test_the_axis_says_what_was_exchanged() -> None:
    assert (
        drawn(some(direction="noise", what=["weights"])).get_xlabel() == "part of the base in the tuned model"
    )
    base = build("gpt2")
    pairs = diff_interactions(base, some_tokens(), other("gpt2"), ["L0.mlp", "L1.mlp"])
    ax = drawn(pairs)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["L0.mlp+L1.mlp"]
    assert ax.get_xlabel() == "interaction of the two parts"
    assert drawn(some(parts=["L0.attn"], what=["weights"])).get_xlabel() == "nothing changed"
    plt.close("all")


def test_another_result_is_refused() -> None:
    with pytest.raises(ValueError, match=r"must be a result of interp.editing.diff"):
        drawn(xr.Dataset({"value": 1.0}))
