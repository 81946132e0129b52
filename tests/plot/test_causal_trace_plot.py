"""Maps and curves of a causal trace show its effects, their intervals, and what was restored."""

from dataclasses import replace

import matplotlib as mpl
import numpy as np
import pytest
import torch
import xarray as xr

from interp import Batch, HookedTransformer
from interp.causal import causal_trace as trace
from interp.metrics import answer_probability
from interp.plot.causal_trace import causal_trace, causal_trace_curves
from interp.views.writing import number
from tests.configs import build, some_tokens

SUBJECTS = [range(2, 4), range(1, 2), range(2, 3)]


def traced(**how: object) -> xr.Dataset:
    model = build("gpt2")
    rows = [row[:n].tolist() for row, n in zip(some_tokens(3, 7), (7, 5, 6), strict=True)]
    answers = [int(model(torch.tensor([row]))[0, -1].argmax()) for row in rows]
    given: dict = {"samples": 2, "metric": replace(answer_probability(), fewest=3)} | how
    return trace(HookedTransformer(model), Batch.of(rows), SUBJECTS, answers, **given)


@pytest.fixture(scope="module")
def result() -> xr.Dataset:
    return traced()


def test_the_map_by_roles_shows_effects_and_half_widths(result: xr.Dataset) -> None:
    ax = causal_trace(result)
    ax.figure.canvas.draw()
    shown = np.ma.filled(ax.images[0].get_array(), np.nan)
    np.testing.assert_array_equal(shown, result.value.transpose("role", "layer"))
    low, high = ax.images[0].get_clim()
    assert low == -high == -float(abs(result.value).max())
    texts = [text.get_text() for text in ax.texts]
    last = result.sel(role="last token", layer=1)
    assert texts[-1] == f"{number(float(last.value))}\n±{float(last.high - last.value):.2f}"
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names[0] == "first subject (1 of 3)" and names[-1] == "last token"
    assert texts[names.index("middle subject (0 of 3)") * 2] == "", "no prompt has it"
    assert texts[0].lstrip("−") == f"{abs(float(result.value[0, 0])):.2f}", "one prompt has no interval"
    assert texts[1] == "-" and not result.changed[1, 0], "what leaves the last block elsewhere is lost"
    assert ax.get_xlabel() == "layer restored" and f"{float(result.total[0]):.2f}" in ax.get_title()
    assert ax.figure.axes[-1].get_ylabel() == "indirect effect (probability)"


def test_the_map_of_one_prompt_has_its_tokens_and_stars_its_subject(result: xr.Dataset) -> None:
    ax = causal_trace(result, prompt=1)
    tokens = result.token.values[1, :5].tolist()
    names = [label.get_text() for label in ax.get_yticklabels()]
    assert names == [f"{word}*" if column == 1 else word for column, word in enumerate(tokens)]
    np.testing.assert_array_equal(ax.images[0].get_array(), result.each[1, :, :5].T)


def test_curves_have_the_intervals_as_bands(result: xr.Dataset) -> None:
    ax = causal_trace_curves(result, ["last subject", "last token"])
    for line, band, role in zip(ax.lines, ax.collections, ("last subject", "last token"), strict=False):
        cell = result.sel(role=role)
        np.testing.assert_array_equal(line.get_ydata(), cell.value)
        assert line.get_label() == role
        ends = band.get_paths()[0].vertices[:, 1]
        assert ends.min() == pytest.approx(float(cell.low.min()))
        assert ends.max() == pytest.approx(float(cell.high.max()))
    assert ax.get_ylabel() == "indirect effect (probability)" and ax.get_legend() is not None
    drawn = [line.get_label() for line in causal_trace_curves(result).lines]
    assert "first subject" in drawn and "middle subject" not in drawn
    with pytest.raises(KeyError, match=r"no role 'last' .*nearest: last token"):
        causal_trace_curves(result, ["last"])


def test_titles_say_what_was_restored_and_what_was_severed() -> None:
    ax = causal_trace(traced(kind="mlp", window=2, severed="attn"))
    assert ax.get_title().startswith("restoring MLP outputs\nlater attention outputs kept corrupted")
    assert ax.get_xlabel() == "centre of the 2 layers restored"
    assert ax.figure.axes[-1].get_ylabel() == "indirect effect (probability)"


def test_a_deep_model_is_drawn_without_numbers_and_nothing_global_changes(result: xr.Dataset) -> None:
    before = dict(mpl.rcParams)
    deep = result.isel(layer=[0, 1] * 24).assign_coords(layer=range(48))
    ax = causal_trace(deep)
    ax.figure.canvas.draw()
    assert not ax.texts and len(ax.get_xticks()) <= 13
    assert causal_trace_curves(deep) is not ax
    assert dict(mpl.rcParams) == before
