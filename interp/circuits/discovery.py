"""Finding a circuit: score edges, keep the largest, or those that lead to the logits, or those that cannot go."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.causal.contrast import Direction, paired
from interp.causal.effects import EDGE_DIMS
from interp.causal.graph import EdgeGraph
from interp.circuits.edge_attribution import EdgeAttribution, Method, Rule
from interp.circuits.edge_circuit import Circuit, CircuitProtocol, computing, connected
from interp.circuits.edge_effects import EdgeEffects
from interp.circuits.edge_rankings import largest
from interp.circuits.interchange import Interchange, Replacement, reference_of
from interp.core.boundary import Count, public
from interp.core.stats import Partial
from interp.data.batch import Prompts
from interp.data.sources import Data
from interp.model.edits import Edit
from interp.passes.analysis import Analysis, Question
from interp.passes.metrics import LogitFunction, Metric, as_metric
from interp.passes.observe import Model, Subject, as_network, text_of
from interp.runs.run import answered

if TYPE_CHECKING:
    import xarray as xr

Scoring = Method | Literal["exact"]
"""What scores edges: a method of edge attribution, or their exact effects."""
Search = Literal["top_n", "threshold", "greedy", "iterative"]
BLOCK = 0.25
"""The share of the remaining edges that one round of the iterative search tries to drop."""
SLACK = 0.01
"""How much more than its edges one by one, in shares of the whole effect, a block may cost."""
MASKS = 256
"""Circuits that the iterative search asks about at once."""
Ask = Callable[[Bool[Tensor, "c sender receiver"]], "xr.Dataset"]
"""From circuits to the answer of `Interchange`."""


@dataclass(frozen=True, eq=False)
class FindCircuit(Question):
    """The scores of all edges and those that a search by score keeps; asked of pairs of prompts.

    Its answer is that of `EdgeAttribution` (or `EdgeEffects`) with `kept` [sender, receiver]; `Circuit.of_result` makes
    a circuit of it, as `find_circuit` does. The searches by score are one pass over the data of any size; the iterative
    one asks the same data again in every round, so only `find_circuit` has it.
    """

    metric: Metric | LogitFunction | None = None
    """None = the logit difference of the answers that the data bring."""
    method: Scoring = "eap-ig-inputs"
    """What scores the edges: a method of edge attribution, or "exact"."""
    edges: int | None = None
    """How many are kept, before loose ends are pruned."""
    threshold: float | None = None
    """The least absolute score that is kept, in the metric's unit."""
    search: Search = "top_n"
    """How edges are picked by their scores: top_n, threshold or greedy."""
    replacement: Replacement = "resample"
    """What the edges outside carry, as a note for whoever evaluates the circuit: these searches run none."""
    direction: Direction = "denoise"
    """What a score is the effect of: denoise, clean edges in the corrupted run; noise, the other way round."""
    task: str = ""
    """The task, noted in the record."""
    seed: int | None = None
    """The seed of the prompts, noted in the record."""

    def asked(self, model: Subject) -> Analysis:
        """The question of the edges' scores; the search comes last."""
        graph = EdgeGraph.of(model.transformer.config)
        check_search(graph, self.search, self.edges, self.threshold)
        if self.search == "iterative":
            raise ValueError(
                "the iterative search asks the same prompts again in every round: find_circuit(..., "
                "search='iterative') does"
            )
        scores = scoring(self.method, metric=self.metric, direction=self.direction).asked(model)
        finish = partial(_picked_from, inner=scores.finish, graph=graph, asked=self)
        return replace(scores, name=self.name, finish=finish)

    def protocol(self, prompts: int, method: str | None = None) -> CircuitProtocol:
        """How the circuit is found, for so many pairs."""
        metric = as_metric(self.metric)
        return CircuitProtocol(
            metric.name,
            metric.unit,
            method or self.method,
            self.search,
            self.replacement,
            prompts,
            self.seed,
            self.direction,
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
    threshold: float | None = None,
    search: Search = "top_n",
    replacement: Replacement = "resample",
    reference: Prompts | None = None,
    direction: Direction = "denoise",
    task: str = "",
    seed: int | None = None,
    edits: Sequence[Edit] = (),
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> Circuit:
    """The circuit that makes the difference of a metric between clean and corrupted prompts, without loose ends.

    Of all connections from part to part, the few that carry what tells the two prompts apart.
    Edges are scored by `edge_attribution` (or, "exact", by `edge_effects`), and kept by absolute score:
    top_n       the `edges` largest.
    threshold   all of at least `threshold`, in the metric's unit.
    greedy      from the logits backwards: again and again the largest edge into a node that is already in, until there
                are `edges` (`apply_greedy` of EAP-IG, Hanna et al. 2024), so that every edge leads to the logits.
    iterative   from the whole model: again and again the exact effect of dropping each edge that is left, in the
                circuit as it is by then (`interchange`); the quarter with the smallest goes, or less of it where they
                do together what none of them does alone, until there are `edges`, or the smallest exceeds `threshold`
                (in the spirit of ACDC, Conmy et al. 2023, arXiv:2304.14997). `method` is not used. It costs a pass per
                edge and round: for small models.
    Edges on no path from the input to the logits are pruned in the end, so there may be fewer than `edges`.
    direction: what a score is the effect of. denoise: positive where the clean edge raises the metric (found
    iteratively: in the circuit without it); noise: positive where the corrupted edge does.
    replacement, reference: see `interchange`; only the iterative search runs circuits. task, seed: noted in the record.
    `interp.run([FindCircuit(...)], model, Pairs(...))` finds one on data of any size, but for the iterative search.
    Caveats: scores of single edges cannot see two parts of which either suffices; the iterative search keeps one.
    Errors: ValueError for pairs that do not align, a number of edges outside 1 to all, or a search without its limit.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> found = find_circuit(model, *pairs, metric=interp.logit_difference(3, 4), edges=20, search="greedy")
        >>> found.edges[-1].endswith("->logits"), len(found.edges) <= 20
        (True, True)
    """
    data = paired(text_of(model), clean, corrupt, prepend_bos=prepend_bos)
    asked = FindCircuit(metric, method, edges, threshold, search, replacement, direction, task, seed)
    answer = partial(
        answered, model=model, data=data, edits=edits, prepend_bos=prepend_bos, batch_size=batch_size
    )
    name = getattr(model, "name", "")
    reference = reference_of(model, replacement, reference, corrupt, prepend_bos=prepend_bos)
    if search != "iterative":
        return Circuit.of_result(answer(asked), model=name)

    def ask(kept: Bool[Tensor, "c sender receiver"]) -> xr.Dataset:
        return answer(Interchange(kept, metric, replacement, reference))

    return _iterative(ask, EdgeGraph.of(as_network(model).config), asked, name)


def scoring(
    method: Scoring,
    *,
    metric: Metric | LogitFunction | None = None,
    steps: Count = 5,
    rule: Rule = "released",
    direction: Direction = "denoise",
    each: bool = False,
) -> EdgeAttribution | EdgeEffects:
    """The question of the scores of all edges by any method: `EdgeAttribution`, or, "exact", `EdgeEffects`."""
    if method == "exact":
        return EdgeEffects(metric, direction, each)
    return EdgeAttribution(metric, method, steps, rule, direction, each)


@public()
def score_edges(
    model: Model,
    clean: Prompts | Data,
    corrupt: Prompts | Data,
    *,
    metric: Metric | LogitFunction | None = None,
    method: Scoring = "eap-ig-inputs",
    steps: Count = 5,
    rule: Rule = "released",
    direction: Direction = "denoise",
    each: bool = False,
    edits: Sequence[Edit] = (),
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> xr.Dataset:
    """The scores of all edges by any method: `edge_attribution`'s, or the exact ones of `edge_effects`."""
    data = paired(text_of(model), clean, corrupt, prepend_bos=prepend_bos)
    question = scoring(method, metric=metric, steps=steps, rule=rule, direction=direction, each=each)
    return answered(question, model, data, edits=edits, prepend_bos=prepend_bos, batch_size=batch_size)


def backwards(
    graph: EdgeGraph, values: Float[Tensor, "sender receiver"], n: int
) -> Bool[Tensor, "sender receiver"]:
    """n edges from the logits backwards: always the largest of those into a node that sends already, or the logits."""
    computes, found = computing(graph), torch.zeros_like(graph.exists)
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
        found[sender, receiver] = True
        open_inputs(computes[:, sender].nonzero()[:, 0].tolist())
    return found


def pruned(
    ask: Ask, graph: EdgeGraph, n: int, threshold: float | None = None
) -> tuple[Bool[Tensor, "sender receiver"], Float[Tensor, "sender receiver"]]:
    """At most n edges that are left when the least needed are dropped round by round, and what dropping each changes.

    A block of edges goes together if that changes no more than the sum of its edges' own changes and 1 % of the whole
    effect; else half of it, and so on. Changes are those of the mean over prompts.
    """
    whole = graph.exists
    full, empty = _means(ask, torch.stack((whole, torch.zeros_like(whole))))
    slack, kept = SLACK * float((full - empty).abs()), whole.clone()
    while True:
        cells, changes = _changes(ask, kept)
        order = changes.abs().argsort(stable=True)
        smallest = changes.abs()[order]
        few = len(cells) - n if threshold is None else int((smallest <= threshold).sum())
        size = min(max(1, int(BLOCK * len(cells))), few, len(cells) - n)
        if size < 1:
            break
        sizes = [size >> i for i in range(size.bit_length())]
        tried = torch.stack([_without(kept, cells[order[:s]]) for s in sizes])
        both = _means(ask, torch.cat((kept[None], tried)))
        joint, alone = (both[1:] - both[0]).abs(), smallest.cumsum(0)
        fits = (s for i, s in enumerate(sizes) if float(joint[i]) <= float(alone[s - 1]) + slack)
        kept = connected(graph, _without(kept, cells[order[: next(fits, 1)]]))
    scores = torch.zeros(whole.shape, dtype=changes.dtype)
    scores[cells[:, 0], cells[:, 1]] = changes
    return kept, scores


def _iterative(ask: Ask, graph: EdgeGraph, asked: FindCircuit, model: str) -> Circuit:
    """What the iterative search leaves; scores are signed as `direction` says."""
    check_search(graph, asked.search, asked.edges, asked.threshold)
    kept, changes = pruned(ask, graph, asked.edges or 1, asked.threshold)
    scores = changes if asked.direction == "noise" else -changes
    prompts = int(ask(kept[None]).n.max())
    how = asked.protocol(prompts, "exact")
    return Circuit.of(graph, connected(graph, kept), scores, model=model, task=asked.task, protocol=how)


def _means(ask: Ask, kept: Bool[Tensor, "c sender receiver"]) -> Float[Tensor, "c"]:
    """The mean metric of every circuit."""
    return torch.from_numpy(ask(kept).value.values)


def _changes(ask: Ask, kept: Bool[Tensor, "sender receiver"]) -> tuple[Tensor, Float[Tensor, "n"]]:
    """The edges of a circuit, and the change of the mean metric when each is dropped from it."""
    cells = kept.nonzero()
    here = _means(ask, kept[None])
    found = [here[:0]]
    for some in cells.split(MASKS):
        masks = torch.stack([_without(kept, cell[None]) for cell in some])
        found.append(_means(ask, masks) - here)
    return cells, torch.cat(found)


def _picked_from(
    merged: Partial, inner: Callable[[Partial], xr.Dataset], graph: EdgeGraph, asked: FindCircuit
) -> xr.Dataset:
    """The table of scores with the edges that are kept, and with all that makes a circuit of them."""
    from interp.core.viewer import ANALYSIS

    table = inner(merged)
    kept = connected(graph, _picked(graph, torch.from_numpy(table.value.values), asked))
    how = asked.protocol(int(table.n.max()))
    held = {"graph": asdict(graph), "task": asked.task, "protocol": asdict(how)}
    found = table.assign(kept=(EDGE_DIMS, kept.numpy()))
    return found.assign_attrs({ANALYSIS: asked.name, "circuit": json.dumps(held), "search": asked.search})


def _without(kept: Bool[Tensor, "sender receiver"], cells: Tensor) -> Bool[Tensor, "sender receiver"]:
    left = kept.clone()
    left[cells[:, 0], cells[:, 1]] = False
    return left


def _picked(
    graph: EdgeGraph, scores: Float[Tensor, "sender receiver"], asked: FindCircuit
) -> Bool[Tensor, "sender receiver"]:
    values, n = scores.abs().nan_to_num(nan=-torch.inf), asked.edges or 0
    if asked.search == "threshold":
        return values >= (0 if asked.threshold is None else asked.threshold)
    pick = largest(values, n) if asked.search == "top_n" else backwards(graph, values, n)
    return pick & graph.exists


def check_search(graph: EdgeGraph, search: Search, edges: int | None, threshold: float | None) -> None:
    """ValueError for a search without its limit, or with that of another one."""
    limits = {"top_n": [(True, False)], "greedy": [(True, False)], "threshold": [(False, True)]}
    given = (edges is not None, threshold is not None)
    if given not in limits.get(search, [(True, False), (False, True)]):
        wanted = {"threshold": "threshold=...", "iterative": "edges=n or threshold=..."}.get(
            search, "edges=n"
        )
        raise ValueError(
            f"search={search!r} requires {wanted} alone, got edges={edges} and threshold={threshold}"
        )
    if edges is not None and not 1 <= edges <= len(graph):
        raise ValueError(f"1 to {len(graph)} edges are required, got {edges}")
    if threshold is not None and not threshold > 0:
        raise ValueError(f"a threshold above 0 is required, got {threshold}")
