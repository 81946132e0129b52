"""What a question of rows can need of the model for one batch: a pass or a sweep, and the results of each.

A question about rows is a generator (`Steps`): it yields the pass (`Pass`) or the sweep (`Sweeping`) that it needs
next, is sent what was found, and ends with its values: `seen = yield from recorded(batch, reads)`. `schedule` meets the
needs of several questions together.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

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
    """Rows that a question will sweep after its pass, and the sites that it will edit there.

    Said beforehand, a pass over these rows that is needed now is recorded so that the sweep can depart from it.
    """

    batch: Batch
    sites: Sequence[str]


@dataclass(frozen=True, eq=False)
class TowardMetric:
    """Target of a differentiated pass: the sum of a metric over its rows.

    Rows do not meet, so each has its own gradient.
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
        """The number, from the final stream of the pass."""
        whose = torch.arange(len(batch), device=stream.device) if self.example is None else self.example
        seen, batch = self.metric.sees(stream, batch), batch.to(stream.device)
        return self.metric.of(
            Outcome(model, seen, batch, to_device(whose, stream.device), self.reference)
        ).sum()

    def key(self, batch: Batch) -> Hashable:
        """Equal for passes over the same tokens that are differentiated towards the same number."""
        about = (batch.answer, batch.wrong, batch.forced, batch.row, self.reference, self.example)
        return metric_key(self.metric), self.in_runs, *map(id, about)


@dataclass(frozen=True, eq=False)
class TowardLoss:
    """Target of a differentiated pass: a loss of its logits; of a model without logits, of its final states."""

    loss: Callable[[Float[Tensor, "b n v"], Batch], Float[Tensor, ""]]
    everywhere: bool = False
    """Whether it sees the logits at every token; otherwise those at each row's last."""

    def value(self, model: Transformer, batch: Batch, logits: Float[Tensor, "b n v"]) -> Float[Tensor, ""]:
        """The number, from the logits that the loss sees."""
        return self.loss(logits, batch.to(logits.device))

    def columns(self, model: Transformer, batch: Batch) -> Int[Tensor, "b 1"] | None:
        """Where logits are computed; None = everywhere."""
        return None if self.everywhere or not model.config.unembed else batch.host().last()[:, None]

    def key(self, batch: Batch) -> Hashable:
        """Equal for passes over the same tokens that are differentiated towards the same number."""
        return self.loss, self.everywhere, *map(id, (batch.answer, batch.wrong, batch.forced, batch.row))


Toward = TowardMetric | TowardLoss
"""Targets of a differentiated pass."""


@dataclass(frozen=True, eq=False)
class Pass:
    """A need: one pass over these rows, and what these sites hold in it."""

    batch: Batch
    reads: Sequence[Read]
    last_only: bool = False
    """Whether sites after the blocks (final norm, logits) are needed at the last real token only."""
    final: bool = False
    """Whether the final stream is needed too, to compute metrics from it."""
    exact: bool = False
    """Whether what is read must equal the base run of a sweep bit by bit: then attention takes the path of these reads
    alone (reading patterns rounds otherwise), whatever others read."""
    model: Transformer | None = None
    """The model that runs; None: the one under study."""
    ahead: Sequence[Ahead] = ()
    """The sweeps that follow."""
    edits: Sequence[Edit] = ()
    """Interventions of this pass. It is shared with passes that have equal ones."""
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
        about = (self.batch.answer, self.batch.wrong, self.batch.forced, self.batch.row, reference)
        key = (metric_key(metric), *map(id, about))
        if key not in self._values:
            judge = MetricOfVariants(metric, self.batch, self.model, reference)
            self._values[key] = about, judge.value(self.final_at(metric), 1)[0]
        return self._values[key][1]


@dataclass(frozen=True, eq=False)
class Sweeping:
    """A need: variants of these rows, and what is watched of them."""

    batch: Batch
    variants: Sequence[Variant]
    watch: tuple[Metric, ...] | tuple[Read, ...] | None
    """Metrics, each of which is a sweep of its own from one base run; what sites hold; None = the final stream at each
    row's last token."""
    common: Variant = field(default_factory=Variant)
    """Edits of every variant and of the run that they are compared with."""
    reference: Float[Tensor, "b n d"] | None = None
    """The reference of a metric that compares (`Sweep.run`)."""
    reference_model: Transformer | None = None
    """The model that the reference comes from; None = the one that runs."""
    model: Transformer | None = None
    """The model that runs; None: the one under study."""


Need = Pass | Sweeping


Answer = Recorded | Sequence[Swept] | Mapping[Read, Tensor] | Tensor
"""The results of a pass; of a sweep by metric, by read, or of the final stream."""
Steps = Generator[Need, list[Answer], T]
"""A computation over one batch that yields what it needs next, is sent what was found, and ends with its values.

What was found comes in a list of one that is emptied at once, so that it is freed when the question lets go of it.
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
    """The step of needing a pass: `seen = yield from recorded(batch, reads)`. Arguments are those of `Pass`."""
    found = (yield Pass(batch, reads, last_only, final, exact, model, ahead, edits, toward, rules)).pop()
    assert isinstance(found, Recorded)
    return found


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
    """The step of needing a sweep: `found = yield from swept(batch, variants, metric)`."""
    (found,) = yield from swept_by(
        batch,
        variants,
        (metric,),
        common=common,
        reference=reference,
        reference_model=reference_model,
        model=model,
    )
    return found


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
    """The step of needing several metrics of the same variants; what is found is in their order."""
    need = Sweeping(batch, variants, tuple(metrics), common or Variant(), reference, reference_model, model)
    found = (yield need).pop()
    assert isinstance(found, Sequence)
    return found


def swept_reads(
    batch: Batch, variants: Sequence[Variant], reads: Sequence[Read], *, common: Variant | None = None
) -> Steps[Mapping[Read, Float[Tensor, "v b ..."]]]:
    """The step of needing what sites hold in every variant (`Sweep.read`)."""
    found = (yield Sweeping(batch, variants, tuple(reads), common or Variant())).pop()
    assert isinstance(found, Mapping)
    return found


def swept_final(
    batch: Batch, variants: Sequence[Variant], *, model: Transformer | None = None
) -> Steps[Float[Tensor, "v b d"]]:
    """The step of needing the final stream of every variant at each row's last token (`Sweep.final`).

    That of the run they depart from is one more: of a variant that edits nothing.
    """
    found = (yield Sweeping(batch, variants, None, model=model)).pop()
    assert isinstance(found, Tensor)
    return found


def metric_key(metric: Metric) -> Hashable:
    """Metrics of one key are equal, field by field; a field that cannot be compared counts by its identity."""
    return tuple(each if isinstance(each, Hashable) else id(each) for each in vars(metric).values())
