"""Writing of files: whole or not at all, in the place of regular files alone, with permissions as they were."""

import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

NO_FILES = {
    stat.S_IFDIR: "a folder", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}  # fmt: skip
NO_ROOM = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_ELSEWHERE = "give a place that may be written to, or its permissions"
WHAT_TO_DO: Mapping[int, str] = {
    **dict.fromkeys(NO_ROOM, "make room and do it again, or resume; nothing is half-written"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), _ELSEWHERE),
}
"""Advice by the number of a system's error."""


def write_atomically(path: Path, write: Callable[[Path], object], *, new: bool = False) -> None:
    """Let `write` fill a temporary file next to `path`, then rename it, so that no half-written file has the name.

    A file that is there keeps its permissions, a new one has those that the process gives to new files.

    Args:
        new: of several processes that write it at once the first succeeds; FileExistsError if it is there already.

    Raises:
        ValueError: what is no regular file (a device, a pipe, a symbolic link), which a rename would replace.
        OSError: with the file and what to do, where the disk is full or may not be written to.
    """
    path = Path(path)
    check_replaceable(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{path.suffix}")
    try:
        try:
            os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            mode = stat.S_IMODE((path if path.exists() else temporary).stat().st_mode)
            temporary.chmod(mode)
            write(temporary)
            temporary.chmod(mode)
        except Exception as cause:
            if (found := explained(cause, path)) is None:
                raise
            raise found from cause
        if new:
            _link(temporary, path)
        else:
            temporary.replace(path)
    finally:
        with suppress(OSError):  # it never was where the first line of these failed
            temporary.unlink(missing_ok=True)


def check_replaceable(path: Path) -> None:
    """Errors if no file may be written at a place, or instead of what is there.

    ValueError for what is no regular file or a name that no file can have, FileNotFoundError where the folder is not
    there, PermissionError for a file that is read-only.
    """
    path = named_path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "a folder that is there is required", str(path.parent))
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        what = f"a symbolic link to {path.readlink()}" if stat.S_ISLNK(mode) else NO_FILES[stat.S_IFMT(mode)]
        raise ValueError(f"a new or a regular file is required to write to, {path} is {what}")
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, f"it is read-only: {WHAT_TO_DO[errno.EACCES]}", str(path))


def explained(cause: Exception, path: Path) -> OSError | None:
    """The error of a write with its file and with what to do; None for any other error.

    Libraries written in Rust, such as safetensors, say a system's error in words: "... (os error 28)", or, older ones,
    "... Os { code: 28, ...".
    """
    number = cause.errno if isinstance(cause, OSError) else None
    if number is None and (found := re.search(r"(?:\(os error|Os \{ code:) (\d+)", str(cause))):
        number = int(found[1])
    if number is None or number not in WHAT_TO_DO:
        return None
    return OSError(number, f"{os.strerror(number)}: {WHAT_TO_DO[number]}", str(path))


def _link(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(f"{path} is there already") from None
        temporary.replace(path)


def regular(path: Path | str) -> Path:
    """A file that can be read: a pipe would be waited on for ever.

    Errors, by its name: FileNotFoundError if it is not there (a link to nothing is not), ValueError for a name that no
    file can have or for what is no regular file.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as cause:
        raise FileNotFoundError(f"{_named(path)} does not exist") from cause
    except (OSError, ValueError) as cause:  # a name that is too long, holds a zero byte, or links to itself
        raise ValueError(f"{_named(path)} is the name of no file: {cause}") from cause
    if not stat.S_ISREG(mode):
        raise ValueError(f"a regular file is required, {_named(path)} is {NO_FILES[stat.S_IFMT(mode)]}")
    return path


def named_path(path: Path | str) -> Path:
    """A place to make a file or a folder at; ValueError, by its name, for one that no file system takes.

    The system would say so with an error that names no place (a zero byte, half of a surrogate pair), or only when the
    work is done (a name of more than 255 bytes).
    """
    path = Path(path)
    try:
        parts = [os.fsencode(part) for part in path.parts]
    except UnicodeEncodeError as cause:
        raise ValueError(f"{_named(path)} is the name of no file: {cause}") from cause
    if any(b"\0" in part or len(part) > 255 for part in parts):
        raise ValueError(
            f"{_named(path)} is the name of no file: it has a zero byte, or a part of more than 255 bytes"
        )
    try:
        path.resolve()
    except (RuntimeError, OSError) as cause:  # which of them depends on the version of Python
        raise ValueError(f"{_named(path)} is the name of no file: {cause}") from cause
    return path


def made_folder(path: Path | str) -> Path:
    """The folder, made with those that it is in. ValueError, by its name, for no folder's name or what is a file."""
    path = named_path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as cause:
        raise ValueError(f"a folder is required, {path} is a file or in one") from cause
    return path


def _named(path: Path) -> str:
    """A path in a message, where it may be long and hold anything."""
    text = str(path)
    return (
        text if len(text) < 300 and text.isprintable() else repr(f"{text[:60]} ... {text[-60:]}"[: len(text)])
    )


def json_object(path: Path | str) -> dict[str, object]:
    """The object in a JSON file.

    Errors, by the file's name: ValueError for what is no regular file, no UTF-8, no JSON, nested beyond reading, or no
    object; OSError for a file that is not there.
    """
    try:
        record = json.loads(regular(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as cause:
        raise ValueError(f"{path} is not readable JSON: {cause}") from cause
    except ValueError as cause:  # of `regular`, or a number of too many digits
        text = str(cause)
        raise ValueError(text if str(path) in text else f"{path} is not readable JSON: {text}") from cause
    if not isinstance(record, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(record).__name__}")
    return record
