"""Edge attribution patching: the first-order effect of changing every edge of the model's graph, all in one pass.

An edge u -> v is changed when v reads u's output of the other run of a pair, and everything else as in the own run. To
first order the metric then changes by (u_other - u_own) . d metric / d (input of v) (Syed et al. 2023, "Attribution
Patching Outperforms Automated Circuit Discovery"). Where a softmax saturates that gradient is near zero although the
effect is not; EAP-IG averages it along a line between the two runs (Hanna et al. 2024, "Have Faith in Faithfulness").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from interp.causal.contrast import Contrast, Direction
from interp.causal.effects import MISSED, MOVED, EffectTable, MeasuredEffects, causal
from interp.causal.graph import EdgeGraph
from interp.circuits.edge_scores import START, Gradients, SenderChange, check_edits, edge_scores
from interp.core.kinds import Count
from interp.core.stats import upcast
from interp.core.transfers import to_device
from interp.data.batch import Batch
from interp.model.edits import Edit
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.metrics import LogitFunction, Metric, as_metric
from interp.passes.needs import Recorded, Steps, TowardMetric, recorded
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question
from interp.passes.rules import Rules, rules_attrs, under_rules
from interp.runs.functions import of_pairs
from interp.tokens.input_gradients import nodes

if TYPE_CHECKING:
    pass

ROWS = 32
"""Rows of a differentiated pass, pairs times points of a line, up to which small batches are packed."""
EdgeMethod = Literal["eap", "eap-ig-inputs", "eap-ig-activations", "clean-corrupted"]
LineRule = Literal["released", "midpoint", "gauss"]


@dataclass(frozen=True)
class GradientLine:
    """Points on the line from the corrupted run (0) to the clean run (1), and weights, of the mean gradient.

    eap: at the run that is intervened on, whichever it is. clean-corrupted: the mean of both ends. eap-ig-inputs: the
    stream entering block 0 moves. eap-ig-activations: the output of one sublayer moves, in the run that is intervened
    on, and scores the edges out of it; all heads of a layer move together.
    """

    method: EdgeMethod = "eap"
    steps: Count = 5
    """Number of points of the integrated methods, equally far apart, or by a quadrature rule."""
    rule: LineRule = "released"
    """released: k/m, for inputs k = 0 ... m-1, for activations 1 ... m. midpoint, gauss: smaller error per step."""

    def __post_init__(self) -> None:
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
            return nodes(self.rule, self.steps)
        return points.double(), torch.full((len(points),), 1 / len(points), dtype=torch.float64)


@dataclass(frozen=True)
class Sublayer:
    """One sublayer as a group of senders: the site of its output in the stream, and the layers that read it."""

    site: str
    senders: slice
    layers: range
    """The layers whose heads see it."""
    mlps: Mapping[str, range]
    """The layers whose MLPs see it, for each of `EdgeGraph.mlps`."""


@dataclass(frozen=True, eq=False)
class EdgeAttribution(Question):
    """First-order estimate of each edge's effect on the metric when it carries the other run's value.

    score(u, v) = sum_pos (u_other - u_own) . mean gradient at v's input, before v's norm. In "denoise" own is the
    corrupted run and other the clean one, and the score is positive where the clean edge raises the metric; in "noise"
    the other way round. x(a) = corrupt + a (clean - corrupt), a from 0 to 1, is the line between them; g_own the
    gradients of the run that is intervened on. The methods differ in the mean gradient:

        eap                 g_own, at the clean run in noise and at the corrupted run in denoise
        clean-corrupted     mean of both ends, g(x(0)) and g(x(1)): alike in both directions but for the sign
        eap-ig-inputs       mean over a of g(x(a)), x the embedding: the whole run moves, so that the gradients are the
                            same in both directions, and the scores differ in their sign alone
        eap-ig-activations  mean over a of g_own with one sublayer's output at x(a), all else as in the own run:
                            gradients of either run, so that one direction's scores do not give the other's

    With enough steps the scores out of the input ("eap-ig-inputs") or out of one sublayer ("eap-ig-activations") sum
    to the exact effect of changing it. Points are those of the released code in both directions, a = k/m. (That code
    averages the gradients of all sublayers' lines for every edge instead, which sums to nothing in particular.)

    Args:
        clean, corrupt: prompts; each pair has the same number of tokens, aligned one by one. Files and streams are
            paired row by row.
        metric: a `Metric`, or a function of the logits [b, v] at the last token; None is the logit difference of the
            answers that come with the clean prompts. A metric that compares, such as the KL divergence, compares with
            the clean run.
        method: where the gradient is taken: "eap", "clean-corrupted", "eap-ig-inputs" or "eap-ig-activations".
        steps: number of points of the integrated methods.
        rule: how these points lie: "released", as in the released code, or by a quadrature rule, "midpoint" or
            "gauss".
        direction: "denoise" puts clean values into the corrupted run, "noise" the other way round.
        each: whether every prompt's scores are kept.
        rules: backward rules under which gradients are taken, or a preset of them, as in `attribution_patch`; "relp"
            gives EAP-RelP, under which edges into queries and keys score 0.

    Returns:
        Dataset over `sender` and `receiver`, in the metric's unit, positions summed over. Names and their order are
        those of `EdgeGraph`. The coordinate `edge` is true where there is an edge; `interp.frame` has one row for
        each, with its name in the column `edge`.

        - `value`: estimate, mean over prompts, with the ends `low` and `high` of its 95 % interval (NaN where there is
          no edge) and `n` (0 there).
        - `normalised`: `value` as a share of the difference between the runs.
        - `changed`: whether the estimate is not 0 in any prompt.
        - `clean`, `corrupt`: metric of both runs; [prompt] with `each`.
        - `each` [prompt, sender, receiver], with `each`: every prompt's scores.

        `attrs["integral_error"]` says by how much the scores of "eap-ig-inputs" miss the exact effect, summed over
        prompts and relative to how far the metric moves; where that is more than .05 a note says so.

    Raises:
        ValueError: pairs that do not align, models (or edits) whose stream is not a sum (`EdgeGraph.of`), a metric
            that compares with the very run it is differentiated at, and a metric without any gradient.

    Memory:
        What a backward pass keeps, and the activations of heads, d_head wide; no `[batch, pos, head, d_model]`.

    Cost:
        One forward pass of the other prompts, and a forward and a backward pass of the own ones; the integrated
        methods take `steps` such passes, over activations that many for every sublayer and the input. Every point of a
        line is a row, and no pass has more rows than the batch (or 32). Heads after a norm of their sum (sandwich and
        output norms): see `edge_scores.Change`.

    Source:
        Syed et al. 2023, "Attribution Patching Outperforms Automated Circuit Discovery" (eap); Hanna et al. 2024,
        "Have Faith in Faithfulness" (the integrated methods).

    See Also:
        `edge_effects`: the exact effects. `find_circuit`: keeps the best edges.

    Example:
        >>> pairs = torch.tensor([[5, 6, 7]]), torch.tensor([[5, 9, 7]])
        >>> found = edge_attribution(model, *pairs, metric=interp.logit_difference(3, 4), method="eap-ig-inputs")
        >>> found.value.sel(sender="L0.mlp", receiver="logits").shape
        ()
    """

    _: KW_ONLY
    metric: Metric | LogitFunction | None = None
    method: EdgeMethod = "eap"
    steps: Count = 5
    rule: LineRule = "released"
    direction: Direction = "denoise"
    each: bool = False
    rules: Rules = ()

    def bind(self, model: Subject) -> ByRow:
        """Two forward passes and a backward pass per batch of pairs, or one for every point of a line."""
        network, metric = under_rules(model.transformer, self.rules), as_metric(self.metric, model.text)
        line, graph = GradientLine(self.method, self.steps, self.rule), EdgeGraph.of(network.config)
        check_edits(network, gradients=True)
        if metric.compares and self.method == "eap" and self.direction == "noise":
            raise ValueError(
                f"{metric.name} compares with the clean run, where its gradient is 0: use direction='denoise' or an "
                "integrated method"
            )
        attrs = {
            "method": self.method, "steps": len(line.points()[0]), "rule": self.rule, "direction": self.direction,
            **rules_attrs(self.rules),
        }  # fmt: skip
        table = EffectTable.of_edges(self.name, graph, metric, model.text, attrs)
        measure = partial(
            _effects, graph=graph, metric=metric, line=line, direction=self.direction, rules=self.rules
        )
        return causal(model, table, measure, each=self.each, pairs=True)


edge_attribution = of_pairs(EdgeAttribution)


@torch.no_grad()
def _effects(
    model: Transformer,
    batch: Batch,
    graph: EdgeGraph,
    metric: Metric,
    line: GradientLine,
    direction: Direction,
    rules: Rules,
) -> Steps[MeasuredEffects]:
    """The scores of some pairs, and the metric of their clean and corrupted runs."""
    size = max(1, max(len(batch), ROWS) // len(line.points()[0]))
    parts = []
    for rows in batch.split(size):
        parts.append((yield from _scores(model, Contrast.of(rows, direction), metric, line, graph, rules)))
    return MeasuredEffects.joined(parts)


def _scores(
    model: Transformer, pair: Contrast, metric: Metric, line: GradientLine, graph: EdgeGraph, rules: Rules
) -> Steps[MeasuredEffects]:
    """The scores of pairs whose points of a line fit into one pass."""
    reads, need, quality = (
        _reads(model, graph, line),
        partial(recorded, final=True, exact=True, rules=rules),
        {},
    )
    other_run = yield from need(pair.other, reads)
    if line.method == "eap":
        toward = TowardMetric(
            metric, other_run.reference(metric)
        )  # a metric that compares: with the clean run
        own_run = yield from need(pair.own, [*reads, *_all_gradients(model)], toward=toward)
        change = SenderChange.between(own_run.model, own_run.trace, other_run.trace)
        scores = edge_scores(graph, change, Gradients.of(own_run.model, own_run.trace, line.points()[1]))
        quality = own_run.completeness()
    else:
        own_run = yield from need(pair.own, reads)
        toward = TowardMetric(metric, pair.runs(own_run, other_run)["clean"].reference(metric))
        along = _scores_along_activations if line.method == "eap-ig-activations" else _scores_along_inputs
        scores = yield from along(PairedRuns(pair, own_run, other_run, rules), toward, line, graph)
    own_value, other_value = (run.value(metric, toward.reference) for run in (own_run, other_run))
    if line.method == "eap-ig-inputs":
        quality = {
            MISSED: (scores[:, 0].sum(-1) - (other_value - own_value)).abs(),
            MOVED: (other_value - own_value).abs(),
        }
    return MeasuredEffects(scores, scores != 0, pair.runs(own_value, other_value), quality)


@dataclass(frozen=True, eq=False)
class PairedRuns:
    """Both recorded runs of some pairs: the own one, in which edges are changed, and the other."""

    pair: Contrast
    own: Recorded
    other: Recorded
    rules: Rules

    @cached_property
    def change(self) -> SenderChange:
        """Change of every sender from the own run to the other one."""
        return SenderChange.between(self.own.model, self.own.trace, self.other.trace)

    def gradients_along(
        self, site: str, toward: TowardMetric, line: GradientLine, reads: Sequence[Read]
    ) -> Steps[Gradients]:
        """Gradients in own runs where a site takes the values at the points of the line, corrupted to clean."""
        own, (points, weights) = self.pair.own, line.points()
        example = torch.arange(len(own)).repeat_interleave(len(points))
        ends = self.pair.runs(self.own.trace[Read(site)], self.other.trace[Read(site)])
        run = yield from recorded(
            own.rows(example),
            reads,
            edits=[Edit(site, Between(ends["corrupt"], ends["clean"], points))],
            toward=replace(toward, example=example),
            rules=self.rules,
        )
        return Gradients.of(run.model, run.trace, weights)


@dataclass(frozen=True, eq=False)
class Between:
    """Change of a pass: the site's value at points of the line from each example's corrupted to its clean value.

    The rows of the pass are `example, point`.
    """

    corrupt: Float[Tensor, "b p d"]
    clean: Float[Tensor, "b p d"]
    points: Float[Tensor, "k"]

    def __call__(self, value: Float[Tensor, "r p d"]) -> Float[Tensor, "r p d"]:
        """The values that replace the site's own."""
        start, end = (upcast(x.to(value.device))[:, None] for x in (self.corrupt, self.clean))  # [b 1 p d]
        share = to_device(self.points.to(start.dtype), value.device)[:, None, None]
        return torch.lerp(start, end, share).flatten(0, 1).to(value.dtype)  # [b k p d] -> [r p d]


def _reads(model: Transformer, graph: EdgeGraph, line: GradientLine) -> tuple[Read, ...]:
    """Reads of both runs: senders, and under eap-ig-activations the outputs that move."""
    moving = [group.site for group in _sublayers(graph)] if line.method == "eap-ig-activations" else []
    return tuple(dict.fromkeys((*SenderChange.reads(model), *map(Read, moving))))


def _all_gradients(model: Transformer) -> tuple[Read, ...]:
    """Reads of the gradients at the inputs of all receivers."""
    layers = range(model.config.n_layers)
    return Gradients.reads(model, layers, dict.fromkeys(model.config.mlps, layers))


def _scores_along_inputs(
    runs: PairedRuns, toward: TowardMetric, line: GradientLine, graph: EdgeGraph
) -> Steps[Float[Tensor, "b s r"]]:
    """Scores of all edges by the gradients of runs whose embeddings lie between the corrupted and the clean ones."""
    gradients = yield from runs.gradients_along(START, toward, line, _all_gradients(runs.own.model))
    return edge_scores(graph, runs.change, gradients)


def _scores_along_activations(
    runs: PairedRuns, toward: TowardMetric, line: GradientLine, graph: EdgeGraph
) -> Steps[Float[Tensor, "b s r"]]:
    """Scores of the edges out of each sublayer by the gradients of own runs in which that sublayer's output moves."""
    total = None
    for group in _sublayers(graph):
        reads = Gradients.reads(runs.own.model, group.layers, group.mlps)
        gradients = yield from runs.gradients_along(group.site, toward, line, reads)
        scores = edge_scores(
            graph, runs.change, gradients, first=group.senders.start, last=group.senders.stop
        )
        total = scores if total is None else total + scores
    assert total is not None
    return total


def _sublayers(graph: EdgeGraph) -> Iterator[Sublayer]:
    """The input and every sublayer."""
    n = graph.n_layers
    yield Sublayer(START, slice(0, 1), range(n), dict.fromkeys(graph.mlps, range(n)))
    for layer in range(n):
        this, later = range(layer, n), range(layer + 1, n)
        after = dict.fromkeys(graph.mlps, later)
        if graph.mlp_before:
            place = graph.mlp_sender(layer, "mlp_before")
            before = f"blocks.{layer}.hook_mlp_before_out"
            yield Sublayer(before, slice(place, place + 1), this, {**after, "mlp": this})
        own = {"mlp": this} if graph.mlp and not graph.parallel else {}
        yield Sublayer(f"blocks.{layer}.hook_attn_out", graph.heads(layer), later, {**after, **own})
        if graph.mlp:
            place = graph.mlp_sender(layer)
            yield Sublayer(f"blocks.{layer}.hook_mlp_out", slice(place, place + 1), later, after)
