"""Rows of one column of a Parquet file, read from the row group that holds the first row asked for."""

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from interp.core.shapes import nearest
from interp.data.rows import BLOCK, STRIDE, Reading, Rejected, Row, digest_of, usable

if TYPE_CHECKING:
    import pyarrow as pa


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
    def open(cls, path: Path, reading: Reading) -> "TableFile":
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

    def _values(self, group: int) -> Iterator["pa.Scalar"]:
        import pyarrow.parquet as pq

        with pq.ParquetFile(self.path, buffer_size=BLOCK, pre_buffer=False) as table:
            groups = range(group, len(self.starts) - 1)
            for batch in table.iter_batches(STRIDE, row_groups=groups, columns=[self.column]):
                yield from batch.column(0)

    def _row(self, row: int, value: "pa.Scalar") -> Row | Rejected:
        try:
            return usable(row, value.as_py(), f"column {self.column!r}")
        except UnicodeDecodeError as cause:
            return Rejected.of(
                row, f"column {self.column!r} is not utf-8: {cause.reason} at {cause.start}", ""
            )
