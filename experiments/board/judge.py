"""How well one method knows one circuit: its ranking beside the truth, and the circuit it leads to, run on other pairs.

Edges are corrupted in the clean run (direction "noise"), as in the truth of the models. A method sees one half of the
pairs, its circuit runs on the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from experiments.board.cases import Case
from interp.causal.graph import EdgeGraph
from interp.circuits.discovery import score_edges
from interp.circuits.edge_attribution import edge_attribution
from interp.circuits.edge_circuit import connected
from interp.circuits.edge_rankings import edge_auroc, largest, worth
from interp.circuits.interchange import interchange
from interp.core.axes import shape_text
from interp.core.results import labelled
from interp.hooked import HookedTransformer
from interp.model.parts import Edge
from interp.passes.metrics import Metric, logit_difference

if TYPE_CHECKING:
    import xarray as xr

Method = Callable[[HookedTransformer, Tensor, Tensor, Metric], "xr.Dataset | Tensor"]
"""From a model, clean and corrupted tokens [n, p] and the metric to the scores of all edges.

Scores are a table as `score_edges` gives it, or a matrix [sender, receiver] in the order of `EdgeGraph`, positive where
corrupting the edge raises the metric.
"""
ROUNDS = 3
"""How many dropped edges the adversary may bring back, one after the other."""
LITTLE = 0.05
"""The share of the whole effect below which the exchange of one edge does nothing to speak of."""


def _by(method: str, model: HookedTransformer, clean: Tensor, corrupt: Tensor, metric: Metric) -> xr.Dataset:
    return score_edges(model, clean, corrupt, metric=metric, method=method, direction="noise")  # type: ignore[arg-type]


def _relp(model: HookedTransformer, clean: Tensor, corrupt: Tensor, metric: Metric) -> xr.Dataset:
    return edge_attribution(model, clean, corrupt, metric=metric, direction="noise", rules="relp")


def _random(model: HookedTransformer, clean: Tensor, corrupt: Tensor, metric: Metric) -> Tensor:
    """Normal numbers, drawn anew for every set of pairs: what a method without knowledge gets."""
    generator = torch.Generator().manual_seed(int(clean.sum()) * 1009 + int(corrupt.sum()))
    return torch.randn(EdgeGraph.of(model.cfg).exists.shape, generator=generator)


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        name: partial(_by, name)
        for name in ("exact", "eap", "clean-corrupted", "eap-ig-inputs", "eap-ig-activations")
    }
    | {"relp": _relp, "random": _random}
)
"""The methods of the board by name; a user's own stands beside them: `benchmark(methods={**METHODS, "mine": mine})`."""
SCORES: Mapping[str, str] = MappingProxyType(
    {
        "auroc": "chance that an edge of the circuit scores higher than another one",
        "ap": "average precision of the circuit's edges",
        "recall": "share of the circuit's edges among as many best",
        "cpr": "area under faithfulness over the share of edges kept, ranked by helpful",
        "cmd": "area between faithfulness and 1, ranked by magnitude",
        "faithfulness": "share of the effect that as many best edges keep as the circuit has, on other pairs",
        "accuracy": "interchange accuracy: share of other pairs that prefer the answer, all other edges exchanged",
        "restoration": "lowest faithfulness once an adversary brings back some of the other edges",
        "passes": "floating-point operations of the method over those of one pass of its pairs",
        "seconds": "time of the method, operations being counted",
    }
)
"""What is measured, by name. Of cmd, passes and seconds less is better, of all others more."""
MODES: Mapping[str, str] = MappingProxyType(
    {
        "plain": "none of the others",
        "redundancy": "its exchange alone moves no pair by a twentieth: others do its work",
        "cancellation": "its effects have both signs: their mean is a quarter of their mean size, or less",
        "suppression": "its exchange moves the metric against the whole effect",
        "saturation": "the gradient at the clean run sees less than a tenth of its effect",
    }
)
"""What makes an edge of a circuit hard to find, each edge by the first that is true of it; measured by its exchange."""


def judged(case: Case, methods: Mapping[str, Method] = METHODS) -> xr.Dataset:
    """Every method on one model with a known circuit.

    Returns Dataset with `value` [attribution, score] (`SCORES`), `found` [attribution, mode], the share of the
    circuit's edges of each kind (`MODES`) among as many best as the circuit has (equal scores: its expectation), and
    `edges` [mode], how many the circuit has of that kind.
    Areas are trapezoids over every number of edges from none to all. MIB (Mueller et al. 2025) takes nine shares of all
    edges, which on a graph of tens of edges are mostly none. The adversary brings back the edge that lowers
    faithfulness most, again and again, at most three, each time out of all: a search that can miss worse sets.
    Errors: ValueError for no methods, or scores that are not [sender, receiver] or not finite where there is an edge.

    Example:
        >>> case = next(experiments.board.cases(["two_hop"], pairs=4))
        >>> float(experiments.board.judged(case).value.sel(attribution="exact", score="auroc")) > 0.9
        True
    """
    if not methods:
        raise ValueError("at least one of methods is required, got none")
    bench = _Bench.of(case)
    kinds = bench.kinds
    rows, found = [], []
    for name, method in methods.items():
        table, cost = bench.scored(name, method)
        rows.append([*_ranking(table, bench), *_circuits(table, bench), *cost])
        inside = expected_among(worth(table), int(bench.truth.sum()))
        found.append([float(inside[kinds == kind].mean()) for kind in range(len(MODES))])
    counts = [int((kinds == kind).sum()) for kind in range(len(MODES))]
    return judgement(case.program, case.seed, list(methods), rows, found, counts)


def judgement(
    program: str,
    seed: int,
    methods: Sequence[str],
    value: Sequence[Sequence[float]],
    found: Sequence[Sequence[float]],
    edges: Sequence[int],
) -> xr.Dataset:
    """The labelled result of `judged` from its numbers; ValueError or TypeError for numbers of another shape."""
    variables = {
        "value": (("attribution", "score"), torch.tensor(value, dtype=torch.float64)),
        "found": (("attribution", "mode"), torch.tensor(found, dtype=torch.float64)),
        "edges": (("mode",), torch.tensor(edges, dtype=torch.int64)),
    }
    coords = {"attribution": list(methods), "score": list(SCORES), "mode": list(MODES)}
    for name, (dims, numbers) in variables.items():
        shape = tuple(len(coords[dim]) for dim in dims)
        if tuple(numbers.shape) != shape:
            raise ValueError(
                f"{name} of shape {shape_text(shape)} is required, got {shape_text(numbers.shape)}"
            )
    return labelled("judged", variables, coords=coords, attrs={"program": program, "seed": seed})


@dataclass(frozen=True, eq=False)
class _Bench:
    """A model, the pairs that methods see, the pairs that judge, and the truth as a mask."""

    model: HookedTransformer
    clean: Int[Tensor, "n p"]
    corrupt: Int[Tensor, "n p"]
    metric: Metric
    other_clean: Int[Tensor, "m p"]
    other_corrupt: Int[Tensor, "m p"]
    other_metric: Metric
    edges: frozenset[str]

    @classmethod
    def of(cls, case: Case) -> _Bench:
        planted = case.planted
        half = len(planted.clean) // 2
        metrics = [
            logit_difference(planted.answer[at], planted.wrong[at]) for at in (slice(half), slice(half, None))
        ]
        return cls(
            HookedTransformer(planted.model), planted.clean[:half], planted.corrupt[:half], metrics[0],
            planted.clean[half:], planted.corrupt[half:], metrics[1], planted.edges,
        )  # fmt: skip

    @cached_property
    def graph(self) -> EdgeGraph:
        return EdgeGraph.of(self.model.cfg)

    @cached_property
    def truth(self) -> Bool[Tensor, "sender receiver"]:
        """True at the edges of the circuit."""
        mask = torch.zeros_like(self.graph.exists)
        for edge in self.edges:
            sender, receiver = str(Edge.of(edge)).split("->")
            mask[self.graph.senders.index(sender), self.graph.receivers.index(receiver)] = True
        return mask

    @cached_property
    def exact(self) -> xr.Dataset:
        """The exchange of every edge alone, pair by pair."""
        return score_edges(
            self.model,
            self.clean,
            self.corrupt,
            metric=self.metric,
            method="exact",
            direction="noise",
            each=True,
        )

    @cached_property
    def kinds(self) -> Int[Tensor, "sender receiver"]:
        """Which of `MODES` an edge of the circuit is of; -1 for all others."""
        each = torch.from_numpy(self.exact["each"].values).double()
        whole = torch.from_numpy((self.exact.corrupt - self.exact.clean).values).double()
        gradient = METHODS["eap"](self.model, self.clean, self.corrupt, self.metric)
        assert not isinstance(gradient, Tensor)
        estimate = torch.from_numpy(gradient.value.values).double()
        mean, size, full = each.mean(0), each.abs().mean(0), whole.mean()
        is_so = [
            (each / whole[:, None, None]).abs().amax(0) < LITTLE,
            mean.abs() <= size / 4,
            mean / full < 0,
            estimate.abs() < mean.abs() / 10,
        ]
        kinds = torch.zeros(mean.shape, dtype=torch.int64)
        for kind, some in reversed(list(enumerate(is_so, 1))):
            kinds[some] = kind
        return kinds.masked_fill(~self.truth, -1)

    def scored(self, name: str, method: Method) -> tuple[xr.Dataset, tuple[float, float]]:
        """The scores as a table, and what they cost in passes and seconds."""
        with _Operations() as one, torch.no_grad():
            self.model.transformer(self.clean)
        begun = time.perf_counter()
        with _Operations() as every:
            scores = method(self.model, self.clean, self.corrupt, self.metric)
        seconds = time.perf_counter() - begun
        return self._table(name, scores), (every.total / one.total, seconds)

    def _table(self, name: str, scores: xr.Dataset | Tensor) -> xr.Dataset:
        given = scores if isinstance(scores, Tensor) else torch.from_numpy(scores.value.values)
        exists = self.graph.exists
        if given.shape != exists.shape or not bool(given[exists].isfinite().all()):
            raise ValueError(
                f"{name} gave {shape_text(given.shape)}; finite scores of shape {shape_text(exists.shape)} [sender, "
                "receiver] are required"
            )
        values = given.detach().double().cpu().masked_fill(~exists, torch.nan)
        return self.exact.assign(value=(("sender", "receiver"), values.numpy()))

    def faithfulness(self, masks: Bool[Tensor, "c sender receiver"]) -> Float[Tensor, "c"]:
        """The share of the whole effect that each circuit keeps on the pairs that judge."""
        whole = self.graph.exists
        both = torch.cat((torch.stack((whole, torch.zeros_like(whole))), masks))
        full, empty, *found = self._run(both).mean(0).split([1, 1, len(masks)])
        return (found[0] - empty) / (full - empty)

    def accuracy(self, mask: Bool[Tensor, "sender receiver"]) -> float:
        """The share of the pairs that judge in which a circuit prefers the answer."""
        return float((self._run(mask[None]) > 0).double().mean())

    def _run(self, masks: Bool[Tensor, "c sender receiver"]) -> Float[Tensor, "n c"]:
        found = interchange(self.model, self.other_clean, self.other_corrupt, masks, metric=self.other_metric)
        return torch.from_numpy(found["each"].values).double()


class _Operations(TorchDispatchMode):
    """Counts floating-point operations of products of matrices, those of backward passes included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=out)
        return out


def _ranking(table: xr.Dataset, bench: _Bench) -> tuple[float, float, float]:
    """AUROC, average precision and recall."""
    exists, values = bench.graph.exists, worth(table)
    inside = expected_among(values, int(bench.truth.sum()))
    return (
        edge_auroc(table, bench.edges),
        average_precision(values[exists], bench.truth[exists]),
        float(inside[bench.truth].mean()),
    )


def _circuits(table: xr.Dataset, bench: _Bench) -> tuple[float, ...]:
    """CPR, CMD, faithfulness, accuracy and restoration, on the pairs that judge."""
    count = len(bench.graph)
    sizes = torch.linspace(0, 1, count + 1, dtype=torch.float64)
    curves = [
        bench.faithfulness(largest(worth(table, rank), range(count + 1))) for rank in ("helpful", "magnitude")
    ]
    n = int(bench.truth.sum())
    kept = connected(bench.graph, largest(worth(table), n))
    return (
        float(torch.trapezoid(curves[0], sizes)),
        float(torch.trapezoid((curves[1] - 1).abs(), sizes)),
        float(curves[1][n]),
        bench.accuracy(kept),
        restored(bench.faithfulness, bench.graph.exists, kept),
    )


def restored(
    ask: Callable[[Bool[Tensor, "c sender receiver"]], Float[Tensor, "c"]],
    exists: Bool[Tensor, "sender receiver"],
    kept: Bool[Tensor, "sender receiver"],
) -> float:
    """The lowest faithfulness that bringing back other edges leads to, one after the other, at most `ROUNDS`."""
    lowest = float(ask(kept[None])[0])
    for _ in range(ROUNDS):
        cells = (exists & ~kept).nonzero()
        if not len(cells):
            break
        tried = kept.repeat(len(cells), 1, 1)
        tried[torch.arange(len(cells)), cells[:, 0], cells[:, 1]] = True
        found = ask(tried)
        best = int(found.argmin())
        if float(found[best]) >= lowest:
            break
        lowest, kept = float(found[best]), tried[best]
    return lowest


def expected_among(values: Float[Tensor, "sender receiver"], n: int) -> Float[Tensor, "sender receiver"]:
    """How likely each edge is among the n largest if equal ones are drawn by lot."""
    edge = ~values.isneginf()
    last = values[edge].sort(descending=True).values[n - 1]
    above, equal = values > last, values == last
    return above.double() + equal * float((n - int(above.sum())) / int(equal.sum()))


def average_precision(values: Float[Tensor, "e"], truth: Bool[Tensor, "e"]) -> float:
    """The sum over distinct scores, from the largest on, of the recall gained times the precision there."""
    levels = values.unique(sorted=True).flip(0)
    taken = values[None] >= levels[:, None]
    hits = (taken & truth).sum(1).double()
    gained = torch.diff(hits, prepend=hits.new_zeros(1)) / truth.sum()
    return float((gained * hits / taken.sum(1)).sum())
