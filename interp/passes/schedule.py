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
    """Passes from which later sweeps of the same rows can depart."""

    model: Transformer
    expected: dict[Hashable, dict[str, Sequence[str]]] = field(default_factory=dict)
    """The coming sweeps, by tokens and path of attention: which question, with edits at which sites."""
    known: dict[Hashable, Base] = field(default_factory=dict)

    def expect(self, passes: Mapping[str, Pass], sweeps: Mapping[str, Sweeping]) -> None:
        """Register the coming sweeps of each question, now or after the pass that it needs now."""
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
        """A pass that answers these needs and is a base for coming sweeps.

        None if there are none to come, or it cannot be: logits are read, another model runs, or the pass is edited or
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
        """The pass from which this sweep can depart, if one was made."""
        if not self.known or need.common.edits or need.model is not None:
            return None
        return self.known.get((_tokens_key(need.batch), _slow_sites(_edited_sites(need), self.model)))

    def leave(self, name: str) -> None:
        """Forget the coming sweeps of this question, and every pass that no sweep waits for any more."""
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
                own_trace = Trace({read: trace[read] for read in need.reads})
                found[name] = replace(one, batch=need.batch, trace=own_trace)
    return {name: found[name] for name in needed}


def one_pass(model: Transformer, needed: Sequence[Pass]) -> tuple[Trace, Float[Tensor, "b p d"] | None]:
    """The answers to all reads of the same tokens, and the final stream if any of them needs it.

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
    """The results of a sweep, by consecutive groups of so many variants."""
    if need.watch is None:
        return sweep.final().split(list(counts))
    if reads := [each for each in need.watch if isinstance(each, Read)]:
        return _split_reads(sweep.read(reads), counts)
    metrics = [each for each in need.watch if isinstance(each, Metric)]
    every = [sweep.run(metric, need.reference, need.reference_model) for metric in metrics]
    return list(zip(*(_split(one, counts) for one in every), strict=True))


def _split_reads(found: Mapping[Read, Tensor], counts: Sequence[int]) -> Sequence[Answer]:
    """The values at sites, by consecutive groups of so many variants."""
    if len(counts) == 1:
        return [found]
    parts = {read: value.split(list(counts)) for read, value in found.items()}
    return [{read: part[i] for read, part in parts.items()} for i in range(len(counts))]


def _split(swept: Swept, counts: Sequence[int]) -> list[Swept]:
    """The metrics of a sweep, by consecutive groups of so many variants."""
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
    watch = tuple(each if isinstance(each, Read) else metric_key(each) for each in need.watch or ())
    models = id(need.model or model), id(need.reference_model)
    return rows, watch, common, id(need.reference), models, edited


def _edited_sites(need: Sweeping) -> list[str]:
    """The sites that a sweep edits."""
    return list(dict.fromkeys(edit.site for variant in need.variants for edit in variant.edits))


def _slow_paths(model: Transformer, needed: Iterable[Pass]) -> frozenset[str]:
    """The sites, among those that these passes read, that make a pass round otherwise.

    A scale or a weight that is differentiated must carry the computation, which its own fused kernel then cannot.
    """
    reads = _reads(needed)
    carried = (read.site for read in reads if read.grad and read.site.endswith(_CARRYING))
    return _slow_sites((read.site for read in reads), model) | {
        sites.find(site, model.config)[0].name for site in carried
    }


def _slow_sites(names: Iterable[str], model: Transformer) -> frozenset[str]:
    """Sites that a pass computes on another path if they are read, so that other values differ in their last bits.

    Attention whose scores or patterns are read is not fused; a stream for every head is projected for itself.
    """
    found = set()
    for name in dict.fromkeys(names):
        row, _ = sites.find(name, model.config)
        on_demand = row.on_demand and not name.endswith("hook_mlp_in")  # which is the stream itself
        if on_demand or name.endswith(("attn_scores", "pattern")):
            found.add(row.name)
    return frozenset(found)


def _tokens_key(batch: Batch) -> Hashable:
    """Key of the tokens of a batch: batches of one key hold equal tokens in the same columns."""
    host = batch if batch.tokens.is_cpu else vars(batch).get("_host")
    if host is None:  # fetching the tokens would wait for the device
        return tuple(map(id, (batch.tokens, batch.keep, batch.documents, batch.types, batch.memory)))
    values = (host.tokens, host.keep, host.documents, host.types)
    return id(batch.memory), *(None if x is None else (x.shape, x.numpy().tobytes()) for x in values)
