"""Edge attribution patching: the first-order effect of corrupting every edge of the model's graph, all in one pass.

An edge u -> v is corrupted when v reads u's output of the corrupted run, and everything else as in the clean run. To
first order the metric then changes by (u_corrupt - u_clean) . d metric / d (input of v) (Syed et al. 2023, "Attribution
Patching Outperforms Automated Circuit Discovery"). Where a softmax saturates that gradient is near zero although the
effect is not; EAP-IG averages it along a line between the two runs (Hanna et al. 2024, "Have Faith in Faithfulness").
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from interp.causal.contrast import Contrast, Watched
from interp.causal.graph import EdgeGraph
from interp.circuits.edge_scores import START, Change, Gradients, edge_scores
from interp.core.results import labelled
from interp.core.stats import Moments
from interp.data.text import Prompts
from interp.model.tap import Edit, Read, Trace
from interp.model.transformer import Transformer
from interp.passes.metrics import Metric, logit_difference
from interp.passes.observe import Observation, Subject
from interp.tokens.input_gradients import IntegratedGradients

if TYPE_CHECKING:
    import xarray as xr

Method = Literal["eap", "eap-ig-inputs", "eap-ig-activations", "clean-corrupted"]
Rule = Literal["released", "midpoint", "gauss"]


@dataclass(frozen=True)
class Line:
    """Where on the line from the corrupted run (0) to the clean run (1) the gradient is taken, and how it is averaged.

    eap: at the clean run. clean-corrupted: the mean of both ends. eap-ig-inputs: the stream entering block 0 moves.
    eap-ig-activations: the output of one sublayer moves, in the clean run, and scores the edges out of it; all heads of
    a layer move together.
    """

    method: Method = "eap"
    steps: int = 5
    """Points of the integrated methods, equally far apart as in the released code, or by a quadrature rule."""
    rule: Rule = "released"
    """released: k/m, for inputs k = 0 ... m-1, for activations 1 ... m. midpoint, gauss: smaller error per step."""

    def __post_init__(self) -> None:
        for name, kinds in (("method", Method), ("rule", Rule)):
            if getattr(self, name) not in get_args(kinds):
                raise ValueError(f"{name} must be one of {get_args(kinds)}, got {getattr(self, name)!r}")
        if self.steps < 1:
            raise ValueError(f"at least one step is required, got {self.steps}")

    def points(self) -> tuple[Float[Tensor, "k"], Float[Tensor, "k"]]:
        """The points and their weights, which sum to 1; in float64."""
        if self.method == "eap":
            points = torch.ones(1)
        elif self.method == "clean-corrupted":
            points = torch.tensor([0.0, 1.0])
        elif self.rule == "released":
            first = 0 if self.method == "eap-ig-inputs" else 1
            points = (torch.arange(self.steps).double() + first) / self.steps
        else:
            return IntegratedGradients(self.steps, rule=self.rule).nodes()
        return points.double(), torch.full((len(points),), 1 / len(points), dtype=torch.float64)


@dataclass(frozen=True)
class Sublayer:
    """One sublayer as a group of senders: where its output enters the stream, and who reads it."""

    site: str
    senders: slice
    layers: range
    """The layers whose heads see it."""
    mlps: range
    """The layers whose MLPs see it."""


def edge_attribution(
    model: Subject,
    clean: Prompts,
    corrupt: Prompts,
    *,
    metric: Metric | None = None,
    method: Method = "eap",
    steps: int = 5,
    rule: Rule = "released",
    each: bool = False,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> "xr.Dataset":
    """The estimated change of the metric when one edge carries the corrupted run's value, for every edge.

    Returns Dataset with `score` [sender, receiver] (the mean over prompts; `score_low` and `score_high` its 95 %
    interval; NaN where there is no edge), and the metric of both runs, `clean` and `corrupt` [prompt], in the metric's
    unit. `each` adds every prompt's scores, [prompt, sender, receiver]. Names and their order are those of `EdgeGraph`,
    positions are summed over. Positive: corrupting the edge raises the metric.
    score(u, v) = sum_pos (u_corrupt - u_clean) . mean gradient at v's input, before v's norm. The points of the mean
    are those of `Line`; for "clean-corrupted" and "eap-ig-inputs" the gradients are those of whole runs on the moved
    embedding. With enough steps the scores out of the input ("eap-ig-inputs") or out of one sublayer
    ("eap-ig-activations") sum to the exact effect of corrupting it. The released code of the latter averages the
    gradients of all sublayers' lines for every edge instead, which sums to nothing in particular.
    metric: None is the logit difference of the answers that the clean batch carries; one that compares (KL divergence)
    compares with the clean run.
    Cost: one forward pass of the corrupted prompts, and a forward and a backward pass of the clean ones; the integrated
    methods take `steps` such passes, over activations that many for every sublayer and the input. `batch_size` counts
    rows, and every point of a line is a row. Memory: what a backward pass keeps, and the activations of heads, d_head
    wide; no `[batch, pos, head, d_model]`.
    Heads behind a norm of their sum (sandwich and output norms): see `edge_scores.Change`.
    Errors: ValueError for pairs that do not align, models whose stream is not a sum (`EdgeGraph.of`), a metric that
    compares, under "eap", and a metric without any gradient.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> found = edge_attribution(model, *pairs, metric=logit_difference(3, 4), method="eap-ig-inputs")
        >>> found.score.sel(sender="m0", receiver="logits").shape
        ()
    """
    metric, line = logit_difference() if metric is None else metric, Line(method, steps, rule)
    graph = EdgeGraph.of(model.transformer.config)
    if metric.compares and method == "eap":
        raise ValueError(
            f"{metric.name} compares with the clean run, where its gradient is 0: use an integrated method"
        )
    pair = Contrast.of(model, clean, corrupt, metric, prepend_bos=prepend_bos)
    moments, kept, values = None, [], []
    for some in pair.split(max(1, batch_size // len(line.points()[0]))):
        scores, *runs = _scores(model.transformer, some, metric, line, graph)
        part = Moments.of(scores)
        moments = part if moments is None else moments.merge(part)
        kept += [scores] if each else []
        values.append(torch.stack(runs, 1))
    assert moments is not None
    if not bool(moments.mean.any() | moments.spread.any()):
        raise ValueError(f"{metric.name}: its gradient is zero in every prompt; it is constant or saturated")
    return _table(graph, moments, kept, torch.cat(values), metric, line)


def _table(
    graph: EdgeGraph,
    moments: Moments,
    kept: list[Tensor],
    values: Float[Tensor, "b 2"],
    metric: Metric,
    line: Line,
) -> "xr.Dataset":
    missing = ~graph.exists.to(moments.mean.device)
    dims = ("sender", "receiver")
    cells = moments.cells("score", dims)
    cells |= {"each": (("prompt", *dims), torch.cat(kept))} if kept else {}
    return labelled(
        "edge_attribution",
        {
            **{name: (axes, x.masked_fill(missing, torch.nan)) for name, (axes, x) in cells.items()},
            "clean": (("prompt",), values[:, 0]),
            "corrupt": (("prompt",), values[:, 1]),
        },
        coords={"sender": graph.senders, "receiver": graph.receivers},
        attrs={
            "method": line.method, "steps": len(line.points()[0]), "rule": line.rule, "metric": metric.name,
            "unit": metric.unit, "edges": len(graph), "positive": "corrupting the edge raises the metric",
        },
    )  # fmt: skip


def _scores(
    model: Transformer, pair: Contrast, metric: Metric, line: Line, graph: EdgeGraph
) -> tuple[Float[Tensor, "b s r"], Float[Tensor, "b"], Float[Tensor, "b"]]:
    """The scores of some pairs, and the metric of their clean and corrupted runs."""
    watched, reads = Watched(model, metric), _reads(model, graph, line)
    corrupt = watched.recorded(pair.corrupt, reads)
    if line.method == "eap":
        clean = watched.differentiated(pair.clean, [*reads, *_everywhere(model)])
        change = Change.between(model, clean.trace, corrupt.trace)
        found = edge_scores(graph, change, Gradients.of(model, clean.trace, line.points()[1]))
    else:
        clean = watched.recorded(pair.clean, reads)
        watched = Watched(model, metric, watched.columns(clean.output, pair.clean))
        change = Change.between(model, clean.trace, corrupt.trace)
        along = _along_activations if line.method == "eap-ig-activations" else _along_inputs
        found = along(watched, pair, Runs(change, clean.trace, corrupt.trace), line, graph)
    with torch.no_grad():
        values = [
            watched.value(run.output, batch) for run, batch in ((clean, pair.clean), (corrupt, pair.corrupt))
        ]
    return found, values[0], values[1]


@dataclass(frozen=True, eq=False)
class Runs:
    """What the clean and the corrupted run left, and their difference."""

    change: Change
    clean: Trace
    corrupt: Trace


def _reads(model: Transformer, graph: EdgeGraph, line: Line) -> tuple[Read, ...]:
    """What both runs record: senders, and under eap-ig-activations what moves."""
    moving = [each.site for each in _sublayers(graph)] if line.method == "eap-ig-activations" else []
    return tuple(dict.fromkeys((*Change.reads(model), *map(Read, moving))))


def _everywhere(model: Transformer) -> tuple[Read, ...]:
    layers = range(model.config.n_layers)
    return Gradients.reads(model, layers, layers if model.config.mlp is not None else range(0))


def _along_inputs(
    watched: Watched, pair: Contrast, runs: Runs, line: Line, graph: EdgeGraph
) -> Float[Tensor, "b s r"]:
    """All edges, by the gradients of runs on embeddings between the corrupted and the clean one."""
    model = watched.model
    seen = _moved(watched, pair, runs, START, line, _everywhere(model))
    return edge_scores(graph, runs.change, Gradients.of(model, seen.trace, line.points()[1]))


def _along_activations(
    watched: Watched, pair: Contrast, runs: Runs, line: Line, graph: EdgeGraph
) -> Float[Tensor, "b s r"]:
    """Edges out of each sublayer by the gradients of clean runs in which its output moves."""
    model, total = watched.model, None
    for group in _sublayers(graph):
        reads = Gradients.reads(model, group.layers, group.mlps)
        seen = _moved(watched, pair, runs, group.site, line, reads)
        gradients = Gradients.of(model, seen.trace, line.points()[1])
        found = edge_scores(graph, runs.change, gradients, first=group.senders.start, last=group.senders.stop)
        total = found if total is None else total + found
    assert total is not None
    return total


def _sublayers(graph: EdgeGraph) -> Iterator[Sublayer]:
    """The input and every sublayer."""
    n = graph.n_layers
    mlps = range(n if graph.mlp else 0)
    yield Sublayer(START, slice(0, 1), range(n), mlps)
    for layer in range(n):
        later = range(layer + 1, n)
        own = layer if graph.mlp and not graph.parallel else layer + 1
        yield Sublayer(f"blocks.{layer}.hook_attn_out", graph.heads(layer), later, mlps[own:])
        if graph.mlp:
            place = graph.mlp_sender(layer)
            yield Sublayer(f"blocks.{layer}.hook_mlp_out", slice(place, place + 1), later, mlps[layer + 1 :])


def _moved(
    watched: Watched, pair: Contrast, runs: Runs, site: str, line: Line, reads: tuple[Read, ...]
) -> Observation:
    """Differentiated passes with a site between its corrupted and clean values; rows are `example, point`."""
    points = line.points()[0]
    example = torch.arange(len(pair.clean)).repeat_interleave(len(points))
    ends = [run[Read(site)] for run in (runs.corrupt, runs.clean)]
    edit = Edit(site, partial(_between, corrupt=ends[0], clean=ends[1], points=points))
    return watched.differentiated(pair.clean.rows(example), reads, (edit,), example)


def _between(
    value: Float[Tensor, "r p d"],
    corrupt: Float[Tensor, "b p d"],
    clean: Float[Tensor, "b p d"],
    points: Float[Tensor, "k"],
) -> Float[Tensor, "r p d"]:
    """Every example at every point."""
    share = points.to(value)[:, None, None]
    start, end = (x.to(value)[:, None] for x in (corrupt, clean))
    return torch.lerp(start, end, share).flatten(0, 1)
