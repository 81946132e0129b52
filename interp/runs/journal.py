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
"""Bytes up to which a journal is not folded into a snapshot."""


@dataclass
class Journal:
    """The files `NAME.K.snapshot` and `NAME.K.journal` of one process's share of a run, and the progress in them."""

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
        """The journal of this name with the progress that earlier processes wrote; empty if there is none.

        Args:
            read_only: whether only to read it, since another process may be writing it.
            number: number of its latest snapshot, from a fresh `numbers_in`; None: found by listing the folder.

        Raises:
            ValueError: a damaged snapshot. A torn journal entry is no error: its batch is due again.
        """
        while True:
            journal = cls(
                folder, name, reductions, _number=_newest_number(folder, name) if number is None else number
            )
            number = None
            try:
                journal._read(cut=not read_only)
            except FileNotFoundError:  # the writing process has just replaced the snapshot by the next one
                continue
            # A writer removes an old snapshot before its journal: while the journal exists, both were read whole.
            if journal._path("journal").exists() or journal._number == _newest_number(folder, name):
                break
        if not read_only:
            journal._tidy()
        return journal

    def write(self, done: BatchDone) -> None:
        """Append one batch to the journal and to the progress; an OSError leaves both as they were."""
        entry = _entry_bytes(packed_done(done))
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
        """Write the whole progress as the next snapshot, and begin a new, empty journal."""
        data = _entry_bytes(_safetensors_bytes(self.progress.groups(), self.progress.account()))
        fresh = self.folder / f"{self.name}.{self._number + 1}.snapshot"
        write_atomically(fresh, lambda path: _write_durably(path, data))
        self._number, self._size, self._folded = self._number + 1, 0, len(data)
        self._tidy()

    def _read(self, *, cut: bool) -> None:
        """Read the snapshot and every whole journal entry; with `cut`, truncate the file after the last whole entry."""
        if self._number:
            data = self._path("snapshot").read_bytes()
            self.progress = _snapshot_progress(self._path("snapshot"), data, self.reductions)
            self._folded = len(data)
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
        """Remove earlier snapshots and journals, and the temporary files of a killed process."""
        current = {self._path("snapshot"), self._path("journal")}
        for pattern in (f"{self.name}.*.snapshot", f"{self.name}.*.journal"):
            for path in set(self.folder.glob(pattern)) - current:
                path.unlink(missing_ok=True)
        clear(self.folder, f"{self.name}.*.snapshot")

    def _path(self, kind: str) -> Path:
        return self.folder / f"{self.name}.{self._number}.{kind}"


def packed_done(done: BatchDone) -> bytes:
    """The partial results and the tally of one batch as bytes, for a file or another process."""
    about = {"window": done.window, "batch": done.batch, "last": done.last, "tally": asdict(done.tally)}
    return _safetensors_bytes(named("part", done.partials), about)


def unpacked_done(data: bytes, reductions: Reductions) -> BatchDone:
    """The inverse of `packed_done`, bit for bit."""
    about, groups = _safetensors_content(data)
    partials = loaded(groups, reductions).get("part")
    return BatchDone(about["window"], about["batch"], about["last"], partials, tally_of(about["tally"]))


def numbers_in(folder: Path) -> dict[str, int]:
    """The names of all journals in a folder, each with the number of its latest snapshot (0: none yet)."""
    numbers: dict[str, int] = {}
    for path in sorted(folder.glob("[!.]*.*.*")):
        name, number, kind = path.name.rsplit(".", 2)
        if kind in ("journal", "snapshot"):
            numbers[name] = max(numbers.get(name, 0), int(number) if kind == "snapshot" else 0)
    return numbers


def _entry_bytes(data: bytes) -> bytes:
    """A journal entry: the data, with their length and checksum in front."""
    return _HEAD.pack(len(data), zlib.crc32(data)) + data


def _entries(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Every whole entry as (end offset, data), up to the first that is truncated or damaged."""
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
    """Write all bytes or raise: `os.write` may write only some of them."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _safetensors_bytes(groups: ValueGroups, about: Json) -> bytes:
    from safetensors.torch import save

    content = {"groups": list(groups), **about}  # safetensors sorts names, but results keep this order
    return save(on_host(groups), metadata={"about": json.dumps(content)})


def _safetensors_content(data: bytes) -> tuple[dict[str, Any], ValueGroups]:
    from safetensors.torch import load

    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    about, tensors = json.loads(header["__metadata__"]["about"]), load(data)
    return about, {name: tensors[name] for name in about.pop("groups")}


def _newest_number(folder: Path, name: str) -> int:
    """The number of the latest snapshot; 0 before the first."""
    return max((int(path.name.split(".")[-2]) for path in folder.glob(f"{name}.*.snapshot")), default=0)


def _snapshot_progress(path: Path, data: bytes, reductions: Reductions) -> Progress:
    """The progress in the bytes of a snapshot; raises ValueError for a damaged file."""
    entry = next(_entries(memoryview(data)), None)
    if entry is None or entry[0] != len(data):
        raise ValueError(f"{path} is damaged: its {len(data)} bytes are not those that were written")
    account, groups = _safetensors_content(bytes(entry[1]))
    return Progress.restored(account, groups, reductions)
