"""Resumable folders: a manifest says what a folder is for, and contents of two things are never mixed in one.

A run over data, the record of an experiment, a store of activations and a training run keep theirs by the same rules.
The manifest, a JSON file, is there before anything else; what it says is compared with what is asked. A file appears
whole or not at all, and may be listed with its size and hash. A lock is free once its process is dead. What a process
that was killed left half-written is removed.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from interp.core.boundary import check_fields
from interp.core.files import explained, json_object, named_path, write_atomically
from interp.model.config import Json

T = TypeVar("T")
File = TypeVar("File", bound="ManifestEntry")
LOCK = ".lock"
"""The file that the one writer of a folder locks."""
ABSENT = "(absent)"
"""Stands for the value of a name that one side of a comparison does not have."""


@dataclass(frozen=True)
class FolderKind:
    """One kind of folder, and the manifest by which it is known."""

    what: str
    """The contents of such a folder, in words that stand after "a"."""
    manifest: str
    """The name of the file."""
    format: str
    """First entry of the manifest; a file without it belongs to another program."""
    unmarked: bool = False
    """Whether a file without that entry is accepted all the same: earlier versions did not write it."""

    def read(self, folder: Path) -> dict[str, Any]:
        """The manifest; ValueError with the reason why the folder is none of this kind."""
        path, required = folder / self.manifest, f"the folder of a {self.what} is required"
        if not path.is_file():
            why = f"has no {self.manifest}" if folder.is_dir() else "is a file" if folder.exists() else ""
            raise ValueError(f"{required}, {folder} {why or 'does not exist'}")
        try:
            found = json_object(path)
        except (OSError, ValueError) as cause:
            raise ValueError(f"{required}, {path} cannot be read: {cause}") from cause
        mark = found.pop("format", self.format if self.unmarked else None)
        if mark != self.format:
            raise ValueError(f"{required}, {path} must be of the format {self.format!r}, got {mark!r}")
        return found

    def begun(self, folder: Path, *, resume: bool = True) -> dict[str, Any] | None:
        """The manifest; None for a folder that is new or empty.

        Raises:
            ValueError: a folder that holds other things, and without `resume` for one of this kind.
        """
        named_path(folder)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"a folder is required, {folder} is a file")
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        if (folder / self.manifest).exists():  # asked last: another process may have begun the same just now
            if not resume:
                raise ValueError(
                    f"{folder} holds a {self.what} already: resume=True goes on with it, or give another folder"
                )
            return self.read(folder)
        if others := [name for name in names if name != LOCK and not name.startswith(f".{self.manifest}.")]:
            raise ValueError(
                f"a new or empty folder is required, or that of a {self.what}; {folder} holds {', '.join(others[:3])}"
            )
        return None

    def locked(
        self, folder: Path, parameters: Json, *, resume: bool = True
    ) -> tuple[dict[str, Any], ExitStack]:
        """The manifest, as `claim`, and the lock of the one process that may write there.

        Raises:
            ValueError: as `begun` and `agree`; while another process writes there.
            OSError: with what to do, where the folder cannot be made or written to.
        """
        self.begun(folder, resume=resume)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = locked(folder / LOCK, f"another process writes the {self.what} in {folder}: one at a time")
        except OSError as cause:
            if (found := explained(cause, folder)) is None:
                raise
            raise found from cause
        try:
            return self.claim(folder, parameters), lock
        except BaseException:
            lock.close()
            raise

    def claim(self, folder: Path, parameters: Json) -> dict[str, Any]:
        """The manifest: `asked`, unless there was one or another process was faster.

        Raises:
            ValueError: as `begun`.
        """
        while (found := self.begun(folder)) is None:
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError, FileNotFoundError):  # who was faster clears away what others began
                write_json(folder / self.manifest, {"format": self.format, **parameters}, new=True)
        clear(folder, self.manifest)
        return found

    def write(self, folder: Path, values: Json) -> None:
        """Put another manifest in its place, in one step."""
        write_json(folder / self.manifest, {"format": self.format, **values})

    def agree(self, folder: Path, there: Json, parameters: Json) -> None:
        """ValueError naming everything in which the folder differs from the request."""
        if differing := changes(there, parameters):
            listed = "; ".join(f"{name}: was {_short(was)}, is {_short(now)}" for name, was, now in differing)
            raise ValueError(
                f"{folder} holds another {self.what}: {listed}; a new folder is required for this"
            )


@dataclass(frozen=True)
class ManifestEntry:
    """A file as a manifest lists it."""

    file: str
    bytes: int
    sha256: str

    @classmethod
    def written(cls: type[File], path: Path, write: Callable[[Path], object], **more: object) -> File:
        """The file that `write` fills, written in one step; `more`: what else is listed of it."""
        write_atomically(path, write)
        return cls(file=path.name, bytes=path.stat().st_size, sha256=file_hash(path), **more)

    def check(self, folder: Path, *, contents: bool = False) -> None:
        """FileNotFoundError or ValueError if it is not there as it was written: its size, or also its bytes."""
        path = folder / self.file
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing, though it is listed as written")
        if (size := path.stat().st_size) != self.bytes:
            raise ValueError(f"{path} must have {self.bytes} bytes, got {size} (truncated?)")
        if contents and file_hash(path) != self.sha256:
            raise ValueError(f"{path} is corrupt: its SHA-256 is not the one listed")


def locked(file: Path, taken: str, *, wait: float = 0.0) -> ExitStack:
    """A lock, kept till the end of `with` or till it is closed; ValueError (`taken`) if another process has it."""
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise ValueError(f"a regular file is required as a lock, {file} is none")
    from filelock import FileLock, Timeout

    lock, stack = FileLock(file), ExitStack()
    try:
        lock.acquire(timeout=wait, poll_interval=0.05)
    except Timeout as cause:
        raise ValueError(taken) from cause
    stack.callback(lock.release)
    return stack


def is_locked(file: Path) -> bool:
    """Whether a process has a lock; True where the system does not say."""
    try:
        locked(file, "").close()
    except (ValueError, OSError):
        return True
    return False


def clear(folder: Path, names: str = "*") -> None:
    """Remove what killed processes left of files of these names: the temporary files of `write_atomically`."""
    for path in folder.glob(f".{names}.*"):
        if path.suffix != ".lock" and path.is_file():
            path.unlink(missing_ok=True)


def built(cls: type[T], values: Mapping[str, object]) -> T:
    """A record from its JSON; ValueError naming keys that are unknown, missing or of a wrong value."""
    known = {each.name for each in fields(cast("type", cls))}
    if not isinstance(values, Mapping):
        raise ValueError(f"{cls.__name__} must be an object, got {values!r}")
    if values.keys() != known:
        odd = sorted(values.keys() ^ known)
        raise ValueError(f"the folder is of another version of interp: {cls.__name__} differs in {odd}")
    record = cls(**{name: tuple(each) if isinstance(each, list) else each for name, each in values.items()})
    check_fields(record)
    return record


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file in one step, and the folders it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write_bytes(data))


def write_json(path: Path, values: Json, *, new: bool = False) -> None:
    """Write a JSON file in one step; new: FileExistsError if there is one."""
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    try:
        text.encode()
    except UnicodeEncodeError as cause:
        around = text[max(cause.start - 20, 0) : cause.end + 20]
        raise ValueError(f"{path}: texts of whole characters are required, got {around!r}") from cause
    write_atomically(path, lambda file: file.write_text(text, encoding="utf-8"), new=new)


def file_hash(file: Path) -> str:
    """SHA-256 of a file's bytes."""
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def changes(before: Mapping[str, object], after: Mapping[str, object]) -> list[tuple[str, str, str]]:
    """Every name with different values, both as JSON text; names inside records are joined by dots.

    Example:
        >>> changes({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
        [('a.b', '1', '3')]
    """
    old, new = flat(before), flat(after)
    pairs = ((name, old.get(name, ABSENT), new.get(name, ABSENT)) for name in old | new)
    return [each for each in pairs if each[1] != each[2]]


def flat(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Values as JSON text by name; names inside records are joined by dots.

    Example:
        >>> flat({"a": {"b": [1]}, "c": "x"})
        {'a.b': '[1]', 'c': '"x"'}
    """
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = json.dumps(value, ensure_ascii=False)
    return found


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
