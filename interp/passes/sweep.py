"""Many interventions on the same examples as one planned computation instead of one forward pass each.

base run -> where each variant leaves it (block, column) -> packs -> one pass each: block by block, variants entering at
theirs, keys and values of the columns before theirs from the base run -> metric of the final stream at one column.
The numbers are those of a loop over `observe(model, batch, edits=...)`, to rounding, whatever the packing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from tqdm import tqdm

from interp.core.boundary import public
from interp.core.stats import upcast
from interp.core.transfers import to_device, to_host
from interp.data.batch import Batch
from interp.model import sites
from interp.model.attention import picked
from interp.model.cells import Span, edited
from interp.model.config import ModelConfig, Rotary
from interp.model.edits import COLUMNS, Edit, Set, Zero
from interp.model.kv_cache import KVCache, Prefix
from interp.model.position import depends_on_length
from interp.model.tap import Read, Tap
from interp.model.transformer import Transformer
from interp.passes.duration import announce
from interp.passes.memory import bytes_per_token, that_fit
from interp.passes.metrics import Metric, Outcome
from interp.passes.observe import Model, as_network
from interp.passes.packs import Pack, Start, SweepPlan, block_products, fixed_cost, halves, planned
from interp.passes.variants import PlacedEdit, Variant, canonical, changes, layer_of, on_device, placed

AT_ONCE = 2**24
"""Cells of sites that are compared with the base run before the host fetches the comparisons from the device."""


Axes = tuple[str, ...]
_AFTER_KEYS = (
    "attn.hook_q", "attn.q_", "attn.hook_rot_q", "attn.hook_attn_scores", "attn.hook_pattern", "attn.hook_z",
    "attn.hook_result", "ln1_post.", "hook_attn_out", "hook_resid_mid", "hook_mlp_in", "ln2", "mlp.", "hook_mlp_out",
    "hook_resid_post", "hook_normalized_resid_post",
)  # fmt: skip
"""Sites of a block that do not enter the keys and values of its attention."""


@dataclass(frozen=True, eq=False)
class Base:
    """The values of a base run that a sweep keeps."""

    final: Float[Tensor, "b p d"]
    """The stream that leaves the last block."""
    entering: Mapping[int, Float[Tensor, "b p d"]]
    """The stream entering each block, but for the first, where a variant may start."""
    values: Mapping[str, Tensor]
    """Every site that is edited or read."""
    cache: KVCache | None
    """Keys and values of every block; None where a column's value depends on later ones, or rows are packed."""
    trace: Mapping[Read, Tensor] = field(default_factory=dict)
    """The values that other questions read in the same pass."""

    def serves(self, touched: Touched, config: ModelConfig) -> bool:
        """Whether a sweep that edits the sites of `touched` may depart from this base run."""
        return (
            set(touched.planned) <= self.values.keys() and set(touched.layers(config)) <= self.entering.keys()
        )

    @classmethod
    def joined(cls, parts: Sequence[Base]) -> Base:
        """The base runs of several batches, one below the other."""
        caches = [part.cache for part in parts if part.cache is not None]
        return cls(
            torch.cat([part.final for part in parts]),
            {layer: torch.cat([part.entering[layer] for part in parts]) for layer in parts[0].entering},
            {site: torch.cat([part.values[site] for part in parts]) for site in parts[0].values},
            KVCache.joined(caches) if caches else None,
        )


@dataclass(frozen=True)
class Touched:
    """The sites that a sweep edits: what it needs of its base run."""

    sites: tuple[str, ...]
    planned: tuple[str, ...]
    """Sites whose values in the base run are compared with the values that edits put there."""

    @classmethod
    def of(cls, variants: Sequence[Sequence[PlacedEdit]]) -> Touched:
        """The sites that these variants edit."""
        every = [edit for edits in variants for edit in edits]
        touched = dict.fromkeys(edit.site for edit in every)
        return cls(tuple(touched), tuple(dict.fromkeys(edit.site for edit in every if edit.planned)))

    def layers(self, config: ModelConfig) -> list[int]:
        """The blocks where variants may start, but for the first."""
        return sorted({layer_of(site, config) for site in self.sites} - {0})


@torch.no_grad()
def base_run(
    model: Transformer,
    batch: Batch,
    touched: Touched,
    common: Sequence[PlacedEdit],
    reads: Sequence[Read] = (),
) -> Base:
    """One pass under the common edits that records the sites where variants edit and start, and those of `reads`."""
    config = model.config
    entering = {  # before the block's own edits
        layer: Read(sites.stream_after(config, layer - 1)) for layer in touched.layers(config)
    }
    plain_reads = [read for read in reads if read.via is None and not read.grad]
    seen = {
        site: Read(site) for site in dict.fromkeys([*touched.planned, *(read.site for read in plain_reads)])
    }
    every = dict.fromkeys([*entering.values(), *seen.values(), *reads])
    tap = Tap(list(every), changes([(0, edit) for edit in common], 1, len(batch), 0))
    n = batch.tokens.shape[1]
    cache: KVCache | None = None
    if batch.documents is None and continues(config, n):
        new_cache = model.new_cache(len(batch), n)
        assert isinstance(new_cache, KVCache)  # a network with a memory of its own is stateful
        cache = new_cache
    final = model(batch.tokens, tap, stop=config.n_layers, cache=cache, **batch.inputs)
    values = dict(tap.values)
    tap.close()
    return Base(
        final,
        {layer: values[r] for layer, r in entering.items()},
        {site: values[r] for site, r in seen.items()},
        cache,
        {read: values[read] for read in reads},
    )


def continues(config: ModelConfig, columns: int) -> bool:
    """Whether a column of a text of this length can be computed from the cached keys and values of earlier columns."""
    return config.causal and not config.stateful and not _turns_by_length(config, columns)


def _turns_by_length(config: ModelConfig, columns: int) -> bool:
    """Whether rotary angles depend on the text's full length, so that cached keys of a prefix cannot be reused."""
    rotations = (r for r in (config.position, config.local_position) if isinstance(r, Rotary))
    return any((depends_on_length(r) or columns) < columns for r in rotations)


@dataclass(frozen=True, eq=False)
class Departures:
    """Where variants leave the base run."""

    layers: Sequence[int]
    """The first block that each variant changes."""
    first: Int[Tensor, "v b"]
    """The first column that each variant changes in each example; the number of columns if none. On the host."""
    reaches: Bool[Tensor, "v b"]
    """Whether a change can reach the watched columns; where False, `first` has no meaning. On the host."""


def departures(
    config: ModelConfig,
    base: Base,
    variants: Sequence[Sequence[PlacedEdit]],
    batch: Batch,
    watched: Int[Tensor, "b n"] | None,
) -> Departures:
    """Where each variant leaves the base run; watched: the columns of each example that count, None = all do.

    watched is on the host. An edit that finds its values already there changes nothing. A function may change all the
    cells that it names.
    """
    n = batch.tokens.shape[1]
    where = _Differences(base, config, batch, None if watched is None else watched.numpy())
    where.compare(edit for edits in variants for edit in edits)
    first = np.full((len(variants), len(batch)), n)
    layers = []
    for i, edits in enumerate(variants):
        touched = []
        for edit in edits:
            columns = where.first(edit)
            if columns.min() < n:
                touched.append(layer_of(edit.site, config))
                first[i] = np.minimum(first[i], columns)
        layers.append(min(touched, default=0))
    first_columns = torch.from_numpy(first)
    causal = base.cache is not None
    limit = n - 1 if watched is None or not causal else watched.amax(1)
    return Departures(layers, first_columns, first_columns <= limit)


class _Differences:
    """Where edits differ from the base run; values that many of them share are compared once."""

    def __init__(self, base: Base, config: ModelConfig, batch: Batch, watched: "np.ndarray | None") -> None:
        self._base, self._watched_columns = base, watched
        self._examples, self._columns = batch.tokens.shape
        self._layout = batch.layout
        self._last, self._stateful = f"blocks.{config.n_layers - 1}.", config.stateful
        self._known: dict[tuple[str, int, bool], tuple[Axes, np.ndarray]] = {}

    def first(self, edit: PlacedEdit) -> "np.ndarray":
        """The first column of each example that the edit changes; the number of columns where it changes none."""
        if not edit.planned:
            columns = self._named_columns(edit)
            return columns if self._base.cache is not None else np.where(columns < self._columns, 0, columns)
        axes, differs = self._differing_cells(edit)
        first = edit.change.first if isinstance(edit.change, Set) else 0
        rows = differs if len(differs) == self._examples else differs[first : first + self._examples]
        apart = [i for i, axis in enumerate(axes, 1) if isinstance(edit.at.get(axis), tuple)]
        for i in apart:  # examples that have the token in other columns, or not at all
            column = edit.columns(axes[i - 1], self._examples).reshape(-1, *[1] * (rows.ndim - 1))
            rows = np.take_along_axis(rows, np.maximum(column, 0), i) & (column >= 0)
        index = tuple(
            slice(None) if axis not in edit.at else 0 if i in apart else edit.at[axis]
            for i, axis in enumerate(axes, 1)
        )
        differs_there = rows[(slice(None), *index)]  # [example, *remaining_axes]
        remaining_axes = [axis for axis in axes if axis not in edit.at]
        place = next((i for i, axis in enumerate(remaining_axes) if axis in COLUMNS), None)
        by_column = differs_there[:, None] if place is None else np.moveaxis(differs_there, place + 1, 1)
        hit = np.any(by_column.reshape(*by_column.shape[:2], -1), axis=2)  # [example, column]
        places = np.arange(self._columns)[None] if place is not None else self._named_columns(edit)[:, None]
        if self._watched_columns is not None and self._stays_in_column(edit):
            hit = hit & (places[:, :, None] == self._watched_columns[:, None]).any(2)
        places = np.broadcast_to(places, (self._examples, places.shape[1]))
        first_hit = places[np.arange(self._examples), hit.argmax(1)]
        column = np.where(hit.any(1), first_hit, self._columns)
        return column if self._base.cache is not None else np.where(column < self._columns, 0, self._columns)

    def _stays_in_column(self, edit: PlacedEdit) -> bool:
        """Whether an edit cannot reach other columns: it acts after the keys and values of the last block."""
        if self._stateful:  # a convolution or rows of patterns carry it on
            return False
        name = edit.site.removeprefix(self._last)
        return name != edit.site and name.startswith(_AFTER_KEYS)

    def compare(self, edits: Iterable[PlacedEdit]) -> None:
        """Compare the values of all planned edits with the base run, fetching the comparisons to the host together."""
        axes: dict[tuple[str, int, bool], Axes] = {}
        waiting: dict[tuple[str, int, bool], Tensor] = {}
        for edit in edits:
            if not edit.planned or (key := self._key(edit)) in axes:
                continue
            differs = self._site_differs(edit) if key[2] else self._edit_differs(edit)
            axes[key], waiting[key] = self._by_vector(edit.site, differs)
            if sum(map(Tensor.numel, waiting.values())) > AT_ONCE:
                self._known |= {key: (axes[key], cells.numpy()) for key, cells in to_host(waiting).items()}
                waiting = {}
        self._known |= {key: (axes[key], cells.numpy()) for key, cells in to_host(waiting).items()}

    def _key(self, edit: PlacedEdit) -> tuple[str, int, bool]:
        """Cache key of an edit, `(site, id of the values, covers_site)`.

        covers_site: the edit's values cover the whole site, so that one comparison with the base run serves all edits
        that share these values.
        """
        change = edit.change
        covers_site = isinstance(change, Zero) or (
            isinstance(change, Set)
            and (
                not isinstance(change.values, Tensor)
                or change.values.ndim == self._base.values[edit.site].ndim
            )
        )
        if not covers_site:
            return edit.site, id(edit), False
        return edit.site, id(change.values) if isinstance(change, Set) else 0, True

    def _differing_cells(self, edit: PlacedEdit) -> tuple[Axes, "np.ndarray"]:
        """The axes of an edit's site, and True at cells `[example, *axes]` where it differs from the base run."""
        return self._known[self._key(edit)]

    def _site_differs(self, edit: PlacedEdit) -> Tensor:
        """True where the values that an edit puts at the whole site differ from the base run's."""
        base = self._base.values[edit.site]
        values = edit.change.values if isinstance(edit.change, Set) else 0.0
        if not isinstance(values, Tensor):
            return base != values
        values = to_device(values, base.device).to(base.dtype)
        if len(values) not in (1, len(base)):
            base = base.repeat(len(values) // len(base), *[1] * (base.ndim - 1))
        return values != base

    def _edit_differs(self, edit: PlacedEdit) -> Tensor:
        """True where the base run's value of the site changes when the edit is carried out on it."""
        base = self._base.values[edit.site]
        return edited(edit.as_edit(), base, Span(layout=self._layout, width=self._columns)) != base

    @staticmethod
    def _by_vector(site: str, differs: Tensor) -> tuple[Axes, Tensor]:
        """The differences with one cell per vector of the last axis `d` or `e`, and the names of their axes."""
        axes = tuple(sites.axes_of(site).split()[1:])
        if axes[-1] in "de":
            differs, axes = differs.any(-1), axes[:-1]
        return axes, differs

    def _named_columns(self, edit: PlacedEdit) -> "np.ndarray":
        """The column that an edit names in each example: 0 without a position, one past the end without the token."""
        axis = next((axis for axis in COLUMNS if axis in edit.at), None)
        if axis is None:
            return np.zeros(self._examples, dtype=np.int64)
        columns = edit.columns(axis, self._examples)
        return np.where(columns < 0, self._columns, columns)


@dataclass(frozen=True, eq=False)
class SweepPass:
    """The pass of one pack: rows are variants x examples, in the pack's order; columns from the pack's on are computed.

    A variant joins at the block that it changes first, so the rows of variants that joined earlier always come first.
    """

    model: Transformer
    batch: Batch
    base: Base
    starts: Sequence[Start]
    pack: Pack
    variants: Sequence[Sequence[PlacedEdit]]
    """The edits of every variant of the sweep."""
    common: Sequence[PlacedEdit]
    """Edits of all variants, carried out before the variant's own."""

    def final(self, at: Int[Tensor, "b n"] | None) -> Float[Tensor, "r n d"]:
        """The final stream of every row at the columns `at` of its example; None: at all, the base run's first."""
        last = self.model.config.n_layers - 1
        if self.model.by_block:
            stream = self._rows_entering(last, {})
            if at is not None:
                return self._run_last_block(stream, at)
            stream = self._run_block(last, stream, range(self._n_present(last)))
        else:
            stream = self._run_in_one_pass(last + 1, {})
            if at is not None:
                return picked(stream, self._columns_of_pack(at, len(self.pack.variants)))
        before = self.base.final[:, : self.pack.column].repeat(len(self.pack.variants), 1, 1)
        return torch.cat((before, stream), 1)

    def record(self, answers: Mapping[Read, Tensor], stop: int) -> None:
        """Write the values of the sites read into `answers` `[v b ...]`, for the variants and columns of this pack."""
        if not self.model.by_block:
            self._run_in_one_pass(stop, answers)
            return
        stream = self._rows_entering(stop - 1, answers)
        if self._n_present(stop - 1):
            self._run_block(stop - 1, stream, range(self._n_present(stop - 1)), answers)

    def _run_in_one_pass(self, stop: int, answers: Mapping[Read, Tensor]) -> Float[Tensor, "r p d"]:
        """The rows that enter block `stop`, in one pass from the lowest block where a variant of the pack starts."""
        slots = range(len(self.pack.variants))
        first = min(self.starts[i].layer for i in self.pack.variants)
        source = self.base.entering[first] if first else self.batch.tokens
        rows = source[:, self.pack.column :]
        return self._run_blocks(
            range(first, stop), rows.repeat(len(slots), *[1] * (rows.ndim - 1)), slots, answers
        )

    def _columns_of_pack(self, at: Int[Tensor, "b n"], copies: int) -> Int[Tensor, "r n"]:
        """The columns `at` of every example, counted from the pack's first one."""
        return (at - self.pack.column).clamp_min(0).repeat(copies, 1)

    def _rows_entering(self, stop: int, answers: Mapping[Read, Tensor]) -> Tensor:
        """The rows that enter block `stop`: tokens for the first block, else the stream."""
        stream = self._joining_rows(0)
        for layer in range(stop):
            if self._n_present(layer):
                stream = self._run_block(layer, stream, range(self._n_present(layer)), answers)
            if self._n_present(layer + 1) > self._n_present(layer):
                entering = self._joining_rows(layer + 1)
                stream = torch.cat((stream, entering)) if self._n_present(layer) else entering
        return stream

    def _run_last_block(self, stream: Tensor, at: Int[Tensor, "b n"]) -> Float[Tensor, "r n d"]:
        """The final stream at the columns `at`; without edits in the last block, others stop at keys and values."""
        last = self.model.config.n_layers - 1
        by_variant = stream.unflatten(0, (-1, len(self.batch)))  # [(v b) p d] -> [v b p d]
        busy = (
            set()
            if self.common
            else {i for i, own_edits in enumerate(self._edits_of_variants) if last in own_edits}
        )
        everyone = range(len(self.pack.variants))
        groups = [[i for i in everyone if (i in busy) is has_edits] for has_edits in (True, False)]
        out = self.base.final.new_empty(len(everyone), *at.shape, self.model.config.d_model)
        for slots in filter(None, groups):
            columns = self._columns_of_pack(at, len(slots))
            if len(slots) == len(everyone):
                return self._run_block(last, stream, slots, only=columns)
            which = to_device(slots, stream.device)
            done = self._run_block(last, by_variant[which].flatten(0, 1), slots, only=columns)
            out[which] = done.unflatten(0, (len(slots), -1))
        return out.flatten(0, 1)

    def _run_block(
        self,
        layer: int,
        rows: Tensor,
        slots: Sequence[int],
        answers: Mapping[Read, Tensor] | None = None,
        only: Int[Tensor, "r n"] | None = None,
    ) -> Float[Tensor, "r n d"]:
        """The stream of these variants after one block with their edits; `rows` are tokens for the first block."""
        return self._run_blocks(range(layer, layer + 1), rows, slots, answers or {}, only)

    def _run_blocks(
        self,
        layers: range,
        rows: Tensor,
        slots: Sequence[int],
        answers: Mapping[Read, Tensor],
        only: Int[Tensor, "r n"] | None = None,
    ) -> Float[Tensor, "r n d"]:
        """The stream of these variants after some blocks with their edits; `rows` are tokens for the first block."""
        reads = [read for read in answers if layer_of(read.site, self.model.config) in layers]
        edits = [edit for layer in layers for edit in self._edits(layer, slots)]
        tap = Tap(reads, edits) if reads or edits else None
        c, copies, batch = self.pack.column, len(slots), self._copied_inputs(len(slots))
        cache = (
            None
            if self.base.cache is None or c == 0
            else Prefix(self.base.cache, c, copies, keep=self.batch.keep)
        )
        out = self.model(
            rows, tap, layers.start, layers.stop,
            keep=None if batch.keep is None else batch.keep[:, c:],
            cache=cache,
            logits_at=only,
            documents=batch.documents,
            types=None if batch.types is None or layers.start else batch.types[:, c:],
            memory=batch.memory,
            branches=batch.branches,
        )  # fmt: skip
        if tap is not None:
            for read in reads:
                self._write_read(read, tap.values[read], answers[read])
            tap.close()
        return out

    def _edits(self, layer: int, slots: Sequence[int]) -> list[Edit]:
        """The common edits, then each variant's own."""
        everybody = [(i, edit) for i in range(len(slots)) for edit in self._common_edits.get(layer, ())]
        of_variants = [
            (i, edit) for i, slot in enumerate(slots) for edit in self._edits_of_variants[slot].get(layer, ())
        ]
        return changes([*everybody, *of_variants], len(slots), len(self.batch), self.pack.column)

    def _write_read(self, read: Read, value: Tensor, into: Tensor) -> None:
        """Write the value `[(variant example), ...]` of one read into `into`, from the pack's first column on."""
        value = value.unflatten(0, (-1, len(self.batch)))  # [(v b) *axes] -> [v b *axes]
        which = to_device(self.pack.variants[: len(value)], into.device)
        axes = sites.axes_of(read.site).split()
        place = next((i for i, axis in enumerate(axes) if axis in COLUMNS), None)
        if place is None:
            into[which] = value
        else:
            into.movedim(place + 1, 1)[which, self.pack.column :] = value.movedim(place + 1, 1)

    def _joining_rows(self, layer: int) -> Tensor:
        """The rows of the variants that join at this block: tokens for the first block, else the base run's stream."""
        joining = self._n_present(layer) - self._n_present(layer - 1)
        source = (
            self.batch.tokens if layer == 0 else self.base.entering[layer] if joining else self.base.final
        )
        rows = source[:, self.pack.column :]
        return rows.repeat(joining, *[1] * (rows.ndim - 1))

    def _n_present(self, layer: int) -> int:
        """Number of the pack's variants that start at this block or an earlier one."""
        return sum(self.starts[i].layer <= layer for i in self.pack.variants)

    def _copied_inputs(self, copies: int) -> Batch:
        """The batch whose mask, documents, types and memory are repeated `copies` times; its tokens are not used."""
        batch = self.batch
        bare = Batch(batch.tokens, **batch.inputs)
        if all(layout is None for layout in batch.inputs.values()):
            return bare
        return bare.rows(torch.arange(len(bare), device=bare.tokens.device).repeat(copies))

    @cached_property
    def _edits_of_variants(self) -> list[dict[int, list[PlacedEdit]]]:
        """The edits of every variant of the pack, by block."""
        return [self._by_layer(self.variants[i]) for i in self.pack.variants]

    @cached_property
    def _common_edits(self) -> dict[int, list[PlacedEdit]]:
        return self._by_layer(self.common)

    def _by_layer(self, edits: Sequence[PlacedEdit]) -> dict[int, list[PlacedEdit]]:
        by_layer: dict[int, list[PlacedEdit]] = {}
        for edit in edits:
            by_layer.setdefault(layer_of(edit.site, self.model.config), []).append(edit)
        return by_layer


@dataclass(frozen=True, eq=False)
class Swept:
    """The results of a sweep."""

    values: Float[Tensor, "v b"]
    """The metric of every variant of every example; the base run's where the variant changed nothing."""
    base: Float[Tensor, "b"]
    """The metric of the base run."""
    changed: Bool[Tensor, "v b"]
    """Whether the variant changed anything that can reach the metric."""
    reference: Float[Tensor, "b n d"]
    """The final stream that a comparing metric compared with, at the columns that it sees."""


@public()
@dataclass(frozen=True, eq=False)
class Sweep:
    """Many variants of one batch as one planned computation, and the values or metrics to record of each.

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
    """Edits of the base run and of every variant, before the variant's own; after the model's own edits."""
    at: Int[Tensor, "b n"] | None = None
    """The columns where each example is watched; None = those that the metric looks at."""
    memory: int | None = None
    """Bytes that a pack may hold; None = as suits the device."""
    made: Base | None = None
    """An earlier base run of these rows, used if it recorded all sites that this sweep edits; None: run a new one."""

    def run(
        self,
        metric: Metric,
        reference: Float[Tensor, "b n d"] | None = None,
        reference_model: Transformer | None = None,
    ) -> Swept:
        """The metric of every variant.

        A pack that does not fit into the device's memory is halved until it does.

        Args:
            metric: the metric.
            reference: [b, n, d], the final stream that a comparing metric compares with, at the watched columns;
                None: the base run's.
            reference_model: the model that the reference comes from; None: this one.

        Returns:
            `Swept`: the values [v, b] of the variants and of the base run.
        """
        return self.run_all([metric], reference, reference_model)[0]

    def run_all(
        self,
        metrics: Sequence[Metric],
        reference: Float[Tensor, "b n d"] | None = None,
        reference_model: Transformer | None = None,
    ) -> list[Swept]:
        """The results of `run` for several metrics, in one computation for all that look at the same columns.

        Args:
            metrics: the metrics; others as in `run`.

        Returns:
            One `Swept` for each metric, in their order.
        """
        columns = [self._watched_columns(metric) for metric in metrics]
        found: dict[int, Swept] = {}
        for watched in {_columns_key(each): each for each in columns}.values():
            key = _columns_key(watched)
            same = [i for i, each in enumerate(columns) if _columns_key(each) == key]
            swept = self._run_together([metrics[i] for i in same], watched, reference, reference_model)
            found |= dict(zip(same, swept, strict=True))
        return [found[i] for i in range(len(metrics))]

    def _run_together(
        self,
        metrics: Sequence[Metric],
        watched: Int[Tensor, "b n"] | None,
        reference: Float[Tensor, "b n d"] | None,
        reference_model: Transformer | None,
    ) -> list[Swept]:
        """The results for metrics that all look at the columns `watched`."""
        base = self.base
        columns = None if watched is None else to_device(watched, self._network.device)
        home = base.final if columns is None else picked(base.final, columns)
        reference = home if reference is None else reference
        judges = [
            MetricOfVariants(metric, self._batch, self._network, reference, reference_model)
            for metric in metrics
        ]
        base_values = [judge.value(home, 1)[0] for judge in judges]
        values = [base_value.repeat(len(self.variants), 1) for base_value in base_values]

        def measure(sweep_pass: SweepPass) -> None:
            stream, variants = sweep_pass.final(columns), sweep_pass.pack.variants
            for judge, of_metric in zip(judges, values, strict=True):
                of_metric[to_device(variants, of_metric.device)] = judge.value(stream, len(variants))

        where = self._departures_for(watched)
        names = " and ".join(metric.name for metric in metrics)
        self._run_packs(base, self._planned(where, watched), names, measure)
        reaches = to_device(where.reaches, home.device)
        return [
            Swept(torch.where(reaches, of_metric, base_value), base_value, reaches, reference)
            for of_metric, base_value in zip(values, base_values, strict=True)
        ]

    def read(self, reads: Sequence[Read]) -> dict[Read, Tensor]:
        """Values at sites inside the blocks in every variant, `[variant, example, *axes]`; no logits are computed.

        Raises:
            ValueError: a read with `via` or `grad`: the columns that a variant shares with the base run are filled in
                from there.
        """
        if refused := [read for read in reads if read.via is not None or read.grad]:
            raise ValueError(f"a sweep records whole values; {refused[0]} asks for something else")
        config = self._network.config
        canonical_reads = {read: replace(read, site=canonical(read.site, config)) for read in reads}
        base = self.recorded(list(canonical_reads.values()))
        values = {
            r: base.values[r.site].expand(len(self.variants), *[-1] * base.values[r.site].ndim).clone()
            for r in canonical_reads.values()
        }
        stop = 1 + max(layer_of(read.site, config) for read in values)
        plan = self._planned(self._departures(base, None), None)
        self._run_packs(base, plan, "reading", lambda sweep_pass: sweep_pass.record(values, stop))
        return {read: values[same] for read, same in canonical_reads.items()}

    def final(self) -> Float[Tensor, "v b d"]:
        """The final stream of every variant at each row's last token; the base run's where it changed nothing."""
        base, watched = self.base, self._batch.host().last()[:, None] if self.at is None else self.at.cpu()
        columns = to_device(watched, self._network.device)
        home = picked(base.final, columns)[:, 0]
        streams = home.repeat(len(self.variants), 1, 1)

        def keep(sweep_pass: SweepPass) -> None:
            streams[to_device(sweep_pass.pack.variants, streams.device)] = sweep_pass.final(columns)[
                :, 0
            ].unflatten(0, (-1, len(home)))

        self._run_packs(base, self._planned(self._departures_for(watched), watched), "final stream", keep)
        return streams

    def plan(self, *, everywhere: bool = False) -> SweepPlan:
        """The plan of the passes, and what it saves: `print(sweep.plan().explain())`. It takes the base run to know.

        Args:
            everywhere: for a metric that looks at every column.
        """
        at = self._batch.host().prompt_ends()[:, None] if self.at is None else self.at.cpu()
        watched = None if everywhere else at
        return self._planned(self._departures_for(watched), watched)

    def _planned(self, where: Departures, watched: Int[Tensor, "b n"] | None) -> SweepPlan:
        config, columns = self._network.config, self._batch.tokens.shape[1]
        reached = torch.where(where.reaches, where.first, columns).amin(1)
        latest = columns - 1 if watched is None else int(watched.min())
        latest = latest if all(edit.planned for edit in self._common_edits) else 0
        starts = [
            Start(layer if self._network.restarts else 0, min(first, latest), idle=first >= columns)
            for layer, first in zip(where.layers, reached.tolist(), strict=True)
        ]
        explicit = any(
            edit.site.endswith(("attn_scores", "pattern"))
            for edits in (*self._variants, self._common_edits)
            for edit in edits
        )
        token_bytes = bytes_per_token(
            config, columns, self._network.embed.weight.element_size(), explicit=explicit
        )
        tokens = that_fit(self._network, token_bytes, self.memory)
        fixed = fixed_cost(config, self._network.device)
        plan = planned(
            starts, config, len(self._batch), columns, tokens=tokens, everywhere=watched is None, fixed=fixed
        )
        return replace(plan, enters=self._network.restarts)

    @cached_property
    def base(self) -> Base:
        """The run that every variant departs from."""
        made = self.made
        serves = made is not None and made.serves(Touched.of(self._variants), self._network.config)
        return made if made is not None and serves else self.recorded(())

    def recorded(self, reads: Sequence[Read]) -> Base:
        """The run that every variant departs from, with the values that `reads` name."""
        return base_run(
            self._unedited_network, self._batch, Touched.of(self._variants), self._common_edits, reads
        )

    def base_at(self, touched: Touched, reads: Sequence[Read]) -> Base:
        """The base run for sweeps with edits at the sites of `touched`, with the values that other questions read."""
        return base_run(self._unedited_network, self._batch, touched, self._common_edits, reads)

    def _run_packs(
        self, base: Base, plan: SweepPlan, name: str, use_pass: Callable[[SweepPass], None]
    ) -> None:
        network, n = self._network, len(self.variants)
        announce(
            f"{name} of {n} variants of {plan.examples} rows, the work of {plan.passes:.0f} passes over them",
            plan.cost * block_products(network.config),
            network.device,
            "fewer cells (parts, layers, by=) take less, estimates such as attribution_patch a few passes",
        )
        waiting = list(plan.packs[::-1])
        with tqdm(total=len(self.variants), desc=name, delay=1, leave=False) as bar, torch.no_grad():
            bar.update(sum(start.idle for start in plan.starts))
            while waiting:
                pack = waiting.pop()
                try:
                    use_pass(
                        SweepPass(
                            self._unedited_network, self._batch, base, plan.starts, pack, self._variants,
                            self._common_edits,
                        )
                    )  # fmt: skip
                except torch.OutOfMemoryError:
                    waiting += halves(pack)
                    continue
                bar.update(len(pack.variants))

    @cached_property
    def _network(self) -> Transformer:
        """The network, under the interventions that hold here and now."""
        return as_network(self.model)

    @cached_property
    def _batch(self) -> Batch:
        return self.batch.to(self._network.device)

    def _watched_columns(self, metric: Metric) -> Int[Tensor, "b n"] | None:
        """The columns that a metric looks at, on the host; None = every one."""
        if metric.everywhere or self.at is None:
            return metric.columns(self._batch.host())
        return self.at.cpu()

    @cached_property
    def _variants(self) -> tuple[tuple[PlacedEdit, ...], ...]:
        return tuple(self._placed_edits(variant) for variant in self.variants)

    @cached_property
    def _common_edits(self) -> tuple[PlacedEdit, ...]:
        return self._placed_edits(Variant([*self._network.edits, *self.common.edits]))

    def _placed_edits(self, variant: Variant) -> tuple[PlacedEdit, ...]:
        placed_edits = placed(variant, self._network.config, self._batch.host())
        move = partial(on_device, device=self._network.device, moved=self._values_on_device)
        return tuple(edit._replace(change=move(edit.change)) for edit in placed_edits)

    @cached_property
    def _values_on_device(self) -> dict[int, tuple[Tensor, Tensor]]:
        """id of a host tensor -> its copy on the device, and the tensor itself, kept so that the id is not reused."""
        return {}

    @cached_property
    def _unedited_network(self) -> Transformer:
        """The model without its own edits, which are among the common ones."""
        return self._network.unedited

    def _departures_for(self, watched: Int[Tensor, "b n"] | None) -> Departures:
        """Where the variants leave the base run, looked up once for all metrics of the same columns."""
        key = _columns_key(watched)
        if key not in self._departures_by_columns:
            self._departures_by_columns[key] = self._departures(self.base, watched)
        return self._departures_by_columns[key]

    @cached_property
    def _departures_by_columns(self) -> dict[Hashable, Departures]:
        return {}

    def _departures(self, base: Base, watched: Int[Tensor, "b n"] | None) -> Departures:
        return departures(self._network.config, base, self._variants, self._batch, watched)


def _columns_key(watched: Int[Tensor, "b n"] | None) -> Hashable:
    """Key of columns on the host: equal for equal ones."""
    return None if watched is None else (tuple(watched.shape), watched.numpy().tobytes())


@dataclass(frozen=True, eq=False)
class MetricOfVariants:
    """A metric with all it needs, in slices that keep the logits small."""

    metric: Metric
    batch: Batch
    model: Transformer
    reference: Float[Tensor, "b n d"] | None
    reference_model: Transformer | None = None

    @torch.no_grad()
    def value(self, stream: Float[Tensor, "r n d"], copies: int) -> Float[Tensor, "copies b"]:
        """The metric `[copies, example]` of the final streams of `copies` runs of all examples."""
        example = torch.arange(len(self.batch)).repeat(copies)
        size = that_fit(self.model, 8 * self.model.config.n_outputs * stream.shape[1])
        values = []
        for rows, examples in zip(stream.split(size), example.split(size), strict=True):
            all_at_once = len(examples) == len(example) == len(self.batch)
            reference_rows = (
                torch.arange(len(examples), device=stream.device)
                if all_at_once
                else to_device(examples, stream.device)
            )
            batch = self.batch if all_at_once else self.batch.rows(examples)
            if self.metric.of_answer and not all_at_once:  # these rows may have shorter answers than others
                rows = rows[:, : batch.answer_columns().shape[1]]
            reference = None if self.reference is None else self.reference[:, : rows.shape[1]]
            outcome = Outcome(self.model, rows, batch, reference_rows, reference, self.reference_model)
            values.append(upcast(self.metric.of(outcome)))
        return torch.cat(values).unflatten(0, (copies, len(self.batch)))  # [(copies b)] -> [copies b]
