"""Writing an activation store: batches in, shards out, one forward pass each, and on again after a crash.

What is known of a batch without running it (row, position and token of every entry) is compared with what is stored;
only batches after that are run. So a store that was killed at any moment ends with the bits of one that was not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import get_args

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from interp.core.boundary import public
from interp.core.shapes import describe
from interp.data.batch import Batch
from interp.data.rows import Rejected
from interp.data.sources import Data
from interp.data.windows import Feed, prompts_feed, windows_of
from interp.model.mask import Layout
from interp.model.sites import find
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.passes.observe import Model, as_network, deepest, observe, text_of
from interp.runs.provenance import model_hash
from interp.runs.store import DTYPES, INDEX, TABLES, ActivationStore, Index, Positions, Shard


@public()
def store_activations(
    model: Model,
    data: Feed | Data,
    sites: Sequence[str],
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.float16,
    pos: Positions = "all",
    skip_bos: bool = True,
    shard_entries: int = 16_384,
    source: str | None = None,
    prepend_bos: bool = True,
    batch_size: int = 32,
) -> ActivationStore:
    """The store of what these sites hold at every token of the data, one forward pass per batch, in constant memory.

    A pass ends with the deepest site. Padding is never stored. Memory: one batch and one shard of all sites.
    data: texts, token ids, files, a `Stream`, or batches as they are. Pieces of a text that was split share its number
    (`row` of the store), and each begins at position 0. Rows of a file or stream that cannot be used are left out and
    counted (`store.index.rejected`). sites: full names of sites with one value per position.
    dtype: float16, bfloat16 or float32. pos: all tokens of a text, or its last. skip_bos: leave out the BOS of batches
    that have one. source: the data's fingerprint, kept in the index.

    Called again with the same arguments, it goes on after the entries stored: the batches are compared with these, and
    run only where they are new, so an interrupted write ends with the same bits. One writer per folder.
    Errors: ValueError for a folder of other contents, model, sites or dtype (saying what differs), for batches that are
    not those stored or without entries, for values that are NaN or do not fit the dtype, and for an edited model.

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
    wanted = _new_index(network, sites, dtype, pos, skip_bos, shard_entries, source)
    index = _begun(folder, wanted)
    feed = prompts_feed(data, text_of(model), prepend_bos=prepend_bos, batch_size=batch_size)
    rejected: list[Rejected] = []
    parts = _new_entries(network, _batches(feed, rejected), ActivationStore(folder, index))
    for tensors in _regrouped(parts, shard_entries):
        shard = Shard.write(folder, len(index.shards), tensors)
        shapes = {site: tuple(tensors[site].shape[1:]) for site in index.sites}
        index = replace(index, shapes=shapes, shards=(*index.shards, shard), complete=False)
        index.write(folder)
    if not index.entries:
        raise ValueError(f"at least one entry is required, the batches have none{_first(rejected)}")
    if not index.complete:
        replace(index, complete=True, rejected=len(rejected)).write(folder)
    return ActivationStore.open(folder)


def _batches(feed: Feed, rejected: list[Rejected]) -> Iterator[Batch]:
    """All batches of a feed; its rows that cannot be used go to a list."""
    for window in windows_of(feed):
        rejected += window.rejected
        yield from window.batches


def _first(rejected: Sequence[Rejected]) -> str:
    return f", and row {rejected[0].row} cannot be used: {rejected[0].reason}" if rejected else ""


def _new_index(
    network: Transformer,
    sites: Sequence[str],
    dtype: torch.dtype,
    pos: Positions,
    skip_bos: bool,
    shard_entries: int,
    source: str | None,
) -> Index:
    """The index of an empty store; everything the caller asks for is checked here."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {name}")
    if pos not in get_args(Positions):
        raise ValueError(f"pos must be all or last, got {pos!r}")
    if shard_entries < 1:
        raise ValueError(f"at least one entry per shard is required, got {shard_entries}")
    if isinstance(sites, str) or not sites or len(set(sites)) != len(sites):
        raise ValueError(f"a list of distinct sites is required, got {sites!r}")
    for site in sites:
        axes = find(site, network.config)[0].axes
        if not axes.startswith("b p"):
            raise ValueError(f"sites with one value per position are required, {site!r} is {describe(axes)}")
    return Index(name, tuple(sites), model_hash(network), pos, skip_bos, shard_entries, source)


def _begun(folder: Path, wanted: Index) -> Index:
    """The index of what the folder holds already, which must agree with what is wanted."""
    folder.mkdir(parents=True, exist_ok=True)
    for torn in (*folder.glob(".shard-*"), *folder.glob(f".{INDEX}.*")):
        torn.unlink()
    if not (folder / INDEX).exists():
        if others := sorted(path.name for path in folder.iterdir()):
            raise ValueError(
                f"an empty folder or a store is required, {folder} holds {', '.join(others[:3])}"
            )
        wanted.write(folder)
        return wanted
    stored = Index.read(folder)
    if differences := stored.differences(wanted):
        raise ValueError(f"{folder} is another store: {'; '.join(differences)}")
    for shard in stored.shards:
        shard.check(folder)
    return stored


def _new_entries(
    network: Transformer, batches: Iterable[Batch], store: ActivationStore
) -> Iterator[dict[str, Tensor]]:
    """Tables and activations of the entries that the store does not hold yet, batch by batch."""
    stop, seen = deepest(store.sites, network.config), 0
    for batch in batches:
        where, tables = _entries(batch, store.index)
        n = len(tables["row"])
        known = min(max(len(store) - seen, 0), n)
        _check_same(store, {name: table[:known] for name, table in tables.items()}, seen)
        if known < n:
            values = _values(network, batch, where, store.index, stop)
            yield {name: tensor[known:] for name, tensor in (tables | values).items()}
        seen += n
    if seen < len(store):
        raise ValueError(f"{store.folder} holds {len(store)} entries, the batches have only {seen}")


def _entries(batch: Batch, index: Index) -> tuple[Bool[Tensor, "b p"], dict[str, Tensor]]:
    """Which tokens of a batch are entries, and the tables of these."""
    assert batch.row is not None
    tokens, real = batch.tokens, batch.real
    pos = Layout(batch.keep, batch.documents).positions(tokens.shape[1], 0, tokens.device).expand_as(tokens)
    text = (
        torch.arange(len(batch), device=tokens.device)[:, None]
        if batch.documents is None
        else batch.documents
    )
    text = text.expand_as(tokens).clamp_min(0)
    where = real & (pos > 0) if index.skip_bos and batch.bos else real
    if index.positions == "last":
        where = where & (pos == text[real].bincount()[text] - 1)
    tables = {"row": batch.row.to(tokens.device)[text], "pos": pos, "token": tokens}
    return where, {name: table[where].long().cpu() for name, table in tables.items()}


def _values(
    network: Transformer, batch: Batch, where: Bool[Tensor, "b p"], index: Index, stop: int | None
) -> dict[str, Tensor]:
    """What the sites hold at these tokens, in the store's dtype, chosen and narrowed at the site."""
    rows, columns = where.nonzero().to(network.device).unbind(1)
    narrowed = partial(_narrowed, rows=rows, columns=columns, dtype=DTYPES[index.dtype])
    reads = [Read(site, partial(narrowed, site=site)) for site in index.sites]
    trace = observe(network, batch, reads, stop=stop, answers_only=True).trace
    return {read.site: trace[read].cpu() for read in reads}


def _narrowed(
    value: Shaped[Tensor, "_ p ..."],
    *,
    site: str,
    rows: Int[Tensor, "n"],
    columns: Int[Tensor, "n"],
    dtype: torch.dtype,
) -> Shaped[Tensor, "n ..."]:
    if len(value) == 1:  # the same in every row
        rows = torch.zeros_like(rows)
    # 2 048 tokens x 640 on a core: a flat index takes 0.5 ms, a mask 3.4; the extremes 0.3 ms, isfinite 6.
    places = (rows * value.shape[1] + columns).to(value.device)
    wide = value.flatten(0, 1).index_select(0, places)
    limit = torch.finfo(dtype).max
    low, high = wide.aminmax()
    if not bool((low >= -limit) & (high <= limit)):
        if not bool(wide.isfinite().all()):
            raise ValueError(f"finite activations are required, the model's are NaN or infinite at {site!r}")
        raise ValueError(
            f"activations up to {limit:g} fit {dtype}, got {float(wide.abs().max()):g} at {site!r}: "
            "store them as bfloat16 or float32"
        )
    return wide.to(dtype)


def _check_same(store: ActivationStore, tables: Mapping[str, Tensor], start: int) -> None:
    """The tables of some batch must be those stored from entry `start` on."""
    n = len(tables["row"])
    if not n:
        return
    stored = {name: store.read(name, slice(start, start + n)) for name in TABLES}
    differ = torch.stack([stored[name] != tables[name] for name in TABLES]).any(0)
    if bool(differ.any()):
        i = int(differ.int().argmax())
        here, there = ({name: int(t[name][i]) for name in TABLES} for t in (tables, stored))
        raise ValueError(
            f"the batches that were stored are required, in their order, to go on with {store.folder}: "
            f"entry {start + i} is {here}, stored {there}"
        )


def _regrouped(parts: Iterable[Mapping[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """The same entries in groups of `size`; the last may be smaller."""
    held: list[Mapping[str, Tensor]] = []
    for part in parts:
        held.append(part)
        n = sum(len(each["row"]) for each in held)
        if n < size:
            continue
        joined = _joined(held)
        for start in range(0, n - size + 1, size):
            yield {name: tensor[start : start + size] for name, tensor in joined.items()}
        held = [{name: tensor[n // size * size :] for name, tensor in joined.items()}]
    if any(len(each["row"]) for each in held):
        yield _joined(held)


def _joined(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
