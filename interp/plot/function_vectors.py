"""Average indirect effects of heads as a map, and what function vectors do next to their nulls."""

from __future__ import annotations

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from interp.core.boundary import public
from interp.core.damaged import WHOLE, label_flaw
from interp.core.results import check_result, in_order
from interp.core.wording import nearest
from interp.plot.canvas import axes, draw_heads, printable, score_of
from interp.views.function_vectors import effect_map

NULL = "random heads"
MARKS = ("o", "s", "^", "D")


@public()
def average_indirect_effect(result: xr.Dataset, task: str | None = None, *, ax: Axes | None = None) -> Axes:
    """The average indirect effect of every head as a layer x head map: blue where it brings the answer back.

    A frame marks heads whose interval, of the effect minus that of the null, lies above 0 (of all tasks only).

    Args:
        result: what `interp.causal.average_indirect_effect` returned.
        task: one task, whose mean effects are drawn; None: the mean over all.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: a task that is not there.

    Example:
        >>> pairs, lists = [([i], [i + 1]) for i in range(3, 12)], interp.tasks.PairLists(shots=3, rows=3)
        >>> found = interp.causal.average_indirect_effect(model, {"next": pairs}, lists=lists)
        >>> average_indirect_effect(found)
    """
    check_result("result", result, ("value", "beyond", "by_task"), "interp.causal.average_indirect_effect")
    result = in_order("result", result, {"layer": None, "head": None})
    cells = result.value if task is None else result.by_task.sel(task=_one_of(result, "task", task))
    marked = (result.beyond.sel(estimate="low") > 0).to_numpy() if task is None else None
    label = f"change of {result.attrs['metric']} ({result.attrs['unit']})"
    name = "all tasks" if task is None else task
    view = effect_map(cells.to_numpy(), marked, label, f"average indirect effect, {_title_of(name)}")
    return draw_heads(ax, view, cells)


@public()
def function_vectors(
    result: xr.Dataset,
    score: str = "accuracy",
    *,
    setting: str = "zero-shot",
    layer: int | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A score of every task without a vector, with the function vector and with others; grey, random heads.

    Points have 95 % intervals over the pairs set aside. The grey bar is the middle 95 % of vectors of random heads.

    Args:
        result: what `interp.causal.function_vectors` returned.
        score: "accuracy", "probability", or the change of one of them.
        setting: which prompts: "zero-shot", "shuffled labels" or a template.
        layer: after which block the vectors are added; None: the first of the result.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: a score, a setting or a layer that is not there.

    Example:
        >>> pairs, lists = [([i], [i + 1]) for i in range(3, 12)], interp.tasks.PairLists(shots=3, rows=3)
        >>> found = interp.causal.function_vectors(model, {"next": pairs}, top=2, random=3, lists=lists)
        >>> function_vectors(found, "probability", setting="shuffled labels")
    """
    check_result("result", result, ("value", "band", "setting", "vector"), "interp.causal.function_vectors")
    if result.sizes["end"] != 2:
        raise ValueError("result must be a whole result, with both ends of the band, got one without an end")
    some = score_of(result, score).sel(setting=_one_of(result, "setting", setting))
    layer = int(result.layer[0]) if layer is None else layer
    some = some.sel(layer=_one_of(result, "layer", layer))
    ax = axes(ax, 2.4 + 1.1 * result.sizes["task"], 4.0)
    place, names = np.arange(result.sizes["task"]), [str(name) for name in result.vector.values]
    low, high = some.band.transpose("end", "task").to_numpy()
    ax.bar(place, high - low, 0.8, low, color="0.5", alpha=0.25, label=f"{result.sizes['draw']} {NULL}")
    for i, name in enumerate(names):
        cells = some.sel(vector=name)
        ends = np.abs(np.stack((cells.low, cells.high)) - cells.value.to_numpy())
        shift = 0.6 * (i / max(1, len(names) - 1) - 0.5)
        ax.errorbar(place + shift, cells.value, yerr=ends, fmt=MARKS[i], markersize=5, capsize=2, label=name)
    ax.set_xticks(place, [_title_of(str(task)) for task in result.task.values], rotation=20)
    ax.set_ylabel(f"{score.replace('_', ' ')} ({some['unit'].item()})")
    ax.set_title(f"{_title_of(setting)}, after block {layer}; n = {int(some.n.max())}")
    ax.legend(title="vector", fontsize="small", edgecolor="none", loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return ax


def _title_of(name: str) -> str:
    """The name of a task or a setting as matplotlib writes it, its spaces as spaces."""
    return printable(name).replace("·", " ")


def _one_of(result: xr.Dataset, dim: str, label: str | int) -> str | int:
    """A label of a dim; KeyError naming the nearest for one that is not there, ValueError for a dim without labels."""
    if flaw := label_flaw(result, dim):
        raise ValueError(WHOLE.format("result", flaw))
    known = result[dim].values.tolist()
    if label not in known:
        raise KeyError(f"no {dim} {label!r} in this result; {nearest(str(label), map(str, known))}")
    return label
