"""What questions that intervene need of passes, asked for step by step, so that those of one batch share them.

Such a question is a generator: it yields the run or the sweep that it needs next and is sent what was found.
`done_together` takes several of them along: runs of the same rows are one pass with everybody's reads, sweeps of the
same rows and metric are one sweep with everybody's variants. The numbers are those of each alone, to rounding.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

from jaxtyping import Float
from torch import Tensor

from interp.data.batch import Batch
from interp.model import sites
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.metrics import Metric
from interp.passes.observe import observe
from interp.passes.sweep import Judge, Sweep, Swept
from interp.passes.variants import Variant

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Recording:
    """A run without interventions is needed, with what these sites hold in it."""

    batch: Batch
    reads: Sequence[Read]
    final: bool
    """Whether the final stream is needed too; without it the pass ends where everything is read."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """What such a run found."""

    model: Transformer
    batch: Batch
    trace: Trace
    final: Float[Tensor, "b p d"] | None
    _homes: dict[bool, Float[Tensor, "b n d"]] = field(default_factory=dict)
    _values: dict[Hashable, tuple[object, Float[Tensor, "b"]]] = field(default_factory=dict)
    """With what each was compared with, which is held so that no other tensor can get its identity."""

    def home(self, metric: Metric) -> Float[Tensor, "b n d"]:
        """The final stream at the columns that the metric sees; the same tensor for all who ask."""
        assert self.final is not None, "the final stream was not asked for"
        if metric.everywhere not in self._homes:
            self._homes[metric.everywhere] = metric.sees(self.final, self.batch)
        return self._homes[metric.everywhere]

    def value(self, metric: Metric, reference: Float[Tensor, "b n d"] | None = None) -> Float[Tensor, "b"]:
        """The metric of every row; one that compares does so with the reference. Computed once for all who ask."""
        key = (_judged(metric), id(reference))
        if key not in self._values:
            judge = Judge(metric, self.batch, self.model, reference)
            self._values[key] = reference, judge.value(self.home(metric), 1)[0]
        return self._values[key][1]


@dataclass(frozen=True, eq=False)
class Sweeping:
    """The metric of variants of these rows is needed."""

    batch: Batch
    variants: Sequence[Variant]
    metric: Metric
    common: Variant
    """What is edited in every variant and in the run that they are compared with."""
    reference: Float[Tensor, "b n d"] | None
    """What a metric that compares compares with (`Sweep.run`)."""


Steps = Generator[Recording | Sweeping, Recorded | Swept, T]


def recorded(batch: Batch, reads: Sequence[Read], *, final: bool = False) -> Steps[Recorded]:
    """A step: a run of these rows and what sites hold in it; `final`: and the final stream."""
    found = yield Recording(batch, reads, final)
    assert isinstance(found, Recorded)
    return found


def swept(
    batch: Batch,
    variants: Sequence[Variant],
    metric: Metric,
    *,
    common: Variant | None = None,
    reference: Float[Tensor, "b n d"] | None = None,
) -> Steps[Swept]:
    """A step: the metric of every variant of these rows."""
    found = yield Sweeping(batch, variants, metric, common or Variant(), reference)
    assert isinstance(found, Swept)
    return found


def done_together(model: Transformer, asked: Mapping[str, Steps[T]]) -> dict[str, T]:
    """What each of these ends with, by name. All get as far as their sweeps first, then these are made together."""
    done: dict[str, T] = {}
    waiting: dict[str, Recording | Sweeping] = {}

    def goes_on(name: str, found: Recorded | Swept | None) -> None:
        try:
            waiting[name] = next(asked[name]) if found is None else asked[name].send(found)
        except StopIteration as end:
            waiting.pop(name, None)
            done[name] = end.value

    for name in asked:
        goes_on(name, None)
    while waiting:
        runs = {name: need for name, need in waiting.items() if isinstance(need, Recording)}
        sweeps = {name: need for name, need in waiting.items() if isinstance(need, Sweeping)}
        found = _recorded(model, runs) if runs else _swept(model, sweeps)
        for name, each in found.items():
            goes_on(name, each)
    return {name: done[name] for name in asked}


def _recorded(model: Transformer, needed: Mapping[str, Recording]) -> dict[str, Recorded]:
    """One pass for all that need the same rows."""
    found: dict[str, Recorded] = {}
    keys = {
        name: (_rows(need.batch), _ways((read.site for read in need.reads), model))
        for name, need in needed.items()
    }
    for names in _alike(keys):
        some = [needed[name] for name in names]
        batch, reads = some[0].batch, dict.fromkeys(read for need in some for read in need.reads)
        final = any(need.final for need in some)
        stop = model.config.n_layers if final else None
        seen = observe(model, batch, list(reads), stop=stop, answers_only=not final)
        one = Recorded(model, batch, seen.trace, seen.output if final else None)
        found |= dict.fromkeys(names, one)
    return found


def _swept(model: Transformer, needed: Mapping[str, Sweeping]) -> dict[str, Swept]:
    """One sweep for all that need the same metric of the same rows."""
    found: dict[str, Swept] = {}
    for names in _alike({name: _run(need, model) for name, need in needed.items()}):
        some = [needed[name] for name in names]
        variants = [variant for need in some for variant in need.variants]
        sweep = Sweep(model, some[0].batch, variants, some[0].common)
        every = sweep.run(some[0].metric, some[0].reference)
        counts = [len(need.variants) for need in some]
        parts = zip(every.values.split(counts), every.changed.split(counts), strict=True)
        for name, (values, changed) in zip(names, parts, strict=True):
            found[name] = replace(every, values=values, changed=changed)
    return found


def _alike(keys: Mapping[str, Hashable]) -> list[list[str]]:
    """The names with one key, together."""
    found: dict[Hashable, list[str]] = {}
    for name, key in keys.items():
        found.setdefault(key, []).append(name)
    return list(found.values())


def _run(need: Sweeping, model: Transformer) -> Hashable:
    """The same for sweeps that depart from one run and are judged alike."""
    common = id(need.common) if need.common.edits else 0
    ways = _ways((edit.site for variant in need.variants for edit in variant.edits), model)
    return _rows(need.batch), _judged(need.metric), common, id(need.reference), ways


def _ways(names: Iterable[str], model: Transformer) -> frozenset[str]:
    """The sites for which a pass is computed otherwise, so that its other values are the same to rounding only.

    What an edit changes is found by comparing bits with such a pass: attention of scores and patterns is not fused, and
    a stream for every head is projected for itself.
    """
    found = set()
    for name in dict.fromkeys(names):
        row, _ = sites.find(name, model.config)
        if row.on_demand or name.endswith(("attn_scores", "pattern")):
            found.add(row.name)
    return frozenset(found)


def _rows(batch: Batch) -> Hashable:
    """The same for batches of the same tensors."""
    return tuple(id(getattr(batch, each.name)) for each in fields(batch))


def _judged(metric: Metric) -> Hashable:
    """The same for metrics that do the same; of what cannot be compared only itself is the same."""
    return tuple(each if isinstance(each, Hashable) else id(each) for each in vars(metric).values())
