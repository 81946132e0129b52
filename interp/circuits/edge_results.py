"""The one table of edges: effects by sender and receiver, NaN where there is no edge, and the name of every edge."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from interp.causal.effects import Measure, Table, causal
from interp.causal.graph import EdgeGraph
from interp.core.stats import Partial
from interp.passes.analysis import Analysis
from interp.passes.metrics import Metric
from interp.passes.observe import Subject

if TYPE_CHECKING:
    import xarray as xr

DIMS = ("sender", "receiver")


def edge_table(
    model: Subject,
    name: str,
    graph: EdgeGraph,
    metric: Metric,
    measure: Measure,
    attrs: Mapping[str, str | int | float],
    *,
    each: bool,
) -> Analysis:
    """The analysis of a question about the effect of every edge; `measure` gives 0 where there is no edge.

    attrs: how it was measured, `method` and `direction` among it. Without `each` only moments over prompts are kept.
    """
    coords = {"sender": graph.senders, "receiver": graph.receivers}
    table = Table(name, DIMS, coords, metric, model.text, {**attrs, "edges": len(graph)})
    found = causal(model, table, measure, each=each, pairs=True)
    return replace(found, finish=partial(_finish, inner=found.finish, graph=graph, metric=metric))


def of_graph(result: "xr.Dataset", graph: EdgeGraph) -> "xr.Dataset":
    """A result over senders and receivers without numbers where there is no edge, and with the coordinate `edge`."""
    import xarray as xr

    exists = xr.DataArray(graph.exists.numpy(), dims=DIMS)
    changed = {
        name: value.where(exists, np.array(np.nan if value.dtype.kind == "f" else 0, value.dtype))
        for name, value in result.data_vars.items()
        if set(DIMS) <= set(value.dims)
    }
    return result.assign(changed).assign_coords(edge=(DIMS, edge_names(graph)))


def edge_names(graph: EdgeGraph) -> np.ndarray:
    """The name of every edge `[sender, receiver]`, "" where there is none."""
    senders, receivers = (np.array(names, dtype=np.str_) for names in (graph.senders, graph.receivers))
    names = np.char.add(np.char.add(senders, "->")[:, None], receivers)
    return np.where(graph.exists.numpy(), names, "")


def _finish(
    merged: Partial, inner: "Callable[[Partial], xr.Dataset]", graph: EdgeGraph, metric: Metric
) -> "xr.Dataset":
    found = inner(merged)
    if found.attrs["method"] != "exact" and not bool(found.changed.any()):
        raise ValueError(f"{metric.name}: its gradient is zero in every prompt; it is constant or saturated")
    return of_graph(found, graph)
