"""One pack of a sweep on its way through the blocks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.data.batch import Batch
from interp.model import sites
from interp.model.edits import COLUMNS, Edit
from interp.model.kv_cache import Prefix
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer
from interp.passes.base_run import Base
from interp.passes.plan import Pack, Start
from interp.passes.variants import Placed, changes, layer_of


@dataclass(frozen=True, eq=False)
class SweepPass:
    """The rows are variants x examples, variants in the pack's order; columns before the pack's are the base run's.

    A variant joins at the block it first changes, so the first rows are always those that have been on the way longest.
    """

    model: Transformer
    batch: Batch
    base: Base
    starts: Sequence[Start]
    pack: Pack
    variants: Sequence[Sequence[Placed]]
    """The edits of every variant of the sweep."""
    common: Sequence[Placed]
    """Those of all variants, which come first."""

    def final(self, at: Int[Tensor, "b"] | None) -> Float[Tensor, "r n d"]:
        """The final stream of every row: at one column of each example, or at all, the base run's included."""
        last = self.model.config.n_layers - 1
        stream = self._up_to(last, {})
        if at is not None:
            return self._last_block(stream, at)
        stream = self._block(last, stream, range(self._present(last)))
        before = self.base.final[:, : self.pack.column].repeat(len(self.pack.variants), 1, 1)
        return torch.cat((before, stream), 1)

    def record(self, answers: Mapping[Read, Tensor], stop: int) -> None:
        """Write what these sites hold into `answers` `[v b ...]`, for the variants and columns that are on the way."""
        stream = self._up_to(stop - 1, answers)
        if self._present(stop - 1):
            self._block(stop - 1, stream, range(self._present(stop - 1)), answers)

    def _up_to(self, stop: int, answers: Mapping[Read, Tensor]) -> Tensor:
        """The rows that enter block `stop`: tokens for the first block, else the stream."""
        stream = self._entering(0)
        for layer in range(stop):
            if self._present(layer):
                stream = self._block(layer, stream, range(self._present(layer)), answers)
            if self._present(layer + 1) > self._present(layer):
                entering = self._entering(layer + 1)
                stream = torch.cat((stream, entering)) if self._present(layer) else entering
        return stream

    def _last_block(self, stream: Tensor, at: Int[Tensor, "b"]) -> Float[Tensor, "r 1 d"]:
        """Through the last block; only keys and values are computed elsewhere for variants that it has no edits for."""
        last = self.model.config.n_layers - 1
        by_variant = stream.unflatten(0, (-1, len(self.batch)))
        busy = set() if self.common else {i for i, mine in enumerate(self._own) if last in mine}
        everyone = range(len(self.pack.variants))
        groups = [[i for i in everyone if (i in busy) is wanted] for wanted in (True, False)]
        out = self.base.final.new_empty(len(everyone), len(self.batch), 1, self.model.config.d_model)
        for slots in filter(None, groups):
            rows = by_variant if len(slots) == len(everyone) else by_variant[slots]
            columns = (at - self.pack.column).clamp_min(0).repeat(len(slots))[:, None]
            done = self._block(last, rows.flatten(0, 1), slots, only=columns)
            out[slots] = done.unflatten(0, (len(slots), -1))
        return out.flatten(0, 1)

    def _block(
        self,
        layer: int,
        rows: Tensor,
        slots: Sequence[int],
        answers: Mapping[Read, Tensor] | None = None,
        only: Int[Tensor, "r 1"] | None = None,
    ) -> Float[Tensor, "r n d"]:
        """These variants through one block, with their edits; `rows` are tokens for the first block."""
        reads = [read for read in answers or {} if layer_of(read.site, self.model.config) == layer]
        edits = self._edits(layer, slots)
        tap = Tap(reads, edits) if reads or edits else None
        c, copies, batch = self.pack.column, len(slots), self._copied(len(slots))
        cache = (
            None
            if self.base.cache is None or c == 0
            else Prefix(self.base.cache, c, copies, keep=self.batch.keep)
        )
        out = self.model(
            rows, tap, layer, layer + 1,
            keep=None if batch.keep is None else batch.keep[:, c:],
            cache=cache,
            logits_at=only,
            documents=batch.documents,
            types=None if batch.types is None or layer else batch.types[:, c:],
            memory=batch.memory,
        )  # fmt: skip
        if tap is not None:
            for read in reads:
                self._keep(read, tap.values[read], (answers or {})[read])
            tap.close()
        return out

    def _edits(self, layer: int, slots: Sequence[int]) -> list[Edit]:
        """The common edits, then each variant's own."""
        everybody = [(i, edit) for i in range(len(slots)) for edit in self._common.get(layer, ())]
        own = [(i, edit) for i, slot in enumerate(slots) for edit in self._own[slot].get(layer, ())]
        return changes([*everybody, *own], len(slots), len(self.batch), self.pack.column)

    def _keep(self, read: Read, value: Tensor, into: Tensor) -> None:
        """Write what was read of the first variants, columns from the pack's on."""
        value = value.unflatten(0, (-1, len(self.batch)))
        which = torch.tensor(self.pack.variants[: len(value)], device=into.device)
        axes = sites.axes_of(read.site).split()
        place = next((i for i, axis in enumerate(axes) if axis in COLUMNS), None)
        if place is None:
            into[which] = value
        else:
            into.movedim(place + 1, 1)[which, self.pack.column :] = value.movedim(place + 1, 1)

    def _entering(self, layer: int) -> Tensor:
        """The rows of the variants that join at this block: tokens for the first block, else the base run's stream."""
        joining = self._present(layer) - self._present(layer - 1)
        source = (
            self.batch.tokens if layer == 0 else self.base.entering[layer] if joining else self.base.final
        )
        rows = source[:, self.pack.column :]
        return rows.repeat(joining, *[1] * (rows.ndim - 1))

    def _present(self, layer: int) -> int:
        """How many variants are on the way in this block."""
        return sum(self.starts[i].layer <= layer for i in self.pack.variants)

    def _copied(self, copies: int) -> Batch:
        """The examples, `copies` times over."""
        return self.batch.rows(torch.arange(len(self.batch)).repeat(copies))

    @cached_property
    def _own(self) -> list[dict[int, list[Placed]]]:
        """The edits of every variant of the pack, by block."""
        return [self._by_layer(self.variants[i]) for i in self.pack.variants]

    @cached_property
    def _common(self) -> dict[int, list[Placed]]:
        return self._by_layer(self.common)

    def _by_layer(self, edits: Sequence[Placed]) -> dict[int, list[Placed]]:
        found: dict[int, list[Placed]] = {}
        for edit in edits:
            found.setdefault(layer_of(edit.site, self.model.config), []).append(edit)
        return found
