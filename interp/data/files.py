"""Rows of files and folders: text and JSON lines, one column of a Parquet file; which suffix is which, in one table.

One scan of a text file counts and marks its rows, then any stretch is read without what precedes it; a Parquet file is
read from the row group that holds the first row asked for. Memory does not grow with the file, and a row that cannot be
decoded or parsed leaves its neighbours alone.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from interp.core.shapes import nearest
from interp.data.rows import BLOCK, EXCERPT, STRIDE, Reading, Rejected, Row, Unit, digest_of, usable

if TYPE_CHECKING:
    import pyarrow as pa

NEWLINE = ord("\n")
INK = np.array([not bytes([byte]).isspace() for byte in range(256)])
"""Which bytes are more than white space."""
MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
"""What a file may begin with to say its encoding; UTF-32 stands first because its mark begins with UTF-16's."""


def lines(handle: BinaryIO) -> Iterator[bytes]:
    """The lines that have anything but ASCII white space."""
    return (line for line in handle if not line.isspace())


def paragraphs(handle: BinaryIO) -> Iterator[bytes]:
    """Lines that stand together, blank ones between."""
    return (b"".join(part) for blank, part in groupby(handle, key=bytes.isspace) if not blank)


def whole(handle: BinaryIO) -> Iterator[bytes]:
    """Everything."""
    yield handle.read()


PIECES: dict[Unit, Callable[[BinaryIO], Iterator[bytes]]] = {
    "line": lines,
    "paragraph": paragraphs,
    "file": whole,
}


# --- text and JSON lines ------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TextFile:
    """A file of texts or of JSON records: where every 256th row begins, and how many there are."""

    path: Path
    reading: Reading
    records: bool
    """Whether each row is a JSON object with the text in a field."""
    count: int
    size: int
    places: np.ndarray
    """The byte at which row 0, 256, 512, ... begins."""
    digest: str

    @classmethod
    def open(cls, path: Path, reading: Reading) -> TextFile:
        """The file after one scan.

        Errors: ValueError naming the file for one without rows, a mark of another encoding, or NUL bytes (binary, or
        UTF-16 without a mark); OSError if it cannot be read.
        """
        records = path.suffix.lower() == ".jsonl"
        unit: Unit = "line" if records else reading.rows
        with path.open("rb") as handle:
            base = _begin(path, handle, reading.encoding)
            digest = hashlib.sha256()
            count, places = _places(_hashed(handle, digest), base, unit)
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

    def rows(self, start: int, stop: int) -> Iterator[Row | Rejected]:
        """Rows start to stop - 1, as far as there are any. Errors: ValueError if the file has changed its size."""
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

    def _row(self, row: int, piece: bytes) -> Row | Rejected:
        if self.records or self.reading.rows != "file":
            piece = piece.removesuffix(b"\r\n" if piece.endswith(b"\r\n") else b"\n")
        try:
            text = piece.decode(self.reading.encoding)
        except UnicodeDecodeError as cause:
            reason = f"byte {piece[cause.start]:#04x} at {cause.start} is not {self.reading.encoding}"
            return Rejected.of(row, reason, piece[:EXCERPT].decode("utf-8", "backslashreplace"))
        return _field(row, text, self.reading.field) if self.records else usable(row, text, "the text")


def _field(row: int, line: str, name: str) -> Row | Rejected:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as cause:
        return Rejected.of(row, f"malformed JSON: {cause}", line)
    if not isinstance(record, dict):
        return Rejected.of(row, f"a JSON object is required, got {type(record).__name__}", line)
    if name not in record:
        return Rejected.of(row, f"no field {name!r}; it has {', '.join(map(repr, record)) or 'none'}", line)
    return usable(row, record[name], f"field {name!r}")


def _begin(path: Path, handle: BinaryIO, encoding: str) -> int:
    """Put the handle after the mark of UTF-8, if there is one, and say where that is."""
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


def _hashed(handle: BinaryIO, digest: hashlib._Hash) -> Iterator[bytes]:
    """The rest of a file block by block, each added to the digest as it passes."""
    while block := handle.read(BLOCK):
        digest.update(block)
        yield block


def _places(blocks: Iterator[bytes], base: int, unit: Unit) -> tuple[int, np.ndarray]:
    """How many rows a file has whose text begins at byte `base`, and where rows 0, 256, 512, ... begin."""
    if unit == "file":
        return int(sum(map(len, blocks)) > 0), np.array([base])
    count, places = 0, [np.empty(0, np.int64)]
    begin, seen, seen_before = (
        base,
        False,
        False,
    )  # of the line at hand: its place, if it and the last have text
    for block in chain(blocks, (b"\n",)):  # the end of the file ends its last line
        starts, visible = _visible(block)
        visible[0] |= seen
        at = starts + base
        at[0] = begin
        fresh = visible[:-1]
        if unit == "paragraph":
            fresh = fresh & ~np.concatenate(([seen_before], visible))[: len(fresh)]
        found = at[:-1][fresh]
        places.append(found[-count % STRIDE :: STRIDE].copy())  # not a view, which would keep them all
        count += len(found)
        seen_before = bool(visible[-2]) if len(visible) > 1 else seen_before
        begin, seen = int(at[-1]), bool(visible[-1])
        base += len(block)
    return count, np.concatenate(places)


def _visible(block: bytes) -> tuple[np.ndarray, np.ndarray]:
    """Where each line of a block begins, and whether it has anything but white space in this block."""
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
    """The first row of every row group, and the number of rows."""
    _idle: list[tuple[int, Iterator[object]]] = field(default_factory=list, repr=False)
    """Where the last reader stopped, to go on there: a row group may be the whole file."""

    @classmethod
    def open(cls, path: Path, reading: Reading) -> TableFile:
        """The file after a look at its footer.

        Errors: ValueError naming the file for one that is not Parquet, has no rows, or lacks the column.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            footer = pq.read_metadata(path)
        except pa.ArrowInvalid as cause:
            raise ValueError(f"{path} is not a Parquet file: {cause}") from cause
        known = footer.schema.to_arrow_schema()
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
        """How many rows the file has."""
        return self.starts[-1]

    @cached_property
    def _digest(self) -> str:
        with self.path.open("rb") as handle:
            return digest_of("parquet", self.column, hashlib.file_digest(handle, "sha256").hexdigest())

    def fingerprint(self) -> str:
        """A hash of the contents and of how they are read; the first call reads the file."""
        return self._digest

    def rows(self, start: int, stop: int) -> Iterator[Row | Rejected]:
        """Rows start to stop - 1, as far as there are any."""
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
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path, buffer_size=BLOCK, pre_buffer=False) as table:
            groups = range(group, len(self.starts) - 1)
            for batch in table.iter_batches(STRIDE, row_groups=groups, columns=[self.column]):
                yield from batch.column(0)

    def _row(self, row: int, value: pa.Scalar) -> Row | Rejected:
        try:
            return usable(row, value.as_py(), f"column {self.column!r}")
        except UnicodeDecodeError as cause:
            return Rejected.of(
                row, f"column {self.column!r} is not utf-8: {cause.reason} at {cause.start}", ""
            )


# --- several ------------------------------------------------------------

File = TextFile | TableFile
OPENERS: dict[str, Callable[[Path, Reading], File]] = {
    ".txt": TextFile.open,
    ".jsonl": TextFile.open,
    ".parquet": TableFile.open,
}


@dataclass(frozen=True, eq=False)
class Files:
    """Files, one after the other."""

    files: tuple[File, ...]
    starts: tuple[int, ...]
    """The number of the first row of each file, and that of all rows."""

    @classmethod
    def of(cls, files: Sequence[File]) -> Files:
        """These files in this order."""
        return cls(tuple(files), tuple(accumulate((file.count for file in files), initial=0)))

    @property
    def name(self) -> str:
        """The file's name, or the first's and how many more there are."""
        rest = len(self.files) - 1
        return self.files[0].name + (f" and {rest} more" if rest else "")

    @property
    def count(self) -> int:
        """How many rows the files have."""
        return self.starts[-1]

    def fingerprint(self) -> str:
        """A hash of the contents and of how they are read, not of names; Parquet files are read for it."""
        return digest_of(*(file.fingerprint() for file in self.files))

    def rows(self, start: int, stop: int) -> Iterator[Row | Rejected]:
        """Rows start to stop - 1, as far as there are any."""
        for f in range(bisect_right(self.starts, start) - 1, len(self.files)):
            first = self.starts[f]
            if first >= stop:
                return
            for row in self.files[f].rows(max(start - first, 0), stop - first):
                yield replace(row, row=row.row + first) if isinstance(row, Rejected) else row


def open_files(path: Path, reading: Reading) -> list[File]:
    """The file, or every file of a folder and its folders, by relative name; hidden ones are left out.

    Errors: FileNotFoundError; ValueError for a folder without files, or a file that is neither text, JSON lines nor
    Parquet.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist")
    if not path.is_dir():
        return [_opened(path, reading)]
    names = sorted(p.relative_to(path).as_posix() for p in path.rglob("*") if p.is_file())
    shown = [name for name in names if not any(part.startswith(".") for part in name.split("/"))]
    if not shown:
        raise ValueError(f"{path} is a folder without files; {', '.join(OPENERS)} are read")
    return [_opened(path / name, reading) for name in shown]


def _opened(path: Path, reading: Reading) -> File:
    if path.suffix.lower() not in OPENERS:
        raise ValueError(
            f"{path} must be one of {', '.join(OPENERS)}; of a folder with other files, pass a list of those to read"
        )
    return OPENERS[path.suffix.lower()](path, reading)
