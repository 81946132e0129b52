"""Quality of a circuit: faithfulness over its size (CPR, CMD), completeness and minimality, with random controls."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.causal.graph import INPUT, LOGITS, EdgeGraph
from interp.circuits.discovery import backwards
from interp.circuits.edge_circuit import Circuit, connected
from interp.circuits.edge_rankings import Rank, largest, worth
from interp.circuits.interchange import CircuitPasses, Replacement, masks_of, reference_of
from interp.core.kinds import Count, Seed
from interp.core.results import Score, check_finite, check_result, in_order, scored
from interp.core.stats import Moments, Partial, Rows, over
from interp.core.viewer import Brief
from interp.data.batch import Prompts
from interp.data.pairs import Pairs
from interp.data.sources import Data
from interp.data.stream import DataSource
from interp.passes.metrics import LogitFunction, Metric, as_metric
from interp.passes.observe import Model, Subject
from interp.passes.question import ByRow, Question
from interp.runs.functions import of_pairs

if TYPE_CHECKING:
    import xarray as xr

FRACTIONS = (0.001, 0.005, 0.02, 0.1, 0.5, 1.0)
"""Default shares of all edges at which a curve is evaluated."""
MIB_FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Shares of all edges at which the MIB benchmark evaluates."""
KINDS = ("found", "random", "degree-matched")
"""The circuits themselves; as many random edges; random edges with the same degrees in every layer."""
SWAPS = 10
"""Attempted swaps per edge of a random circuit; a few already forget the circuit they started from."""
SHARE = "share of the metric's difference between the whole model and no edge"


@dataclass(frozen=True, eq=False, repr=False)
class CircuitCurve(Brief, Question):
    """Faithfulness of the circuits of the best edges by score, as a function of the share of edges kept.

    The best int(fraction * all) edges are taken, and those on no path from the input to the logits pruned.

    Args:
        clean, corrupt: prompts; each pair has the same number of tokens, aligned one by one. Files and streams are
            paired row by row.
        scores: table of edge scores from `edge_attribution` or `edge_effects`, better on other prompts than these.
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            answers that come with the clean prompts. A metric that compares, such as the KL divergence, compares with
            the clean run.
        rank: by what edges are the best: "magnitude", the absolute score, or "helpful", what helps first and what
            hinders last. MIB takes "helpful" for CPR and "magnitude" for CMD.
        greedy: whether circuits are grown from the logits backwards, as by `find_circuit(..., search="greedy")`.
        fractions: shares of all edges that are kept, rising within (0, 1].
        draws: number of random circuits of either kind for each share; 0: no controls.
        replacement: values of the edges outside a circuit: "resample", of the corrupted run, "mean", over the
            `reference` prompts, or "zero". Resampled is the sender's value in the corrupted run of the same pair;
            means are taken position by position.
        reference: prompts that means are taken over; None: the corrupted ones, for pairs in memory.
        seed: seed of the random circuits.

    Returns:
        Dataset over `circuit`, `fraction` and `score`, in shares of the whole effect. Circuits are "found", "random"
        (as many random edges) and "degree-matched" (random edges with its degrees in every layer); the controls are
        means over `draws` random circuits with as many edges as the pruned one, not pruned themselves.

        - `value`: mean over prompts, with the ends `low` and `high` of its 95 % interval, and `n`. Scores:
          `faithfulness`, f of the circuit; `cpr`, the area under f from the first fraction up to this one, and `cmd`,
          the area between f and 1: at the last fraction they are those of MIB. CPR is 1 for the whole model's, random
          edges have less; CMD 0 is best. Both by trapezoids between the given fractions, so with MIB's a perfect CPR
          is 0.999.
        - `null`: the value of as many random edges.
        - `edges` [fraction]: number of edges left once loose ends are pruned.
        - `each` [prompt, circuit, fraction]: the metric itself. `full`, `empty` [prompt]: that of the whole model and
          of no edge.

    Raises:
        ValueError: scores of another graph, fractions that do not rise within (0, 1], or a metric that is the same in
            the whole model and without any edge.

    Caveats:
        On a small graph the smallest fractions keep no edge at all, and f is 0 there. The interval covers the choice
        of the prompts, not the search (`edge_stability`) nor the few random circuits (more `draws`). Fewer than three
        prompts have no interval: NaN.

    Source:
        CPR and CMD: the MIB benchmark, Mueller et al. 2025, arXiv:2504.13151.

    See Also:
        `evaluate_circuit`: one circuit, its completeness and its nodes.

    Example:
        >>> from interp.circuits import edge_effects
        >>> pairs, metric = (torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])), interp.logit_difference(3, 4)
        >>> curve = circuit_curve(model, *pairs, edge_effects(model, *pairs, metric=metric), metric=metric, draws=1)
        >>> curve.value.dims
        ('circuit', 'fraction', 'score')
    """

    scores: xr.Dataset
    _: KW_ONLY
    metric: Metric | LogitFunction | None = None
    rank: Rank = "magnitude"
    greedy: bool = False
    fractions: Sequence[float] = FRACTIONS
    draws: Count = 1
    replacement: Replacement = "resample"
    reference: Prompts | None = None
    seed: Seed = 0

    def with_data(
        self, model: Model, data: DataSource | Data | Pairs
    ) -> tuple[Question, DataSource | Data | Pairs]:
        """The question with its reference prompts (for means by default the corrupted ones in memory), and the data."""
        return replace(
            self, reference=reference_of(model, self.replacement, self.reference, data, self.metric)
        ), data

    def bind(self, model: Subject) -> ByRow:
        """Passes of all circuits, whose metrics are compared in the end."""
        passes = CircuitPasses.of(model, as_metric(self.metric, model.text), self.replacement, self.reference)
        _check_scores(passes.graph, self.scores, self.fractions)
        ordered = in_order("scores", self.scores, passes.graph.labels)
        tried = _best_edges(passes.graph, replace(self, scores=ordered))
        finish = partial(_curve, question=self, attrs=passes.attrs, tried=tried, fewest=passes.metric.fewest)
        return passes.analysis(model, self.name, tried, finish)


circuit_curve = of_pairs(CircuitCurve)


@dataclass(frozen=True, eq=False, repr=False)
class EvaluateCircuit(Brief, Question):
    """Faithfulness, completeness and minimality of a circuit, with random circuits as controls.

    Is the task still done with only these edges, is it lost without them, and is each of them needed? Nodes are
    knocked out by dropping every edge out of them.

    Args:
        clean, corrupt: prompts; each pair has the same number of tokens, aligned one by one. Files and streams are
            paired row by row.
        circuit: the circuit, of the model's own graph.
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            answers that come with the clean prompts. A metric that compares, such as the KL divergence, compares with
            the clean run.
        replacement: values of the edges outside a circuit: "resample", of the corrupted run, "mean", over the
            `reference` prompts, or "zero". Resampled is the sender's value in the corrupted run of the same pair;
            means are taken position by position.
        reference: prompts that means are taken over; None: the corrupted ones, for pairs in memory.
        subsets: number of random subsets K of the circuit's nodes, each node in K with probability 1/2; all subsets,
            if there are no more than this.
        draws: number of random circuits of either kind; 0: none.
        nodes: number of nodes that are taken out one by one, evenly spaced from the least to the most by the size of
            their edges' scores; None: all. The others' part is estimated to first order.
        deeper: whether these nodes are also taken out of what is left without each subset, for `needed`.
        seed: seed of the subsets and the random circuits.

    Returns:
        Dataset over `circuit` and `score`, in shares of the whole effect. Circuits: "found", the one that was given;
        "random" and "degree-matched", the means of `draws` random ones of either kind; "without L0H1", the circuit
        without one of its nodes; "without K1", without a random subset K of its nodes.

        - `value`: mean over prompts, with the ends `low` and `high` of its 95 % interval (below three: NaN), and `n`.
          Scores: `faithfulness`, f of this circuit; `minimality`, f(C) - f(C without the nodes): what they do;
          `difference`, of the subsets, f(M without K) - f(C without K), and `incompleteness`, its size: a complete
          circuit breaks as the model does.
        - `null`: for the circuit's faithfulness, that of as many random edges.
        - `removed` [circuit, part]: which nodes are taken out.
        - `estimate` [part]: minimality of every node to first order, where some are not taken out: replaced minus
          current output of the node on its edges, against the gradient where they end, in the run of the circuit. A
          note says how far it agrees with the nodes that are taken out.
        - `needed` [part]: |f(C) - f(C without the node)|, with `deeper` the largest such step that it makes in C or in
          C without a subset that leaves it: 0 says that the node does nothing; NaN for nodes that are not taken out.
        - `overlap` [circuit]: share of the circuit's edges that this one has (where degrees leave little choice,
          matched ones have most).
        - `each` [prompt, circuit]: the metric itself. `full`, `empty` [prompt]: that of the whole model and of no
          edge.

    Raises:
        ValueError: a circuit of another graph, or a metric that is the same in the whole model and without any edge.

    Caveats:
        Wang et al. search for the worst K; random ones find a lower bound of the incompleteness. A first-order
        estimate misses what saturates.

    Cost:
        About a forward pass of the pairs for each of 3 + 2 draws + nodes + 2 subsets circuits, 23 by default, and with
        `deeper` nodes x subsets more; the estimate is a pass and its gradient.

    See Also:
        `circuit_curve`: faithfulness of circuits of every size. `interchange`: the metric under any circuits.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> circuit = Circuit(EdgeGraph.of(model.cfg), {"L0.resid->L0.mlp": 1.0, "L0.mlp->logits": 1.0})
        >>> found = evaluate_circuit(model, *pairs, circuit, metric=interp.logit_difference(3, 4), subsets=1)
        >>> found.part.values.tolist(), found.circuit.values[:2].tolist()
        (['L0.mlp'], ['found', 'random'])
    """

    circuit: Circuit
    _: KW_ONLY
    metric: Metric | LogitFunction | None = None
    replacement: Replacement = "resample"
    reference: Prompts | None = None
    subsets: Count = 3
    draws: Count = 2
    nodes: Count | None = 10
    deeper: bool = False
    seed: Seed = 0

    def with_data(
        self, model: Model, data: DataSource | Data | Pairs
    ) -> tuple[Question, DataSource | Data | Pairs]:
        """The question with its reference prompts (for means by default the corrupted ones in memory), and the data."""
        return replace(
            self, reference=reference_of(model, self.replacement, self.reference, data, self.metric)
        ), data

    def bind(self, model: Subject) -> ByRow:
        """Passes of all circuits, whose metrics are compared in the end."""
        passes = CircuitPasses.of(model, as_metric(self.metric, model.text), self.replacement, self.reference)
        (kept,) = masks_of(self.circuit, passes.graph)
        knocked = _NodeKnockouts.of(passes.graph, kept, self)
        finish = partial(
            _evaluation, question=self, attrs=passes.attrs, knocked=knocked, fewest=passes.metric.fewest
        )
        places = [passes.graph.senders.index(node) for node in knocked.nodes]
        estimated = None if len(knocked.alone) == len(knocked.nodes) else (kept, places)
        return passes.analysis(model, self.name, knocked.masks, finish, estimated)


evaluate_circuit = of_pairs(EvaluateCircuit, renamed={"task": "model, clean, corrupt and metric"})


def _with_ends(graph: EdgeGraph, masks: Sequence[Tensor]) -> Bool[Tensor, "c sender receiver"]:
    """Masks [circuit, sender, receiver] of all edges, of no edge, then the given ones."""
    return torch.cat((torch.stack((graph.exists, torch.zeros_like(graph.exists))), *masks))


def _best_edges(graph: EdgeGraph, question: CircuitCurve) -> Bool[Tensor, "c sender receiver"]:
    """Masks of the best edges for every fraction, then of random circuits of either kind."""
    generator = np.random.default_rng(question.seed)
    values = worth(question.scores, question.rank)
    sizes = [int(fraction * len(graph)) for fraction in question.fractions]
    picked = (
        torch.stack([backwards(graph, values, n) for n in sizes])
        if question.greedy
        else largest(values, sizes)
    )
    circuits = connected(graph, picked)
    controls = [_controls(graph, circuits, generator) for _ in range(_count("draws", question.draws))]
    return _with_ends(graph, [circuits, *controls])


def _curve(
    merged: Partial,
    question: CircuitCurve,
    attrs: Mapping[str, str | float | int],
    tried: Bool[Tensor, "c sender receiver"],
    fewest: int,
) -> xr.Dataset:
    assert isinstance(merged, Rows)
    values = merged.rows["value"]
    shares = effect_shares(values)
    count, until = len(question.fractions), partial(area, fractions=question.fractions)
    curves = {
        "faithfulness": _by_kind(shares, count),
        "cpr": _by_kind(shares, count, until),
        "cmd": _by_kind(
            (1 - shares) * (1 - shares.mean(0)).sign(), count, until
        ),  # |1 - f|, linear in the prompts
    }
    kinds = KINDS if question.draws else KINDS[:1]
    result = scored(
        question.name,
        {
            name: Score.of(Moments.of(curve), SHARE, _null_of_found(curve), fewest=fewest)
            for name, curve in curves.items()
        },
        ("circuit", "fraction"),
        coords={"circuit": kinds, "fraction": list(question.fractions)},
        others={"edges": (("fraction",), tried[2 : 2 + count].sum((1, 2)))},
        attrs={
            **_attrs(attrs, values, fewest), "rank": question.rank, "greedy": int(question.greedy),
            "draws": question.draws, "seed": question.seed,
        },
    )  # fmt: skip
    metric = _by_kind(values[:, 2:], count)
    return _with_metric(result, values, metric, ("circuit", "fraction"), str(attrs["unit"]))


def _by_kind(
    values: Float[Tensor, "b n"], count: int, change: Callable[[Tensor], Tensor] | None = None
) -> Float[Tensor, "b kind f"]:
    """Values of every kind of circuit at every fraction, after `change`; those of random kinds are means over draws.

    Args:
        values: columns are the circuit at each of `count` fractions, then each draw of each random kind.
    """
    of_circuit, drawn = values[:, :count], rearrange(values[:, count:], "b (d k f) -> k b d f", k=2, f=count)
    of_circuit, drawn = (of_circuit, drawn) if change is None else (change(of_circuit), change(drawn))
    return torch.stack((of_circuit, *(drawn.mean(2) if drawn.shape[2] else ())), 1)


@dataclass(frozen=True, eq=False)
class _NodeKnockouts:
    """The circuits of `evaluate_circuit`: itself, random ones, itself without nodes, and the model without them."""

    masks: Bool[Tensor, "c sender receiver"]
    """Masks of all edges, no edge, the circuit, random circuits, then the circuit and the model without nodes."""
    nodes: tuple[str, ...]
    alone: tuple[int, ...]
    """Indices into `nodes` of the nodes that are taken out one by one."""
    removed: Bool[Tensor, "k n"]
    """Masks of the random subsets K of the nodes."""
    overlap: Float[Tensor, "circuit"]
    """The share of the circuit's edges that each circuit of the result has."""

    @classmethod
    def of(cls, graph: EdgeGraph, kept: Bool[Tensor, "s r"], question: EvaluateCircuit) -> _NodeKnockouts:
        """The circuits, drawn with the seed."""
        generator = np.random.default_rng(question.seed)
        nodes = tuple(node for node in question.circuit.nodes if node not in (INPUT, LOGITS))
        removed = _subsets(len(nodes), _count("subsets", question.subsets, 1), generator)
        alone = _spaced_nodes(question.circuit, nodes, question.nodes)
        single = torch.eye(len(nodes), dtype=torch.bool)[list(alone)]  # one row per node taken out alone
        controls = [_controls(graph, kept[None], generator) for _ in range(_count("draws", question.draws))]
        deeper = (removed[:, None] | single).flatten(0, 1)[: None if question.deeper else 0]  # [(k n) nodes]
        knocked = [(kept, single), (kept, removed), (graph.exists, removed), (kept, deeper)]
        knocked_out = [_without_nodes(graph, mask, nodes_out, nodes) for mask, nodes_out in knocked]
        shown = torch.cat((kept[None], *knocked_out[:2]))
        size = max(1, int(kept.sum()))
        overlaps = [(mask & kept).sum((1, 2)) / size for mask in (shown, *controls)]
        random = torch.stack(overlaps[1:]).mean(0) if controls else overlaps[0][:0]
        overlap = torch.cat((overlaps[0][:1], random, overlaps[0][1:]))
        return cls(_with_ends(graph, [kept[None], *controls, *knocked_out]), nodes, alone, removed, overlap)


def _evaluation(
    merged: Partial,
    question: EvaluateCircuit,
    attrs: Mapping[str, str | float | int],
    knocked: _NodeKnockouts,
    fewest: int,
) -> xr.Dataset:
    assert isinstance(merged, Rows)
    values = merged.rows["value"]
    shares = effect_shares(values)
    removed, alone = knocked.removed, list(knocked.alone)
    k, n, draws = len(removed), len(alone), question.draws
    n_deeper = k * n if question.deeper else 0
    of_circuit, _, without_node, without_subset, model_without_subset, deeper = shares.split(
        [1, 2 * draws, n, k, k, n_deeper], 1
    )
    kinds = KINDS if draws else KINDS[:1]
    no_value = shares.new_full((len(shares), len(kinds)), torch.nan)
    faithfulness, score = _result_columns(shares, draws, n + k), partial(Score.of, unit=SHARE, fewest=fewest)
    minimality = torch.cat((no_value, of_circuit - without_node, of_circuit - without_subset), 1)
    difference = torch.cat(
        (no_value, torch.full_like(without_node, torch.nan), model_without_subset - without_subset), 1
    )
    table = {
        "faithfulness": score(
            Moments.of(faithfulness), null=_null_of_found(faithfulness) if draws else torch.nan
        ),
        "minimality": score(Moments.of(minimality)),
        "difference": score(Moments.of(difference)),
    }
    table["incompleteness"] = _absolute_score(table["difference"])
    nodes = knocked.nodes
    single_nodes = torch.eye(len(nodes)).bool()[alone]
    nodes_out = torch.cat((torch.zeros(len(kinds), len(nodes)).bool(), single_nodes, removed))
    names = [*kinds, *(f"without {nodes[i]}" for i in alone), *(f"without K{i + 1}" for i in range(k))]
    needed, estimate = torch.full((2, len(nodes)), torch.nan, dtype=shares.dtype)
    needed[alone] = _largest_change(
        (of_circuit - without_node).mean(0), without_subset.mean(0), deeper.mean(0), removed[:, alone]
    )
    notes = []
    if "estimate" in merged.rows:
        effect = (values[:, 0] - values[:, 1]).double().mean()
        estimate = -merged.rows["estimate"].cpu().double().mean(0) / effect.cpu()
        notes.append(_estimate_note(estimate[alone], (of_circuit - without_node).mean(0), len(nodes)))
    result = scored(
        question.name,
        table,
        ("circuit",),
        coords={"circuit": names, "part": list(nodes)},
        others={
            "overlap": (("circuit",), knocked.overlap.double()),
            "removed": (("circuit", "part"), nodes_out),
            "needed": (("part",), needed),
            "estimate": (("part",), estimate),
        },
        notes=notes,
        attrs={
            **_attrs(attrs, values, fewest),
            "edges": len(question.circuit.edges), "draws": draws, "subsets": k, "seed": question.seed,
        },
    )  # fmt: skip
    result.overlap.attrs["unit"] = "share of the circuit's edges"
    result.needed.attrs["unit"] = result.estimate.attrs["unit"] = SHARE
    return _with_metric(
        result, values, _result_columns(values[:, 2:], draws, n + k), ("circuit",), str(attrs["unit"])
    )


def _result_columns(
    values: Float[Tensor, "b n"], draws: int, n_knocked_out: int
) -> Float[Tensor, "b circuit"]:
    """Columns of the result: the circuit, random ones averaged over draws, and the `n_knocked_out` after them."""
    of_circuit, drawn, knocked_out, _ = values.split(
        [1, 2 * draws, n_knocked_out, values.shape[1] - 1 - 2 * draws - n_knocked_out], 1
    )
    random = rearrange(drawn, "b (d k) -> b k d", k=2).mean(2) if draws else drawn
    return torch.cat((of_circuit, random, knocked_out), 1)


def _spaced_nodes(circuit: Circuit, nodes: Sequence[str], count: int | None) -> tuple[int, ...]:
    """Indices of `count` nodes, evenly spaced in the order of the summed |score| of the edges out of each node."""
    if count is None or _count("nodes", count) >= len(nodes):
        return tuple(range(len(nodes)))
    size = dict.fromkeys(nodes, 0.0)
    for edge, score in circuit.scores.items():
        sender = edge.partition("->")[0]
        if sender in size:
            size[sender] += abs(score)
    order = sorted(range(len(nodes)), key=lambda i: size[nodes[i]])
    steps = max(count - 1, 1)
    return tuple(sorted({order[i * (len(nodes) - 1) // steps] for i in range(count)}))


def _estimate_note(estimate: Float[Tensor, "n"], exact: Float[Tensor, "n"], nodes: int) -> str:
    """Note about the agreement of the estimate with the nodes that were taken out."""
    some = f"{len(exact)} of {nodes} nodes were taken out one by one, the others' part is estimated"
    none = f"none of {nodes} nodes was taken out by itself, their part is estimated"
    note = f"{some if len(exact) else none} (in Python, nodes=None takes out all)"
    if len(exact) < 3:
        return note
    off = float((estimate - exact).abs().max())
    r = float(torch.corrcoef(torch.stack((estimate, exact)))[0, 1])
    return f"{note}; on those taken out the estimate is off by at most {off:.2g} and correlates at {r:.2f}"


def _largest_change(
    alone: Float[Tensor, "n"],
    broken: Float[Tensor, "k"],
    deeper: Float[Tensor, "kn"],
    removed: Bool[Tensor, "k n"],
) -> Float[Tensor, "n"]:
    """The largest change from taking a node out of the circuit, or out of the circuit without a subset."""
    if not len(deeper):
        return alone.abs()
    steps = (
        (broken[:, None] - rearrange(deeper, "(k n) -> k n", k=len(removed))).abs().masked_fill(removed, 0)
    )
    return torch.cat((alone.abs()[None], steps)).amax(0)


def effect_shares(values: Float[Tensor, "b all"]) -> Float[Tensor, "b c"]:
    """The share f of the whole effect that each circuit keeps, as one number per prompt whose mean is f.

    f = mean(circuit - empty) / mean(full - empty). Prompt i has f + (circuit_i - empty_i - f (full_i - empty_i)) /
    mean(full - empty): the delta method for a ratio, by which the interval of the mean is that of f to first order.

    Args:
        values: the metric of every prompt, columns: the whole model, no edges, then each circuit.

    Returns:
        [b, c], in shares of the whole effect.

    Raises:
        ValueError: the whole model and no edge have the same mean metric.
    """
    full, empty, of_circuits = values.cpu().double().split([1, 1, values.shape[1] - 2], 1)
    effect = (full - empty).mean()
    if not bool(effect.abs() > 1e-9 * full.mean().abs()):
        raise ValueError(
            f"the whole model and no edge at all have the same metric, {float(full.mean()):.4g}: nothing to explain"
        )
    share = (of_circuits - empty).mean(0) / effect
    return share + (of_circuits - empty - share * (full - empty)) / effect


def area(curve: Float[Tensor, "*n f"], fractions: Sequence[float]) -> Float[Tensor, "*n f"]:
    """The area under a curve between the first fraction and each, by trapezoids."""
    x = torch.tensor(list(fractions), dtype=curve.dtype, device=curve.device)
    return torch.cat((torch.zeros_like(curve[..., :1]), torch.cumulative_trapezoid(curve, x)), -1)


def _absolute_score(score: Score) -> Score:
    """The absolute value of a score; its interval holds the absolute values of all numbers in the score's own."""
    low, high = score.low, score.high
    nearest = torch.where((low <= 0) & (high >= 0), 0.0, torch.minimum(low.abs(), high.abs()))
    return score._replace(
        value=score.value.abs(),
        low=nearest.where(~low.isnan(), low),
        high=torch.maximum(low.abs(), high.abs()),
    )


def _null_of_found(values: Float[Tensor, "b kind *f"]) -> Float[Tensor, "kind *f"]:
    """Null of the found circuit: the mean value of the random ones; NaN for the other circuits."""
    null = torch.full_like(values[0], torch.nan)
    if len(null) > 1:
        null[0] = values[:, 1].mean(0)
    return null


def _with_metric(
    result: xr.Dataset, values: Float[Tensor, "b c"], metric: Tensor, dims: tuple[str, ...], unit: str
) -> xr.Dataset:
    """The result with the metric itself: of every circuit, of the whole model, and of no edge."""
    variables = {"each": (("prompt", *dims), metric), "full": (("prompt",), values[:, 0])}
    variables["empty"] = (("prompt",), values[:, 1])
    return result.assign(
        {name: (dims, x.cpu().numpy(), {"unit": unit}) for name, (dims, x) in variables.items()}
    )


def _controls(
    graph: EdgeGraph, circuits: Bool[Tensor, "f sender receiver"], generator: np.random.Generator
) -> Bool[Tensor, "n sender receiver"]:
    """One random circuit of either kind for each circuit."""
    free = [random_circuit(graph, int(kept.sum()), generator) for kept in circuits]
    return torch.stack([*free, *(degree_matched(graph, kept, generator) for kept in circuits)])


def _subsets(n: int, most: int, generator: np.random.Generator) -> Bool[Tensor, "k n"]:
    """Masks of all 2^n subsets of n nodes if there are at most `most`, else of `most` random subsets."""
    if 2**n <= most:
        return (torch.arange(2**n)[:, None] >> torch.arange(n)) % 2 == 1
    return torch.from_numpy(generator.random((most, n)) < 0.5)


def _without_nodes(
    graph: EdgeGraph,
    kept: Bool[Tensor, "sender receiver"],
    removed: Bool[Tensor, "k n"],
    nodes: Sequence[str],
) -> Bool[Tensor, "k sender receiver"]:
    """The circuit without the edges out of the removed nodes, for each of k sets of them."""
    places = [graph.senders.index(node) for node in nodes]
    silent = torch.zeros(len(removed), len(graph.senders), dtype=torch.bool)
    silent[:, places] = removed
    return kept & ~silent[:, :, None]


def _attrs(
    attrs: Mapping[str, str | float | int], values: Float[Tensor, "b c"], fewest: int
) -> dict[str, str | float | int]:
    return {
        **attrs,
        "unit": SHARE,
        "prompts": len(values),
        "interval": f"{over('prompts', fewest)} (delta method, Student's t)",
        "null": "as many random edges",
    }


def _count(name: str, value: int, least: int = 0) -> int:
    """The value of an argument that counts something. ValueError below `least`."""
    if value < least:
        raise ValueError(f"{name} must be a number, at least {least}, got {value!r}")
    return value


def _check_scores(graph: EdgeGraph, scores: xr.Dataset, fractions: Sequence[float]) -> None:
    check_result("scores", scores, ("sender", "receiver", "value"), "edge_attribution or edge_effects")
    if set(scores.sender.values) != set(graph.senders) or set(scores.receiver.values) != set(graph.receivers):
        raise ValueError("scores of the model's own graph are required, got other senders or receivers")
    check_finite("value of scores", scores["value"], len(graph))
    rising = bool(fractions) and all(a < b for a, b in itertools.pairwise(fractions))
    if not rising or not 0 < fractions[0] <= fractions[-1] <= 1:
        raise ValueError(f"fractions that rise within (0, 1] are required, got {tuple(fractions)}")


# --- circuits that nobody searched for


def random_circuit(
    graph: EdgeGraph, n: int, generator: np.random.Generator
) -> Bool[Tensor, "sender receiver"]:
    """n edges of the graph, every set of n equally likely. ValueError for more than there are."""
    if not 0 <= n <= len(graph):
        raise ValueError(f"0 to {len(graph)} edges are required, got {n}")
    cells = graph.exists.nonzero()[generator.permutation(len(graph))[:n]]
    mask = torch.zeros_like(graph.exists)
    mask[cells[:, 0], cells[:, 1]] = True
    return mask


def degree_matched(
    graph: EdgeGraph, kept: Bool[Tensor, "sender receiver"], generator: np.random.Generator
) -> Bool[Tensor, "sender receiver"]:
    """Random edges with the degrees of a circuit: heads of a layer trade places, then edges are switched.

    As many edges leave the input and every MLP, and enter every MLP and the logits, as before; the same numbers leave
    the heads of a layer, and enter their queries, keys and values, though not the same heads'. (Degrees that each head
    keeps leave hardly anything to chance in circuits of a few dozen edges.)
    """
    senders, receivers = heads_shuffled(graph, generator)
    moved = torch.zeros_like(graph.exists)
    moved[senders[:, None], receivers] = graph.exists & kept
    return switched(graph, moved, generator)


def heads_shuffled(
    graph: EdgeGraph, generator: np.random.Generator
) -> tuple[Int[Tensor, "sender"], Int[Tensor, "receiver"]]:
    """The new place of every sender and receiver when the heads of each layer trade places.

    Heads that share keys and values stay together.
    """
    senders, receivers = torch.arange(len(graph.senders)), torch.arange(len(graph.receivers))
    size = graph.n_heads // graph.n_kv_heads
    for layer in range(graph.n_layers):
        groups = generator.permutation(graph.n_kv_heads)
        heads = [group * size + generator.permutation(size) for group in groups]
        head, group = torch.from_numpy(np.concatenate(heads)), torch.from_numpy(groups)
        first = graph.inputs(layer).start
        senders[graph.heads(layer)] = graph.heads(layer).start + head
        places = (head, graph.n_heads + group, graph.n_heads + graph.n_kv_heads + group)
        receivers[graph.inputs(layer)] = first + torch.cat(places)
    return senders, receivers


def switched(
    graph: EdgeGraph, kept: Bool[Tensor, "sender receiver"], generator: np.random.Generator
) -> Bool[Tensor, "sender receiver"]:
    """Random edges with as many out of every sender, and into every receiver, as a circuit.

    Pairs of edges u -> v, x -> y become u -> y, x -> v wherever both are edges of the graph and not there yet, ten
    attempts per edge (the switching chain of Milo et al. 2003, arXiv:cond-mat/0312028). A circuit in which no switch is
    possible (all edges of one node, say) stays as it is.
    """
    exists, present = graph.exists.numpy(), (graph.exists & kept).numpy().copy()
    edges = np.argwhere(present)
    for i, j in generator.integers(max(1, len(edges)), size=(SWAPS * len(edges), 2)).tolist():
        (u, v), (x, y) = edges[i].tolist(), edges[j].tolist()
        if exists[u, y] and exists[x, v] and not present[u, y] and not present[x, v]:
            present[u, v] = present[x, y] = False
            present[u, y] = present[x, v] = True
            edges[i, 1], edges[j, 1] = y, v
    return torch.from_numpy(present)
