"""How the needs of several questions for one batch are met together.

`answer_together` drives the generators of several questions (`needs.Steps`) over one batch. Passes over the same tokens
become one pass with everybody's reads; so do passes that are differentiated towards the same number. Sweeps of the same
rows and metric become one sweep with everybody's variants; sweeps wait until nobody needs a pass. The numbers are those
of each question alone, to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TypeVar

from jaxtyping import Float
from torch import Tensor

from interp.data.batch import Batch
from interp.model import sites
from interp.model.edits import Edit
from interp.model.rules import Rule
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.passes.checkpointed import differentiated_in_runs, runs_of_blocks
from interp.passes.metrics import Metric
from interp.passes.needs import (
    Answer,
    Need,
    Pass,
    Recorded,
    Steps,
    Sweeping,
    Toward,
    TowardLoss,
    TowardMetric,
    TowardSites,
    TowardStream,
    metric_key,
)
from interp.passes.observe import deepest, observe
from interp.passes.rules import as_rules, under_rules
from interp.passes.sweep import Base, Sweep, Swept, Touched
from interp.passes.variants import canonical

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
_CARRYING = ("hook_scale", "hook_expert_weights")
"""Sites whose values a pass carries on only where they are changed or differentiated; otherwise they are only read.
"""


def run_steps(model: Transformer, steps: Steps[T]) -> T:
    """The result of one computation over the rows of a batch, where no other one could share its passes."""
    return answer_together(model, {"": steps})[""]


def answer_together(model: Transformer, asking: Mapping[str, Steps[T]]) -> dict[str, T]:
    """The results of several computations over the rows of one batch, by name, from as few passes as possible."""
    done: dict[str, T] = {}
    waiting: dict[str, Need] = {}
    bases, networks = _Bases(model), _Networks(model)

    def go_on(name: str, answers: list[Answer]) -> None:
        try:
            waiting[name] = asking[name].send(answers) if answers else next(asking[name])
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
            answers = _pass_answers(networks, passes, bases)
        else:
            answers = _sweep_answers(model, sweeps, bases)
        # drop all references to needs and answers, so that tensors are freed as soon as a question drops them
        waiting = {name: need for name, need in waiting.items() if name not in answers}
        passes, sweeps = {}, {}
        while answers:
            name = next(iter(answers))
            go_on(name, [answers.pop(name)])
    return {name: done[name] for name in asking}


@dataclass(eq=False)
class _Networks:
    """The models that run: under backward rules a model is another one, made once per set of rules."""

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
    """Base runs for later sweeps, recorded in passes over the same rows that other questions need."""

    model: Transformer
    expected: dict[Hashable, dict[str, Sequence[str]]] = field(default_factory=dict)
    """(Tokens, slow sites) of a coming sweep -> name of the question -> the sites that it will edit."""
    known: dict[Hashable, Base] = field(default_factory=dict)

    def expect(self, passes: Mapping[str, Pass], sweeps: Mapping[str, Sweeping]) -> None:
        """Register the sweeps that questions need now, and those announced by needed passes (`Pass.ahead`)."""
        for name, need in passes.items():
            for ahead in need.ahead:
                self._register(name, ahead.batch, ahead.sites)
        for name, sweep in sweeps.items():
            if not sweep.common.edits and sweep.model is None:
                self._register(name, sweep.batch, _edited_sites(sweep))

    def _register(self, name: str, batch: Batch, edited: Iterable[str]) -> None:
        names = [canonical(site, self.model.config) for site in edited]
        key = _tokens_key(batch), _slow_sites(names, self.model)
        self.expected.setdefault(key, {})[name] = names

    def pass_of(
        self, needed: Sequence[Pass], path: frozenset[str]
    ) -> tuple[Trace, Float[Tensor, "b p d"] | None] | None:
        """The trace and final stream of one pass that answers these needs and is recorded as base run of coming sweeps.

        None if no sweep is coming, if logits are read, if another model runs, or if the pass is edited or
        differentiated.
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
        """The recorded base run for this sweep; None if there is none."""
        if not self.known or need.common.edits or need.model is not None:
            return None
        return self.known.get((_tokens_key(need.batch), _slow_sites(_edited_sites(need), self.model)))

    def leave(self, name: str) -> None:
        """Forget the coming sweeps of this question, and every base run that no coming sweep needs."""
        for key, expected in list(self.expected.items()):
            expected.pop(name, None)
            if not expected:
                self.expected.pop(key)
                self.known.pop(key, None)


def _pass_answers(networks: _Networks, needed: Mapping[str, Pass], bases: _Bases) -> dict[str, Answer]:
    """The results of each needed pass; needs with equal tokens, edits, gradients and attention path share one pass."""
    answers: dict[str, Answer] = {}
    models = {name: networks.of(need) for name, need in needed.items()}
    for names in _groups_of_one_key(needed, lambda name: (id(models[name]), _pass_key(needed[name]))):
        network = models[names[0]]
        free = [name for name in names if not needed[name].exact]
        paths = {
            name: _slow_paths(
                network, (needed[member] for member in ([name] if needed[name].exact else free))
            )
            for name in names
        }
        for group in _groups_of_one_key(names, paths.__getitem__):
            some = [needed[name] for name in group]
            trace, final = bases.pass_of(some, paths[group[0]]) or one_pass(network, some)
            result = Recorded(network, some[0].batch, trace, final)
            for name, need in zip(group, some, strict=True):
                own_trace = Trace({read: trace[read] for read in need.reads})
                answers[name] = replace(result, batch=need.batch, trace=own_trace)
    return {name: answers[name] for name in needed}


def one_pass(model: Transformer, needed: Sequence[Pass]) -> tuple[Trace, Float[Tensor, "b p d"] | None]:
    """The answers to all reads of the same tokens, and the final stream if any of them needs it.

    The pass ends in the deepest block that anybody asks about, unless the final stream or the logits are needed, or
    what is differentiated is computed from them.
    """
    config, batch, reads = model.config, needed[0].batch, _reads(needed)
    edits, toward = needed[0].edits, needed[0].toward
    if toward is not None:
        return _differentiated_pass(model, batch, reads, edits, toward)
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


def _differentiated_pass(
    model: Transformer, batch: Batch, reads: Sequence[Read], edits: Sequence[Edit], toward: Toward
) -> tuple[Trace, Float[Tensor, "b p d"] | None]:
    """The values and gradients of one forward and backward pass, and the stream it ends with; None for a loss."""
    if isinstance(toward, TowardSites):
        return _pass_toward_sites(model, batch, reads, edits, toward), None
    number = partial(toward.value, model, batch)
    if isinstance(toward, TowardLoss):
        where = toward.columns(model, batch)
        return observe(model, batch, reads, edits, logits_at=where, metric=number).trace, None
    in_runs = isinstance(toward, TowardMetric) and toward.in_runs
    runs = runs_of_blocks(model, batch) if in_runs else []
    if len(runs) > 1:
        return differentiated_in_runs(model, batch, reads, edits, number, runs)
    stop = toward.stop if isinstance(toward, TowardStream) else model.config.n_layers
    seen = observe(model, batch, reads, edits, stop=stop, metric=number)
    return seen.trace, seen.output


def _pass_toward_sites(
    model: Transformer, batch: Batch, reads: Sequence[Read], edits: Sequence[Edit], toward: TowardSites
) -> Trace:
    """The values and gradients `[k ...]` of a pass that ends after the sites whose numbers are differentiated."""
    seen: dict[str, Tensor] = {}

    def keep(site: str, value: Tensor) -> Tensor:
        seen[site] = value
        return value

    watched = [Edit(site, partial(keep, site)) for site in toward.sites]
    stop = deepest(toward.sites, model.config)
    return observe(
        model, batch, reads, [*edits, *watched], stop=stop, metric=lambda _: toward.numbers(seen), each=True
    ).trace


def _reads(needed: Iterable[Pass]) -> list[Read]:
    """All reads of these passes, without repeats."""
    return list(dict.fromkeys(read for need in needed for read in need.reads))


def _sweep_answers(model: Transformer, needed: Mapping[str, Sweeping], bases: _Bases) -> dict[str, Answer]:
    """The results of each needed sweep; needs with equal rows and equal metrics or reads share one sweep."""
    answers: dict[str, Answer] = {}
    for names in _groups_of_one_key(needed, lambda name: _sweep_key(needed[name], model)):
        some = [needed[name] for name in names]
        variants = [variant for need in some for variant in need.variants]
        first, counts = some[0], [len(need.variants) for need in some]
        sweep = Sweep(first.model or model, first.batch, variants, first.common, made=bases.of(first))
        answers |= dict(zip(names, _sweep_results(sweep, first, counts), strict=True))
    return answers


def _sweep_results(sweep: Sweep, need: Sweeping, counts: Sequence[int]) -> Sequence[Answer]:
    """The results of a sweep, split into consecutive groups of `counts[i]` variants."""
    if need.watch is None:
        return sweep.final().split(list(counts))
    if reads := [watched for watched in need.watch if isinstance(watched, Read)]:
        return _split_reads(sweep.read(reads), counts)
    metrics = [watched for watched in need.watch if isinstance(watched, Metric)]
    every = sweep.run_all(metrics, need.reference, need.reference_model)
    return list(zip(*(_split_metrics(swept, counts) for swept in every), strict=True))


def _split_reads(values: Mapping[Read, Tensor], counts: Sequence[int]) -> Sequence[Answer]:
    """The values at sites `[v b ...]`, split into consecutive groups of `counts[i]` variants."""
    if len(counts) == 1:
        return [values]
    parts = {read: value.split(list(counts)) for read, value in values.items()}
    return [{read: part[i] for read, part in parts.items()} for i in range(len(counts))]


def _split_metrics(swept: Swept, counts: Sequence[int]) -> list[Swept]:
    """The metrics of a sweep `[v b]`, split into consecutive groups of `counts[i]` variants."""
    parts = zip(swept.values.split(list(counts)), swept.changed.split(list(counts)), strict=True)
    return [replace(swept, values=values, changed=changed) for values, changed in parts]


def _groups_of_one_key(values: Iterable[K], key: Callable[[K], Hashable]) -> list[list[K]]:
    """The values in groups of equal keys, in the order in which each key first occurs."""
    groups: dict[Hashable, list[K]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return list(groups.values())


def _pass_key(need: Pass) -> Hashable:
    """Key of a pass: passes of one model with equal keys have the same values and gradients."""
    toward = None if need.toward is None else need.toward.key(need.batch)
    return _tokens_key(need.batch), tuple(map(id, need.edits)), toward


def _sweep_key(need: Sweeping, model: Transformer) -> Hashable:
    """Key of a sweep: sweeps with equal keys have the same base run, and the same metrics or reads.

    A metric may look at anything that the batch has; what is read follows from its tokens and the numbers of its rows.
    """
    batch, numbers = need.batch, need.batch.row
    if any(isinstance(each, Metric) for each in need.watch or ()):
        rows: Hashable = tuple(id(getattr(batch, each.name)) for each in fields(batch))
    else:
        rows = _tokens_key(batch), None if numbers is None else tuple(numbers.tolist())
    common = id(need.common) if need.common.edits else 0
    edited = _slow_sites(_edited_sites(need), model)
    watch = tuple(each if isinstance(each, Read) else metric_key(each) for each in need.watch or ())
    models = id(need.model or model), id(need.reference_model)
    return rows, watch, common, id(need.reference), models, edited


def _edited_sites(need: Sweeping) -> list[str]:
    """The sites that a sweep edits."""
    return list(dict.fromkeys(edit.site for variant in need.variants for edit in variant.edits))


def _slow_paths(model: Transformer, needed: Iterable[Pass]) -> frozenset[str]:
    """The sites read by these passes that make a pass take an unfused path, so that its values round differently.

    A norm scale or expert weight that is differentiated must be part of the graph, which a fused kernel does not allow.
    """
    reads = _reads(needed)
    carried = (read.site for read in reads if read.grad and read.site.endswith(_CARRYING))
    return _slow_sites((read.site for read in reads), model) | {
        sites.find(site, model.config)[0].name for site in carried
    }


def _slow_sites(names: Iterable[str], model: Transformer) -> frozenset[str]:
    """The sites among these whose reading switches off a fused kernel, so that other values differ in their last bits.

    Attention is not fused where scores or patterns are read; the inputs of single heads are projected separately.
    """
    slow = set()
    for name in dict.fromkeys(names):
        row, _ = sites.find(name, model.config)
        on_demand = row.on_demand and not name.endswith("hook_mlp_in")  # which is the stream itself
        if on_demand or name.endswith(("attn_scores", "pattern")):
            slow.add(row.name)
    return frozenset(slow)


def _tokens_key(batch: Batch) -> Hashable:
    """Key of the tokens of a batch: batches of one key hold equal tokens in the same columns."""
    host = batch if batch.tokens.is_cpu else vars(batch).get("_host")
    if host is None:  # fetching the tokens would wait for the device
        parts = (batch.tokens, batch.keep, batch.documents, batch.types, batch.memory, batch.branches)
        return tuple(map(id, parts))
    values = (host.tokens, host.keep, host.documents, host.types, host.branches)
    return id(batch.memory), *(None if x is None else (x.shape, x.numpy().tobytes()) for x in values)
