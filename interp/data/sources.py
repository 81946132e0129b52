"""What rows there are: whatever a user calls his data, as numbered rows that can be asked for by stretch.

A source is ordered rows with a fingerprint. The number of a row in its source is its identity, whatever is sharded,
batched or restarted later; `data.stream` turns stretches of rows into batches.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from interp.core.boundary import Required, check, public, shown
from interp.core.shapes import nearest, shape_text
from interp.data.batch import Batch
from interp.data.files import OPENERS, Files, open_files
from interp.data.rows import STRIDE, Reading, Rejected, Row, Unit, digest_of, usable
from interp.data.text import Prompts, no_prompts


@runtime_checkable
class Source(Protocol):
    """Ordered rows with a fingerprint."""

    @property
    def name(self) -> str:
        """What it is, for people."""
        ...

    @property
    def count(self) -> int | None:
        """How many rows there are; None where only the end will tell."""
        ...

    def fingerprint(self) -> str | None:
        """A hash of all rows, the same wherever they are the same; None where rows cannot be read twice."""
        ...

    def rows(self, start: int, stop: int) -> Iterator[Row | Rejected]:
        """Rows start to stop - 1, as far as there are any."""
        ...


@runtime_checkable
class Columns(Protocol):
    """What marks a Hugging Face dataset, said here so that nobody has to import the library to name one."""

    @property
    def features(self) -> Mapping[str, object]:
        """Its columns by name."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Mapping[str, Iterable[object]]:
        """Some rows, column by column."""
        ...


def _no_data(value: object) -> str | None:
    """None for what may hold rows; else how to write what was meant, "" where nothing is close."""
    instead = no_prompts(value)
    if instead is None or isinstance(value, Path | Columns):
        return None
    if instead or isinstance(value, type | Tensor | np.ndarray | Mapping) or not isinstance(value, Iterable):
        return instead
    numbers = isinstance(value, list | tuple) and all(isinstance(each, bool | float | None) for each in value)
    return "" if numbers else None


Data = Annotated[
    Prompts | Path | Columns | Iterable[object],
    Required("texts, token ids, a Batch, files, a data set or an iterator of rows", _no_data),
]
"""Texts, token ids, a batch, files, a folder, a Hugging Face dataset, or anything that gives rows one by one."""


@public(unchecked=("data",))
def open_source(data: Data, *, field: str = "text", rows: Unit = "line", encoding: str = "utf-8") -> Source:
    """The rows of any data.

    - Texts; token ids `[n p]` or `[p]`, or a list of ids or 1-D tensors; a `Batch` (the real tokens of each row, or of
      each packed text), or a list of them. Ids are taken as they are.
    - A `Path` to a `.txt`, `.jsonl` or `.parquet` file or to a folder of them, or a list of `Path`s. A `str` is a path
      if it ends like one of these files, begins with "/", "./", "../" or "~/", or names a folder with a "/" in it;
      a list of `str` is of paths if all its elements are; every other `str` is a text.
    - A Hugging Face dataset (one split), or any other iterable of texts, ids, batches or records.

    field: of records (`.jsonl`, `.parquet`, data sets, mappings), the one that holds the text or the list of ids.
    rows: what a row of a `.txt` file is. Lines without text are no rows, blank lines separate paragraphs; all other
    rows count, and a bad one is `Rejected`. encoding: of `.txt` and `.jsonl`; a mark of UTF-8 is skipped.
    Everything but an iterator can be read again, in any order, by any process; an iterator gives each row once.
    A file is scanned once (hashed and counted) and never loaded; a single row is.
    Errors: ValueError for no rows, a field that no record has, files that are not what they seem (the message names
    the file), a batch with more than tokens; FileNotFoundError.

    Example:
        >>> list(open_source(["one text", "", "another"]).rows(0, 3))
        ['one text', Rejected(row=1, reason='the row is empty', excerpt=''), 'another']
    """
    reading = Reading(field, rows, encoding)
    paths = _paths(data)
    if paths:
        return Files.of([file for path in paths for file in open_files(path, reading)])
    if isinstance(data, Columns):
        return Dataset.of(data, field)
    if isinstance(data, Mapping):
        known = ", ".join(map(repr, data))
        raise ValueError(f"one data set is required, got several by name: choose one of {known}")
    if isinstance(data, bytes | bytearray | type) or hasattr(data, "iloc"):
        check("open_source: data", data, Data)
    if isinstance(data, str | Tensor | Batch | Sequence):
        return Listed.of(data, field)
    if isinstance(data, Iterable):
        return Arriving(data, field)
    raise ValueError(f"data must be rows: texts, token ids, files or a data set, got {shown(data)}")


# --- in memory ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Listed:
    """Texts or token ids in memory."""

    name: str
    items: Sequence[object] | Tensor
    field: str

    @classmethod
    def of(cls, data: str | Tensor | Batch | Sequence[object], field: str) -> Listed:
        """The rows of a text, of several, of token ids, or of batches. Errors: ValueError for none."""
        items: Sequence[object] | Tensor
        if isinstance(data, Tensor):
            if data.is_floating_point() or data.ndim not in (1, 2):
                raise ValueError(
                    f"token ids [row, pos] are required, got {data.dtype} of shape {shape_text(data.shape)}"
                )
            items = data[None] if data.ndim == 1 else data
        elif isinstance(data, str | Batch):
            items = list(_spread([data]))
        else:
            items = list(_spread(data)) if any(isinstance(x, Batch) for x in data) else data
        if len(items) == 0:
            raise ValueError("at least one row is required, got none")
        return cls("ids" if isinstance(data, Tensor | Batch) else "rows", items, field)

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self.items)

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256()
        for row in self.rows(0, self.count):
            known = [row.reason, row.excerpt] if isinstance(row, Rejected) else row
            digest.update(json.dumps(known).encode() + b"\n")
        return digest.hexdigest()

    def fingerprint(self) -> str:
        """A hash of all rows."""
        return self._digest

    def rows(self, start: int, stop: int) -> Iterator[Row | Rejected]:
        """Rows start to stop - 1, as far as there are any."""
        for row in range(start, min(stop, self.count)):
            yield _item(row, self.items[row], self.field)


def _item(row: int, item: object, field: str) -> Row | Rejected:
    """A row of a list or an iterator: a text, ids, or a record."""
    if not isinstance(item, Mapping):
        return usable(row, item, "the row")
    if field not in item:
        known = ", ".join(map(repr, item)) or "none"
        return Rejected.of(row, f"no field {field!r}; it has {known}", dict(item))
    return usable(row, item[field], f"field {field!r}")


def _spread(items: Iterable[object]) -> Iterator[object]:
    """The items, and in the place of a batch its rows."""
    for item in items:
        if isinstance(item, Batch):
            yield from _real_rows(item)
        else:
            yield item


def _real_rows(batch: Batch) -> list[list[int]]:
    more = [name for name in ("answer", "wrong", "types", "memory") if getattr(batch, name) is not None]
    if more:
        raise ValueError(f"a batch of tokens alone is required as data, got one with {', '.join(more)}")
    if batch.documents is not None:
        return [text.tolist() for text in batch.unpack(batch.tokens)]
    if batch.keep is None:
        return batch.tokens.tolist()
    return [ids[keep].tolist() for ids, keep in zip(batch.tokens, batch.keep, strict=True)]


# --- elsewhere ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Dataset:
    """One column of a Hugging Face dataset."""

    name: str
    data: Columns
    field: str

    @classmethod
    def of(cls, data: Columns, field: str) -> Dataset:
        """The column `field`. Errors: ValueError if there is no such column, or no row."""
        known = list(data.features)
        if field not in known:
            raise ValueError(
                f"the data set has no column {field!r}; {nearest(field, known)}; it has {', '.join(known)}"
            )
        if len(data) == 0:
            raise ValueError("at least one row is required, the data set has none")
        name = getattr(getattr(data, "info", None), "dataset_name", None)
        return cls(name or "data set", data, field)

    @property
    def count(self) -> int:
        """How many rows there are."""
        return len(self.data)

    def fingerprint(self) -> str | None:
        """A hash of the data set's own fingerprint and the column; None if it has none."""
        known = getattr(self.data, "_fingerprint", None)
        return None if known is None else digest_of("dataset", str(known), self.field)

    def rows(self, start: int, stop: int) -> Iterator[Row | Rejected]:
        """Rows start to stop - 1, as far as there are any."""
        stop = min(stop, self.count)
        for first in range(start, stop, STRIDE):
            values = self.data[first : min(first + STRIDE, stop)][self.field]
            for row, value in enumerate(values, first):
                yield usable(row, value, f"field {self.field!r}")


class Arriving:
    """Rows that come one by one and only once: a generator, a socket, a streamed data set."""

    name = "iterator"
    count: int | None = None

    def __init__(self, items: Iterable[object], field: str) -> None:
        self._items = _spread(items)
        self._field = field
        self._next = 0

    def fingerprint(self) -> str | None:
        """None: to hash the rows would be to use them up."""
        return None

    def rows(self, start: int, stop: int) -> Iterator[Row | Rejected]:
        """Rows start to stop - 1, as far as there are any; those before are passed over.

        Errors: ValueError if a row is asked for that has already been given or passed over.
        """
        if start < self._next:
            raise ValueError(
                f"row {start} of an iterator is asked for after row {self._next - 1}: it gives every row once and in "
                "order; to read in any order, or again, pass a list, files or a data set"
            )
        for item in islice(self._items, stop - self._next):
            row, self._next = self._next, self._next + 1
            if row >= start:
                yield _item(row, item, self._field)


# --- which strings are paths --------------------------------------------------------------------------------------


def _paths(data: object) -> list[Path]:
    """The paths that the data is, if all of it is paths."""
    items = [data] if isinstance(data, str | Path) else data if isinstance(data, list | tuple) else []
    paths = []
    for item in items:
        if not isinstance(item, Path) and not (isinstance(item, str) and _is_path(item)):
            return []
        paths.append(Path(item).expanduser())
    return paths


def _is_path(text: str) -> bool:
    if "\n" in text or len(text) > 1000:
        return False
    if text.endswith(tuple(OPENERS)) or text.startswith(("/", "./", "../", "~/")):
        return True
    return os.sep in text and Path(text).is_dir()
