"""Activations on disk: written in one pass over data of any length, read back lazily for probes and dictionaries.

A store is a folder of safetensors files (its shards) and an `index.json`. An entry is one token of one row: what every
site holds there, beside the tables `row` (its number in the source), `pos` (tokens before it in its text, BOS included)
and `token`. The index is written anew after each shard. What is known of a batch without running it (row, position and
token of every entry) is compared with what is stored; only batches after that are run. So a store whose writing was
killed at any moment ends with the bits of one that was not.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from itertools import accumulate, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from interp.core.axes import describe, shape_text
from interp.core.boundary import public
from interp.core.kinds import require_device
from interp.core.wording import nearest
from interp.data.batch import Batch
from interp.data.sources import Data, Rejected
from interp.data.stream import DataSource, PromptBatches, prompt_source, windows_of
from interp.model.config import Json
from interp.model.layout import Layout
from interp.model.sites import find
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.observe import Model, as_network, deepest, observe, text_of
from interp.runs.folder import FolderKind, ManifestEntry, built, clear
from interp.runs.provenance import model_hash

if TYPE_CHECKING:
    from safetensors import safe_open

StoredPositions = Literal["all", "last"]
TABLES = ("row", "pos", "token")
"""Tables of every shard besides the sites, one int64 per entry."""
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32)}
STORED_AS = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
"""The dtypes' names in safetensors files."""
FORMAT = "interp activations 1"
STORE = FolderKind("store of activations", "index.json", FORMAT)


@dataclass(frozen=True)
class StoreShard(ManifestEntry):
    """One file of a store."""

    entries: int


@dataclass(frozen=True)
class StoreIndex:
    """The contents of a store and how it was made; written to `index.json`."""

    dtype: str
    sites: tuple[str, ...]
    model_sha256: str
    positions: StoredPositions
    skip_bos: bool
    shard_entries: int
    data: str | None
    """The fingerprint of the source, if the writer was given one."""
    complete: bool = False
    rejected: int = 0
    """Number of rows of the source that could not be used; counted when the store is complete."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape of one entry at each site; empty before the first shard."""
    shards: tuple[StoreShard, ...] = ()

    @property
    def entries(self) -> int:
        """Number of entries of all shards."""
        return sum(shard.entries for shard in self.shards)

    @property
    def settings(self) -> Json:
        """The fields that decide the entries, which are all but those of the progress."""
        contents = ("complete", "rejected", "shapes", "shards")
        return {name: value for name, value in asdict(self).items() if name not in contents}

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> StoreIndex:
        """The index that a manifest holds; manifests of the first version lack `rejected`, which is then 0."""
        values: dict[str, Any] = {"rejected": 0, **manifest}
        if {"shapes", "shards"} <= values.keys():  # else `built` says what is missing
            if not isinstance(values["shards"], list) or not isinstance(values["shapes"], dict):
                raise ValueError(
                    f"shards must be a list and shapes an object, got {values['shards']!r} and {values['shapes']!r}"
                )
            shapes = {
                name: tuple(entry) if isinstance(entry, list) else entry
                for name, entry in values["shapes"].items()
            }
            values["shapes"] = shapes
            values["shards"] = tuple(built(StoreShard, entry) for entry in values["shards"])
        index = built(cls, values)
        least = 8 * len(TABLES)
        if wrong := [shard for shard in index.shards if not 0 <= shard.entries * least <= shard.bytes]:
            raise ValueError(
                f"{wrong[0].file} is listed with {wrong[0].entries} entries, each of at least {least} bytes, and "
                f"{wrong[0].bytes} bytes"
            )
        for i, shard in enumerate(index.shards):
            if shard.file != _shard_name(i):
                raise ValueError(f"shard {i} must be {_shard_name(i)}, got {shard.file}")
        if index.dtype not in DTYPES or (index.shards and index.shapes.keys() != set(index.sites)):
            raise ValueError(
                f"a dtype of {', '.join(DTYPES)} and a shape for each of the sites {', '.join(index.sites)} are "
                f"required, got {index.dtype} and shapes of {', '.join(index.shapes) or 'none'}"
            )
        return index


def _shard_name(i: int) -> str:
    return f"shard-{i:05d}.safetensors"


def _index(folder: Path, manifest: Mapping[str, Any]) -> StoreIndex:
    """The index in the manifest of a folder; a ValueError about it names the file."""
    try:
        return StoreIndex.of(manifest)
    except ValueError as cause:
        raise ValueError(f"{folder / STORE.manifest} is no index of a store: {cause}") from cause


# --- reading ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ActivationStore:
    """Activations in a folder, loaded as they are read.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> batches = [model.text.batch([prompt, "The cat sat"])]
        >>> _ = store_activations(model, batches, ["blocks.1.mlp.hook_post"], folder, dtype=torch.float32)
        >>> store = ActivationStore.open(folder)
        >>> neurons, rows = store.read("blocks.1.mlp.hook_post"), store.read("row")
        >>> neurons.shape == (len(store), model.cfg.mlp.d_mlp) and rows.max()
        tensor(1)
    """

    folder: Path
    index: StoreIndex

    @classmethod
    @public()
    def open(cls, folder: Path | str) -> ActivationStore:
        """The store in a folder.

        Raises:
            FileNotFoundError: a folder without an index or without one of its shards.
            ValueError: one whose writing was not finished, a foreign index, or a shard of another size, place or
                number of entries than when it was written.
        """
        folder = Path(folder)
        if not (folder / STORE.manifest).is_file():
            raise FileNotFoundError(f"{folder} is no store of activations: it has no {STORE.manifest}")
        index = _index(folder, STORE.read(folder))
        if not index.complete or not index.shards:
            raise ValueError(
                f"{folder} is not finished, it holds {index.entries} entries: call store_activations again with the "
                "same arguments to go on"
            )
        listed = {shard.file for shard in index.shards}
        if more := sorted({path.name for path in folder.glob("shard-*.safetensors")} - listed):
            raise ValueError(f"{folder} holds {more[0]}, which its {STORE.manifest} does not list")
        store = cls(folder, index)
        store._check_shards()
        return store

    def __len__(self) -> int:
        return self.index.entries

    @property
    def sites(self) -> tuple[str, ...]:
        """The sites that are stored."""
        return self.index.sites

    @cached_property
    def _ends(self) -> list[int]:
        return list(accumulate(shard.entries for shard in self.index.shards))

    def verify(self) -> None:
        """Check the bytes of the whole store; ValueError naming a shard that differs from what was written."""
        for shard in self.index.shards:
            shard.check(self.folder, contents=True)

    def _check_shards(self) -> None:
        """Raise an error that names the first shard whose size, place or shapes are not those listed."""
        for i, shard in enumerate(self.index.shards):
            shard.check(self.folder)
            with self._opened(i, (*TABLES, *self.sites)):
                pass

    @public()
    def shard(self, i: int) -> dict[str, Tensor]:
        """All sites and tables of one shard, by name."""
        if not 0 <= i < len(self._ends):
            raise IndexError(f"shards are 0 to {len(self._ends) - 1}, got {i}")
        entries = self.index.shards[i].entries
        return {name: self._slice(i, name, 0, entries) for name in (*TABLES, *self.sites)}

    @public()
    def read(self, name: str, entries: slice = slice(None)) -> Shaped[Tensor, "n ..."]:
        """The activations of a site, or a table, at consecutive entries, as stored.

        Args:
            name: a site or a table.
            entries: which entries.

        Returns:
            [n, *shape].

        Raises:
            KeyError: a site that is not stored.
            ValueError: a slice with steps, or an unreadable shard.
        """
        if name not in self.sites and name not in TABLES:
            raise KeyError(f"{name!r} is not stored; {nearest(name, (*self.sites, *TABLES))}")
        start, stop, step = entries.indices(len(self))
        if step != 1:
            raise ValueError(f"consecutive entries are required, got a step of {step}")
        if start >= stop:
            return self._slice(0, name, 0, 0)
        parts = []
        for i in range(bisect_right(self._ends, start), bisect_left(self._ends, stop) + 1):
            first = self._ends[i] - self.index.shards[i].entries
            parts.append(self._slice(i, name, max(start - first, 0), min(stop, self._ends[i]) - first))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @public()
    def batches(
        self,
        site: str,
        size: int,
        *,
        shuffle_seed: int | None = None,
        buffer: int = 65_536,
        epochs: int | None = 1,
        device: torch.device | str = "cpu",
    ) -> Iterator[Shaped[Tensor, "n ..."]]:
        """The activations of a site in batches of `size` entries; each entry exactly once per epoch.

        Args:
            site: a site that is stored.
            size: entries of a batch; the last batch of an epoch may be shorter.
            shuffle_seed: seed of the order: runs of `size` neighbours are drawn from the whole store in random order
                and mixed in a buffer, equally for equal seeds and anew in every epoch. None: the order stored.
            buffer: entries of the buffer in which runs are mixed.
            epochs: passes over the store; None: without end, for training.
            device: where the batches go.

        Returns:
            Iterator of [n, *shape].

        Raises:
            KeyError: a site that is not stored.
            ValueError: a size, buffer or epochs below 1.
        """
        if size < 1 or buffer < size or (epochs is not None and epochs < 1):
            raise ValueError(
                f"1 <= size <= buffer and epochs >= 1 are required, got {size}, {buffer} and {epochs}"
            )
        require_device(device)
        generator = None if shuffle_seed is None else torch.Generator().manual_seed(shuffle_seed)
        for _ in count() if epochs is None else range(epochs):
            for batch in self._epoch(site, size, buffer, generator):
                yield batch.to(device)

    def _epoch(
        self, site: str, size: int, buffer: int, generator: torch.Generator | None
    ) -> Iterator[Shaped[Tensor, "n ..."]]:
        """The batches of one pass over a site's entries, shuffled in a buffer if there is a generator."""
        runs = [slice(start, start + size) for start in range(0, len(self), size)]
        if generator is None:
            yield from (self.read(site, run) for run in runs)
            return
        pool = _Pool(min(len(self), buffer + size), generator)
        for i in torch.randperm(len(runs), generator=generator).tolist():
            pool.add(self.read(site, runs[i]))
            if len(pool) >= buffer:
                yield from pool.drawn(max(1, len(pool) // 2 // size) * size, size)
        yield from pool.drawn(len(pool), size)

    def _slice(self, i: int, name: str, start: int, stop: int) -> Tensor:
        """Entries `start` to `stop` of a site or table in one shard file."""
        with self._opened(i, (name,)) as file:
            return file.get_slice(name)[start:stop]

    def _check_form(self, file: safe_open, path: Path, name: str, entries: int) -> None:
        """Raise a ValueError unless a shard has a table or site in its dtype, with a row for each entry."""
        stored, site = file.get_slice(name), name not in TABLES
        shape = [entries, *(self.index.shapes[name] if site else ())]
        dtype = STORED_AS[self.index.dtype] if site else "I64"
        if (stored.get_shape(), stored.get_dtype()) != (shape, dtype):
            raise ValueError(
                f"{path}: {name} is listed as {shape_text(shape)} {dtype}, got {shape_text(stored.get_shape())} "
                f"{stored.get_dtype()}"
            )

    @contextmanager
    def _opened(self, i: int, names: Sequence[str]) -> Iterator[safe_open]:
        """One shard's file; ValueError unless it was written as this one, with a row of `names` for each entry."""
        from safetensors import SafetensorError, safe_open

        shard = self.index.shards[i]
        path = self.folder / shard.file
        try:
            with safe_open(path, framework="pt") as file:
                if (written := (file.metadata() or {}).get(FORMAT, shard.file)) != shard.file:
                    raise ValueError(f"{path} holds what was written as {written}")
                for name in names:
                    self._check_form(file, path, name, shard.entries)
                yield file
        except (SafetensorError, OSError) as cause:
            raise ValueError(f"{path} is not a readable shard (truncated?): {cause}") from cause


class _Pool:
    """A shuffle buffer of entries: each entry is copied in once and copied out once."""

    def __init__(self, most: int, generator: torch.Generator) -> None:
        self._generator = generator
        self._entries: Tensor | None = None
        self._free = torch.arange(most)
        self._order = torch.empty(0, dtype=torch.long)
        """The place in `_entries` of every entry in the buffer, in the buffer's order."""

    def __len__(self) -> int:
        return len(self._order)

    def add(self, entries: Shaped[Tensor, "n ..."]) -> None:
        """Append entries to the buffer."""
        if self._entries is None:
            self._entries = entries.new_empty(len(self._free), *entries.shape[1:])
        places, self._free = self._free[: len(entries)], self._free[len(entries) :]
        self._entries.index_copy_(0, places, entries)
        self._order = torch.cat((self._order, places))

    def drawn(self, n: int, size: int) -> Iterator[Shaped[Tensor, "n ..."]]:
        """Shuffle the buffer, and yield its first `n` entries in batches of `size`, which leave it."""
        self._order = self._order[torch.randperm(len(self), generator=self._generator)]
        out, self._order = self._order[:n], self._order[n:]
        for places in out.split(size):
            if self._entries is not None and len(places):
                yield self._entries.index_select(0, places)
        self._free = torch.cat((self._free, out)).sort().values


# --- writing ----------------------------------------------------------------------------------------------------


@public()
def store_activations(
    model: Model,
    data: DataSource | Data,
    sites: Sequence[str],
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.float16,
    pos: StoredPositions = "all",
    skip_bos: bool = True,
    shard_entries: int = 16_384,
    source: str | None = None,
    prepend_bos: bool | None = None,
    batch_size: int = 32,
) -> ActivationStore:
    """The store of the values of some sites at every token of the data, written to a folder in constant memory.

    One forward pass per batch, which ends with the deepest site. Padding is never stored. Called again with the same
    arguments, it goes on after the entries stored: the batches are compared with these, and run only where they are
    new, so an interrupted write ends with the same bits. One writer per folder, by a lock.

    Args:
        model: the model, without edits.
        data: texts, token ids, files, a `Stream`, or batches as they are. Pieces of a text that was split share its
            number (`row` of the store), and each begins at position 0. Rows of a file or stream that cannot be used
            are left out and counted (`store.index.rejected`).
        sites: full names of sites with one value per position.
        folder: where the store is, or goes on.
        dtype: float16, bfloat16 or float32.
        pos: all tokens of a text, or its last.
        skip_bos: leave out the BOS of batches that have one.
        shard_entries: entries of a file of the store.
        source: the data's fingerprint, kept in the index.
        prepend_bos: whether texts begin with BOS; None: as the model does by default.
        batch_size: the most rows of a pass.

    Returns:
        The store, opened.

    Raises:
        ValueError: a folder of other contents, model, sites or dtype (the message says what differs), batches that
            are not those stored or without entries, values that are NaN or do not fit the dtype, an edited model, or
            another process that writes the store.
        OSError: a full disk or a place that may not be written to; the message says what to do.

    Memory:
        One batch and one shard of all sites.

    Example:
        >>> import tempfile
        >>> store = store_activations(model, ["The cat sat"], ["blocks.0.hook_resid_post"], tempfile.mkdtemp())
        >>> [len(batch) for batch in store.batches("blocks.0.hook_resid_post", 4, shuffle_seed=0)]
        [3]
    """
    folder, network = Path(folder), as_network(model)
    if network.edits:
        names = ", ".join(edit.name for edit in network.edits)
        raise ValueError(f"a store holds what the model itself computes; this one is edited at {names}")
    requested = _new_index(network, sites, dtype, pos, skip_bos, shard_entries, source)
    stored, lock = STORE.locked(folder, asdict(requested))
    with lock:
        index = _checked_index(folder, requested, stored)
        batch_source = prompt_source(data, text_of(model), prepend_bos=prepend_bos, batch_size=batch_size)
        batch_source = batch_source.in_order() if isinstance(batch_source, PromptBatches) else batch_source
        rejected: list[Rejected] = []
        parts = _new_entries(network, _batches(batch_source, rejected), ActivationStore(folder, index))
        for tensors in _entry_groups(parts, shard_entries):
            path = folder / _shard_name(len(index.shards))
            fill = partial(_fill, tensors=tensors, name=path.name)
            shard = StoreShard.written(path, fill, entries=len(tensors["row"]))
            shapes = {site: tuple(tensors[site].shape[1:]) for site in index.sites}
            index = replace(index, shapes=shapes, shards=(*index.shards, shard), complete=False)
            STORE.write(folder, asdict(index))
        if not index.entries:
            raise ValueError(
                f"at least one entry is required, the batches have none{_first_rejected(rejected)}"
            )
        if not index.complete:
            STORE.write(folder, asdict(replace(index, complete=True, rejected=len(rejected))))
    return ActivationStore.open(folder)


def _fill(path: Path, tensors: dict[str, Tensor], name: str) -> None:
    from safetensors.torch import save_file

    save_file(tensors, path, metadata={FORMAT: name})  # several entries would be in random order


def _batches(source: DataSource, rejected: list[Rejected]) -> Iterator[Batch]:
    """All batches of a data source; rows that cannot be used are appended to `rejected`."""
    for _, window in windows_of(source):
        rejected += window.rejected
        yield from window.batches


def _first_rejected(rejected: Sequence[Rejected]) -> str:
    return f", and row {rejected[0].row} cannot be used: {rejected[0].reason}" if rejected else ""


def _new_index(
    network: Transformer,
    sites: Sequence[str],
    dtype: torch.dtype,
    pos: StoredPositions,
    skip_bos: bool,
    shard_entries: int,
    source: str | None,
) -> StoreIndex:
    """The index of an empty store, with all arguments checked."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name}")
    if shard_entries < 1:
        raise ValueError(f"at least one entry per shard is required, got {shard_entries}")
    if not sites or len(set(sites)) != len(sites):
        raise ValueError(f"a list of distinct sites is required, got {sites!r}")
    for site in sites:
        axes = find(site, network.config)[0].axes
        if not axes.startswith("b p"):
            raise ValueError(f"sites with one value per position are required, {site!r} is {describe(axes)}")
    return StoreIndex(name, tuple(sites), model_hash(network), pos, skip_bos, shard_entries, source)


def _checked_index(folder: Path, requested: StoreIndex, manifest: Mapping[str, Any]) -> StoreIndex:
    """The stored index of the folder; raises ValueError if it disagrees with the arguments, or a shard is not whole."""
    stored = _index(folder, manifest)
    STORE.agree(folder, stored.settings, requested.settings)
    clear(folder, "shard-*")
    ActivationStore(folder, stored)._check_shards()
    return stored


def _new_entries(
    network: Transformer, batches: Iterable[Batch], store: ActivationStore
) -> Iterator[dict[str, Tensor]]:
    """Tables and activations of new entries, batch by batch; entries that are stored already are only compared."""
    stop, before = deepest(store.sites, network.config), 0
    for batch in batches:
        is_entry, tables = _entries(batch, store.index)
        n = len(tables["row"])
        known = min(max(len(store) - before, 0), n)
        _check_same(store, {name: table[:known] for name, table in tables.items()}, before)
        if known < n:
            values = _site_values(network, batch, is_entry, store.index, stop)
            yield {name: tensor[known:] for name, tensor in (tables | values).items()}
        before += n
    if before < len(store):
        raise ValueError(f"{store.folder} holds {len(store)} entries, the batches have only {before}")


def _entries(batch: Batch, index: StoreIndex) -> tuple[Bool[Tensor, "b p"], dict[str, Tensor]]:
    """The mask of a batch's tokens that become entries, and the tables row, pos and token of these entries."""
    assert batch.row is not None
    tokens, real = batch.tokens, batch.real
    pos = Layout(batch.keep, batch.documents).positions(tokens.shape[1], 0, tokens.device).expand_as(tokens)
    text = (
        torch.arange(len(batch), device=tokens.device)[:, None]
        if batch.documents is None
        else batch.documents
    )
    text = text.expand_as(tokens).clamp_min(0)
    is_entry = real & (pos > 0) if index.skip_bos and batch.bos else real
    if index.positions == "last":
        is_entry = is_entry & (pos == text[real].bincount()[text] - 1)
    tables = {"row": batch.row.to(tokens.device)[text], "pos": pos, "token": tokens}
    return is_entry, {name: table[is_entry].long().cpu() for name, table in tables.items()}


def _site_values(
    network: Transformer, batch: Batch, is_entry: Bool[Tensor, "b p"], index: StoreIndex, stop: int | None
) -> dict[str, Tensor]:
    """The activations `[n ...]` of the masked tokens at every site, in the store's dtype."""
    rows, columns = is_entry.nonzero().to(network.device).unbind(1)
    narrowed = partial(_stored_values, rows=rows, columns=columns, dtype=DTYPES[index.dtype])
    reads = [Read(site, partial(narrowed, site=site)) for site in index.sites]
    trace = observe(network, batch, reads, stop=stop, answers_only=True).trace
    return {read.site: trace[read].cpu() for read in reads}


def _stored_values(
    value: Shaped[Tensor, "_ p ..."],
    *,
    site: str,
    rows: Int[Tensor, "n"],
    columns: Int[Tensor, "n"],
    dtype: torch.dtype,
) -> Shaped[Tensor, "n ..."]:
    """The site's values `[n ...]` of the chosen tokens in the store's dtype; raises ValueError if they do not fit."""
    if len(value) == 1:  # a site with one value for all rows
        rows = torch.zeros_like(rows)
    # 2 048 tokens x 640 on a core: a flat index takes 0.5 ms, a mask 3.4; the extremes 0.3 ms, isfinite 6.
    places = (rows * value.shape[1] + columns).to(value.device)
    values = value.flatten(0, 1).index_select(0, places)
    limit = torch.finfo(dtype).max
    low, high = values.aminmax()
    if not bool((low >= -limit) & (high <= limit)):
        if not bool(values.isfinite().all()):
            raise ValueError(f"finite activations are required, the model's are NaN or infinite at {site!r}")
        raise ValueError(
            f"activations up to {limit:g} fit {dtype}, got {float(values.abs().max()):g} at {site!r}: "
            "store them as bfloat16 or float32"
        )
    return values.to(dtype)


def _check_same(store: ActivationStore, tables: Mapping[str, Tensor], start: int) -> None:
    """Raise ValueError unless the tables of a batch equal those that are stored from entry `start` on."""
    n = len(tables["row"])
    if not n:
        return
    stored = {name: store.read(name, slice(start, start + n)) for name in TABLES}
    differ = torch.stack([stored[name] != tables[name] for name in TABLES]).any(0)
    if bool(differ.any()):
        i = int(differ.int().argmax())
        new_entry, stored_entry = ({name: int(t[name][i]) for name in TABLES} for t in (tables, stored))
        raise ValueError(
            f"the batches that were stored are required, in their order, to go on with {store.folder}: "
            f"entry {start + i} is {new_entry}, stored {stored_entry}"
        )


def _entry_groups(parts: Iterable[Mapping[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """The entries of all parts in groups of exactly `size`; the last group may be smaller."""
    pending: list[Mapping[str, Tensor]] = []
    for part in parts:
        pending.append(part)
        n = sum(len(entries["row"]) for entries in pending)
        if n < size:
            continue
        joined = _concatenated(pending)
        for start in range(0, n - size + 1, size):
            yield {name: tensor[start : start + size] for name, tensor in joined.items()}
        pending = [{name: tensor[n // size * size :] for name, tensor in joined.items()}]
    if any(len(entries["row"]) for entries in pending):
        yield _concatenated(pending)


def _concatenated(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
