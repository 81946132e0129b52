"""The plot of sparse probes shows the scores it was given, their intervals and their null."""

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.container import ErrorbarContainer

from interp import HookedTransformer
from interp.features import probe, probe_neurons
from interp.plot.probing import WORDS, probing
from tests.configs import build, some_tokens


@pytest.fixture(scope="module")
def result() -> xr.Dataset:
    labels = torch.arange(40) % 2 == 0
    model = HookedTransformer(build("gpt2", torch.float32))
    return probe_neurons(model, some_tokens(rows=40), labels, sizes=(1, 2, 4), shuffles=2)


@pytest.mark.parametrize("score", WORDS)
def test_lines_intervals_and_null_are_the_results(result: xr.Dataset, score: str) -> None:
    _, ax = plt.subplots()
    before = dict(mpl.rcParams)
    assert probing(result, score, ax=ax) is ax and dict(mpl.rcParams) == before
    bars = [c for c in ax.containers if isinstance(c, ErrorbarContainer)]
    assert [bar.get_label() for bar in bars] == ["layer 0", "layer 1"]
    dashed = [line for line in ax.get_lines() if line.get_linestyle() == "--"]
    for i, bar in enumerate(bars):
        line = result.sel(layer=i, score=score)
        np.testing.assert_allclose(bar.lines[0].get_ydata(), line.value)
        ends = np.array(bar.lines[2][0].get_segments())[:, :, 1]
        np.testing.assert_allclose(ends, np.stack([line.low, line.high], 1), atol=1e-12)
        np.testing.assert_allclose(dashed[i].get_ydata(), line.null)
        low, high = ax.get_ylim()
        assert low <= ends.min() and ends.max() <= high
    assert ax.get_xlabel() == "neurons read" and WORDS[score] in ax.get_ylabel()
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "2", "4"]


def test_one_probe_without_null_is_one_line() -> None:
    labels = torch.arange(40) % 2 == 0
    ax = probing(probe(torch.randn(40, 6), labels, sizes=(1, 2), shuffles=0))
    box = ax.get_legend()
    assert box is not None and [text.get_text() for text in box.get_texts()] == ["probe"]


def test_an_unknown_score_is_refused(result: xr.Dataset) -> None:
    with pytest.raises(KeyError, match="no score 'f2' of a probe; nearest: f1"):
        probing(result, "f2")
