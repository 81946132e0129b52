"""Writing of files, each completely or not at all; only regular files are replaced, and they keep their permissions."""

import errno
import json
import os
import re
import secrets
import signal
import stat
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

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
"""What the user can do, by the errno of a system error."""


def write_atomically(path: Path, write: Callable[[Path], object], *, new: bool = False) -> None:
    """Lets `write` fill a temporary file next to `path`, then renames it, so that `path` is never half-written.

    An existing file keeps its permissions; a new one gets the process' usual permissions.

    Args:
        new: whether an existing file is a FileExistsError; of several processes that write at once, one succeeds.

    Raises:
        ValueError: a `path` that is no regular file (a device, a pipe, a symbolic link), which a rename would replace.
        OSError: a disk that is full or read-only; the message names the file and what to do.
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
            if (error := explained(cause, path)) is None:
                raise
            raise error from cause
        if new:
            _link(temporary, path)
        else:
            temporary.replace(path)
    finally:
        with suppress(OSError):  # the temporary file may not have been created
            temporary.unlink(missing_ok=True)


@contextmanager
def removing_at_signals(remove: Callable[[], object]) -> Iterator[None]:
    """Call `remove` if SIGTERM or SIGHUP ends the process inside the `with`: these skip every `finally`.

    The process then ends as it would have. Python takes handlers in its main thread only: in others nothing is removed.
    """
    names = ("SIGTERM", "SIGHUP") if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.getsignal(number) for name in names if (number := getattr(signal, name, None))}
    # one that is ignored (nohup) ends nothing, and what was not set from Python cannot be set again
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}

    def end(number: int, frame: FrameType | None) -> None:
        remove()
        signal.signal(number, before[signal.Signals(number)])
        signal.raise_signal(number)

    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check_replaceable(path: Path) -> None:
    """Raises an error if no file can be written at `path`, or if what is at `path` cannot be replaced.

    ValueError: it is no regular file, or the name is invalid. FileNotFoundError: its folder does not exist.
    PermissionError: the file is read-only.
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
    """An OSError that names the file and what to do, for an error in `WHAT_TO_DO`; None for any other error.

    Libraries in Rust, such as safetensors, give the errno in the message: "... (os error 28)", or, in older versions,
    "... Os { code: 28, ...".
    """
    number = cause.errno if isinstance(cause, OSError) else None
    if number is None and (match := re.search(r"(?:\(os error|Os \{ code:) (\d+)", str(cause))):
        number = int(match[1])
    if number is None or number not in WHAT_TO_DO:
        return None
    return OSError(number, f"{os.strerror(number)}: {WHAT_TO_DO[number]}", str(path))


def _link(temporary: Path, path: Path) -> None:
    """Gives the temporary file the name `path` as well; FileExistsError if there is a file of that name."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        if path.exists():
            raise FileExistsError(f"{path} is there already") from None
        temporary.replace(path)


def regular(path: Path | str) -> Path:
    """The path, checked to be a regular file: reading a pipe, for example, might never end.

    FileNotFoundError: there is no such file (or it is a broken link). ValueError: the name is invalid, or it is no
    regular file. Both messages name the file.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError) as cause:
        raise FileNotFoundError(f"{_path_text(path)} does not exist") from cause
    except (OSError, ValueError) as cause:  # a name that is too long, holds a zero byte, or links to itself
        raise ValueError(f"{_path_text(path)} is the name of no file: {cause}") from cause
    if not stat.S_ISREG(mode):
        raise ValueError(f"a regular file is required, {_path_text(path)} is {NO_FILES[stat.S_IFMT(mode)]}")
    return path


def is_file(name: Path | str) -> bool:
    """Whether there is a file of this name; a text that no system takes for a name is none."""
    try:
        return Path(name).is_file()
    except OSError:  # a part of more than 255 bytes, for one
        return False


def is_folder(name: Path | str) -> bool:
    """Whether there is a folder of this name; a text that no system takes for a name is none."""
    try:
        return Path(name).is_dir()
    except OSError:
        return False


def named_path(path: Path | str) -> Path:
    """The path of a file or folder to write; a name that no file system allows is a ValueError that names it.

    Without this check the system's error names no path (a zero byte, half of a surrogate pair), or comes only when the
    work is done (a name of more than 255 bytes).
    """
    path = Path(path)
    try:
        parts = [os.fsencode(part) for part in path.parts]
    except UnicodeEncodeError as cause:
        raise ValueError(f"{_path_text(path)} is the name of no file: {cause}") from cause
    if any(b"\0" in part or len(part) > 255 for part in parts):
        raise ValueError(
            f"{_path_text(path)} is the name of no file: it has a zero byte, or a part of more than 255 bytes"
        )
    try:
        path.resolve()
    except (RuntimeError, OSError) as cause:  # which of them depends on the version of Python
        raise ValueError(f"{_path_text(path)} is the name of no file: {cause}") from cause
    return path


def made_folder(path: Path | str) -> Path:
    """The folder, created with its parents if necessary; ValueError for an invalid name, or a path that is a file."""
    path = named_path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as cause:
        raise ValueError(f"a folder is required, {path} is a file or in one") from cause
    return path


def _path_text(path: Path) -> str:
    """A path for an error message: shortened if it is long, quoted if it is not printable."""
    text = str(path)
    return (
        text if len(text) < 300 and text.isprintable() else repr(f"{text[:60]} ... {text[-60:]}"[: len(text)])
    )


def text_contents(path: Path | str) -> str:
    """The text of a file in UTF-8, without the mark that some editors write in front.

    OSError: there is no such file. ValueError, with its name: it is no regular file, or no UTF-8.
    """
    file = regular(path)
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as cause:
        raise ValueError(f"{_path_text(file)} must be UTF-8: {cause}") from cause


def json_object(path: Path | str) -> dict[str, object]:
    """The object in a JSON file.

    OSError: there is no such file. ValueError: as `json_contents`, or something other than an object.
    """
    record = json_contents(path)
    if not isinstance(record, dict):
        raise ValueError(f"{_path_text(Path(path))} must hold a JSON object, got {type(record).__name__}")
    return record


def json_contents(path: Path | str) -> object:
    """Everything that a JSON file holds; of JSON lines (`.jsonl`) a list with the value of each line.

    OSError: there is no such file. ValueError, in one sentence that names the file, and of lines the row: it is no
    regular file, no UTF-8, no JSON, or nested too deeply.
    """
    file = regular(path)
    content, name = file.read_bytes(), _path_text(file)
    if file.suffix.lower() == ".jsonl":
        rows = list(filter(bytes.strip, content.splitlines()))
        return [_json_value(row, f"{name}: row {i}") for i, row in enumerate(rows)]
    return _json_value(content, name)


def _json_value(content: bytes, what: str) -> object:
    try:
        return json.loads(content.decode("utf-8-sig"))
    except RecursionError as cause:
        raise ValueError(f"{what} is not readable JSON: it is nested too deeply") from cause
    except ValueError as cause:  # no UTF-8, no JSON, or a number of too many digits
        raise ValueError(f"{what} is not readable JSON: {cause}") from cause
