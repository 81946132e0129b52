"""Many interventions on the same examples as one planned computation instead of one forward pass each.

base run -> where each variant leaves it (block, column) -> packs -> one pass each: block by block, variants entering at
theirs, keys and values of the columns before theirs from the base run -> metric of the final stream at one column.
The numbers are those of a loop over `observe(model, batch, edits=...)`, to rounding, whatever the packing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from interp.core.boundary import public
from interp.core.precision import wide
from interp.data.batch import Batch
from interp.model.mask import picked
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.base_run import Base, Departures, base_run, departures
from interp.passes.memory import bytes_per_token, that_fit
from interp.passes.metrics import Metric, Outcome
from interp.passes.observe import Model, as_network
from interp.passes.plan import Pack, Plan, Start, planned
from interp.passes.sweep_pass import SweepPass
from interp.passes.variants import Placed, Variant, canonical, layer_of, placed


@dataclass(frozen=True, eq=False)
class Swept:
    """What a sweep found."""

    values: Float[Tensor, "v b"]
    """The metric of every variant of every example; the base run's where the variant changed nothing."""
    base: Float[Tensor, "b"]
    """The metric of the base run."""
    changed: Bool[Tensor, "v b"]
    """Whether the variant changed anything that can reach the metric."""


@public()
@dataclass(frozen=True, eq=False)
class Sweep:
    """Variants of the same examples, and what to watch of them.

    Errors (when it is planned): everything that an `Edit` may have wrong, by name.

    Example:
        >>> batch = model.text.batch(prompt)
        >>> variants = [interp.edits.Variant([interp.Edit(f"L{layer}.mlp", interp.edits.Zero())]) for layer in range(2)]
        >>> Sweep(model.transformer, batch, variants).run(interp.metrics.kl_divergence()).values.shape
        torch.Size([2, 1])
    """

    model: Model
    batch: Batch
    variants: Sequence[Variant]
    common: Variant = field(default_factory=Variant)
    """What is edited in the base run and in every variant, before the variant's own; after the model's own edits."""
    at: Int[Tensor, "b"] | None = None
    """The column where each example is watched; None = its last token."""
    memory: int | None = None
    """Bytes that a pack may hold; None = as suits the device."""

    def run(self, metric: Metric, reference: Float[Tensor, "b n d"] | None = None) -> Swept:
        """The metric of every variant.

        reference: the final stream that a comparing metric compares with, at the watched columns; None = the base
        run's. A pack that does not fit into the device's memory is halved until it does.
        """
        base, everywhere = self.base, metric.everywhere
        home = base.final if everywhere else picked(base.final, self._columns[:, None])
        judge = _Judge(metric, self._batch, self._network, home if reference is None else reference)
        base_value = judge.value(home, 1)[0]
        values = base_value.repeat(len(self.variants), 1)

        def measure(one: SweepPass) -> None:
            stream = one.final(None if everywhere else self._columns)
            values[list(one.pack.variants)] = judge.value(stream, len(one.pack.variants))

        where = self._departures(base, everywhere=everywhere)
        self._run(base, self._planned(where, everywhere=everywhere), metric.name, measure)
        return Swept(torch.where(where.reaches, values, base_value), base_value, where.reaches)

    def read(self, reads: Sequence[Read]) -> dict[Read, Tensor]:
        """What sites inside the blocks hold in every variant, `[variant, example, *axes]`; no logits are computed.

        Errors: ValueError for a read with `via` or `grad`: the columns that a variant shares with the base run are
        filled in from there.
        """
        if refused := [read for read in reads if read.via is not None or read.grad]:
            raise ValueError(f"a sweep records whole values; {refused[0]} asks for something else")
        config = self._network.config
        asked = {read: replace(read, site=canonical(read.site, config)) for read in reads}
        base = self.recorded(list(asked.values()))
        found = {
            r: base.values[r.site].expand(len(self.variants), *[-1] * base.values[r.site].ndim).clone()
            for r in asked.values()
        }
        stop = 1 + max(layer_of(read.site, config) for read in found)
        plan = self._planned(self._departures(base, everywhere=True), everywhere=True)
        self._run(base, plan, "reading", lambda one: one.record(found, stop))
        return {read: found[same] for read, same in asked.items()}

    def plan(self, *, everywhere: bool = False) -> Plan:
        """What will run, and what that saves: `print(sweep.plan().explain())`. It takes the base run to know.

        everywhere: for a metric that looks at every column.
        """
        return self._planned(self._departures(self.base, everywhere=everywhere), everywhere=everywhere)

    def _planned(self, where: Departures, *, everywhere: bool) -> Plan:
        config, columns = self._network.config, self._batch.tokens.shape[1]
        reached = torch.where(where.reaches, where.first, columns).amin(1)
        latest = columns - 1 if everywhere else int(self._columns.min())
        latest = latest if all(edit.planned for edit in self._common) else 0
        starts = [
            Start(layer, min(first, latest), idle=first >= columns)
            for layer, first in zip(where.layers, reached.tolist(), strict=True)
        ]
        explicit = any(
            edit.site.endswith(("attn_scores", "pattern"))
            for edits in (*self._variants, self._common)
            for edit in edits
        )
        each = bytes_per_token(config, columns, self._network.embed.weight.element_size(), explicit=explicit)
        tokens = that_fit(self._network, each, self.memory)
        return planned(starts, config, len(self._batch), columns, tokens=tokens, everywhere=everywhere)

    @cached_property
    def base(self) -> Base:
        """The run that every variant departs from."""
        return self.recorded(())

    def recorded(self, reads: Sequence[Read]) -> Base:
        """The run that every variant departs from, with what these sites hold in it."""
        return base_run(self._plain, self._batch, self._variants, self._common, reads)

    def _run(self, base: Base, plan: Plan, name: str, each: Callable[[SweepPass], None]) -> None:
        waiting = list(plan.packs[::-1])
        with tqdm(total=len(self.variants), desc=name, delay=1, leave=False) as bar, torch.no_grad():
            bar.update(sum(start.idle for start in plan.starts))
            while waiting:
                pack = waiting.pop()
                try:
                    each(
                        SweepPass(
                            self._plain,
                            self._batch,
                            base,
                            plan.starts,
                            pack,
                            self._variants,
                            self._common,
                        )
                    )
                except torch.OutOfMemoryError:
                    waiting += _halves(pack)
                    continue
                bar.update(len(pack.variants))

    @cached_property
    def _network(self) -> Transformer:
        """The network, under the interventions that hold here and now."""
        return as_network(self.model)

    @cached_property
    def _batch(self) -> Batch:
        return self.batch.to(self._network.device)

    @cached_property
    def _columns(self) -> Int[Tensor, "b"]:
        return (self._batch.last() if self.at is None else self.at).to(self._network.device)

    @cached_property
    def _variants(self) -> tuple[tuple[Placed, ...], ...]:
        return tuple(self._placed(variant) for variant in self.variants)

    @cached_property
    def _common(self) -> tuple[Placed, ...]:
        return self._placed(Variant([*self._network.edits, *self.common.edits]))

    def _placed(self, variant: Variant) -> tuple[Placed, ...]:
        return placed(variant, self._network.config, len(self.batch), self.batch.tokens.shape[1])

    @cached_property
    def _plain(self) -> Transformer:
        """The model without its own edits, which are among the common ones."""
        return self._network.unedited

    def _departures(self, base: Base, *, everywhere: bool) -> Departures:
        watched = None if everywhere else self._columns
        return departures(self._network.config, base, self._variants, self._batch, watched)


@dataclass(frozen=True, eq=False)
class _Judge:
    """A metric with all it needs, in slices that keep the logits small."""

    metric: Metric
    batch: Batch
    model: Transformer
    reference: Float[Tensor, "b n d"]

    @torch.no_grad()
    def value(self, stream: Float[Tensor, "r n d"], copies: int) -> Float[Tensor, "copies b"]:
        """The metric of rows that are `copies` times the examples."""
        example = torch.arange(len(self.batch), device=stream.device).repeat(copies)
        size = that_fit(self.model, 8 * self.model.config.d_vocab * stream.shape[1])
        found = []
        for rows in torch.arange(len(stream), device=stream.device).split(size):
            some = example[rows]
            outcome = Outcome(self.model, stream[rows], self.batch.rows(some), some, self.reference)
            found.append(wide(self.metric.of(outcome)))
        return torch.cat(found).unflatten(0, (copies, len(self.batch)))


def _halves(pack: Pack) -> list[Pack]:
    """The same in two packs; MemoryError for a pack of one variant."""
    middle = len(pack.variants) // 2
    if not middle:
        raise MemoryError(
            "one variant of these examples does not fit into the device's memory: give the sweep fewer examples"
        )
    torch.cuda.empty_cache()
    return [Pack(pack.variants[middle:], pack.column), Pack(pack.variants[:middle], pack.column)]
