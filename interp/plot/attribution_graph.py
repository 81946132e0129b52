"""An attribution graph: tokens across, layers upwards, the edges that carry most of the logits."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection

from interp.circuits.graph_influence import GIVEN, ends
from interp.core.boundary import public
from interp.core.kinds import PositiveCount
from interp.core.visible import visible
from interp.plot.canvas import axes
from interp.plot.circuit import AGAINST, FOR

MARKERS = {"embedding": "s", "logit": "s", "error": "D", "head": "^", "mlp": "p", "resid": "h"}
"""Of kinds of nodes; neurons and features are circles."""
THIN, THICK = 0.3, 4.0
"""Line widths of an edge that carries nothing and of the strongest, in points."""
NAMED = 12
"""Neurons or features that are named, those of largest effect."""


@public()
def attribution_graph(
    result: xr.Dataset, *, most: PositiveCount = 60, edges: PositiveCount = 200, ax: Axes | None = None
) -> Axes:
    """The nodes of largest effect on the logits, and the strongest edges between them.

    Tokens of the prompt stand from left to right, layers from below, the logits on top. A node is as large as its
    effect and an edge as wide as what it carries, blue where it speaks for the logits and red where against. The
    title says how much of the sizes of all effects is drawn.

    Args:
        result: what `interp.circuits.attribution_graph` or `prune_graph` returned.
        most: the most neurons, features and errors that are drawn.
        edges: the most edges that are drawn.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> graph = interp.circuits.attribution_graph(model, "one two three", most=8)
        >>> ax = attribution_graph(graph)
    """
    kind, effect = result["kind"].to_numpy(), result["effect"].to_numpy()
    inner = ~np.isin(kind, ("embedding", "logit"))
    shown = ~inner
    shown[np.argsort(-np.abs(effect) * inner, kind="stable")[:most]] = True
    source, target = ends(result)
    value = result["value"].to_numpy()
    kept = np.flatnonzero(shown[source] & shown[target])
    kept = kept[np.argsort(np.abs(value[kept]), kind="stable")[-edges:]]
    used = np.zeros(len(kind), bool)
    used[[*source[kept], *target[kept]]] = True
    places = _places(result, np.flatnonzero(shown & used))
    width = 1.0 + max(x for x, _ in places.values()) if places else 1.0
    ax = axes(ax, min(14.0, 2.0 + 0.75 * width), 5.5)
    _edges(ax, places, source[kept], target[kept], value[kept])
    _nodes(ax, result, places)
    entries = ~np.isin(kind, GIVEN)
    drawn = np.abs(effect[entries & shown & used]).sum() / max(np.abs(effect[entries]).sum(), 1e-30)
    share = f"{drawn * result.attrs['covered']:.0%} of the sizes of all effects"
    ax.set_title(f"{len(kept)} of {len(value)} edges; nodes with {share}", fontsize="medium")
    return ax


def _places(result: xr.Dataset, nodes: np.ndarray) -> dict[int, tuple[float, float]]:
    """Where each node stands: columns as wide as the most nodes that share a place in them."""
    at = defaultdict(list)
    height = {"embedding": -1, "logit": int(result.attrs["n_layers"])}
    kind, layer, pos = (result[name].to_numpy() for name in ("kind", "layer", "pos"))
    for node in nodes.tolist():
        at[int(pos[node]), height.get(kind[node], int(layer[node]))].append(node)
    places, left = {}, 0.0
    for column in range(int(pos.max()) + 1):
        here = {level: each for (where, level), each in at.items() if where == column}
        room = max([1, *map(len, here.values())])
        for level, each in here.items():
            for i, node in enumerate(each):
                places[node] = left + room / 2 + i - (len(each) - 1) / 2, float(level)
        left += room
    return places


def _edges(
    ax: Axes,
    places: dict[int, tuple[float, float]],
    source: np.ndarray,
    target: np.ndarray,
    value: np.ndarray,
) -> None:
    share = np.abs(value) / max(np.abs(value).max(initial=0.0), 1e-30)
    ax.add_collection(
        LineCollection(
            [(places[s], places[t]) for s, t in zip(source, target, strict=True)],
            colors=[FOR if x > 0 else AGAINST for x in value], linewidths=THIN + (THICK - THIN) * share,
            alpha=0.2 + 0.6 * share, zorder=1,
        )
    )  # fmt: skip


def _nodes(ax: Axes, result: xr.Dataset, places: dict[int, tuple[float, float]]) -> None:
    """The nodes with the names of the largest, tokens below their columns, layers at the side."""
    kind, effect = result["kind"].to_numpy(), result["effect"].to_numpy()
    largest = max((abs(effect[node]) for node in places if kind[node] != "logit"), default=1.0) or 1.0
    for node, (x, y) in places.items():
        size = 20 + 140 * min(1.0, abs(effect[node]) / largest)
        colour = FOR if effect[node] > 0 else AGAINST
        ax.scatter(
            [x], [y], s=size, marker=MARKERS.get(kind[node], "o"), color=colour, edgecolor="white", zorder=2
        )
    inner = [node for node in places if kind[node] not in ("embedding", "logit")]
    for node in sorted(inner, key=lambda node: -abs(effect[node]))[:NAMED]:
        name = str(result["node"].to_numpy()[node]).partition("@")[0]
        ax.annotate(name, places[node], (0, 6), textcoords="offset points", ha="center", fontsize=7, zorder=3)
    tokens = result["token"].to_numpy()
    below, above = ([node for node in places if kind[node] == each] for each in ("embedding", "logit"))
    ax.set_xticks([places[node][0] for node in below], [visible(tokens[node]) for node in below], rotation=90)
    for node in above:
        ax.annotate(tokens[node], places[node], (0, 8), textcoords="offset points", ha="center", fontsize=8)
    layers = sorted({int(y) for _, y in places.values()})
    words = {-1: "embedding", int(result.attrs["n_layers"]): "logits"}
    ax.set_yticks(layers, [words.get(layer, f"L{layer}") for layer in layers], fontsize=7)
    ax.set_ylim(-1.8, int(result.attrs["n_layers"]) + 1.5)
    for side in ("top", "right"):
        ax.spines[side].set_visible(False)
