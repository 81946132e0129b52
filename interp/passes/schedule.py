"""What questions need of the model for one batch, and how the needs of several questions are met together.

A question about rows is a generator (`Steps`): it yields the pass or the sweep that it needs next, is sent what was
found, and ends with its values. `answer_together` drives several of them over one batch. Passes over the same tokens
become one pass with everybody's reads; so do passes that are differentiated towards the same number. Sweeps of the same
rows and metric become one sweep with everybody's variants; sweeps wait until nobody needs a pass. The numbers are those
of each question alone, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.transfers import sent
from interp.data.batch import Batch
from interp.model import sites
from interp.model.edits import Edit
from interp.model.rules import Rule
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.checkpointed import differentiated_in_runs, runs_of_blocks
from interp.passes.metrics import Metric, Outcome
from interp.passes.observe import deepest, observe
from interp.passes.rules import Rules, as_rules, completeness, under_rules
from interp.passes.sweep import Base, Judge, Sweep, Swept, Touched
from interp.passes.variants import Variant, canonical

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
_CARRYING = ("hook_scale", "hook_expert_weights")
"""Sites whose values a pass carries on only where they are changed or differentiated; otherwise they are looked at."""


@dataclass(frozen=True, eq=False)
class Ahead:
    """Rows that a question will sweep after its pass, and the sites that it will edit there.

    Said beforehand, a pass over these rows that somebody needs now is recorded so that the sweep can depart from it.
    """

    batch: Batch
    sites: Sequence[str]


@dataclass(frozen=True, eq=False)
class TowardMetric:
    """A pass is differentiated towards the sum of a metric over its rows: rows do not meet, so each has its own."""

    metric: Metric
    reference: Float[Tensor, "b n d"] | None = None
    """What a metric that compares compares with: the final stream of each example, at the columns that it sees."""
    example: Int[Tensor, "r"] | None = None
    """Which example each row is a copy of, where examples are run several times; None = row i is example i."""
    in_runs: bool = False
    """Whether blocks are differentiated in runs where a whole pass would keep too much (`checkpointed`): of a pass that
    is read and edited at the embeddings alone."""

    def value(self, model: Transformer, batch: Batch, stream: Float[Tensor, "r p d"]) -> Float[Tensor, ""]:
        """The number, from the final stream of the pass."""
        whose = torch.arange(len(batch), device=stream.device) if self.example is None else self.example
        seen, batch = self.metric.sees(stream, batch), batch.to(stream.device)
        return self.metric.of(Outcome(model, seen, batch, sent(whose, stream.device), self.reference)).sum()

    def key(self, batch: Batch) -> Hashable:
        """Equal for passes over the same tokens that are differentiated towards the same number."""
        about = (batch.answer, batch.wrong, batch.row, self.reference, self.example)
        return _metric_key(self.metric), self.in_runs, *map(id, about)


@dataclass(frozen=True, eq=False)
class TowardLoss:
    """A pass is differentiated towards a loss of its logits; of a model without logits, of its final states."""

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
        return self.loss, self.everywhere, *map(id, (batch.answer, batch.wrong, batch.row))


Toward = TowardMetric | TowardLoss
"""What a pass is differentiated towards."""


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
    """The model that runs; None = the one that is asked about."""
    ahead: Sequence[Ahead] = ()
    """What will be swept next."""
    edits: Sequence[Edit] = ()
    """Interventions of this pass alone. It is shared with passes that have the very same ones."""
    toward: Toward | None = None
    """What it is differentiated towards, which answers `Read(site, grad=True)`; None = it keeps no gradients."""
    rules: Rules = ()
    """Backward rules under which the model runs; those who name the same ones share the model under them."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """What a pass found, for one of the questions that needed it."""

    model: Transformer
    batch: Batch
    trace: Trace
    final: Float[Tensor, "b p d"] | None
    _homes: dict[bool, Float[Tensor, "b n d"]] = field(default_factory=dict)
    _values: dict[Hashable, tuple[object, Float[Tensor, "b"]]] = field(default_factory=dict)
    """Metrics by what they are and are about, each with the tensors whose identities stand in its key."""
    _missed: list[dict[str, Float[Tensor, "b"]]] = field(default_factory=list)

    @property
    def end(self) -> Float[Tensor, "b p d"]:
        """The final stream, of a pass with `final=True`."""
        assert self.final is not None, "the final stream was not asked for"
        return self.final

    def home(self, metric: Metric) -> Float[Tensor, "b n d"]:
        """The final stream at the columns that the metric sees; the same tensor for all who ask."""
        if metric.everywhere not in self._homes:
            self._homes[metric.everywhere] = metric.sees(self.end, self.batch)
        return self._homes[metric.everywhere]

    def reference(self, metric: Metric) -> Float[Tensor, "b n d"] | None:
        """What a metric compares with, where it compares with this run; None for one that compares with none."""
        return self.home(metric) if metric.compares else None

    def completeness(self) -> dict[str, Float[Tensor, "b"]]:
        """How far relevances miss the final stream's (`rules.completeness`), of a differentiated pass that reads the
        gradient there. Computed once for all who ask.
        """
        if not self._missed:
            slope = self.trace[Read(sites.final_stream(self.model.config), grad=True)]
            self._missed.append(completeness(self.model, self.batch, self.end, slope))
        return dict(self._missed[0])

    def value(self, metric: Metric, reference: Float[Tensor, "b n d"] | None = None) -> Float[Tensor, "b"]:
        """The metric of every row; one that compares does so with the reference. Computed once for all who ask."""
        about = (self.batch.answer, self.batch.wrong, self.batch.row, reference)
        key = (_metric_key(metric), *map(id, about))
        if key not in self._values:
            judge = Judge(metric, self.batch, self.model, reference)
            self._values[key] = about, judge.value(self.home(metric), 1)[0]
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
    """What is edited in every variant and in the run that they are compared with."""
    reference: Float[Tensor, "b n d"] | None = None
    """What a metric that compares compares with (`Sweep.run`)."""
    reference_model: Transformer | None = None
    """The model that the reference comes from; None = the one that runs."""
    model: Transformer | None = None
    """The model that runs; None = the one that is asked about."""


Need = Pass | Sweeping
Answer = Recorded | Sequence[Swept] | Mapping[Read, Tensor] | Tensor
"""What was found: of a pass; of a sweep by metric, by read, or of the final stream."""
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


def run_steps(model: Transformer, steps: Steps[T]) -> T:
    """What one computation over the rows of a batch ends with, where no other one could share its passes."""
    return answer_together(model, {"": steps})[""]


def answer_together(model: Transformer, asking: Mapping[str, Steps[T]]) -> dict[str, T]:
    """What each of these computations over the rows of one batch ends with, by name, from as few passes as possible."""
    done: dict[str, T] = {}
    waiting: dict[str, Need] = {}
    bases, networks = _Bases(model), _Networks(model)

    def go_on(name: str, found: list[Answer]) -> None:
        try:
            waiting[name] = asking[name].send(found) if found else next(asking[name])
        except StopIteration as end:
            bases.leave(name)
            done[name] = end.value

    for name in asking:
        go_on(name, [])
    while waiting:
        passes = {name: need for name, need in waiting.items() if isinstance(need, Pass)}
        sweeps = {name: need for name, need in waiting.items() if isinstance(need, Sweeping)}
        if passes:
            bases.expect(passes, sweeps)
            found = _passed(networks, passes, bases)
        else:
            found = _swept(model, sweeps, bases)
        # what a question needed, and what it is sent, nobody else holds while it goes on
        waiting = {name: need for name, need in waiting.items() if name not in found}
        passes, sweeps = {}, {}
        while found:
            name = next(iter(found))
            go_on(name, [found.pop(name)])
    return {name: done[name] for name in asking}


@dataclass(eq=False)
class _Networks:
    """The models that run: under backward rules a model is another one, made once for all who name these rules."""

    model: Transformer
    _ruled: dict[tuple[int, tuple[Rule, ...]], Transformer] = field(default_factory=dict)

    def of(self, need: Pass) -> Transformer:
        """The model of a pass."""
        network = need.model or self.model
        key = id(network), as_rules(need.rules)
        if need.rules and key not in self._ruled:
            self._ruled[key] = under_rules(network, need.rules)
        return self._ruled.get(key, network)


@dataclass(eq=False)
class _Bases:
    """Passes that sweeps of the same rows can depart from, as long as a sweep of theirs is to come."""

    model: Transformer
    expected: dict[Hashable, dict[str, Sequence[str]]] = field(default_factory=dict)
    """By tokens and path of attention: who will sweep these rows, with edits at which sites."""
    known: dict[Hashable, Base] = field(default_factory=dict)

    def expect(self, passes: Mapping[str, Pass], sweeps: Mapping[str, Sweeping]) -> None:
        """Take in who sweeps which rows, now or after the pass that it needs now."""
        for name, need in passes.items():
            for each in need.ahead:
                self._note(name, each.batch, each.sites)
        for name, sweep in sweeps.items():
            if not sweep.common.edits and sweep.model is None:
                self._note(name, sweep.batch, _edited_sites(sweep))

    def _note(self, name: str, batch: Batch, edited: Iterable[str]) -> None:
        names = [canonical(site, self.model.config) for site in edited]
        key = _tokens_key(batch), _slow_sites(names, self.model)
        self.expected.setdefault(key, {})[name] = names

    def pass_of(
        self, needed: Sequence[Pass], path: frozenset[str]
    ) -> tuple[Trace, Float[Tensor, "b p d"] | None] | None:
        """A pass that answers these and is a base for the sweeps to come; None if there is none to come, or it cannot
        be: logits are read, another model runs, or the pass is edited or differentiated.
        """
        key = _tokens_key(needed[0].batch), path
        expected = self.expected.get(key)
        reads, config = _reads(needed), self.model.config
        if (
            not expected
            or any(need.model or need.rules or need.edits or need.toward for need in needed)
            or deepest((r.site for r in reads), config) is None
        ):
            return None
        edited = tuple(dict.fromkeys(site for names in expected.values() for site in names))
        base = Sweep(self.model, needed[0].batch, ()).base_at(Touched(edited, edited), reads)
        self.known[key] = replace(base, trace={})
        return Trace(base.trace), base.final

    def of(self, need: Sweeping) -> Base | None:
        """The pass from which this sweep can depart, if one was made."""
        if not self.known or need.common.edits or need.model is not None:
            return None
        return self.known.get((_tokens_key(need.batch), _slow_sites(_edited_sites(need), self.model)))

    def leave(self, name: str) -> None:
        """Forget what this question expected, and every pass that nobody waits for any more."""
        for key, expected in list(self.expected.items()):
            expected.pop(name, None)
            if not expected:
                self.expected.pop(key)
                self.known.pop(key, None)


def _passed(networks: _Networks, needed: Mapping[str, Pass], bases: _Bases) -> dict[str, Answer]:
    """One pass for all that need the same tokens under the same edits and gradients, on one path of attention."""
    found: dict[str, Answer] = {}
    models = {name: networks.of(need) for name, need in needed.items()}
    for names in _alike(needed, lambda name: (id(models[name]), _pass_key(needed[name]))):
        network = models[names[0]]
        free = [name for name in names if not needed[name].exact]
        paths = {
            name: _slow_paths(network, (needed[each] for each in ([name] if needed[name].exact else free)))
            for name in names
        }
        for group in _alike(names, paths.__getitem__):
            some = [needed[name] for name in group]
            trace, final = bases.pass_of(some, paths[group[0]]) or one_pass(network, some)
            one = Recorded(network, some[0].batch, trace, final)
            for name, need in zip(group, some, strict=True):
                own = Trace({read: trace[read] for read in need.reads})
                found[name] = replace(one, batch=need.batch, trace=own)
    return {name: found[name] for name in needed}


def one_pass(model: Transformer, needed: Sequence[Pass]) -> tuple[Trace, Float[Tensor, "b p d"] | None]:
    """What all of these read of the same tokens, and the final stream if anybody needs it.

    The pass ends in the deepest block that anybody asks about, unless the final stream or the logits are needed, or
    what is differentiated is computed from them.
    """
    config, batch, reads = model.config, needed[0].batch, _reads(needed)
    edits, toward = needed[0].edits, needed[0].toward
    if toward is not None:
        return _differentiated(model, batch, reads, edits, toward)
    names = [*(read.site for read in reads), *(edit.site for edit in edits)]
    final, stop = any(need.final for need in needed), deepest(names, config)
    if final and stop is not None:
        seen = observe(model, batch, reads, edits, stop=config.n_layers)
        return seen.trace, seen.output
    last = Read(sites.final_stream(config)) if final else None
    some = [need for need in needed if need.reads]
    if not some:
        return Trace({}), None
    last_only = stop is None and not final and all(need.last_only for need in some)
    where = batch.host().last()[:, None] if last_only else None
    every = reads if last is None else [*reads, last]
    trace = observe(model, batch, every, edits, stop=stop, logits_at=where, answers_only=True).trace
    return trace, None if last is None else trace[last]


def _differentiated(
    model: Transformer, batch: Batch, reads: Sequence[Read], edits: Sequence[Edit], toward: Toward
) -> tuple[Trace, Float[Tensor, "b p d"] | None]:
    """One forward and one backward pass, and the final stream if that is what the number is computed from."""
    number = partial(toward.value, model, batch)
    if isinstance(toward, TowardLoss):
        where = toward.columns(model, batch)
        return observe(model, batch, reads, edits, logits_at=where, metric=number).trace, None
    runs = runs_of_blocks(model, batch) if toward.in_runs else []
    if len(runs) > 1:
        return differentiated_in_runs(model, batch, reads, edits, number, runs)
    seen = observe(model, batch, reads, edits, stop=model.config.n_layers, metric=number)
    return seen.trace, seen.output


def _reads(needed: Iterable[Pass]) -> list[Read]:
    """Everything that these passes read, once."""
    return list(dict.fromkeys(read for need in needed for read in need.reads))


def _swept(model: Transformer, needed: Mapping[str, Sweeping], bases: _Bases) -> dict[str, Answer]:
    """One sweep for all that watch the same of the same rows."""
    found: dict[str, Answer] = {}
    for names in _alike(needed, lambda name: _sweep_key(needed[name], model)):
        some = [needed[name] for name in names]
        variants = [variant for need in some for variant in need.variants]
        first, counts = some[0], [len(need.variants) for need in some]
        sweep = Sweep(first.model or model, first.batch, variants, first.common, made=bases.of(first))
        found |= dict(zip(names, _watched(sweep, first, counts), strict=True))
    return found


def _watched(sweep: Sweep, need: Sweeping, counts: Sequence[int]) -> Sequence[Answer]:
    """What a sweep watches, by consecutive groups of so many variants."""
    if need.watch is None:
        return sweep.final().split(list(counts))
    if reads := [each for each in need.watch if isinstance(each, Read)]:
        return _split_reads(sweep.read(reads), counts)
    metrics = [each for each in need.watch if isinstance(each, Metric)]
    every = [sweep.run(metric, need.reference, need.reference_model) for metric in metrics]
    return list(zip(*(_split(one, counts) for one in every), strict=True))


def _split_reads(found: Mapping[Read, Tensor], counts: Sequence[int]) -> Sequence[Answer]:
    """What sites hold, by consecutive groups of so many variants."""
    if len(counts) == 1:
        return [found]
    parts = {read: value.split(list(counts)) for read, value in found.items()}
    return [{read: part[i] for read, part in parts.items()} for i in range(len(counts))]


def _split(swept: Swept, counts: Sequence[int]) -> list[Swept]:
    """What a sweep found, by consecutive groups of so many variants."""
    parts = zip(swept.values.split(list(counts)), swept.changed.split(list(counts)), strict=True)
    return [replace(swept, values=values, changed=changed) for values, changed in parts]


def _alike(values: Iterable[K], key: Callable[[K], Hashable]) -> list[list[K]]:
    """The values in groups of one key, in the order in which the groups begin."""
    found: dict[Hashable, list[K]] = {}
    for value in values:
        found.setdefault(key(value), []).append(value)
    return list(found.values())


def _pass_key(need: Pass) -> Hashable:
    """Passes of one key, by one model, hold the same values and gradients."""
    toward = None if need.toward is None else need.toward.key(need.batch)
    return _tokens_key(need.batch), tuple(map(id, need.edits)), toward


def _sweep_key(need: Sweeping, model: Transformer) -> Hashable:
    """Sweeps of one key depart from the same run and are judged by the same metrics, or read at the same sites.

    A metric may look at anything that the batch has; what is read follows from its tokens and the numbers of its rows.
    """
    batch, numbers = need.batch, need.batch.row
    if any(isinstance(each, Metric) for each in need.watch or ()):
        rows: Hashable = tuple(id(getattr(batch, each.name)) for each in fields(batch))
    else:
        rows = _tokens_key(batch), None if numbers is None else tuple(numbers.tolist())
    common = id(need.common) if need.common.edits else 0
    edited = _slow_sites(_edited_sites(need), model)
    watch = tuple(each if isinstance(each, Read) else _metric_key(each) for each in need.watch or ())
    models = id(need.model or model), id(need.reference_model)
    return rows, watch, common, id(need.reference), models, edited


def _edited_sites(need: Sweeping) -> list[str]:
    """The sites that a sweep edits."""
    return list(dict.fromkeys(edit.site for variant in need.variants for edit in variant.edits))


def _slow_paths(model: Transformer, needed: Iterable[Pass]) -> frozenset[str]:
    """Which of the sites that these passes read make a pass round otherwise.

    A scale or a weight that is differentiated must carry the computation, which its own fused kernel then cannot.
    """
    reads = _reads(needed)
    carried = (read.site for read in reads if read.grad and read.site.endswith(_CARRYING))
    return _slow_sites((read.site for read in reads), model) | {
        sites.find(site, model.config)[0].name for site in carried
    }


def _slow_sites(names: Iterable[str], model: Transformer) -> frozenset[str]:
    """Those of these sites that a pass computes on another path if they are looked at: its other values then differ in
    their last bits. Attention whose scores or patterns are read is not fused; a stream for every head is projected for
    itself.
    """
    found = set()
    for name in dict.fromkeys(names):
        row, _ = sites.find(name, model.config)
        on_demand = row.on_demand and not name.endswith("hook_mlp_in")  # which is the stream itself
        if on_demand or name.endswith(("attn_scores", "pattern")):
            found.add(row.name)
    return frozenset(found)


def _tokens_key(batch: Batch) -> Hashable:
    """Batches of one key hold the same tokens in the same columns, whatever is asked about them."""
    host = batch if batch.tokens.is_cpu else vars(batch).get("_host")
    if host is None:  # fetching the tokens would wait for the device
        return tuple(map(id, (batch.tokens, batch.keep, batch.documents, batch.types, batch.memory)))
    values = (host.tokens, host.keep, host.documents, host.types)
    return id(batch.memory), *(None if x is None else (x.shape, x.numpy().tobytes()) for x in values)


def _metric_key(metric: Metric) -> Hashable:
    """Metrics of one key are equal, field by field; a field that cannot be compared counts by its identity."""
    return tuple(each if isinstance(each, Hashable) else id(each) for each in vars(metric).values())
