"""Sources of rows: any data of a user as numbered rows, of which any range can be read.

A source is ordered rows with a fingerprint. The index of a row in its source identifies it, however the data are
sharded, batched or restarted later; `data.stream` turns ranges of rows into batches.

Rows of files and folders: one scan of a text file counts its rows and stores the offset of every 256th, so that any
range is read without the rows before it; a Parquet file is read from the row group that holds the first requested row.
Memory does not grow with the file, and a row that cannot be decoded or parsed does not affect other rows.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, Literal, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import check, public
from interp.core.files import is_folder, regular
from interp.core.hints import Required
from interp.core.wording import beginning, nearest, odd_value, value_text
from interp.data.batch import Batch, Prompts, encoded, no_prompts
from interp.data.ids import IDS

if TYPE_CHECKING:
    import pyarrow as pa


Plain = str | list[int]
"""A text, or token ids."""


@dataclass(frozen=True)
class Example:
    """A row that is a pair of prompts, with their answers."""

    clean: Plain
    corrupt: Plain
    answer: Plain | None = None
    """The right next token of the clean prompt, if the data have it."""
    wrong: Plain | None = None
    """The token that the answer is contrasted with."""


SourceRow = Plain | Example
"""A valid row of a source: a text, token ids, or a pair of prompts."""
Unit = Literal["line", "paragraph", "file"]
"""The unit that is a row of a text file."""
STRIDE = 256
"""Rows that are read together; of a text file the byte offset of every 256th row is stored."""
BLOCK = 1 << 18
"""Bytes of a file that are read together."""
EXCERPT = 80
"""Characters of a rejected row that are kept."""


@dataclass(frozen=True)
class Rejected:
    """A row that cannot be used, and the reason."""

    row: int
    """Number of the row in the source."""
    reason: str
    excerpt: str
    """Beginning of the row."""

    @classmethod
    def of(cls, row: int, reason: str, content: object) -> "Rejected":
        """The record of a row with this content, of which only the beginning is kept."""
        excerpt = content[:EXCERPT] if isinstance(content, str) else beginning(content, EXCERPT)
        return cls(row, reason, excerpt.encode("utf-8", "backslashreplace").decode())


@dataclass(frozen=True)
class FileReading:
    """Options for reading files.

    Raises:
        ValueError: an unknown unit or encoding, or an encoding with wide line ends.
    """

    field: str = "text"
    """Field of a record that holds the row: a text, or a list of token ids."""
    rows: Unit = "line"
    """Unit that is a row of a text file; blank lines separate paragraphs, and are no rows."""
    encoding: str = "utf-8"
    """Encoding of text and JSON; it must write a line end as the one byte it is in ASCII."""

    def __post_init__(self) -> None:
        try:
            narrow = b"\n".decode(self.encoding) == "\n"
        except UnicodeDecodeError:
            narrow = False
        except (LookupError, ValueError) as cause:  # a name with a zero byte or half of a surrogate pair
            raise ValueError(f"unknown encoding {self.encoding!r}") from cause
        if not narrow:
            raise ValueError(
                f"an encoding that writes a line end as one byte is required, such as utf-8 or latin-1, got "
                f"{self.encoding!r}; convert the file first (iconv -f {self.encoding} -t utf-8)"
            )


def usable(row: int, value: object, what: str) -> SourceRow | Rejected:
    """The value if it is a text or token ids, else the reason why it is not; `what` names the value in the reason."""
    if isinstance(value, Tensor | np.ndarray):
        value = value.tolist()
    if isinstance(value, str):
        if not value:
            return Rejected.of(row, f"{what} is empty", value)
        try:
            value.encode()  # JSON can spell what UTF-8 cannot
        except UnicodeEncodeError as cause:
            return Rejected.of(row, f"{what} has half of a surrogate pair at {cause.start}", value)
        return value
    if isinstance(value, list) and not value:
        return Rejected.of(row, f"{what} is empty", value)
    if isinstance(value, list) and set(map(type, value)) == {int}:
        return value
    kind = "null" if value is None else f"{type(value).__name__}, neither a text nor a list of ids"
    return Rejected.of(row, f"{what} is {kind}", value)


def digest_of(*parts: str) -> str:
    """The SHA-256 of several strings, in hexadecimal."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


NEWLINE = ord("\n")
INK = np.array([not bytes([byte]).isspace() for byte in range(256)])
"""[256], True for bytes that are not ASCII white space."""
MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""Byte order marks of encodings; UTF-32 before UTF-16, since its mark begins with that of UTF-16."""


def lines(handle: BinaryIO) -> Iterator[bytes]:
    """The lines that are not blank (ASCII white space only)."""
    return (line for line in handle if not line.isspace())


def paragraphs(handle: BinaryIO) -> Iterator[bytes]:
    """The paragraphs: groups of consecutive lines that blank lines separate."""
    return (b"".join(block) for blank, block in groupby(handle, key=bytes.isspace) if not blank)


def whole(handle: BinaryIO) -> Iterator[bytes]:
    """The whole file as one row."""
    yield handle.read()


PIECES: dict[Unit, Callable[[BinaryIO], Iterator[bytes]]] = {
    "line": lines,
    "paragraph": paragraphs,
    "file": whole,
}


# --- text and JSON lines ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TextFile:
    """A file of texts or of JSON records, with the number of its rows and the byte offset of every 256th row."""

    path: Path
    reading: FileReading
    records: bool
    """Whether each row is a JSON object with the text in a field."""
    count: int
    size: int
    places: np.ndarray
    """The byte at which row 0, 256, 512, ... begins."""
    digest: str

    @classmethod
    def open(cls, path: Path, reading: FileReading) -> TextFile:
        """The file after one scan.

        Raises:
            ValueError: naming the file for one without rows, a mark of another encoding, or NUL bytes (binary, or
                UTF-16 without a mark).
            OSError: if it cannot be read.
        """
        records = path.suffix.lower() == ".jsonl"
        unit: Unit = "line" if records else reading.rows
        with path.open("rb") as handle:
            base = _skip_mark(path, handle, reading.encoding)
            digest = hashlib.sha256()
            count, places = _row_places(_hashed_blocks(handle, digest), base, unit)
            size = handle.tell()
        if count == 0:
            raise ValueError(f"{path} has no rows: it is empty, or blank")
        options = ["jsonl", reading.field] if records else ["txt", unit]
        known = digest_of(*options, reading.encoding, digest.hexdigest())
        return cls(path, reading, records, count, size, places, known)

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    def fingerprint(self) -> str:
        """A hash of the contents and of how they are read."""
        return self.digest

    def rows(self, start: int, stop: int) -> Iterator[SourceRow | Rejected]:
        """Rows `start` to `stop - 1`, or fewer at the end; ValueError if the file has changed its size."""
        if start >= self.count:
            return
        with self.path.open("rb") as handle:
            if handle.seek(0, 2) != self.size:
                raise ValueError(
                    f"{self.path} has changed since it was opened, from {self.size} bytes to {handle.tell()}"
                )
            handle.seek(int(self.places[start // STRIDE]))
            skip = start % STRIDE
            pieces = PIECES["line" if self.records else self.reading.rows](handle)
            for row, piece in enumerate(islice(pieces, skip, skip + stop - start), start):
                yield self._row(row, piece)

    def _row(self, row: int, piece: bytes) -> SourceRow | Rejected:
        """The row that the bytes `piece` encode, or the reason why they encode none."""
        if self.records or self.reading.rows != "file":
            piece = piece.removesuffix(b"\r\n" if piece.endswith(b"\r\n") else b"\n")
        try:
            text = piece.decode(self.reading.encoding)
        except UnicodeDecodeError as cause:
            reason = f"byte {piece[cause.start]:#04x} at {cause.start} is not {self.reading.encoding}"
            return Rejected.of(row, reason, piece[:EXCERPT].decode("utf-8", "backslashreplace"))
        return (
            _row_of_record(row, text, self.reading.field) if self.records else usable(row, text, "the text")
        )


def _row_of_record(row: int, line: str, name: str) -> SourceRow | Rejected:
    """The field `name` of the JSON object in a line, or the reason why there is none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as cause:
        return Rejected.of(row, f"malformed JSON: {cause}", line)
    if not isinstance(record, dict):
        return Rejected.of(row, f"a JSON object is required, got {type(record).__name__}", line)
    if name not in record:
        return Rejected.of(row, f"no field {name!r}; it has {', '.join(map(repr, record)) or 'none'}", line)
    return usable(row, record[name], f"field {name!r}")


def _skip_mark(path: Path, handle: BinaryIO, encoding: str) -> int:
    """Move the handle past the byte order mark of UTF-8, if there is one, and return the new offset."""
    head = handle.read(4096)
    mark = next((m for m in MARKS if head.startswith(m)), b"")
    if mark and not codecs.lookup(encoding).name.startswith(MARKS[mark]):
        raise ValueError(
            f"{path} begins with the mark of {MARKS[mark]}, not {encoding}; "
            f"convert it first (iconv -f {MARKS[mark]} -t utf-8)"
        )
    if b"\0" in head:
        raise ValueError(f"{path} has NUL bytes: it is not a text file, or one in UTF-16 without a mark")
    return handle.seek(len(mark))


def _hashed_blocks(handle: BinaryIO, digest: hashlib._Hash) -> Iterator[bytes]:
    """The remaining blocks of a file; each is added to the digest when it is read."""
    while block := handle.read(BLOCK):
        digest.update(block)
        yield block


def _row_places(blocks: Iterator[bytes], base: int, unit: Unit) -> tuple[int, np.ndarray]:
    """Number of rows of a file whose text begins at byte `base`, and the byte offsets of rows 0, 256, 512, ..."""
    if unit == "file":
        return int(sum(map(len, blocks)) > 0), np.array([base])
    count, places = 0, [np.empty(0, np.int64)]
    begin, seen, seen_before = (
        base,
        False,
        False,
    )  # of the line at hand: its place, if it and the last have text
    for block in chain(blocks, (b"\n",)):  # the end of the file ends its last line
        starts, visible = _line_starts(block)
        visible[0] |= seen
        at = starts + base
        at[0] = begin
        fresh = visible[:-1]
        if unit == "paragraph":
            fresh = fresh & ~np.concatenate(([seen_before], visible))[: len(fresh)]
        row_starts = at[:-1][fresh]
        places.append(row_starts[-count % STRIDE :: STRIDE].copy())  # not a view, which would keep them all
        count += len(row_starts)
        seen_before = bool(visible[-2]) if len(visible) > 1 else seen_before
        begin, seen = int(at[-1]), bool(visible[-1])
        base += len(block)
    return count, np.concatenate(places)


def _line_starts(block: bytes) -> tuple[np.ndarray, np.ndarray]:
    """The offsets of the lines in a block, and whether each line has a byte in this block that is not white space."""
    data = np.frombuffer(block + b"\n", np.uint8)  # so that no last line is empty
    starts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(data[:-1] == NEWLINE) + 1))
    return starts, np.logical_or.reduceat(INK[data], starts)


# --- Parquet ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TableFile:
    """One column of a Parquet file."""

    path: Path
    column: str
    starts: Sequence[int]
    """The index of the first row of every row group, and last the number of rows."""
    _idle: list[tuple[int, Iterator[object]]] = field(default_factory=list, repr=False)
    """The last reader and the row it stopped at, to go on from there: a row group may be the whole file."""

    @classmethod
    def open(cls, path: Path, reading: FileReading) -> TableFile:
        """The file after reading its footer.

        Raises:
            ValueError: naming the file for one that is not Parquet, has no rows, or lacks the column.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            footer = pq.read_metadata(path)
            known = footer.schema.to_arrow_schema()
        except (pa.ArrowException, OSError) as cause:
            if isinstance(cause, OSError) and cause.errno is not None:
                raise
            raise ValueError(f"{path} is not a Parquet file: {cause}") from cause
        if reading.field not in known.names:
            raise ValueError(
                f"{path} has no column {reading.field!r}; {nearest(reading.field, known.names)}; "
                f"it has {', '.join(known.names)}"
            )
        sizes = [footer.row_group(g).num_rows for g in range(footer.num_row_groups)]
        if not sum(sizes):
            raise ValueError(f"{path} has no rows")
        return cls(path, reading.field, tuple(int(n) for n in np.cumsum([0, *sizes])))

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_idle": []}

    @property
    def name(self) -> str:
        """The file's name."""
        return self.path.name

    @property
    def count(self) -> int:
        """Number of rows in the file."""
        return self.starts[-1]

    @cached_property
    def _digest(self) -> str:
        with self.path.open("rb") as handle:
            return digest_of("parquet", self.column, hashlib.file_digest(handle, "sha256").hexdigest())

    def fingerprint(self) -> str:
        """A hash of the contents and of how they are read; the first call reads the file."""
        return self._digest

    def rows(self, start: int, stop: int) -> Iterator[SourceRow | Rejected]:
        """Rows `start` to `stop - 1`, or fewer at the end."""
        stop = min(stop, self.count)
        if start >= stop:
            return
        group = bisect_right(self.starts, start) - 1
        at, values = self._idle.pop() if self._idle else (-1, iter(()))
        if not self.starts[group] <= at <= start:
            at, values = self.starts[group], self._values(group)
        for row, value in enumerate(islice(values, start - at, stop - at), start):
            yield self._row(row, value)
        self._idle.append((stop, values))

    def _values(self, group: int) -> Iterator[pa.Scalar]:
        """The values of the column from the first row of a row group to the end of the file."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        groups = range(group, len(self.starts) - 1)
        try:
            with pq.ParquetFile(self.path, buffer_size=BLOCK, pre_buffer=False) as table:
                for batch in table.iter_batches(STRIDE, row_groups=groups, columns=[self.column]):
                    yield from batch.column(0)
        except (OSError, pa.ArrowException) as cause:
            raise OSError(
                f"{self.path} cannot be read as Parquet from row {self.starts[group]} on: {cause}"
            ) from cause

    def _row(self, row: int, value: pa.Scalar) -> SourceRow | Rejected:
        try:
            return usable(row, value.as_py(), f"column {self.column!r}")
        except UnicodeDecodeError as cause:
            return Rejected.of(
                row, f"column {self.column!r} is not utf-8: {cause.reason} at {cause.start}", ""
            )


# --- several ------------------------------------------------------------

TextOrTable = TextFile | TableFile
OPENERS: dict[str, Callable[[Path, FileReading], TextOrTable]] = {
    ".txt": TextFile.open,
    ".jsonl": TextFile.open,
    ".parquet": TableFile.open,
}


@dataclass(frozen=True, eq=False)
class Files:
    """Several files as one source, one after the other."""

    files: tuple[TextOrTable, ...]
    starts: tuple[int, ...]
    """The index of the first row of each file, and last the number of rows of all files."""

    @classmethod
    def of(cls, files: Sequence[TextOrTable]) -> Files:
        """The source of these files in this order."""
        return cls(tuple(files), tuple(accumulate((file.count for file in files), initial=0)))

    @property
    def name(self) -> str:
        """The name of the first file, and how many more files there are."""
        more = len(self.files) - 1
        return self.files[0].name + (f" and {more} more" if more else "")

    @property
    def count(self) -> int:
        """Number of rows in the files."""
        return self.starts[-1]

    def fingerprint(self) -> str:
        """A hash of the contents and of how they are read, not of names; Parquet files are read for it."""
        return digest_of(*(file.fingerprint() for file in self.files))

    def rows(self, start: int, stop: int) -> Iterator[SourceRow | Rejected]:
        """Rows `start` to `stop - 1`, or fewer at the end."""
        for f in range(bisect_right(self.starts, start) - 1, len(self.files)):
            first = self.starts[f]
            if first >= stop:
                return
            for row in self.files[f].rows(max(start - first, 0), stop - first):
                yield replace(row, row=row.row + first) if isinstance(row, Rejected) else row


def open_files(path: Path, reading: FileReading) -> list[TextOrTable]:
    """The file, or every file in a folder and its subfolders, sorted by relative path; hidden files are left out.

    Raises:
        FileNotFoundError, ValueError: a folder without files, or a file that is neither text, JSON lines nor Parquet.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if not path.is_dir():
        return [_open_file(path, reading)]
    names = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    shown = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    if not shown:
        raise ValueError(f"{path} is a folder without files; {', '.join(OPENERS)} are read")
    return [_open_file(path / name, reading) for name in shown]


def _open_file(path: Path, reading: FileReading) -> TextOrTable:
    """The opened file, by its suffix; ValueError for a suffix that is not read."""
    if path.suffix.lower() not in OPENERS:
        raise ValueError(
            f"{path} must be one of {', '.join(OPENERS)}; of a folder with other files, pass a list of those to read"
        )
    return OPENERS[path.suffix.lower()](regular(path), reading)


@runtime_checkable
class Source(Protocol):
    """Ordered rows with a fingerprint."""

    @property
    def name(self) -> str:
        """Name for messages and results."""
        ...

    @property
    def count(self) -> int | None:
        """Number of rows; None where it is known only at the end."""
        ...

    def fingerprint(self) -> str | None:
        """A hash of all rows, equal for equal rows; None where rows cannot be read twice."""
        ...

    def rows(self, start: int, stop: int) -> Iterator[SourceRow | Rejected]:
        """Rows `start` to `stop - 1`, or fewer at the end."""
        ...


@runtime_checkable
class HuggingFaceColumns(Protocol):
    """Protocol by which a Hugging Face dataset is recognised without importing the library."""

    @property
    def features(self) -> Mapping[str, object]:
        """The columns by name."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice) -> Mapping[str, Iterable[object]]:
        """Some rows, column by column."""
        ...


def _no_data(value: object) -> str | None:
    """None for a value that may hold rows; else advice on how to write what was meant, "" where nothing is close."""
    instead = no_prompts(value)
    if instead is None or isinstance(value, Path | HuggingFaceColumns):
        return None
    if instead or isinstance(value, type | Tensor | np.ndarray | Mapping) or not isinstance(value, Iterable):
        return instead
    numbers = isinstance(value, list | tuple) and all(isinstance(item, bool | float | None) for item in value)
    return "" if numbers else None


Data = Annotated[
    Prompts | Path | HuggingFaceColumns | Iterable[object],
    Required("texts, token ids, a Batch, files, a data set or an iterator of rows", _no_data),
]
"""Texts, token ids, a batch, files, a folder, a Hugging Face dataset, or anything that gives rows one by one."""


@public(unchecked=("data",))
def open_source(data: Data, *, field: str = "text", rows: Unit = "line", encoding: str = "utf-8") -> Source:
    """Source of numbered rows for any data: texts, token ids, batches, files, data sets or iterators.

    Everything but an iterator can be read again, in any order, by any process; an iterator gives each row once. A file
    is scanned once (hashed and counted) and never loaded; a single row is.

    Args:
        data: the rows, in any of these forms:

            - Texts; token ids `[n p]` or `[p]`, or a list of ids or 1-D tensors; a `Batch` (the real tokens of each
              row, or of each packed text), or a list of them. Ids are taken as they are.
            - A `Path` to a `.txt`, `.jsonl` or `.parquet` file or to a folder of them, or a list of `Path`s. A `str`
              is a path if it ends like one of these files, begins with "/", "./", "../" or "~/", or names a folder
              with a "/" in it; a list of `str` is of paths if all its elements are; every other `str` is a text.
            - A Hugging Face dataset (one split), or any other iterable of texts, ids, batches or records.
        field: field of records (`.jsonl`, `.parquet`, data sets, mappings) that holds the text or the list of ids.
        rows: unit that is a row of a `.txt` file. Lines without text are no rows, blank lines separate paragraphs; all
            other rows count, and a bad one is `Rejected`.
        encoding: encoding of `.txt` and `.jsonl`; a mark of UTF-8 is skipped.

    Returns:
        The `Source`: ordered rows, which are read when they are asked for.

    Raises:
        ValueError: no rows, a field that no record has, files that are not what they seem (the message names the
            file), a batch with more than tokens.
        FileNotFoundError: a path that does not exist.

    Example:
        >>> list(open_source(["one text", "", "another"]).rows(0, 3))
        ['one text', Rejected(row=1, reason='the row is empty', excerpt=''), 'another']
    """
    reading = FileReading(field, rows, encoding)
    paths = _paths(data)
    if paths:
        return Files.of([file for path in paths for file in open_files(path, reading)])
    if isinstance(data, HuggingFaceColumns):
        return Dataset.of(data, field)
    if isinstance(data, Mapping) and IDS in data:
        data = encoded(data)
    if isinstance(data, Mapping):
        known = ", ".join(map(repr, data))
        raise ValueError(f"one data set is required, got several by name: choose one of {known}")
    if isinstance(data, bytes | bytearray | type) or hasattr(data, "iloc"):
        check("open_source: data", data, Data)
    if isinstance(data, str | Tensor | Batch | Sequence):
        return InMemory.of(data, field)
    if isinstance(data, Iterable):
        return Arriving(data, field)
    raise ValueError(f"data must be rows: texts, token ids, files or a data set, got {value_text(data)}")


# --- in memory ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class InMemory:
    """Texts or token ids in memory."""

    name: str
    items: Sequence[object] | Tensor
    field: str

    @classmethod
    def of(cls, data: str | Tensor | Batch | Sequence[object], field: str) -> InMemory:
        """The rows of a text, of several, of token ids, or of batches; ValueError for none."""
        items: Sequence[object] | Tensor
        if isinstance(data, Tensor):
            if odd := odd_value(data):
                raise ValueError(f"data must be rows of token ids, got {odd}")
            if data.is_floating_point() or data.ndim not in (1, 2):
                raise ValueError(
                    f"token ids [row, pos] are required, got {data.dtype} of shape {shape_text(data.shape)}"
                )
            items = data[None] if data.ndim == 1 else data
        elif isinstance(data, str | Batch):
            items = list(_items_or_rows([data]))
        else:
            items = list(_items_or_rows(data)) if any(isinstance(x, Batch) for x in data) else data
        if len(items) == 0:
            raise ValueError("at least one row is required, got none")
        return cls("ids" if isinstance(data, Tensor | Batch) else "rows", items, field)

    @property
    def count(self) -> int:
        """Number of rows."""
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

    def rows(self, start: int, stop: int) -> Iterator[SourceRow | Rejected]:
        """Rows `start` to `stop - 1`, or fewer at the end."""
        for row in range(start, min(stop, self.count)):
            yield _row_of_item(row, self.items[row], self.field)


def _row_of_item(row: int, item: object, field: str) -> SourceRow | Rejected:
    """A row of a list or an iterator: a text, ids, or a record."""
    if not isinstance(item, Mapping):
        return usable(row, item, "the row")
    if field not in item:
        known = ", ".join(map(repr, item)) or "none"
        return Rejected.of(row, f"no field {field!r}; it has {known}", dict(item))
    return usable(row, item[field], f"field {field!r}")


def _items_or_rows(items: Iterable[object]) -> Iterator[object]:
    """The items, with each batch replaced by its rows as lists of ids."""
    for item in items:
        if isinstance(item, Batch):
            yield from _real_rows(item)
        else:
            yield item


def _real_rows(batch: Batch) -> list[list[int]]:
    """The token ids of each row (or packed text) of a batch, without padding."""
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
    data: HuggingFaceColumns
    field: str

    @classmethod
    def of(cls, data: HuggingFaceColumns, field: str) -> Dataset:
        """The column `field`; ValueError if there is no such column, or no row."""
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
        """Number of rows."""
        return len(self.data)

    def fingerprint(self) -> str | None:
        """A hash of the data set's own fingerprint and the column; None if the data set has no fingerprint."""
        known = getattr(self.data, "_fingerprint", None)
        return None if known is None else digest_of("dataset", str(known), self.field)

    def rows(self, start: int, stop: int) -> Iterator[SourceRow | Rejected]:
        """Rows `start` to `stop - 1`, or fewer at the end."""
        stop = min(stop, self.count)
        for first in range(start, stop, STRIDE):
            values = self.data[first : min(first + STRIDE, stop)][self.field]
            for row, value in enumerate(values, first):
                yield usable(row, value, f"field {self.field!r}")


class Arriving:
    """Rows of an iterator, which gives each row once: a generator, a socket, a streamed data set."""

    name = "iterator"
    count: int | None = None

    def __init__(self, items: Iterable[object], field: str) -> None:
        self._items = _items_or_rows(items)
        self._field = field
        self._next = 0

    def fingerprint(self) -> str | None:
        """None, since hashing the rows would use them up."""
        return None

    def rows(self, start: int, stop: int) -> Iterator[SourceRow | Rejected]:
        """Rows `start` to `stop - 1`, or fewer at the end; rows before `start` are skipped.

        Raises:
            ValueError: a row that has already been given or skipped.
        """
        if start < self._next:
            raise ValueError(
                f"row {start} of an iterator is asked for after row {self._next - 1}: it gives every row once and in "
                "order; to read in any order, or again, pass a list, files or a data set"
            )
        for item in islice(self._items, stop - self._next):
            row, self._next = self._next, self._next + 1
            if row >= start:
                yield _row_of_item(row, item, self._field)


# --- which strings are paths --------------------------------------------------------------------------------------


def _paths(data: object) -> list[Path]:
    """The data as paths if every item is one, else an empty list."""
    items = [data] if isinstance(data, str | Path) else data if isinstance(data, list | tuple) else []
    paths = []
    for item in items:
        if not isinstance(item, Path) and not (isinstance(item, str) and _is_path(item)):
            return []
        paths.append(Path(item).expanduser())
    return paths


def _is_path(text: str) -> bool:
    """Whether a text is a path: it ends like a data file, begins like a path, or names a folder."""
    if "\n" in text or len(text) > 1000:
        return False
    if text.endswith(tuple(OPENERS)) or text.startswith(("/", "./", "../", "~/")):
        return True
    return os.sep in text and is_folder(text)
