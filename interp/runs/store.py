"""Activations on disk: written in one pass over batches of any length, read back lazily for probes and dictionaries.

A store is a folder of safetensors files (the shards) and an `index.json`; `store_writer.py` fills it. An entry is one
token of one row: what every site holds there, beside the tables `row` (its number in the source), `pos` (tokens before
it in its text, BOS included) and `token`. The index is written anew after each shard, so that a killed write leaves a
store that can be continued.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from itertools import accumulate, count
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Shaped
from torch import Tensor

from interp.core.results import write_atomically
from interp.core.shapes import nearest
from interp.runs.provenance import changes, file_hash, write_json

Positions = Literal["all", "last"]
TABLES = ("row", "pos", "token")
"""What every shard holds beside the sites, one int64 per entry."""
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float16, torch.bfloat16, torch.float32)}
FORMAT = "interp activations 1"
INDEX = "index.json"


@dataclass(frozen=True)
class Shard:
    """One file of a store."""

    file: str
    entries: int
    bytes: int
    sha256: str

    @classmethod
    def write(cls, folder: Path, number: int, tensors: dict[str, Tensor]) -> "Shard":
        """Write tables and sites as the shard of this number, in one step."""
        from safetensors.torch import save_file

        path = folder / f"shard-{number:05d}.safetensors"
        write_atomically(path, lambda file: save_file(tensors, file, metadata={"format": FORMAT}))
        return cls(path.name, len(tensors["row"]), path.stat().st_size, file_hash(path))

    def check(self, folder: Path, *, contents: bool = False) -> None:
        """FileNotFoundError or ValueError if it is not there as it was written: its size, or also its bytes."""
        path = folder / self.file
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: the index names it")
        if (size := path.stat().st_size) != self.bytes:
            raise ValueError(f"{path} must have {self.bytes} bytes, got {size} (truncated?)")
        if contents and file_hash(path) != self.sha256:
            raise ValueError(f"{path} is corrupt: its SHA-256 is not the one in the index")


@dataclass(frozen=True)
class Index:
    """What a store holds and how it came about; written to `index.json`."""

    dtype: str
    sites: tuple[str, ...]
    model_sha256: str
    positions: Positions
    skip_bos: bool
    shard_entries: int
    data: str | None
    """The fingerprint of the source, where the writer was given one."""
    complete: bool = False
    rejected: int = 0
    """How many rows of the source could not be used and were left out, as counted when the last shard was in."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape of one entry at each site; empty as long as there is none."""
    shards: tuple[Shard, ...] = ()

    @property
    def entries(self) -> int:
        """How many entries the shards hold together."""
        return sum(shard.entries for shard in self.shards)

    @classmethod
    def read(cls, folder: Path) -> "Index":
        """The index of a folder; FileNotFoundError without one, ValueError if it is no index of ours."""
        path = folder / INDEX
        if not path.is_file():
            raise FileNotFoundError(f"{folder} is no activation store: it has no {INDEX}")
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
                raise ValueError(f"its format is not {FORMAT!r}")
            found.setdefault("rejected", 0)  # stores of the first edition count none
            if set(found) != {f.name for f in fields(cls)}:
                raise ValueError(f"it has the keys {sorted(found)}")
            found["sites"] = tuple(found["sites"])
            found["shapes"] = {name: tuple(shape) for name, shape in found["shapes"].items()}
            found["shards"] = tuple(Shard(**shard) for shard in found["shards"])
        except (ValueError, TypeError, AttributeError) as cause:
            raise ValueError(f"{path} is not the index of an activation store: {cause}") from cause
        return cls(**found)

    def write(self, folder: Path) -> None:
        """Write it in one step."""
        write_json(folder / INDEX, {"format": FORMAT, **asdict(self)})

    def differences(self, other: "Index") -> list[str]:
        """In words, what two stores do not have in common, contents apart."""
        contents = {"complete", "rejected", "shapes", "shards"}
        names = [f.name for f in fields(self) if f.name not in contents]
        ours, theirs = ({name: getattr(index, name) for name in names} for index in (self, other))
        return [f"{name}: stored {had}, asked {has}" for name, had, has in changes(ours, theirs)]


@dataclass(frozen=True)
class ActivationStore:
    """Activations in a folder, read as they are asked for: nothing is loaded before.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> batches = [model.text.batch([prompt, "The cat sat"])]
        >>> write = interp.runs.store_writer.store_activations
        >>> _ = write(model, batches, ["blocks.1.mlp.hook_post"], folder, dtype=torch.float32)
        >>> store = ActivationStore.open(folder)
        >>> neurons, rows = store.read("blocks.1.mlp.hook_post"), store.read("row")
        >>> neurons.shape == (len(store), model.cfg.mlp.d_mlp) and rows.max()
        tensor(1)
    """

    folder: Path
    index: Index

    @classmethod
    def open(cls, folder: Path | str) -> "ActivationStore":
        """The store in a folder.

        Errors: FileNotFoundError for a folder without an index or without one of its shards; ValueError for one whose
        writing was not finished, a foreign index, or a shard of another size than when it was written.
        """
        folder = Path(folder)
        index = Index.read(folder)
        if not index.complete:
            raise ValueError(
                f"{folder} is not finished, it holds {index.entries} entries: call store_activations again with the "
                "same arguments to go on"
            )
        for shard in index.shards:
            shard.check(folder)
        return cls(folder, index)

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
        """ValueError naming the shard whose bytes are not those that were written; reads the whole store."""
        for shard in self.index.shards:
            shard.check(self.folder, contents=True)

    def shard(self, i: int) -> dict[str, Tensor]:
        """All sites and tables of one shard, by name."""
        if not 0 <= i < len(self._ends):
            raise IndexError(f"shards are 0 to {len(self._ends) - 1}, got {i}")
        entries = self.index.shards[i].entries
        return {name: self._slice(i, name, 0, entries) for name in (*TABLES, *self.sites)}

    def read(self, name: str, entries: slice = slice(None)) -> Shaped[Tensor, "n ..."]:
        """The activations of a site, or a table, at consecutive entries `[n, *shape]`, as stored.

        Errors: KeyError for a site that is not stored; ValueError for a slice with steps, or an unreadable shard.
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

        Without a seed in the order stored. With one, runs of `size` neighbours are drawn from the whole store in
        random order and mixed in a buffer of `buffer` entries, the same for the same seed and anew in every epoch. The
        last batch of an epoch may be shorter. epochs: None = without end, for training.
        Errors: KeyError for a site that is not stored; ValueError for a size, buffer or epochs below 1.
        """
        if size < 1 or buffer < size or (epochs is not None and epochs < 1):
            raise ValueError(
                f"1 <= size <= buffer and epochs >= 1 are required, got {size}, {buffer} and {epochs}"
            )
        generator = None if shuffle_seed is None else torch.Generator().manual_seed(shuffle_seed)
        for _ in count() if epochs is None else range(epochs):
            for batch in self._epoch(site, size, buffer, generator):
                yield batch.to(device)

    def _epoch(
        self, site: str, size: int, buffer: int, generator: torch.Generator | None
    ) -> Iterator[Shaped[Tensor, "n ..."]]:
        runs = [slice(start, start + size) for start in range(0, len(self), size)]
        if generator is None:
            yield from (self.read(site, run) for run in runs)
            return
        pool: list[Tensor] = []
        held = 0
        for i in torch.randperm(len(runs), generator=generator).tolist():
            pool.append(self.read(site, runs[i]))
            held += len(pool[-1])
            if held < buffer:
                continue
            mixed = _shuffled(pool, generator)
            out = max(1, held // 2 // size) * size
            yield from mixed[:out].split(size)
            pool, held = [mixed[out:]], held - out
        yield from (batch for batch in _shuffled(pool, generator).split(size) if len(batch))

    def _slice(self, i: int, name: str, start: int, stop: int) -> Tensor:
        from safetensors import SafetensorError, safe_open

        path = self.folder / self.index.shards[i].file
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_slice(name)[start:stop]
        except (SafetensorError, OSError) as cause:
            raise ValueError(f"{path} is not a readable shard (truncated?): {cause}") from cause


def _shuffled(parts: Sequence[Tensor], generator: torch.Generator) -> Tensor:
    joined = torch.cat(list(parts))
    return joined[torch.randperm(len(joined), generator=generator)]
