"""The pictures of heads, function vectors and relations show the numbers of their results."""

import functools

import numpy as np
import pytest
import xarray as xr

from interp import HookedTransformer, plot
from interp.causal import average_indirect_effect, function_vectors, linear_relation
from interp.tasks import PairLists
from tests.configs import build

TASKS = {step: [([i], [i + n]) for i in range(3, 13)] for n, step in enumerate(("next", "second"), 1)}
LISTS = PairLists(shots=3, rows=4)


@functools.cache
def model() -> HookedTransformer:
    return HookedTransformer(build("gpt2"), None)


@functools.cache
def vectors() -> xr.Dataset:
    return function_vectors(model(), TASKS, top=2, random=3, layers=[0, 1], lists=LISTS)


def test_map_of_heads_shows_the_effects_and_frames_those_above_the_null() -> None:
    found = average_indirect_effect(model(), TASKS, lists=LISTS)
    is_above = np.where(found.part.values == "L1H2", 1.0, -1.0)
    above = found.assign(beyond=found.beyond.copy(data=np.stack([is_above] * 3, -1)))
    ax = plot.average_indirect_effect(above)
    np.testing.assert_array_equal(np.asarray(ax.images[0].get_array()), found.value)
    (frame,) = ax.patches
    assert (frame.get_x(), frame.get_y()) == (1.5, 0.5)  # type: ignore[attr-defined]
    one = plot.average_indirect_effect(found, "second")
    np.testing.assert_array_equal(np.asarray(one.images[0].get_array()), found.by_task.sel(task="second"))
    with pytest.raises(KeyError, match="no task 'secnd' in this result; nearest: second"):
        plot.average_indirect_effect(found, "secnd")


def test_points_and_bars_are_scores_and_bands() -> None:
    ax = plot.function_vectors(vectors(), "probability", setting="shuffled labels", layer=1)
    cells = vectors().sel(score="probability", setting="shuffled labels", layer=1)
    bars, *points = ax.containers
    np.testing.assert_allclose([bar.get_y() for bar in bars], cells.band.sel(end="low"))
    np.testing.assert_allclose([bar.get_y() + bar.get_height() for bar in bars], cells.band.sel(end="high"))
    for container, name in zip(points, vectors().vector.values, strict=True):
        np.testing.assert_array_equal(container.lines[0].get_ydata(), cells.value.sel(vector=name))  # type: ignore[attr-defined]
        assert container.get_label() == name
    assert [label.get_text() for label in ax.get_xticklabels()] == ["next", "second"]


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(KeyError, match="no setting 'zero shot' in this result; nearest: zero-shot"):
        plot.function_vectors(vectors(), setting="zero shot")
    with pytest.raises(KeyError, match="no layer 5"):
        plot.function_vectors(vectors(), layer=5)
    with pytest.raises(KeyError, match="no score"):
        plot.function_vectors(vectors(), "loss")


def test_points_of_a_relation_are_its_scores_beside_their_nulls() -> None:
    found = linear_relation(model(), TASKS["next"], layers=[0], examples=3, only_known=False)
    ax = plot.linear_relation(found)
    assert len(ax.containers) == found.sizes["score"]
    for container, name in zip(ax.containers, found.score.values, strict=True):
        np.testing.assert_array_equal(container.lines[0].get_ydata(), found.value.sel(score=name))  # type: ignore[attr-defined]
        hollow = str(container.lines[0].get_markerfacecolor()) == "none"  # type: ignore[attr-defined]
        assert hollow == (name not in ("faithfulness", "causality"))
