"""run.json, the file that identifies a run folder: its parameters, its code, and its progress."""

import dataclasses
import enum
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

from interp.model.config import Json
from interp.runs.folder import FolderKind, built, changes, file_hash
from interp.runs.provenance import git_dirty, git_revision, now, versions

NAME = "run.json"
RECORD = FolderKind("run of an experiment", NAME, "interp experiment run, 1")
"""Format entry of a `run.json`; a file without it is another program's, such as a report's."""
RunState = Literal["running", "finished", "failed", "interrupted"]
ResultKind = Literal["dataset", "frame", "tensors"]


@dataclass(frozen=True)
class RunSession:
    """One process that worked on the run; a resumed run has several."""

    command: str
    started: str
    last: str
    """When it last wrote; its end, unless it was killed."""
    pid: int
    host: str
    platform: str
    versions: dict[str, str]
    git_revision: str | None
    git_dirty: bool | None
    file_sha256: str | None
    """Hash of the experiment file; None for an experiment that is not in a file."""

    @classmethod
    def begun(cls, command: str | None, file: Path | None) -> "RunSession":
        """This process at work on an experiment file, from now on; command: what was typed (None: as Python saw it)."""
        folder = None if file is None else file.resolve().parent
        return cls(
            command=shlex.join(sys.argv) if command is None else command,
            started=now(),
            last=now(),
            pid=os.getpid(),
            host=platform.node(),
            platform=platform.platform(),
            versions=dict(versions()),
            git_revision=git_revision(folder),
            git_dirty=git_dirty(folder),
            file_sha256=None if file is None else file_hash(file),
        )

    def changed_since(self, before: "RunSession") -> list[str]:
        """The changes of the code since an earlier session, in words."""
        names = ("git_revision", "git_dirty", "file_sha256", "versions")
        old, new = ({name: getattr(session, name) for name in names} for session in (before, self))
        return [
            f"changed since the last session: {name} was {was}, is {now}"
            for name, was, now in changes(old, new)
        ]


@dataclass(frozen=True)
class RunStep:
    """One result on disk; it is listed only after its files are written, so that listed files are complete."""

    kind: ResultKind
    files: tuple[str, ...]
    """Paths relative to the run folder; the first file is the one from which the result is read."""
    seconds: float
    written: str


@dataclass(frozen=True)
class RunFile:
    """The contents of run.json."""

    name: str
    file: str | None
    question: str
    """The docstring of the experiment file."""
    parameters: Json
    defaults: Json
    """Defaults of the parameters that have one."""
    seed: int | None
    sessions: tuple[RunSession, ...]
    state: RunState = "running"
    error: str | None = None
    models: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the weights, by name."""
    data: dict[str, str] = field(default_factory=dict)
    """Fingerprints of the data, by name."""
    steps: dict[str, RunStep] = field(default_factory=dict)
    tables: dict[str, tuple[str, ...]] = field(default_factory=dict)
    figures: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> "RunFile":
        """The file of a run folder; ValueError saying why the folder is not one."""
        values = RECORD.read(folder)
        try:
            sessions = tuple(built(RunSession, fields) for fields in values.pop("sessions"))
            steps = {name: built(RunStep, fields) for name, fields in values.pop("steps").items()}
            tables = {name: tuple(files) for name, files in values.pop("tables").items()}
            run = built(cls, values | {"sessions": sessions, "steps": steps, "tables": tables})
            if empty := [name for name, step in steps.items() if not step.files]:
                raise ValueError(f"step {empty[0]!r} requires files, got none")
            if not sessions or run.seconds < 0:
                raise ValueError("at least one session, which ends after it began, is required")
        except KeyError as cause:
            raise ValueError(f"{folder / NAME} lacks {cause}") from cause
        except (TypeError, AttributeError, ValueError) as cause:
            raise ValueError(f"{folder / NAME} is no record of a run: {cause}") from cause
        return run

    @property
    def seconds(self) -> float:
        """The sum of the sessions' durations; a session that was killed counts up to its last entry in the file."""
        ends = ((datetime.fromisoformat(s.started), datetime.fromisoformat(s.last)) for s in self.sessions)
        return sum((last - started).total_seconds() for started, last in ends)

    @property
    def provenance(self) -> Json:
        """The origin of the results, by the last session, and the command that repeats the run."""
        last = self.sessions[-1]
        return {
            "experiment": self.file,
            "seed": self.seed,
            "models": self.models,
            "data": self.data,
            "git_revision": last.git_revision,
            "git_dirty": last.git_dirty,
            "file_sha256": last.file_sha256,
            "versions": last.versions,
            "platform": last.platform,
            "command": self.sessions[0].command,
        }

    def write(self, folder: Path) -> "RunFile":
        """Write the file in one step; returns what was written, with the present time in its last session."""
        current = dataclasses.replace(self.sessions[-1], last=now())
        written = dataclasses.replace(self, sessions=(*self.sessions[:-1], current))
        RECORD.write(folder, dataclasses.asdict(written))
        return written


def plain(value: object) -> object:
    """A parameter as JSON: records as objects, paths as text, tuples as lists.

    Raises:
        ValueError: anything that JSON cannot hold.
    """
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError(f"a parameter must be text that UTF-8 can hold, got {value!r}")
    if value is None or isinstance(value, bool | int | float | str):
        return value.name if isinstance(value, enum.Enum) else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__, **fields_of(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, Path):
        return str(value)
    raise ValueError(
        f"a parameter must be a number, text, path or record of these, got {type(value).__name__} {value!r}"
    )


def fields_of(record: object) -> Json:
    """The fields of a dataclass instance as JSON; ValueError if it is none, or a field does not fit."""
    if not dataclasses.is_dataclass(record) or isinstance(record, type):
        raise ValueError(f"parameters must be a dataclass instance, got {record!r}")
    return {field.name: plain(getattr(record, field.name)) for field in dataclasses.fields(record)}


def defaults_of(kind: type) -> Json:
    """The defaults of the fields of a dataclass; fields without one are left out.

    Example:
        >>> from interp.tasks import RepeatedTokens
        >>> defaults_of(RepeatedTokens)["seed"]
        0
    """
    defaults: Json = {}
    for each_field in dataclasses.fields(kind):
        if each_field.default is not dataclasses.MISSING:
            defaults[each_field.name] = plain(each_field.default)
        elif each_field.default_factory is not dataclasses.MISSING:
            defaults[each_field.name] = plain(each_field.default_factory())
    return defaults


def duration(seconds: float) -> str:
    """Seconds in the two largest units.

    Example:
        >>> duration(7.0), duration(125.0), duration(7260.0)
        ('7 s', '2 min 5 s', '2 h 1 min')
    """
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60} s"
    return f"{total // 3600} h {total % 3600 // 60} min"
