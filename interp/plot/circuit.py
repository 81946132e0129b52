"""A circuit as a layered graph, and how faithful circuits are over their size."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from interp.causal.graph import INPUT, LOGITS
from interp.circuits.edge_circuit import Circuit
from interp.core.boundary import public
from interp.core.kinds import PositiveCount
from interp.core.results import check_result
from interp.model.parts import Part
from interp.plot.canvas import COLOURS, axes, curve

BOX = (0.76, 0.4)
"""Width and height of a node, where neighbours stand 1 apart."""
NARROWEST = 3.5
"""Distance of the outermost nodes below which there is blank space at the sides."""
PORTS = {"q": -0.25, "k": 0.0, "v": 0.25}
"""Where a head's queries, keys and values enter, from the middle of its lower side."""
FOR, AGAINST = (to_hex(colormaps[COLOURS["signed"]](shade)) for shade in (0.9, 0.1))
THIN, THICK = 0.5, 4.5
"""Line widths of a score of 0 and of the largest, in points."""
STYLES = {"found": "-", "random": ":", "degree-matched": "--"}


@public()
def circuit(found: Circuit | xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """The circuit's nodes in the order of the forward pass, the input below, heads with their q, k and v inputs.

    An arrow is an edge, as wide as its absolute score, coloured by whether what the score is the effect of (its clean
    value in the corrupted run, or the other way round) raises the metric or lowers it. Keys and values that several
    heads share enter each of those that are drawn.

    Args:
        found: a circuit, or the result of `find_circuit`.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        ValueError: a circuit without edges.

    Example:
        >>> scores = {"L0.resid->L0.mlp": 1.0, "L0.mlp->logits": 2.0}
        >>> ax = circuit(Circuit(interp.causal.EdgeGraph.of(model.cfg), scores))
    """
    found = Circuit.of_result(found) if isinstance(found, xr.Dataset) else found
    if not found.edges:
        raise ValueError("a circuit with at least one edge is required, got none")
    places = _places(found)
    ax = _graph_axes(ax, places)
    reach = max(abs(score) for score in found.scores.values()) or 1.0
    for edge, score in sorted(found.scores.items(), key=lambda item: abs(item[1])):
        for arrow in _arrows(found, edge, places, score, reach):
            ax.add_patch(arrow)
    for node, (x, y) in places.items():
        _draw_node(ax, node, x, y, head=Part.of(node).kind == "head")
    ax.set_title(_title(found), fontsize="medium")
    _explain(ax, found, reach)
    return ax


@public()
def feature_circuit(result: xr.Dataset, *, top: PositiveCount = 24, ax: Axes | None = None) -> Axes:
    """The features and errors of a circuit in the order of their layers, the metric on top, and the edges between them.

    An arrow is an edge, as wide as the size of its weight; blue speaks for the metric (what the sender is in the clean
    run raises it), red against it. Errors are grey.

    Args:
        result: what `interp.circuits.feature_circuit` returned.
        top: most nodes that are drawn, those of the largest effects; the title says of how many.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        ValueError: a result of something else.

    Example:
        >>> eye, zero = torch.eye(24), torch.zeros(24)
        >>> weights = {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero}
        >>> sae = interp.features.Dictionary(interp.features.ReLU(), weights, reads="blocks.1.hook_resid_post")
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> asked = {"metric": interp.logit_difference(3, 4), "node_threshold": 0.0, "most": 8}
        >>> found = interp.circuits.feature_circuit(model.with_dictionaries([sae]), *pairs, **asked)
        >>> ax = feature_circuit(found)
    """
    check_result("result", result, ("node", "edge_value", "error_share"), "feature_circuit")
    order = np.argsort(-np.abs(result.value.to_numpy()), kind="stable")[:top]
    shown = result.isel(node=np.sort(order))
    names = [*map(str, shown.node.to_numpy()), LOGITS]
    weights = result.edge_value.sel(sender=names[:-1], receiver=names).to_numpy()
    weights = -weights if result.attrs["direction"] == "noise" else weights
    places = _feature_places(shown)
    ax = _graph_axes(ax, places)
    reach = float(np.nanmax(np.abs(weights), initial=0.0)) or 1.0
    for sender, receiver in np.argwhere(~np.isnan(weights)):
        weight = float(weights[sender, receiver])
        ends = places[names[sender]], places[names[receiver]]
        ax.add_patch(_arrow(*ends, weight, reach, FOR if weight > 0 else AGAINST))
    for node, (x, y) in places.items():
        _draw_node(ax, node, x, y, shaded=".error" in node or node == LOGITS)
    more = f" of {result.sizes['node']}" if result.sizes["node"] > len(order) else ""
    ax.set_title(
        f"{len(order)}{more} nodes, {result.attrs['edges']} edges; "
        f"errors {result.attrs['errors'].partition(' of ')[0]} of the effects",
        fontsize="medium",
    )
    label = f"widest: {reach:.3g} {result.attrs['unit']}"
    handles = [
        Line2D([], [], color=colour, linewidth=THICK, label=f"{does} the {result.attrs['metric']}")
        for colour, does in ((FOR, "raises"), (AGAINST, "lowers"))
    ]
    ax.legend(handles=handles, title=label, fontsize="small", title_fontsize="small", loc="upper center",
              bbox_to_anchor=(0.5, 0.0), frameon=False)  # fmt: skip
    return ax


def _feature_places(result: xr.Dataset) -> dict[str, tuple[float, float]]:
    """Where every node stands: one row per layer that has one, the metric in the middle of the row above."""
    layers = [Part.of(part).layer or 0 for part in result.part.to_numpy().tolist()]
    rows: dict[int, list[str]] = {}
    for name, layer in zip(result.node.to_numpy().tolist(), layers, strict=True):
        rows.setdefault(layer, []).append(str(name))
    places = {
        node: (i - (len(rows[layer]) - 1) / 2, float(height))
        for height, layer in enumerate(sorted(rows))
        for i, node in enumerate(rows[layer])
    }
    return {**places, LOGITS: (0.0, float(len(rows)))}


def _graph_axes(ax: Axes | None, places: dict[str, tuple[float, float]]) -> Axes:
    """Axes without frame in which nodes stand 1 apart."""
    left, right, top = (f(place[i] for place in places.values()) for f, i in ((min, 0), (max, 0), (max, 1)))
    spare = max(0.0, NARROWEST - (right - left)) / 2 + 0.6
    ax = axes(ax, 0.3 + 0.95 * (right - left + 2 * spare), 1.4 + 0.95 * top)
    ax.set_xlim(left - spare, right + spare)
    ax.set_ylim(-0.4, top + 0.4)
    ax.set_axis_off()
    return ax


@public()
def circuit_curve(
    result: xr.Dataset, *, label: str = "found", circuits: Sequence[str] | None = None, ax: Axes | None = None
) -> Axes:
    """The faithfulness of `interp.circuits.circuit_curve` over the share of edges, with bands.

    Args:
        result: what `interp.circuits.circuit_curve` returned.
        label: a name for the legend, where several results share an Axes.
        circuits: which of the result's circuits to show; None: all.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> from interp.circuits import edge_effects
        >>> pairs, metric = (torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])), interp.logit_difference(3, 4)
        >>> scores = edge_effects(model, *pairs, metric=metric)
        >>> ax = circuit_curve(interp.circuits.circuit_curve(model, *pairs, scores, metric=metric, draws=1))
    """
    ax = axes(ax, 6.0, 3.8)
    if not ax.lines:
        ax.axhline(1, color="0.6", linewidth=0.8)
        ax.axhline(0, color="0.6", linewidth=0.8)
    result = result.sortby("fraction")
    for kind in result.circuit.values.tolist() if circuits is None else circuits:
        one = result.sel(circuit=kind, score="faithfulness")
        cpr, cmd = result.value.sel(circuit=kind, score=["cpr", "cmd"]).isel(fraction=-1).values
        name = f"{label}: CPR {cpr:.2f}, CMD {cmd:.2f}" if kind == "found" else kind
        curve(ax, one.fraction, one, STYLES[kind], marker="o", markersize=3, label=name)
    ax.set_xscale("log")
    ax.set_xlabel(f"share of all edges kept (rest: {result.attrs['replacement']})")
    ax.set_ylabel(f"faithfulness\n(share of the {result.attrs['metric']})")
    ax.set_title("faithfulness by size of circuit, 95 % over prompts", fontsize="medium")
    ax.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False)
    return ax


@public()
def circuit_checks(result: xr.Dataset, *, ax: Axes | None = None) -> Axes:
    """Faithfulness of a circuit and of random ones as bars with 95 % intervals, from `evaluate_circuit`.

    Left of the line the circuit and the random ones of its size (1 = the whole effect), right of it what is lost
    without each node that was taken out (minimality). The title gives the mean and the largest incompleteness.

    Args:
        result: what `evaluate_circuit` returned.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> found = Circuit(interp.causal.EdgeGraph.of(model.cfg), {"L0.resid->L0.mlp": 1.0, "L0.mlp->logits": 1.0})
        >>> asked = {"metric": interp.logit_difference(3, 4), "draws": 2}
        >>> ax = circuit_checks(interp.evaluate_circuit(model, *pairs, found, **asked))
    """
    kinds = [kind for kind in result.circuit.values.tolist() if kind in STYLES]
    known = set(result.circuit.values.tolist())
    names = [*kinds, *(name for node in result.part.values if (name := f"without {node}") in known)]
    whole = result.sel(circuit=kinds, score="faithfulness")
    nodes = result.sel(circuit=names[len(kinds) :], score="minimality")
    values, low, high = (
        np.concatenate([each[end].to_numpy() for each in (whole, nodes)]) for end in ("value", "low", "high")
    )
    ax = axes(ax, 2.4 + 0.5 * len(names), 3.6)
    split = len(kinds)
    colours = [FOR] * split + ["0.6"] * (len(names) - split)
    ax.bar(
        range(len(names)),
        values,
        color=colours,
        yerr=np.abs((values - low, high - values)),
        capsize=3,
        width=0.7,
    )
    ax.axhline(0, color="black", linewidth=0.8)
    ax.axhline(1, color="0.6", linewidth=0.8)
    ax.axvline(split - 0.5, color="0.6", linewidth=0.8, linestyle=":")
    ax.set_xticks(range(len(names)), names, rotation=45, ha="right")
    ax.set_ylabel(f"share of the {result.attrs['metric']}")
    missing = result.value.sel(score="incompleteness")
    ax.set_title(
        f"{result.attrs['edges']} edges; incompleteness {float(missing.mean()):.2f}, "
        f"at most {float(missing.max()):.2f}",
        fontsize="medium",
    )
    return ax


ATTENTION = 1
"""Place of the heads among the rows of a layer."""


def _places(found: Circuit) -> dict[str, tuple[float, float]]:
    """Where every node stands: one row per sublayer of the circuit, heads in the middle, MLPs to the right."""
    rows: dict[tuple[int, int], list[str]] = {}
    for node in found.nodes:
        rows.setdefault(_depth(found, node), []).append(node)
    aside = max(len(row) for row in rows.values()) / 2 + 0.75
    return {
        node: (aside if depth[1] != ATTENTION else i - (len(rows[depth]) - 1) / 2, float(height))
        for height, depth in enumerate(sorted(rows))
        for i, node in enumerate(rows[depth])
    }


def _depth(found: Circuit, node: str) -> tuple[int, int]:
    """The row of a node: layer, and in it the MLP before attention, attention, and the MLP."""
    part = Part.of(node)
    if part.layer is None:
        return found.graph.n_layers, ATTENTION
    return (-1 if node == INPUT else part.layer), {"mlp_before": 0, "mlp": 2}.get(part.kind, ATTENTION)


def _arrows(
    found: Circuit, edge: str, places: dict[str, tuple[float, float]], score: float, reach: float
) -> list[FancyArrowPatch]:
    """The arrow of an edge; several where heads share what it carries."""
    sender, receiver = found.graph.index(edge)
    port = PORTS.get(Part.of(found.graph.receivers[receiver]).kind.removeprefix("group_")[0], 0.0)
    start, colour = places[found.graph.senders[sender]], _colour(found, score)
    ends = [places[node] for node in found.graph.nodes_of(receiver) if node in places]
    return [_arrow(start, end, score, reach, colour, port) for end in ends]


def _arrow(
    start: tuple[float, float],
    end: tuple[float, float],
    score: float,
    reach: float,
    colour: str,
    port: float = 0.0,
) -> FancyArrowPatch:
    """The arrow between two nodes, as wide as its score. port: where it enters, from the middle of the lower side."""
    (x, y), (to_x, to_y) = start, end
    width = THIN + (THICK - THIN) * abs(score) / reach
    bend = 0.0 if to_y - y <= 1 else 0.15 * (1 if to_x >= x else -1)
    return FancyArrowPatch(
        (x, y + BOX[1] / 2), (to_x + port, to_y - BOX[1] / 2),
        connectionstyle=f"arc3,rad={bend}", arrowstyle="-|>", mutation_scale=7 + 1.5 * width,
        shrinkA=0, shrinkB=0, linewidth=width, color=colour, alpha=0.8, zorder=1,
    )  # fmt: skip


def _draw_node(ax: Axes, node: str, x: float, y: float, *, head: bool = False, shaded: bool = True) -> None:
    width, height = BOX
    box = FancyBboxPatch(
        (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.08",
        facecolor="white" if head or not shaded else "0.92", edgecolor="0.3", linewidth=0.9, zorder=2,
    )  # fmt: skip
    ax.add_patch(box)
    ax.text(x, y + 0.07 * head, node, ha="center", va="center", fontsize=9 if len(node) < 9 else 7, zorder=3)
    for letter, shift in PORTS.items():
        if head:
            ax.text(x + shift, y - 0.12, letter, ha="center", va="center", fontsize=6, color="0.35", zorder=3)


def _title(found: Circuit) -> str:
    name = ", ".join(part for part in (found.model, found.task) if part)
    size = f"{len(found.edges)} of {len(found.graph)} edges ({100 * found.share:.2g} %)"
    return f"{name}: {size}" if name else size


def _removed(found: Circuit) -> bool:
    """Whether scores say what corrupting an edge does, instead of what its clean value does."""
    return found.protocol is not None and found.protocol.direction == "noise"


def _colour(found: Circuit, score: float) -> str:
    """Blue for an edge that speaks for the metric: its clean value raises it, corrupting it lowers it."""
    return FOR if (score < 0 if _removed(found) else score > 0) else AGAINST


def _explain(ax: Axes, found: Circuit, reach: float) -> None:
    """Write what colours and widths mean."""
    how = found.protocol
    metric = "the metric" if how is None else f"the {how.metric}"
    unit = "" if how is None else f" {how.unit}"
    done = "corrupting it" if _removed(found) else "its clean value"
    scores = found.scores.values()
    largest = {"lowers": min(scores, default=0.0), "raises": max(scores, default=0.0)}
    handles = [
        Line2D([], [], color=_colour(found, score), linewidth=THICK, label=f"{done} {does} {metric}")
        for does, score in largest.items()
        if (score > 0) == (does == "raises")
    ]
    title = f"widest: {reach:.3g}{unit}"
    ax.legend(handles=handles, title=title, fontsize="small", title_fontsize="small", loc="upper center",
              bbox_to_anchor=(0.5, 0.0), frameon=False)  # fmt: skip
