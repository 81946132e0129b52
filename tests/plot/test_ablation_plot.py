"""Maps and bars show the effects of the result and its intervals; what was not changed is left white."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr

from interp import HookedTransformer
from interp.causal import ablate, recall, short_circuit
from interp.model.edits import Resample, Zero
from interp.passes.metrics import logit_difference
from interp.plot.ablation import ablation, recall_curve, recall_map
from tests.configs import build, some_tokens

TOKENS = some_tokens()
METRIC = logit_difference([3, 4, 5], [6, 7, 8])


def model() -> HookedTransformer:
    return HookedTransformer(build("gpt2"), None)


@pytest.fixture(scope="module")
def recited() -> xr.Dataset:
    span = torch.zeros(3, 9, dtype=torch.bool)
    span[:, 4:] = True
    return recall(model(), TOKENS, span, [0, range(2), 1])


def test_two_dims_are_a_map_with_numbers_and_white_where_nothing_changed() -> None:
    corrupt = TOKENS.clone()
    corrupt[:, 6:] = some_tokens(seed=1)[:, 6:]
    how = {"change": Resample(), "reference": corrupt, "metric": METRIC, "by": ("layer", "pos")}
    result = ablate(model(), TOKENS, "mlp", **how)  # type: ignore[arg-type]
    figure, ax = plt.subplots()
    assert ablation(result, ax=ax) is ax
    figure.canvas.draw()
    shown = np.ma.filled(ax.images[0].get_array(), np.nan)
    assert np.isnan(shown[:, :6]).all()
    np.testing.assert_allclose(shown, result.value.where(result.changed))
    np.testing.assert_allclose(shown[0, 6:], result.value[0, 6:])
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("pos", "layer")
    assert ax.images[0].colorbar.ax.get_ylabel() == "change of logit difference (logits)"
    assert ax.get_title() == "every mlp: resample, n = 3"
    assert ax.texts[-1].get_text() == f"{float(result.value[1, 8]):+.2f}"


def test_one_dim_is_bars_with_intervals() -> None:
    sets = [["L0H1", "L1.mlp"], "L0.mlp"]
    for result, title in (
        (short_circuit(model(), TOKENS, metric=METRIC), "attention pattern = identity, n = 3"),
        (ablate(model(), TOKENS, sets, change=Zero(), metric=METRIC), "named parts: zero, n = 3"),
    ):
        ax = ablation(result)
        ax.figure.canvas.draw()
        assert [bar.get_height() for bar in ax.containers[-1]] == pytest.approx(list(result.value.values))
        (lines,) = ax.collections
        ends = np.array([segment[:, 1] for segment in lines.get_segments()])
        np.testing.assert_allclose(ends, np.stack((result.low, result.high), 1))
        assert ax.get_ylabel() == "change of logit difference (logits)" and ax.get_title() == title


def test_other_dims_are_refused() -> None:
    result = ablate(model(), TOKENS, change=Zero(), metric=METRIC, by=("layer", "pos", "head"))
    with pytest.raises(ValueError, match="one or two dims"):
        ablation(result)
    assert ablation(result.sel(pos=8)).get_xlabel() == "head"


def test_a_curve_has_the_whole_model_and_every_single_layer(recited: xr.Dataset) -> None:
    ax = recall_curve(recited, "loss", label="mine")
    assert [x.get_text() for x in ax.get_xticklabels()] == ["none", "L0.attn", "L1.attn"]
    points = next(line for line in ax.lines if line.get_marker() == "o")
    np.testing.assert_allclose(
        points.get_ydata(), recited.value.sel(score="loss", part=["none", "L0.attn", "L1.attn"])
    )
    assert ax.get_ylabel() == "loss (nats per token)"
    assert ax.get_legend_handles_labels()[1] == ["mine"]


def test_a_map_has_every_range_at_its_ends(recited: xr.Dataset) -> None:
    ax = recall_map(recited, "entropy")
    shown = np.ma.filled(ax.images[0].get_array(), np.nan)
    entropy = recited.value.sel(score="entropy")
    np.testing.assert_allclose(shown[0], entropy.sel(part=["L0.attn", "L0.attn+L1.attn"]))
    assert np.isnan(shown[1, 0]) and shown[1, 1] == float(entropy.sel(part="L1.attn"))
    with pytest.raises(KeyError, match="nearest: token_accuracy"):
        recall_map(recited, "accuracy")
