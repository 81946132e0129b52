"""The forward passes and sweeps that a question can need for one batch, and the results of each.

A question about rows is a generator (`Steps`): it yields the pass (`Pass`) or the sweep (`Sweeping`) that it needs
next, is sent the result, and returns its values: `seen = yield from recorded(batch, reads)`. `schedule` answers the
needs of several questions together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.stats import upcast
from interp.core.transfers import to_device
from interp.data.batch import Batch
from interp.model import sites
from interp.model.edits import Edit
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.metrics import Metric, Outcome
from interp.passes.rules import Rules, completeness
from interp.passes.sweep import MetricOfVariants, Swept
from interp.passes.variants import Variant

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Ahead:
    """Rows that a question will sweep after its pass, and the sites that the sweep will edit.

    With this announced, a pass over these rows that runs before is recorded as the sweep's base run.
    """

    batch: Batch
    sites: Sequence[str]


@dataclass(frozen=True, eq=False)
class TowardMetric:
    """Target of a differentiated pass: the sum of a metric over its rows.

    No row sees another, so each row's gradient is that of its own metric.
    """

    metric: Metric
    reference: Float[Tensor, "b n d"] | None = None
    """The reference of a metric that compares: the final stream of each example, at the columns that it sees."""
    example: Int[Tensor, "r"] | None = None
    """Example that each row is a copy of, where examples are run several times; None: row i is example i."""
    in_runs: bool = False
    """Whether blocks are differentiated in runs where a whole pass would keep too much (`checkpointed`): of a pass that
    is read and edited at the embeddings alone."""

    def value(self, model: Transformer, batch: Batch, stream: Float[Tensor, "r p d"]) -> Float[Tensor, ""]:
        """The sum of the metric over the rows, from the final stream of the pass."""
        whose = torch.arange(len(batch), device=stream.device) if self.example is None else self.example
        seen, batch = self.metric.sees(stream, batch), batch.to(stream.device)
        return self.metric.of(
            Outcome(model, seen, batch, to_device(whose, stream.device), self.reference)
        ).sum()

    def key(self, batch: Batch) -> Hashable:
        """Equal for passes over the same tokens that are differentiated towards the same number."""
        about = (
            batch.answer,
            batch.wrong,
            batch.forced,
            batch.row,
            batch.choices,
            self.reference,
            self.example,
        )
        return metric_key(self.metric), self.in_runs, *map(id, about)


@dataclass(frozen=True, eq=False)
class TowardLoss:
    """Target of a differentiated pass: a loss of its logits; of a model without logits, of its final states."""

    loss: Callable[[Float[Tensor, "b n v"], Batch], Float[Tensor, ""]]
    everywhere: bool = False
    """Whether it sees the logits at every token; otherwise those at each row's last."""
    whole: bool = False
    """Whether it sees the logits at every token that predicts one of the answer (`Batch.answer_columns`)."""

    def value(self, model: Transformer, batch: Batch, logits: Float[Tensor, "b n v"]) -> Float[Tensor, ""]:
        """The loss, from the logits at `columns`."""
        return self.loss(logits, batch.to(logits.device))

    def columns(self, model: Transformer, batch: Batch) -> Int[Tensor, "b k"] | None:
        """The columns at which logits are computed; None = all."""
        if self.everywhere or not model.config.unembed:
            return None
        return batch.host().answer_columns() if self.whole else batch.host().last()[:, None]

    def key(self, batch: Batch) -> Hashable:
        """Equal for passes over the same tokens that are differentiated towards the same number."""
        return (
            self.loss,
            self.everywhere,
            self.whole,
            *map(id, (batch.answer, batch.wrong, batch.forced, batch.row)),
        )


@dataclass(frozen=True, eq=False)
class TowardStream:
    """Target of a differentiated pass that ends before block `stop`: stream . gradient, for a known gradient.

    It goes on with a backward pass from the middle of the network, where the gradient of the rest is known.
    """

    gradient: Float[Tensor, "b p d"]
    """The gradient of the stream that enters the block; that of the final stream, where `stop` is their number."""
    stop: int

    def value(self, model: Transformer, batch: Batch, stream: Float[Tensor, "b p d"]) -> Float[Tensor, ""]:
        """The sum over the rows of stream . gradient."""
        return (upcast(stream) * upcast(self.gradient).to(stream.device)).sum()

    def key(self, batch: Batch) -> Hashable:
        """Equal for passes over the same tokens that are differentiated towards the same number."""
        return self.stop, id(self.gradient)


@dataclass(frozen=True, eq=False)
class TowardSites:
    """Target of a differentiated pass that ends after the last of some sites: numbers computed from their values.

    The backward passes of the numbers share the forward pass. A read of a gradient has one along its first axis for
    each number.
    """

    sites: Sequence[str]
    numbers: Callable[[Mapping[str, Tensor]], Float[Tensor, "k"]]
    """Function of the values of the sites, by name."""

    def key(self, batch: Batch) -> Hashable:
        """Equal for passes over the same tokens that are differentiated towards the same numbers."""
        return tuple(self.sites), id(self.numbers)


Toward = TowardMetric | TowardLoss | TowardStream | TowardSites
"""Targets of a differentiated pass."""


@dataclass(frozen=True, eq=False)
class Pass:
    """A need: one pass over the batch, and the values of `reads` in it."""

    batch: Batch
    reads: Sequence[Read]
    last_only: bool = False
    """Whether sites after the blocks (final norm, logits) are needed at the last real token only."""
    final: bool = False
    """Whether the final stream is needed too, to compute metrics from it."""
    exact: bool = False
    """Whether the values read must equal those of a sweep's base run bit by bit: then reads of other questions do not
    switch off fused attention in this pass (an unfused pass rounds differently)."""
    model: Transformer | None = None
    """The model that runs; None: the model of the question."""
    ahead: Sequence[Ahead] = ()
    """The sweeps that the question will need after this pass."""
    edits: Sequence[Edit] = ()
    """Interventions of this pass; passes with the same edits are run as one."""
    toward: Toward | None = None
    """The target towards which it is differentiated, which answers `Read(site, grad=True)`; None: it keeps no
    gradients.
    """
    rules: Rules = ()
    """Backward rules under which the model runs; questions with equal rules share the model under them."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """The results of a pass, for one of the questions that needed it."""

    model: Transformer
    batch: Batch
    trace: Trace
    final: Float[Tensor, "b p d"] | None
    _homes: dict[tuple[bool, bool], Float[Tensor, "b n d"]] = field(default_factory=dict)
    _values: dict[Hashable, tuple[object, Float[Tensor, "b"]]] = field(default_factory=dict)
    """Metrics computed so far, by a key of the metric and its data, each with the tensors whose identities stand in
    its key.
    """
    _missed: list[dict[str, Float[Tensor, "b"]]] = field(default_factory=list)

    @property
    def end(self) -> Float[Tensor, "b p d"]:
        """The final stream, of a pass with `final=True`."""
        assert self.final is not None, "the final stream was not asked for"
        return self.final

    def final_at(self, metric: Metric) -> Float[Tensor, "b n d"]:
        """The final stream at the columns that the metric sees; one tensor shared by all callers."""
        of_answer = metric.of_answer and self.batch.forced is not None
        key = metric.everywhere, of_answer
        if key not in self._homes:
            self._homes[key] = metric.sees(self.end, self.batch)
        return self._homes[key]

    def reference(self, metric: Metric) -> Float[Tensor, "b n d"] | None:
        """The reference of a metric that compares with this run; None for a metric that does not compare."""
        return self.final_at(metric) if metric.compares else None

    def completeness(self) -> dict[str, Float[Tensor, "b"]]:
        """Error of the sum of relevances (`rules.completeness`), of a pass that reads the final gradient.

        Computed once for all callers.
        """
        if not self._missed:
            slope = self.trace[Read(sites.final_stream(self.model.config), grad=True)]
            self._missed.append(completeness(self.model, self.batch, self.end, slope))
        return dict(self._missed[0])

    def value(self, metric: Metric, reference: Float[Tensor, "b n d"] | None = None) -> Float[Tensor, "b"]:
        """The metric of every row, against the reference where it compares. Computed once for all callers."""
        batch = self.batch
        about = (batch.answer, batch.wrong, batch.forced, batch.row, batch.choices, reference)
        key = (metric_key(metric), *map(id, about))
        if key not in self._values:
            judge = MetricOfVariants(metric, self.batch, self.model, reference)
            self._values[key] = about, judge.value(self.final_at(metric), 1)[0]
        return self._values[key][1]


@dataclass(frozen=True, eq=False)
class Sweeping:
    """A need: the variants of a sweep over the batch, and the metrics or values to record of them."""

    batch: Batch
    variants: Sequence[Variant]
    watch: tuple[Metric, ...] | tuple[Read, ...] | None
    """Metrics of each variant, or values of sites; None = the final stream at each row's last token."""
    common: Variant = field(default_factory=Variant)
    """Edits of every variant and of the run that they are compared with."""
    reference: Float[Tensor, "b n d"] | None = None
    """The reference of a metric that compares (`Sweep.run`)."""
    reference_model: Transformer | None = None
    """The model that the reference comes from; None = the one that runs."""
    model: Transformer | None = None
    """The model that runs; None: the model of the question."""


Need = Pass | Sweeping


Answer = Recorded | Sequence[Swept] | Mapping[Read, Tensor] | Tensor
"""The result of a pass, or of a sweep: one per metric, one per read, or the final stream."""
Steps = Generator[Need, list[Answer], T]
"""A generator over one batch that yields the pass or sweep it needs next, is sent the result, and returns its values.

The result comes in a list of one, which the generator empties, so that it holds the only reference to the result.
"""


def recorded(
    batch: Batch,
    reads: Sequence[Read],
    *,
    last_only: bool = False,
    final: bool = False,
    exact: bool = False,
    model: Transformer | None = None,
    ahead: Sequence[Ahead] = (),
    edits: Sequence[Edit] = (),
    toward: Toward | None = None,
    rules: Rules = (),
) -> Steps[Recorded]:
    """The result of a pass, by `seen = yield from recorded(batch, reads)`. Arguments are those of `Pass`."""
    answer = (yield Pass(batch, reads, last_only, final, exact, model, ahead, edits, toward, rules)).pop()
    assert isinstance(answer, Recorded)
    return answer


def swept(
    batch: Batch,
    variants: Sequence[Variant],
    metric: Metric,
    *,
    common: Variant | None = None,
    reference: Float[Tensor, "b n d"] | None = None,
    reference_model: Transformer | None = None,
    model: Transformer | None = None,
) -> Steps[Swept]:
    """The result of a sweep with one metric, by `result = yield from swept(batch, variants, metric)`."""
    (result,) = yield from swept_by(
        batch,
        variants,
        (metric,),
        common=common,
        reference=reference,
        reference_model=reference_model,
        model=model,
    )
    return result


def swept_by(
    batch: Batch,
    variants: Sequence[Variant],
    metrics: Sequence[Metric],
    *,
    common: Variant | None = None,
    reference: Float[Tensor, "b n d"] | None = None,
    reference_model: Transformer | None = None,
    model: Transformer | None = None,
) -> Steps[Sequence[Swept]]:
    """The results of a sweep with several metrics, in the order of the metrics."""
    need = Sweeping(batch, variants, tuple(metrics), common or Variant(), reference, reference_model, model)
    results = (yield need).pop()
    assert isinstance(results, Sequence)
    return results


def swept_reads(
    batch: Batch, variants: Sequence[Variant], reads: Sequence[Read], *, common: Variant | None = None
) -> Steps[Mapping[Read, Float[Tensor, "v b ..."]]]:
    """The values of sites in every variant of a sweep (`Sweep.read`)."""
    values = (yield Sweeping(batch, variants, tuple(reads), common or Variant())).pop()
    assert isinstance(values, Mapping)
    return values


def swept_final(
    batch: Batch, variants: Sequence[Variant], *, model: Transformer | None = None
) -> Steps[Float[Tensor, "v b d"]]:
    """The final stream of every variant at each row's last token (`Sweep.final`).

    To get the base run's too, add a variant without edits.
    """
    streams = (yield Sweeping(batch, variants, None, model=model)).pop()
    assert isinstance(streams, Tensor)
    return streams


def metric_key(metric: Metric) -> Hashable:
    """Key of a metric: its fields, or their ids where they cannot be hashed."""
    return tuple(each if isinstance(each, Hashable) else id(each) for each in vars(metric).values())
