"""How good a circuit is: faithfulness over its size (CPR, CMD), completeness, minimality, beside random circuits.

Faithfulness, CPR and CMD as in the MIB benchmark (Mueller et al. 2025, arXiv:2504.13151, and its released code,
`evaluate_area_under_curve`); completeness and minimality as in Wang et al. 2022 (arXiv:2211.00593, section 4). All are
in shares of what the metric loses between the whole model M and no edge at all:

    f(C) = (m(C) - m(empty)) / (m(M) - m(empty)),    m = mean of the metric over prompts

Intervals are percentiles of a bootstrap over prompts, the same resamples for everything in one table.
"""

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from interp.causal.graph import INPUT, LOGITS, EdgeGraph
from interp.circuits.circuit_controls import degree_matched, random_circuit
from interp.circuits.discovery import Rank, backwards, largest, worth
from interp.circuits.edge_circuit import Circuit, connected
from interp.circuits.edge_rankings import resampled
from interp.circuits.interchange import Interchange
from interp.core.results import labelled

if TYPE_CHECKING:
    import xarray as xr

FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""The shares of all edges at which the MIB benchmark evaluates."""
KINDS = ("found", "random", "degree-matched")
"""The circuits themselves; as many random edges; random edges with the same degrees in every layer."""
RESAMPLES = 1000


def faithfulness_curve(
    task: Interchange,
    scores: "xr.Dataset",
    *,
    rank: Rank = "magnitude",
    greedy: bool = False,
    fractions: Sequence[float] = FRACTIONS,
    draws: int = 3,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> "xr.Dataset":
    """The faithfulness of the best edges by their scores, over the share of edges kept.

    Returns Dataset with, for each `kind` of `KINDS`: `faithfulness` [kind, fraction], `cpr` and `cmd` [kind], each with
    `_low` and `_high`, the 95 % interval over prompts; and `edges` [fraction], how many are left once loose ends are
    pruned. CPR = area under f over the fraction, 1 is the whole model's, random edges have less; CMD = area between f
    and 1, 0 is best. Both by trapezoids between the given fractions, so with MIB's a perfect CPR is 0.999.
    The best int(fraction * all) edges are taken, as there. rank: MIB takes "helpful" for CPR (what helps first, what
    hinders last) and "magnitude" for CMD. greedy: grown from the logits backwards instead (`find_circuit`).
    scores: of `edge_attribution` or `edge_effects`, better on other prompts than the task's. The controls are means
    over `draws` random circuits (0: no controls) with as many edges as the pruned one, not pruned themselves.
    Caveats: on a small graph the smallest fractions are no edge at all, and f is 0 there. The interval knows the
    chance of the prompts, not that of the search (`edge_stability`) nor of the few random circuits (more `draws`).
    One prompt has no interval: NaN.
    Errors: ValueError for scores of another graph, fractions that do not rise within (0, 1], or a metric that is the
    same in the whole model and without any edge.

    Example:
        >>> from interp.circuits.edge_effects import edge_effects
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> task = Interchange.of(model, *pairs, metric=interp.logit_difference(3, 4))
        >>> scores = edge_effects(model, *pairs, metric=task.metric)
        >>> faithfulness_curve(task, scores, draws=1).faithfulness.dims
        ('kind', 'fraction')
    """
    graph, dice = task.graph, np.random.default_rng(seed)
    _check_scores(graph, scores, fractions)
    values = worth(scores, rank)
    sizes = [int(fraction * len(graph)) for fraction in fractions]
    picked = [backwards(graph, values, n) if greedy else largest(values, n) for n in sizes]
    found = torch.stack([connected(graph, kept) for kept in picked])
    controls = [_controls(graph, found, dice) for _ in range(draws)]
    values = task.run(torch.cat((_ends(graph), found, *controls)))
    shares = faithfulness(values, resamples, dice)
    drawn = rearrange(shares[:, len(sizes) :], "w (d k f) -> k w d f", k=2, f=len(sizes))
    curves = [shares[:, None, : len(sizes)], *(drawn if draws else ())]
    return labelled(
        "faithfulness_curve",
        {
            **_with_interval("faithfulness", ("kind", "fraction"), [c.mean(1) for c in curves]),
            **_with_interval("cpr", ("kind",), [area(c, fractions).mean(1) for c in curves]),
            **_with_interval("cmd", ("kind",), [area((1 - c).abs(), fractions).mean(1) for c in curves]),
            "edges": (("fraction",), found.sum((1, 2))),
        },
        coords={"kind": KINDS[: len(curves)], "fraction": list(fractions)},
        attrs={**_attrs(task), "rank": rank, "greedy": int(greedy), "draws": draws, "seed": seed},
    )  # fmt: skip


def evaluate_circuit(
    task: Interchange,
    circuit: Circuit,
    *,
    subsets: int = 20,
    draws: int = 10,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> "xr.Dataset":
    """Faithfulness, completeness and minimality of one circuit, with random circuits beside it.

    Returns Dataset, all in shares of the whole effect:
    `faithfulness` [kind]: f of the circuit, and the mean of `draws` random ones of either kind (`KINDS`); `overlap`
    [kind]: the share of the circuit's edges that they have. Where degrees leave little choice, matched ones have most.
    `completeness` [subset]: |f(M without K) - f(C without K)| for random subsets K of the circuit's nodes, each node in
    K with probability 1/2 (all subsets, if there are no more than `subsets`); a complete circuit breaks as the model
    does. `removed` [subset, node] says which K.
    `minimality` [node]: f(C) - f(C without the node), and `needed` [node]: the largest |f(C without K) - f(C without K
    and the node)| over no K and the random ones that leave the node: 0 says that the node does nothing.
    Nodes are knocked out by dropping every edge out of them. `_low`, `_high`: 95 % intervals over prompts (one prompt:
    NaN); `needed`, a maximum, has none.
    Caveats: Wang et al. search for the worst K; random ones find a lower bound of the incompleteness. It runs some
    nodes x subsets circuits: with `subsets=1` it is quick.
    Errors: ValueError for a circuit of another graph, or a metric that is the same in the whole model and without any
    edge.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> task = Interchange.of(model, *pairs, metric=interp.logit_difference(3, 4))
        >>> circuit = Circuit(task.graph, {"input->m0": 1.0, "m0->logits": 1.0})
        >>> evaluate_circuit(task, circuit).node.values.tolist()
        ['m0']
    """
    graph, dice = task.graph, np.random.default_rng(seed)
    if circuit.graph != graph:
        raise ValueError(f"a circuit of {graph} is required, got one of {circuit.graph}")
    kept, nodes = circuit.mask(), [node for node in circuit.nodes if node not in (INPUT, LOGITS)]
    removed, single = _subsets(len(nodes), subsets, dice), torch.eye(len(nodes), dtype=torch.bool)
    controls = [_controls(graph, kept[None], dice) for _ in range(draws)]
    knocked = [
        (kept, single), (kept, removed), (graph.exists, removed), (kept, (removed[:, None] | single).flatten(0, 1)),
    ]  # fmt: skip
    parts = [kept[None], *controls, *(_knocked_out(graph, mask, gone, nodes) for mask, gone in knocked)]
    shares = faithfulness(task.run(torch.cat((_ends(graph), *parts))), resamples, dice)
    own, drawn, *left = shares.split([1, 2 * draws, *(len(gone) for _, gone in knocked)], 1)
    same = torch.stack([(mask & kept).sum((1, 2)) / max(1, int(kept.sum())) for mask in controls]).mean(0)
    faith = torch.cat((own, rearrange(drawn, "w (d k) -> w k d", k=2).mean(2)), 1)
    return labelled(
        "evaluate_circuit",
        {
            **_with_interval("faithfulness", ("kind",), list(faith.T)),
            "overlap": (("kind",), torch.cat((torch.ones(1), same))),
            **_with_interval("completeness", ("subset",), list((left[2] - left[1]).abs().T)),
            **_with_interval("minimality", ("node",), list((own - left[0]).T)),
            "needed": (("node",), _needed(own[0] - left[0][0], left[1][0], left[3][0], removed)),
            "removed": (("subset", "node"), removed),
        },
        coords={"kind": KINDS, "node": nodes},
        attrs={**_attrs(task), "edges": len(circuit.edges), "draws": draws, "seed": seed},
    )


def _needed(
    alone: Float[Tensor, "n"],
    broken: Float[Tensor, "k"],
    deeper: Float[Tensor, "kn"],
    removed: Bool[Tensor, "k n"],
) -> Float[Tensor, "n"]:
    """The largest step that taking a node out makes: out of the circuit, or out of what is left without a subset."""
    steps = (
        (broken[:, None] - rearrange(deeper, "(k n) -> k n", k=len(removed))).abs().masked_fill(removed, 0)
    )
    return torch.cat((alone.abs()[None], steps)).amax(0)


def faithfulness(
    values: Float[Tensor, "all b"], resamples: int, dice: np.random.Generator
) -> Float[Tensor, "w c"]:
    """f of every circuit on all prompts (row 0), and on bootstrap resamples of them.

    values: the metric of the whole model, without edges, and of each circuit.
    """
    weights = resampled(values.shape[1], resamples, dice)
    full, empty, *means = (values.cpu().double() @ weights.T).unbind(0)
    if not bool((full[0] - empty[0]).abs() > 1e-9 * full[0].abs()):
        raise ValueError(
            f"the whole model and no edge at all have the same metric, {float(full[0]):.4g}: nothing to explain"
        )
    return torch.stack([(mean - empty) / (full - empty) for mean in means], 1)


def area(curve: Float[Tensor, "*n f"], fractions: Sequence[float]) -> Float[Tensor, "*n"]:
    """The area under a curve between the first and the last fraction, by trapezoids."""
    return torch.trapezoid(curve, torch.tensor(list(fractions), dtype=curve.dtype, device=curve.device))


def _with_interval(
    name: str, dims: tuple[str, ...], found: Sequence[Float[Tensor, "w *f"]]
) -> dict[str, tuple[tuple[str, ...], Tensor]]:
    """The values on all prompts and the middle 95 % of those on resamples."""
    values = torch.stack(list(found), 1) if found else torch.zeros(1, 0)
    low, high = values.quantile(torch.tensor([0.025, 0.975]).to(values), 0)
    return {name: (dims, values[0]), f"{name}_low": (dims, low), f"{name}_high": (dims, high)}


def _controls(
    graph: EdgeGraph, found: Bool[Tensor, "f sender receiver"], dice: np.random.Generator
) -> Bool[Tensor, "n sender receiver"]:
    """One random circuit of either kind for each circuit."""
    free = [random_circuit(graph, int(kept.sum()), dice) for kept in found]
    return torch.stack([*free, *(degree_matched(graph, kept, dice) for kept in found)])


def _subsets(n: int, most: int, dice: np.random.Generator) -> Bool[Tensor, "k n"]:
    """All subsets of n things, or so many random ones."""
    if 2**n <= most:
        return (torch.arange(2**n)[:, None] >> torch.arange(n)) % 2 == 1
    return torch.from_numpy(dice.random((most, n)) < 0.5)


def _ends(graph: EdgeGraph) -> Bool[Tensor, "2 sender receiver"]:
    """All edges, and none."""
    return torch.stack((graph.exists, torch.zeros_like(graph.exists)))


def _knocked_out(
    graph: EdgeGraph, kept: Bool[Tensor, "sender receiver"], which: Bool[Tensor, "k n"], nodes: Sequence[str]
) -> Bool[Tensor, "k sender receiver"]:
    """The circuit without the edges out of each set of nodes."""
    places = [graph.senders.index(node) for node in nodes]
    silent = torch.zeros(len(which), len(graph.senders), dtype=torch.bool)
    silent[:, places] = which
    return kept & ~silent[:, :, None]


def _attrs(task: Interchange) -> dict[str, str | float | int]:
    return {
        "metric": task.metric.name, "replacement": task.replacement, "prompts": len(task.pair.clean),
        "unit": "share of the metric's difference between the whole model and no edge",
    }  # fmt: skip


def _check_scores(graph: EdgeGraph, scores: "xr.Dataset", fractions: Sequence[float]) -> None:
    if tuple(scores.sender.values) != graph.senders or tuple(scores.receiver.values) != graph.receivers:
        raise ValueError("scores of the task's own graph are required, got other senders or receivers")
    rising = all(a < b for a, b in itertools.pairwise(fractions))
    if not rising or not 0 < fractions[0] <= fractions[-1] <= 1:
        raise ValueError(f"fractions that rise within (0, 1] are required, got {tuple(fractions)}")
