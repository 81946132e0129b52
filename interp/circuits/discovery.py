"""Finding a circuit: score edges, keep the largest, or those that lead to the logits, or those that cannot go."""

import heapq
from typing import TYPE_CHECKING, Literal, get_args

import torch
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from interp.causal.graph import EdgeGraph
from interp.circuits.edge_attribution import Method, Rule, edge_attribution
from interp.circuits.edge_circuit import Circuit, CircuitProtocol, computing, connected
from interp.circuits.edge_effects import edge_effects
from interp.circuits.interchange import Interchange, Replacement
from interp.data.text import Prompts
from interp.passes.metrics import Metric, logit_difference
from interp.passes.observe import Subject

if TYPE_CHECKING:
    import xarray as xr

Search = Literal["top_n", "threshold", "greedy", "iterative"]
Rank = Literal["magnitude", "helpful"]
BLOCK = 0.25
"""The share of the remaining edges that one round of the iterative search tries to drop."""
SLACK = 0.01
"""How much more than its edges one by one, in shares of the whole effect, a block may cost."""
MASKS = 256
"""Circuits that the iterative search holds at once."""


def find_circuit(
    model: Subject,
    clean: Prompts,
    corrupt: Prompts,
    *,
    metric: Metric | None = None,
    method: Method | Literal["exact"] = "eap-ig-inputs",
    edges: int | None = None,
    threshold: float | None = None,
    search: Search = "top_n",
    replacement: Replacement = "resample",
    reference: Prompts | None = None,
    task: str = "",
    seed: int | None = None,
    prepend_bos: bool = True,
) -> Circuit:
    """The circuit behind the difference that a metric makes between clean and corrupted prompts, without loose ends.

    Edges are scored by `edge_attribution` (or, "exact", by `edge_effects`), and kept by absolute score:
    top_n       the `edges` largest.
    threshold   all of at least `threshold`, in the metric's unit.
    greedy      from the logits backwards: again and again the largest edge into a node that is already in, until there
                are `edges` (`apply_greedy` of EAP-IG, Hanna et al. 2024), so that every edge leads to the logits.
    iterative   from the whole model: again and again the exact effect of dropping each edge that is left, in the
                circuit as it is by then; the quarter with the smallest goes, or less of it where they do together what
                none of them does alone, until there are `edges`, or the smallest exceeds `threshold` (in the spirit of
                ACDC, Conmy et al. 2023, arXiv:2304.14997). `method` is not used. It costs a pass per edge and round:
                for small models.
    Edges on no path from the input to the logits are pruned in the end, so there may be fewer than `edges`.
    replacement, reference: see `Interchange`; only the iterative search runs circuits. task, seed: noted in the record.
    Caveats: scores of single edges cannot see two parts of which either suffices; the iterative search keeps one.
    Errors: ValueError for pairs that do not align, a number of edges outside 1 to all, or a search without its limit.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> found = find_circuit(model, *pairs, metric=logit_difference(3, 4), edges=20, search="greedy")
        >>> found.edges[-1].endswith("->logits"), len(found.edges) <= 20
        (True, True)
    """
    metric = logit_difference() if metric is None else metric
    graph = EdgeGraph.of(model.transformer.config)
    _check(graph, search, edges, threshold)
    task_of = Interchange.of(
        model, clean, corrupt, metric=metric, replacement=replacement, reference=reference, prepend_bos=prepend_bos
    )  # fmt: skip
    if search == "iterative":
        kept, scores = whittled(task_of, edges or 1, threshold)
        method = "exact"
    else:
        table = score_edges(model, clean, corrupt, metric=metric, method=method, prepend_bos=prepend_bos)
        scores = torch.from_numpy(table.score.values)
        kept = _picked(graph, scores, search, edges, threshold)
    how = CircuitProtocol(
        metric.name, metric.unit, method, search, replacement, len(task_of.pair.clean), seed
    )
    name = getattr(model, "name", "")
    return Circuit.of(graph, connected(graph, kept), scores, model=name, task=task, protocol=how)


def score_edges(
    model: Subject,
    clean: Prompts,
    corrupt: Prompts,
    *,
    metric: Metric | None = None,
    method: Method | Literal["exact"] = "eap-ig-inputs",
    steps: int = 5,
    rule: Rule = "released",
    each: bool = False,
    prepend_bos: bool = True,
) -> "xr.Dataset":
    """The scores of all edges by any method: `edge_attribution`'s, or the exact ones of `edge_effects`."""
    if method == "exact":
        return edge_effects(model, clean, corrupt, metric=metric, each=each, prepend_bos=prepend_bos)
    return edge_attribution(
        model, clean, corrupt, metric=metric, method=method, steps=steps, rule=rule, each=each, prepend_bos=prepend_bos
    )  # fmt: skip


def worth(table: "xr.Dataset", rank: Rank = "magnitude") -> Float[Tensor, "sender receiver"]:
    """What each edge is ranked by, from a table of scores; -inf where there is no edge.

    magnitude: the absolute score. helpful: the score signed such that an edge whose corruption moves the metric as the
    corrupted run does comes first, and one whose corruption does the contrary last.
    """
    return valued(torch.from_numpy(table.score.values), rank, direction(table))


def direction(table: "xr.Dataset") -> int:
    """1 if the corrupted run has the higher metric, -1 if it has the lower."""
    return 1 if float((table.corrupt - table.clean).mean()) > 0 else -1


def valued(scores: Float[Tensor, "*n"], rank: Rank, sign: int) -> Float[Tensor, "*n"]:
    """`worth` of scores, given the `direction` of their table."""
    if rank not in get_args(Rank):
        raise ValueError(f"rank must be one of {get_args(Rank)}, got {rank!r}")
    values = scores.abs() if rank == "magnitude" else scores * sign
    return values.nan_to_num(nan=-torch.inf)


def largest(values: Float[Tensor, "sender receiver"], n: int) -> Bool[Tensor, "sender receiver"]:
    """The n largest; of equal ones those that come first in the graph."""
    found = torch.zeros(values.numel(), dtype=torch.bool)
    found[values.flatten().argsort(descending=True, stable=True)[:n]] = True
    return rearrange(found, "(s r) -> s r", r=values.shape[1]) & ~values.isneginf()


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


def whittled(
    task: Interchange, n: int, threshold: float | None = None
) -> tuple[Bool[Tensor, "sender receiver"], Float[Tensor, "sender receiver"]]:
    """At most n edges that are left when the least needed are dropped round by round, and what dropping each changes.

    A block of edges goes together if that changes no more than the sum of its edges' own changes and 1 % of the whole
    effect; else half of it, and so on. Changes are those of the mean over prompts.
    """
    graph, whole = task.graph, task.graph.exists
    full, empty = task.run(torch.stack((whole, torch.zeros_like(whole)))).mean(1)
    slack, kept = SLACK * float((full - empty).abs()), whole.clone()
    while True:
        cells, changes = _changes(task, kept)
        order = changes.abs().argsort(stable=True)
        smallest = changes.abs()[order]
        few = len(cells) - n if threshold is None else int((smallest <= threshold).sum())
        size = min(max(1, int(BLOCK * len(cells))), few, len(cells) - n)
        if size < 1:
            break
        sizes = [size >> i for i in range(size.bit_length())]
        tried = torch.stack([_without(kept, cells[order[:s]]) for s in sizes])
        both = task.run(torch.cat((kept[None], tried))).mean(1)
        joint, alone = (both[1:] - both[0]).abs(), smallest.cumsum(0)
        fits = (s for i, s in enumerate(sizes) if float(joint[i]) <= float(alone[s - 1]) + slack)
        kept = connected(graph, _without(kept, cells[order[: next(fits, 1)]]))
    scores = torch.zeros(whole.shape, dtype=changes.dtype)
    scores[cells[:, 0], cells[:, 1]] = changes
    return kept, scores


def _changes(task: Interchange, kept: Bool[Tensor, "sender receiver"]) -> tuple[Tensor, Float[Tensor, "n"]]:
    """The edges of a circuit, and the change of the mean metric when each is dropped from it."""
    cells = kept.nonzero()
    here = task.run(kept[None]).mean(1)
    found = [here[:0]]
    for some in cells.split(MASKS):
        masks = torch.stack([_without(kept, cell[None]) for cell in some])
        found.append(task.run(masks).mean(1) - here)
    return cells, torch.cat(found).cpu()


def _without(kept: Bool[Tensor, "sender receiver"], cells: Tensor) -> Bool[Tensor, "sender receiver"]:
    left = kept.clone()
    left[cells[:, 0], cells[:, 1]] = False
    return left


def _picked(
    graph: EdgeGraph,
    scores: Float[Tensor, "sender receiver"],
    search: Search,
    edges: int | None,
    threshold: float | None,
) -> Bool[Tensor, "sender receiver"]:
    values = scores.abs().nan_to_num(nan=-torch.inf)
    if search == "threshold":
        return values >= (0 if threshold is None else threshold)
    pick = largest(values, edges or 0) if search == "top_n" else backwards(graph, values, edges or 0)
    return pick & graph.exists


def _check(graph: EdgeGraph, search: Search, edges: int | None, threshold: float | None) -> None:
    """ValueError for a search without its limit, or with that of another one."""
    if search not in get_args(Search):
        raise ValueError(f"search must be one of {get_args(Search)}, got {search!r}")
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
