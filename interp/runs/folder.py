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
    """What such a folder holds, as a noun for messages: "run over data"."""
    manifest: str
    """The name of the manifest file."""
    format: str
    """The value of the manifest's entry "format"; a file with another value belongs to another program."""
    unmarked: bool = False
    """Whether a manifest without the entry "format" is accepted too, because earlier versions did not write it."""

    def read(self, folder: Path) -> dict[str, Any]:
        """The manifest without its format; raises ValueError with the reason if the folder is not of this kind."""
        path, required = folder / self.manifest, f"the folder of a {self.what} is required"
        if not path.is_file():
            why = f"has no {self.manifest}" if folder.is_dir() else "is a file" if folder.exists() else ""
            raise ValueError(f"{required}, {folder} {why or 'does not exist'}")
        try:
            manifest = json_object(path)
        except (OSError, ValueError) as cause:
            raise ValueError(f"{required}, {path} cannot be read: {cause}") from cause
        mark = manifest.pop("format", self.format if self.unmarked else None)
        if mark != self.format:
            raise ValueError(f"{required}, {path} must be of the format {self.format!r}, got {mark!r}")
        return manifest

    def begun(self, folder: Path, *, resume: bool = True) -> dict[str, Any] | None:
        """The manifest of a folder that was begun; None for a folder that is new or empty.

        Raises:
            ValueError: a folder that holds other things, and without `resume` for one of this kind.
        """
        named_path(folder)
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"a folder is required, {folder} is a file")
        names = sorted(path.name for path in folder.iterdir()) if folder.exists() else []
        # checked after listing: another process may just have written it
        if (folder / self.manifest).exists():
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
        """The manifest as `claim` returns it, and the folder's lock, which this process now holds.

        Raises:
            ValueError: as `begun` and `agree`; while another process writes there.
            OSError: with what to do, where the folder cannot be made or written to.
        """
        self.begun(folder, resume=resume)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = locked(folder / LOCK, f"another process writes the {self.what} in {folder}: one at a time")
        except OSError as cause:
            if (explanation := explained(cause, folder)) is None:
                raise
            raise explanation from cause
        try:
            return self.claim(folder, parameters), lock
        except BaseException:
            lock.close()
            raise

    def claim(self, folder: Path, parameters: Json) -> dict[str, Any]:
        """The folder's manifest: `parameters` written as new, or the one that is there or that another process wrote.

        Raises:
            ValueError: as `begun`.
        """
        while (manifest := self.begun(folder)) is None:
            folder.mkdir(parents=True, exist_ok=True)
            # FileNotFoundError: a faster process has removed our temporary file
            with suppress(FileExistsError, FileNotFoundError):
                write_json(folder / self.manifest, {"format": self.format, **parameters}, new=True)
        clear(folder, self.manifest)
        return manifest

    def write(self, folder: Path, values: Json) -> None:
        """Replace the manifest by these values, in one step."""
        write_json(folder / self.manifest, {"format": self.format, **values})

    def agree(self, folder: Path, there: Json, parameters: Json) -> None:
        """Raise ValueError if the manifest differs from the parameters, with every difference in its message."""
        if differing := changes(there, parameters):
            listed = "; ".join(
                f"{name}: was {_shortened(was)}, is {_shortened(now)}" for name, was, now in differing
            )
            raise ValueError(
                f"{folder} holds another {self.what}: {listed}; a new folder is required for this"
            )


@dataclass(frozen=True)
class ManifestEntry:
    """A file's entry in a manifest: its name, size and hash."""

    file: str
    bytes: int
    sha256: str

    @classmethod
    def written(cls: type[File], path: Path, write: Callable[[Path], object], **more: object) -> File:
        """The entry of a new file that `write` fills, in one step; `more` are further fields of the entry."""
        write_atomically(path, write)
        return cls(file=path.name, bytes=path.stat().st_size, sha256=file_hash(path), **more)

    def check(self, folder: Path, *, contents: bool = False) -> None:
        """Raise FileNotFoundError or ValueError unless the file has the listed size, with `contents` also the hash."""
        path = folder / self.file
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing, though it is listed as written")
        if (size := path.stat().st_size) != self.bytes:
            raise ValueError(f"{path} must have {self.bytes} bytes, got {size} (truncated?)")
        if contents and file_hash(path) != self.sha256:
            raise ValueError(f"{path} is corrupt: its SHA-256 is not the one listed")


def locked(file: Path, taken: str, *, wait: float = 0.0) -> ExitStack:
    """A held lock, released on close or at the end of `with`; raises ValueError(taken) if another process holds it."""
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
    """Whether a process holds the lock of a file; True where that cannot be found out."""
    try:
        locked(file, "").close()
    except (ValueError, OSError):
        return True
    return False


def clear(folder: Path, names: str = "*") -> None:
    """Remove temporary files of `write_atomically` for these names, which killed processes left behind."""
    for path in folder.glob(f".{names}.*"):
        if path.suffix != ".lock" and path.is_file():
            path.unlink(missing_ok=True)


def built(cls: type[T], values: Mapping[str, object]) -> T:
    """The dataclass instance of its JSON fields; raises ValueError for unknown, missing or wrong fields."""
    known = {field.name for field in fields(cast("type", cls))}
    if not isinstance(values, Mapping):
        raise ValueError(f"{cls.__name__} must be an object, got {values!r}")
    if values.keys() != known:
        differing = sorted(values.keys() ^ known)
        raise ValueError(f"the folder is of another version of interp: {cls.__name__} differs in {differing}")
    record = cls(
        **{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    )
    check_fields(record)
    return record


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file in one step, and create its parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write_bytes(data))


def write_json(path: Path, values: Json, *, new: bool = False) -> None:
    """Write a JSON file in one step; with `new` raise FileExistsError if the file exists."""
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
    """Every (name, old, new) whose values differ, as JSON text; names inside records are joined by dots.

    Example:
        >>> changes({"a": {"b": 1}, "c": 2}, {"a": {"b": 3}, "c": 2})
        [('a.b', '1', '3')]
    """
    old, new = flat(before), flat(after)
    pairs = ((name, old.get(name, ABSENT), new.get(name, ABSENT)) for name in old | new)
    return [change for change in pairs if change[1] != change[2]]


def flat(values: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Values as JSON text by name; names inside records are joined by dots.

    Example:
        >>> flat({"a": {"b": [1]}, "c": "x"})
        {'a.b': '[1]', 'c': '"x"'}
    """
    texts: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            texts |= flat(value, f"{prefix}{name}.")
        else:
            texts[f"{prefix}{name}"] = json.dumps(value, ensure_ascii=False)
    return texts


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
