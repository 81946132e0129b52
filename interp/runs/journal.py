"""A run's progress on disk: every batch's partial result appended as it comes, folded up now and then.

A run that is killed, at whatever moment, goes on from here. A batch is in the journal whole or not at all: each entry
has its length and checksum, and a torn last one is cut off. Once the journal outgrows what it folds to, the folded
state is written beside it as a snapshot under the next number, with a new, empty journal; a crash between the two steps
leaves the old pair or the new one valid. What it costs: `docs/scaling.md`.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from interp.core.files import write_atomically
from interp.core.stats import on_host
from interp.model.config import Json
from interp.runs.folder import clear
from interp.runs.progress import BatchDone, Progress, Reductions, ValueGroups, loaded, named, tally_of

_HEAD = struct.Struct("<QI")
"""Length and CRC-32 of the entry that follows."""
_LEAST = 2**24
"""Bytes below which a journal is not worth folding up."""


@dataclass
class Journal:
    """The files `NAME.K.snapshot` and `NAME.K.journal` of one process's share of a run, and what they say."""

    folder: Path
    name: str
    reductions: Reductions
    progress: Progress = field(default_factory=Progress)
    _number: int = 0
    _size: int = 0
    _folded: int = 0

    @classmethod
    def open(
        cls,
        folder: Path,
        name: str,
        reductions: Reductions,
        *,
        read_only: bool = False,
        number: int | None = None,
    ) -> "Journal":
        """The journal of this name with all that earlier processes wrote; empty if there is none.

        Args:
            read_only: another process may be writing it.
            number: of its latest snapshot, as `numbers_in` found it just now; without it the folder is listed.

        Raises:
            ValueError: a damaged snapshot. A torn journal entry is no error: its batch is due again.
        """
        while True:
            journal = cls(
                folder, name, reductions, _number=_newest(folder, name) if number is None else number
            )
            number = None
            try:
                journal._read(cut=not read_only)
            except FileNotFoundError:  # whoever writes it has just put the next snapshot in its place
                continue
            # Of an old pair the journal goes last: while it is there, what was read is whole.
            if journal._path("journal").exists() or journal._number == _newest(folder, name):
                break
        if not read_only:
            journal._tidy()
        return journal

    def write(self, done: BatchDone) -> None:
        """Append one batch and count it as done; after an OSError it is as if it had never been done."""
        entry = _framed(packed_done(done))
        with self._path("journal").open("ab", buffering=0) as file:
            try:
                _write_all(file.fileno(), entry)
            except OSError as cause:
                file.truncate(self._size)
                why = f"{cause.strerror} (no progress is lost: make room and resume)"
                raise OSError(cause.errno, why, file.name) from cause
        self._size += len(entry)
        self.progress.add(done)
        if self._size > max(_LEAST, 4 * self._folded):
            self.fold()

    def fold(self) -> None:
        """Write the folded state as the next snapshot, and begin a new journal."""
        data = _framed(_packed(self.progress.groups(), self.progress.account()))
        fresh = self.folder / f"{self.name}.{self._number + 1}.snapshot"
        write_atomically(fresh, lambda path: _durable(path, data))
        self._number, self._size, self._folded = self._number + 1, 0, len(data)
        self._tidy()

    def _read(self, *, cut: bool) -> None:
        """Take in the snapshot and every whole entry; cut off what follows the last one if this process may."""
        if self._number:
            data = self._path("snapshot").read_bytes()
            self.progress, self._folded = _snapshot(self._path("snapshot"), data, self.reductions), len(data)
        path = self._path("journal")
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise ValueError(f"a regular file is required as a journal, {path} is none")
        data = path.read_bytes() if path.exists() else b""
        for end, entry in _entries(memoryview(data)):
            try:
                self.progress.add(unpacked_done(bytes(entry), self.reductions))
            except ValueError as cause:
                raise ValueError(
                    f"{path} is damaged, its entries do not follow each other: {cause}"
                ) from cause
            self._size = end
        if cut and self._size < len(data):
            os.truncate(path, self._size)

    def _tidy(self) -> None:
        """Remove what came before the snapshot, and what a process left that was killed while it wrote one."""
        kept = {self._path("snapshot"), self._path("journal")}
        for pattern in (f"{self.name}.*.snapshot", f"{self.name}.*.journal"):
            for path in set(self.folder.glob(pattern)) - kept:
                path.unlink(missing_ok=True)
        clear(self.folder, f"{self.name}.*.snapshot")

    def _path(self, kind: str) -> Path:
        return self.folder / f"{self.name}.{self._number}.{kind}"


def packed_done(done: BatchDone) -> bytes:
    """One batch's part as bytes, for a file or another process."""
    about = {"window": done.window, "batch": done.batch, "last": done.last, "tally": asdict(done.tally)}
    return _packed(named("part", done.partials), about)


def unpacked_done(data: bytes, reductions: Reductions) -> BatchDone:
    """The inverse of `packed_done`, bit for bit."""
    about, groups = _unpacked(data)
    partials = loaded(groups, reductions).get("part")
    return BatchDone(about["window"], about["batch"], about["last"], partials, tally_of(about["tally"]))


def numbers_in(folder: Path) -> dict[str, int]:
    """The names of all journals in a folder, each with the number of its latest snapshot (0: none yet)."""
    found: dict[str, int] = {}
    for path in sorted(folder.glob("[!.]*.*.*")):
        name, number, kind = path.name.rsplit(".", 2)
        if kind in ("journal", "snapshot"):
            found[name] = max(found.get(name, 0), int(number) if kind == "snapshot" else 0)
    return found


def _framed(data: bytes) -> bytes:
    """The data as an entry, with its length and checksum before it."""
    return _HEAD.pack(len(data), zlib.crc32(data)) + data


def _entries(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Every whole entry with the place where it ends, up to the first that is torn or damaged."""
    start = 0
    while start + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack(data[start : start + _HEAD.size])
        end = start + _HEAD.size + length
        entry = data[start + _HEAD.size : end]
        if end > len(data) or zlib.crc32(entry) != checksum:
            return
        yield end, entry
        start = end


def _write_all(file: int, data: bytes) -> None:
    """Write everything or raise: a system may take less than it is given."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _durable(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _packed(groups: ValueGroups, about: Json) -> bytes:
    from safetensors.torch import save

    told = {"groups": list(groups), **about}  # safetensors sorts them, and results follow their order
    return save(on_host(groups), metadata={"about": json.dumps(told)})


def _unpacked(data: bytes) -> tuple[dict[str, Any], ValueGroups]:
    from safetensors.torch import load

    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about, found = json.loads(header["__metadata__"]["about"]), load(data)
    return about, {name: found[name] for name in about.pop("groups")}


def _newest(folder: Path, name: str) -> int:
    """The number of the latest snapshot; 0 before the first."""
    return max((int(path.name.split(".")[-2]) for path in folder.glob(f"{name}.*.snapshot")), default=0)


def _snapshot(path: Path, data: bytes, reductions: Reductions) -> Progress:
    whole = next(_entries(memoryview(data)), None)
    if whole is None or whole[0] != len(data):
        raise ValueError(f"{path} is damaged: its {len(data)} bytes are not those that were written")
    account, groups = _unpacked(bytes(whole[1]))
    return Progress.restored(account, groups, reductions)
