"""The folder of a run from outside: made once, held by one process at a time, refused to whoever asks for another."""

import os
import platform
import re
import secrets
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

from filelock import FileLock, Timeout

from interp.runs.provenance import changes, file_hash, git_dirty, git_revision, now, versions
from interp.runs.run_file import RunFile, Session, fields_of

LOCK, LOG = ".lock", "log.txt"
RESULTS, TABLES, FIGURES, STREAMS = "results", "tables", "figures", "streams"


def checked_name(name: str) -> str:
    """The name, if it can be a file name anywhere; ValueError otherwise."""
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,63}", name) is None:
        raise ValueError(
            f"a name is a letter and up to 63 letters, digits, _ or -, for it becomes a file name; got {name!r}"
        )
    return name


def fresh_folder(root: Path, name: str) -> Path:
    """A new folder that nobody else made, `<name>-<UTC time>-<random>`."""
    root.mkdir(parents=True, exist_ok=True)
    while True:
        folder = root / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder


def session_of(command: str | None, file: Path | None) -> Session:
    """This process at work on an experiment file, from now on."""
    here = None if file is None else file.resolve().parent
    return Session(
        command=shlex.join(sys.argv) if command is None else command,
        started=now(),
        last=now(),
        pid=os.getpid(),
        host=platform.node(),
        platform=platform.platform(),
        versions=versions(),
        git_revision=git_revision(here),
        git_dirty=git_dirty(here),
        file_sha256=None if file is None else file_hash(file),
    )


def locked(folder: Path, run: RunFile) -> FileLock:
    """The lock of a run, held; waits a moment, for whoever asks for the state holds it that long."""
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=1, poll_interval=0.05)
    except Timeout:
        last = run.sessions[-1]
        raise ValueError(f"process {last.pid} on {last.host} works on {folder}: one at a time") from None
    return lock


def is_locked(folder: Path) -> bool:
    """Whether a process works on the run; True where we may not ask."""
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except (Timeout, PermissionError):
        return True
    lock.release()
    return False


def refuse(run: RunFile, folder: Path, parameters: object, file: Path | None) -> None:
    """ValueError if the run cannot be gone on with by this file and these parameters."""
    if file is not None and run.file is not None and file.stem != Path(run.file).stem:
        raise ValueError(f"{folder} is a run of {run.file}, not of {file}")
    if run.state == "finished":
        raise ValueError(f"{folder} is finished: there is nothing to go on with; start a new run")
    if differ := changes(run.parameters, fields_of(parameters)):
        listed = "; ".join(f"{name} was {was}, is {now}" for name, was, now in differ)
        raise ValueError(f"{folder} was started with other parameters: {listed}; start a new run for these")


def changed_code(before: Session, after: Session) -> list[str]:
    """What of the code is not as in the last session, in words."""
    names = ("git_revision", "git_dirty", "file_sha256", "versions")
    old, new = ({name: getattr(session, name) for name in names} for session in (before, after))
    return [
        f"changed since the last session: {name} was {was}, is {now}" for name, was, now in changes(old, new)
    ]


def clear(folder: Path) -> None:
    """Remove what a killed process was still writing: the temporary files of `write_atomically`."""
    for place in (folder, *(folder / name for name in (RESULTS, TABLES, FIGURES))):
        for path in place.glob(".*.*") if place.is_dir() else ():
            if path.name != LOCK and path.is_file():
                path.unlink()
