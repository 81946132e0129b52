"""Files and folders as one run of rows; which suffix is read how stands in one table."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from interp.data.rows import Reading, Rejected, Row, digest_of
from interp.data.table_file import TableFile
from interp.data.text_file import TextFile

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
    def of(cls, files: Sequence[File]) -> "Files":
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
