"""Circuit discovery: score edges, keep the largest, or those that lead to the logits, or those that cannot go."""

from __future__ import annotations

import heapq
import json
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.causal.contrast import Direction
from interp.causal.effects import EDGE_DIMS
from interp.causal.graph import EdgeGraph
from interp.circuits.edge_attribution import EdgeAttribution, EdgeMethod, LineRule
from interp.circuits.edge_circuit import Circuit, CircuitProtocol, computing, connected
from interp.circuits.edge_effects import EdgeEffects
from interp.circuits.edge_rankings import largest
from interp.circuits.interchange import Interchange, Replacement, reference_of
from interp.core.boundary import public
from interp.core.kinds import Count, Positive
from interp.core.notes import Note, note
from interp.core.results import noted
from interp.core.stats import FEWEST, Partial, t95
from interp.data.batch import Prompts
from interp.data.pairs import paired
from interp.data.sources import Data
from interp.passes.metrics import LogitFunction, Metric, as_metric
from interp.passes.observe import Model, Subject, as_network, text_of
from interp.passes.question import ByRow, Question
from interp.runs.run import answered

if TYPE_CHECKING:
    import xarray as xr

Scoring = EdgeMethod | Literal["exact"]
"""How edges are scored: a method of edge attribution, or their exact effects."""
SearchMethod = Literal["top_n", "threshold", "greedy", "iterative"]
BLOCK = 0.25
"""The share of the remaining edges that one round of the iterative search tries to drop."""
SLACK = 0.01
"""How much more dropping a block may change than its edges one by one in sum, as a share of the whole effect."""
MASKS = 256
"""Circuits that the iterative search runs at once."""
ENOUGH = 0.8
"""Target faithfulness where neither a number of edges nor a threshold is given."""
SMALLEST = 4
"""Edges of the smallest circuit that is run for the target; each further one has twice as many."""
BETWEEN = 3
"""Number of sizes tried between the largest that is too small and the next, at equal ratios."""
POOR = 0.5
"""Faithfulness below which the other direction is tried, to say whether it would do better."""
ONE_WAY: tuple[Scoring, ...] = ("exact", "eap", "eap-ig-activations")
"""The scorings whose two directions rank edges differently; the scores of the others only change sign."""
CANCELLED = 3
"""Ratio of the size of an edge's effects to their mean from which they count as cancelled."""
LARGE = 0.1
"""Share of the largest size of any edge's effects from which cancelled effects are named."""
MaskEvaluation = Callable[[Bool[Tensor, "c sender receiver"]], "xr.Dataset"]
"""Function from circuits to the result of `Interchange`."""


@dataclass(frozen=True, eq=False)
class FindCircuit(Question):
    """Scores of all edges, and the edges that a search by score keeps, for pairs of prompts in data of any size.

    The searches by score are one pass over the data; the iterative one needs the same data again in every round, so
    only `find_circuit` has it.

    Args:
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            answers that come with the clean prompts.
        method: how edges are scored: a method of edge attribution, or "exact".
        edges: number of edges kept, before loose ends are pruned.
        threshold: least absolute score that is kept, in the metric's unit.
        search: how edges are picked by their scores: "top_n", "threshold" or "greedy".
        replacement: what the edges outside carry, noted for whoever evaluates the circuit: these searches run none.
        direction: run that a score is an effect in: "denoise" puts clean edges into the corrupted run, "noise"
            corrupted edges into the clean run.
        task: name of the task, noted in the record.
        seed: seed of the prompts, noted in the record.

    Returns:
        The Dataset of `edge_attribution` (or `edge_effects`), with

        - `kept` [sender, receiver]: the edges of the circuit. `Circuit.of_result` makes a circuit of it.

    Raises:
        ValueError: neither `edges` nor `threshold`, both, a number of edges outside 1 to all, the iterative search,
            and models whose stream is no sum.

    See Also:
        `find_circuit`: the function; it chooses the size, runs the circuit and says how faithful it is.
    """

    metric: Metric | LogitFunction | None = None
    method: Scoring = "eap-ig-inputs"
    edges: int | None = None
    threshold: Positive | None = None
    search: SearchMethod = "top_n"
    replacement: Replacement = "resample"
    direction: Direction = "denoise"
    task: str = ""
    seed: int | None = None

    def bind(self, model: Subject) -> ByRow:
        """The question about the edges' scores; the search follows at the end."""
        graph = EdgeGraph.of(model.transformer.config)
        if self.edges is None and self.threshold is None:
            raise ValueError(
                "edges=n or threshold=... is required: how many edges are enough is found by running circuits on the "
                "same prompts again, which find_circuit(...) does"
            )
        check_search(graph, self.search, self.edges, self.threshold)
        if self.search == "iterative":
            raise ValueError(
                "the iterative search asks the same prompts again in every round: find_circuit(..., "
                "search='iterative') does"
            )
        question = replace(self, metric=as_metric(self.metric, model.text))
        scores = scoring(self.method, metric=question.metric, direction=self.direction).bind(model)
        finish = partial(_table_with_circuit, inner=scores.result, graph=graph, question=question)
        return replace(scores, name=self.name, result=finish)

    def protocol(
        self, prompts: int, method: str | None = None, faithfulness: float | None = None
    ) -> CircuitProtocol:
        """Record of how the circuit is found, for so many pairs, and how faithful it is to them."""
        metric = self.metric
        assert isinstance(metric, Metric), "the metric is resolved where the model is known"
        return CircuitProtocol(
            metric.name,
            metric.unit,
            method or self.method,
            self.search,
            self.replacement,
            prompts,
            self.seed,
            self.direction,
            faithfulness,
        )


@public()
def find_circuit(
    model: Model,
    clean: Prompts | Data,
    corrupt: Prompts | Data,
    *,
    metric: Metric | LogitFunction | None = None,
    method: Scoring = "eap-ig-inputs",
    edges: int | None = None,
    threshold: Positive | None = None,
    faithfulness: float | None = None,
    search: SearchMethod = "top_n",
    replacement: Replacement = "resample",
    reference: Prompts | None = None,
    direction: Direction = "denoise",
    task: str = "",
    seed: int | None = None,
) -> Circuit:
    """The circuit of edges that make the difference of a metric between clean and corrupted prompts.

    Edges are scored by `edge_attribution` (or, "exact", by `edge_effects`) and kept by absolute score. Edges of score
    0, and those on no path from the input to the logits, are pruned in the end, so there may be fewer than `edges`.
    The circuit is then run on the pairs.

    The searches:

    - top_n: the `edges` largest.
    - threshold: all of at least `threshold`, in the metric's unit.
    - greedy: starts from the logits and adds, one by one, the largest edge into a node that is already in the circuit,
      until there are `edges` (`apply_greedy` of EAP-IG, Hanna et al. 2024), so that every edge leads to the logits.
    - iterative: starts from the whole model. Each round measures the exact effect of dropping each remaining edge from
      the current circuit (`interchange`) and drops the quarter with the smallest, or fewer where dropping them together
      changes more than one by one, until `edges` remain or the smallest effect exceeds `threshold` (in the spirit of
      ACDC, Conmy et al. 2023, arXiv:2304.14997). `method` is not used. It costs a pass per edge and round: for small
      models.

    `interp.run([FindCircuit(...)], model, Pairs(...))` finds a circuit on data of any size, but for the iterative
    search.

    Args:
        clean, corrupt: prompts; each pair has the same number of tokens, aligned one by one. Files and streams are
            paired row by row.
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            answers that come with the clean prompts. A metric that compares, such as the KL divergence, compares with
            the clean run.
        method: how edges are scored: a method of `edge_attribution`, or "exact" by `edge_effects`.
        edges: number of edges kept, before pruning.
        threshold: least absolute score that is kept, in the metric's unit.
        faithfulness: share of the metric's difference between the whole model and no edge, on these prompts, that
            decides the number of edges where neither `edges` nor `threshold` is given; None: 0.8. Circuits of 4, 8,
            16, ... edges are run, and three sizes between the last that falls short and the next. The circuit's
            `notes` say why it has so many.
        search: "top_n", "threshold", "greedy" or "iterative", as above.
        replacement: values of the edges outside a circuit, wherever one is run: "resample", of the corrupted run,
            "mean", over the `reference` prompts, or "zero". Resampled is the sender's value in the corrupted run of
            the same pair; means are taken position by position.
        reference: prompts that means are taken over; None: the corrupted ones, for pairs in memory.
        direction: run that a score is an effect in. "denoise": positive where the clean edge raises the metric (found
            iteratively: in the circuit without it); "noise": positive where the corrupted edge does.
        task: name of the task, noted in the record.
        seed: seed of the prompts, noted in the record.

    Returns:
        A `Circuit` with the scores of its edges. `protocol.faithfulness` is the share of the metric's difference that
        it keeps on the pairs. Its `notes` say what was pruned and what that changed, which edges have effects that
        cancel over the prompts, and, where the circuit keeps less than half, whether the other direction would do
        better: parts all of which are needed (AND) show under "noise", parts each of which is enough (backups) under
        "denoise".

    Raises:
        ValueError: pairs that do not align, a number of edges outside 1 to all, more than one limit, the iterative
            search or one by threshold without theirs, and, where the size is looked for, a metric that is the same in
            the whole model and without any edge.

    Caveats:
        Scores of single edges miss two parts of which either one suffices; the iterative search keeps one of them.

    Cost:
        That of the scores, and about a forward pass of the pairs for each circuit that is run, 4, or 20 where their
        size is looked for.

    See Also:
        `evaluate_circuit`: is the circuit faithful, complete and minimal? `edge_stability`: do its edges depend on the
        prompts?

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> found = find_circuit(model, *pairs, metric=interp.logit_difference(3, 4), edges=20, search="greedy")
        >>> found.edges[-1].endswith("->logits"), len(found.edges) <= 20
        (True, True)
    """
    data = paired(text_of(model), clean, corrupt)
    metric = as_metric(metric, text_of(model))
    question = FindCircuit(metric, method, edges, threshold, search, replacement, direction, task, seed)
    answer = partial(answered, model=model, data=data)
    name, graph = getattr(model, "name", ""), EdgeGraph.of(as_network(model).config)
    reference = reference_of(model, replacement, reference, data, metric)

    def ask(kept: Bool[Tensor, "c sender receiver"]) -> xr.Dataset:
        return answer(Interchange(kept, metric=metric, replacement=replacement, reference=reference))

    if search == "iterative":
        if faithfulness is not None:
            raise ValueError("search='iterative' requires edges=n or threshold=..., got faithfulness")
        circuit = _iterative(ask, graph, question, name)
    else:
        circuit = _by_scores(answer, ask, graph, question, faithfulness, name)
    for text in circuit.notes:
        note(f"find_circuit: {text}")
    return circuit


def scoring(
    method: Scoring,
    *,
    metric: Metric | LogitFunction | None = None,
    steps: Count = 5,
    rule: LineRule = "released",
    direction: Direction = "denoise",
    each: bool = False,
) -> EdgeAttribution | EdgeEffects:
    """The question about the scores of all edges by any method: `EdgeAttribution`, or, "exact", `EdgeEffects`."""
    if method == "exact":
        return EdgeEffects(metric, direction, each)
    return EdgeAttribution(
        metric=metric, method=method, steps=steps, rule=rule, direction=direction, each=each
    )


@public()
def score_edges(
    model: Model,
    clean: Prompts | Data,
    corrupt: Prompts | Data,
    *,
    metric: Metric | LogitFunction | None = None,
    method: Scoring = "eap-ig-inputs",
    steps: Count = 5,
    rule: LineRule = "released",
    direction: Direction = "denoise",
    each: bool = False,
) -> xr.Dataset:
    """Scores of all edges by any method: estimates of `edge_attribution`, or the exact effects of `edge_effects`.

    Args:
        clean, corrupt: prompts; each pair has the same number of tokens, aligned one by one. Files and streams are
            paired row by row.
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            answers that come with the clean prompts.
        method: a method of `edge_attribution`, or "exact".
        steps: points of the integrated methods.
        rule: how these points lie: as in the released code, or by a quadrature rule.
        direction: "denoise" puts clean values into the corrupted run, "noise" the other way round.
        each: whether every prompt's scores are kept.

    Returns:
        The Dataset of `edge_attribution` over `sender` and `receiver`, in the metric's unit.

    Raises:
        ValueError: as in `edge_attribution` and `edge_effects`.
    """
    data = paired(text_of(model), clean, corrupt)
    question = scoring(method, metric=metric, steps=steps, rule=rule, direction=direction, each=each)
    return answered(question, model, data)


def backwards(
    graph: EdgeGraph, values: Float[Tensor, "sender receiver"], n: int
) -> Bool[Tensor, "sender receiver"]:
    """Mask of n edges grown from the logits backwards.

    The next edge is always the largest of those into a node that sends already, or into the logits.
    """
    computes, mask = computing(graph), torch.zeros_like(graph.exists)
    waiting: list[tuple[float, int, int]] = []
    inside: set[int] = set()

    def open_inputs(receivers: list[int]) -> None:
        for receiver in receivers:
            if receiver not in inside:
                inside.add(receiver)
                column = values[: int(graph.visible[receiver]), receiver].tolist()
                for sender, value in enumerate(column):
                    heapq.heappush(waiting, (-value, sender, receiver))

    open_inputs([len(graph.receivers) - 1])
    for _ in range(n):
        if not waiting:
            break
        _, sender, receiver = heapq.heappop(waiting)
        mask[sender, receiver] = True
        open_inputs(computes[:, sender].nonzero()[:, 0].tolist())
    return mask


def pruned(
    ask: MaskEvaluation, graph: EdgeGraph, n: int, threshold: float | None = None
) -> tuple[Bool[Tensor, "sender receiver"], Float[Tensor, "sender receiver"]]:
    """At most n edges that remain when the least needed are dropped round by round, and the change from dropping each.

    A block of edges is dropped together if this changes the metric by no more than the sum of its edges' own changes
    plus 1 % of the whole effect; else half of the block, and so on. Changes are of the metric's mean over prompts.
    """
    every_edge = graph.exists
    full, empty = _means(ask, torch.stack((every_edge, torch.zeros_like(every_edge))))
    slack, kept = SLACK * float((full - empty).abs()), every_edge.clone()
    while True:
        cells, changes = _drop_changes(ask, kept)
        order = changes.abs().argsort(stable=True)
        smallest = changes.abs()[order]
        excess = len(cells) - n if threshold is None else int((smallest <= threshold).sum())
        size = min(max(1, int(BLOCK * len(cells))), excess, len(cells) - n)
        if size < 1:
            break
        sizes = [size >> i for i in range(size.bit_length())]
        tried = torch.stack([_without(kept, cells[order[:s]]) for s in sizes])
        means = _means(ask, torch.cat((kept[None], tried)))
        joint, alone = (means[1:] - means[0]).abs(), smallest.cumsum(0)
        fits = (s for i, s in enumerate(sizes) if float(joint[i]) <= float(alone[s - 1]) + slack)
        kept = connected(graph, _without(kept, cells[order[: next(fits, 1)]]))
    scores = torch.zeros(every_edge.shape, dtype=changes.dtype)
    scores[cells[:, 0], cells[:, 1]] = changes
    return kept, scores


# --- by scores ----------------------------------------------------------------------------------------------------


def _by_scores(
    answer: Callable[[Question], xr.Dataset],
    ask: MaskEvaluation,
    graph: EdgeGraph,
    question: FindCircuit,
    faithfulness: float | None,
    model: str,
) -> Circuit:
    """The circuit of the best edges by their scores, run once, with all its notes."""
    limits = [limit for limit in (question.edges, question.threshold, faithfulness) if limit is not None]
    if len(limits) > 1 or (not limits and question.search == "threshold"):
        raise ValueError(
            f"one of edges, threshold and faithfulness is required, got edges={question.edges}, threshold="
            f"{question.threshold} and faithfulness={faithfulness} for search={question.search!r}"
        )
    if limits and faithfulness is None:
        check_search(graph, question.search, question.edges, question.threshold)
    with warnings.catch_warnings():  # edges are ranked only, and what they keep is measured
        warnings.filterwarnings("ignore", ".*integral did not converge", Note)
        table = answer(scoring(question.method, metric=question.metric, direction=question.direction))
    values = torch.from_numpy(table.value.values)
    notes: list[str] = []
    if question.edges is None and question.threshold is None:
        picked, why = _fewest_edges(
            ask, graph, values, question, ENOUGH if faithfulness is None else faithfulness
        )
        notes.append(why)
    else:
        picked = _edges_by_score(graph, values, question)
    kept = connected(graph, picked)
    before, after = _faithfulness(ask, torch.stack((picked, kept)))
    notes += _pruning_notes(graph, values, picked, kept, question, (before, after))
    notes += _cancellation_notes(graph, table, kept)
    if question.method in ONE_WAY and not after >= POOR:
        notes += _other_direction_notes(answer, ask, graph, question, int(picked.sum()), after)
    protocol = question.protocol(int(table.n.max()), faithfulness=after if math.isfinite(after) else None)
    return Circuit.of(graph, kept, values, model=model, task=question.task, protocol=protocol, notes=notes)


def _fewest_edges(
    ask: MaskEvaluation, graph: EdgeGraph, values: Float[Tensor, "s r"], question: FindCircuit, target: float
) -> tuple[Bool[Tensor, "s r"], str]:
    """Mask of the fewest edges, of the sizes tried, whose faithfulness reaches `target`, and a note that says so."""
    if not 0 < target <= 1:
        raise ValueError(f"a faithfulness above 0 and at most 1 is required, got {target}")

    def tried(sizes: list[int]) -> dict[int, float]:
        masks = [_edges_by_score(graph, values, replace(question, edges=n)) for n in sizes]
        return dict(zip(sizes, _faithfulness(ask, torch.stack(masks)), strict=True))

    sizes = [n for i in range(len(graph).bit_length()) if SMALLEST <= (n := 1 << i) < len(graph)]
    share_of = {0: 0.0, **tried(sizes), len(graph): 1.0}
    if not math.isfinite(share_of[sizes[0]]):
        raise ValueError(
            "the whole model and no edge at all have the same metric, so no number of edges keeps more of it than "
            "another: give edges=n, or prompts whose corruption changes the metric"
        )
    enough = next(n for n, kept_share in share_of.items() if kept_share >= target)
    below = max(n for n in share_of if n < enough)
    ratio = enough / max(below, 1)
    between = {round(max(below, 1) * ratio ** (i / (BETWEEN + 1))) for i in range(1, BETWEEN + 1)}
    if finer := sorted(n for n in between if below < n < enough):
        share_of |= tried(finer)
        enough = next(n for n in (*finer, enough) if share_of[n] >= target)
        below = max(n for n in share_of if n < enough)
    many = (
        f", {enough / len(graph):.0%} of all: the effect is not carried by a few"
        if enough > len(graph) / 2
        else ""
    )
    why = (
        f"{enough} edges{many}: the fewest of {len(share_of) - 2} sizes tried that keep {target:.0%} of the metric's "
        f"difference between the whole model and no edge on these prompts ({share_of[enough]:.0%}; {below} keep "
        f"{share_of[below]:.0%})"
    )
    return _edges_by_score(graph, values, replace(question, edges=enough)), why


def _faithfulness(ask: MaskEvaluation, kept: Bool[Tensor, "c s r"]) -> list[float]:
    """The share of the metric's difference between all edges and none that each circuit keeps; NaN where that is 0."""
    none = torch.zeros_like(kept[:1])
    full, empty, *of_circuits = _means(ask, torch.cat((~none, none, kept))).double().tolist()
    effect = full - empty
    if abs(effect) <= 1e-9 * abs(full):
        return [math.nan] * len(of_circuits)
    return [(value - empty) / effect for value in of_circuits]


def _pruning_notes(
    graph: EdgeGraph,
    values: Float[Tensor, "s r"],
    picked: Bool[Tensor, "s r"],
    kept: Bool[Tensor, "s r"],
    question: FindCircuit,
    faithful: tuple[float, float],
) -> list[str]:
    """Notes about edges that the search picked or was asked for, and that are not in the circuit."""
    notes = []
    n, picks, n_kept = question.edges, int(picked.sum()), int(kept.sum())
    if n is not None and picks < n:
        notes.append(
            f"{n} edges were asked for, and {picks} have a score other than 0 where they are looked for"
        )
    if picks > n_kept:
        lost = picked & ~kept
        place = int(values.abs().where(lost, -torch.inf).flatten().argmax())
        sender, receiver = divmod(place, values.shape[1])
        name, score = graph.name(sender, receiver), float(values[sender, receiver])
        clauses = [
            f"{picks - n_kept} of {picks} edges were pruned, since they are on no path from the input to the logits "
            f"among these; the strongest is {name} ({score:+.3g})"
        ]
        if math.isfinite(faithful[1]):
            clauses.append(f"faithfulness before {faithful[0]:.2f}, after {faithful[1]:.2f}")
        if question.search != "greedy":
            clauses.append("search='greedy' picks edges that lead to the logits alone")
        notes.append("; ".join(clauses))
    return notes


def _cancellation_notes(graph: EdgeGraph, table: xr.Dataset, kept: Bool[Tensor, "s r"]) -> list[str]:
    """Notes about edges left out whose effects in single prompts cancel in the mean."""
    n = int(table.n.max())
    if n < FEWEST:
        return []
    mean = torch.from_numpy(table.value.values).nan_to_num()
    error = torch.from_numpy((table.high - table.low).values).nan_to_num() / 2 / float(t95(n))
    size = (mean**2 + error**2 * (n - 1)).sqrt()  # root mean square over the prompts
    large = size >= LARGE * size.max()
    lost = graph.exists & ~kept & large & (size >= CANCELLED * mean.abs())
    if not bool(lost.any()):
        return []
    place = int(size.where(lost, -torch.inf).flatten().argmax())
    sender, receiver = divmod(place, size.shape[1])
    return [
        f"{int(lost.sum())} edges left out have large effects of other signs in other prompts, which cancel in the "
        f"mean; the strongest is {graph.name(sender, receiver)} (mean "
        f"{float(mean[sender, receiver]):+.3g}, size {float(size[sender, receiver]):.3g})"
    ]


def _other_direction_notes(
    answer: Callable[[Question], xr.Dataset],
    ask: MaskEvaluation,
    graph: EdgeGraph,
    question: FindCircuit,
    n: int,
    faithful: float,
) -> list[str]:
    """Note about the faithfulness of as many edges of the other direction, for a circuit that keeps little."""
    other: Direction = "noise" if question.direction == "denoise" else "denoise"
    size = max(n, question.edges or 0, 1)
    turned = replace(question, direction=other, edges=size, threshold=None, search="greedy")
    table = answer(scoring(question.method, metric=question.metric, direction=other))
    kept = connected(graph, _edges_by_score(graph, torch.from_numpy(table.value.values), turned))
    (instead,) = _faithfulness(ask, kept[None])
    kind = "all of which are needed (AND)" if other == "noise" else "each of which is enough (backups)"
    why = f": parts {kind} show in that direction" if instead >= POOR else ""
    return [
        f"these edges keep {faithful:.2f} of the metric's difference, {int(kept.sum())} of direction={other!r} "
        f"{instead:.2f}{why}"
    ]


# --- round by round -----------------------------------------------------------------------------------------------


def _iterative(ask: MaskEvaluation, graph: EdgeGraph, question: FindCircuit, model: str) -> Circuit:
    """The circuit of the iterative search; an edge's score is its effect in the run that `direction` names."""
    check_search(graph, question.search, question.edges, question.threshold)
    kept, changes = pruned(ask, graph, question.edges or 1, question.threshold)
    scores = changes if question.direction == "noise" else -changes
    prompts = int(ask(kept[None]).n.max())
    connected_edges = connected(graph, kept)
    before, after = _faithfulness(ask, torch.stack((kept, connected_edges)))
    notes = _pruning_notes(
        graph, scores, kept, connected_edges, replace(question, edges=None), (before, after)
    )
    protocol = question.protocol(prompts, "exact", after if math.isfinite(after) else None)
    return Circuit.of(
        graph, connected_edges, scores, model=model, task=question.task, protocol=protocol, notes=notes
    )


def _means(ask: MaskEvaluation, kept: Bool[Tensor, "c sender receiver"]) -> Float[Tensor, "c"]:
    """The mean metric of every circuit."""
    return torch.from_numpy(ask(kept).value.values)


def _drop_changes(
    ask: MaskEvaluation, kept: Bool[Tensor, "sender receiver"]
) -> tuple[Tensor, Float[Tensor, "n"]]:
    """The edges of a circuit, and the change of the mean metric when each is dropped from it."""
    cells = kept.nonzero()
    current = _means(ask, kept[None])
    changes = [current[:0]]
    for chunk in cells.split(MASKS):
        masks = torch.stack([_without(kept, cell[None]) for cell in chunk])
        changes.append(_means(ask, masks) - current)
    return cells, torch.cat(changes)


def _table_with_circuit(
    merged: Partial, inner: Callable[[Partial], xr.Dataset], graph: EdgeGraph, question: FindCircuit
) -> xr.Dataset:
    """The table of edge scores with the mask `kept` of the circuit, and its graph, protocol and notes as attrs."""
    from interp.core.viewer import ANALYSIS

    table = inner(merged)
    values = torch.from_numpy(table.value.values)
    picked = _edges_by_score(graph, values, question)
    kept = connected(graph, picked)
    protocol = question.protocol(int(table.n.max()))
    record = {"graph": asdict(graph), "task": question.task, "protocol": asdict(protocol)}
    result = table.assign(kept=(EDGE_DIMS, kept.numpy()))
    result = result.assign_attrs(
        {ANALYSIS: question.name, "circuit": json.dumps(record), "search": question.search}
    )
    unknown = (math.nan, math.nan)  # no circuit is run in the pass of the scores
    notes = [
        *_pruning_notes(graph, values, picked, kept, question, unknown),
        *_cancellation_notes(graph, table, kept),
    ]
    return noted(result, *notes)


def _without(kept: Bool[Tensor, "sender receiver"], cells: Tensor) -> Bool[Tensor, "sender receiver"]:
    """The mask of a circuit without the edges at these cells [n, (sender, receiver)]."""
    mask = kept.clone()
    mask[cells[:, 0], cells[:, 1]] = False
    return mask


def _edges_by_score(
    graph: EdgeGraph, scores: Float[Tensor, "sender receiver"], question: FindCircuit
) -> Bool[Tensor, "sender receiver"]:
    """Mask of the edges that a search by score keeps, before pruning; never an edge of score 0."""
    values, n = scores.abs().nan_to_num(nan=-torch.inf), question.edges or 0
    if question.search == "threshold":
        return graph.exists & (values >= (0 if question.threshold is None else question.threshold))
    pick = largest(values, n) if question.search == "top_n" else backwards(graph, values, n)
    return graph.exists & pick & (values > 0)


def check_search(graph: EdgeGraph, search: SearchMethod, edges: int | None, threshold: float | None) -> None:
    """ValueError for a search without its limit (`edges` or `threshold`), or with the limit of another search."""
    limits = {"top_n": [(True, False)], "greedy": [(True, False)], "threshold": [(False, True)]}
    limits_given = (edges is not None, threshold is not None)
    if limits_given not in limits.get(search, [(True, False), (False, True)]):
        required = {"threshold": "threshold=...", "iterative": "edges=n or threshold=..."}.get(
            search, "edges=n"
        )
        raise ValueError(
            f"search={search!r} requires {required} alone, got edges={edges} and threshold={threshold}"
        )
    if edges is not None and not 1 <= edges <= len(graph):
        raise ValueError(f"1 to {len(graph)} edges are required, got {edges}")
