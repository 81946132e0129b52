"""The record of an experiment: a folder with its parameters, its results, and enough to go on after a crash.

    runs/name_every_head-20260131T120000Z-3f9a1c/
        run.json        parameters, seeds, versions, git revision, sessions, and what is done so far (`RunFile`)
        log.txt         what the experiment said, with times
        results/        one per step: netCDF and tidy Parquet, Parquet, or safetensors
        tables/ figures/ streams/ index.html

A step is computed once: its files are written first, then it is listed in run.json, each in one rename. A process that
is killed anywhere leaves either the step or no trace of it, and a resumed run loads what is listed. While a process
works on a run it holds a lock that the operating system frees when the process dies, however it dies; so a run that
says "running" and is not locked was interrupted, on whatever machine or in whatever container it ran.
"""

import dataclasses
import io
import logging
import os
import re
import secrets
import shlex
import shutil
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast, runtime_checkable

from interp.core.boundary import public
from interp.core.files import NO_ROOM, made_folder, regular
from interp.core.results import write_tables
from interp.core.viewer import Shown, fitted
from interp.data.sources import Data
from interp.data.stream import DataSource
from interp.passes.observe import Subject
from interp.runs.folder import LOCK, clear, is_locked, locked, write_bytes
from interp.runs.provenance import model_hash, now, question_of
from interp.runs.run import Results, SomeQuestions, run as run_over
from interp.runs.run_file import RECORD, RunFile, RunSession, RunState, RunStep, defaults_of, fields_of
from interp.runs.step_files import encoded, read
from interp.runs.work_folder import WORK

if TYPE_CHECKING:
    import pandas as pd

logger = logging.getLogger(__name__)
LOG = "log.txt"
SHARED_STREAM = "shared stream"
"""The kind of name that a stream has whose rows the jobs of an array share."""
RESULTS, TABLES, FIGURES, STREAMS = "results", "tables", "figures", "streams"
DPI = 150
T = TypeVar("T")


@runtime_checkable
class Drawing(Protocol):
    """Protocol of objects that can draw themselves into a file, as a matplotlib Figure can."""

    def savefig(self, fname: io.BytesIO, *, format: str, dpi: int) -> object:
        """Write the picture."""


@runtime_checkable
class NamedModel(Protocol):
    """A model that knows what it is called, as a HookedTransformer does."""

    name: str


class ShareDoneError(Exception):
    """One job of an array has done its share; what follows needs those of the others."""


class Record(Shown):
    """One run of an experiment on disk; `with record:` around the work says how it ended.

    `Record.create` starts one, `Record.resume` goes on with one, `Record.open` only reads.
    """

    def __init__(
        self, folder: Path, run: RunFile, lock: ExitStack | None = None, *, resumed: bool = False
    ) -> None:
        self.folder = folder
        self.resumed = resumed
        """Whether an earlier session worked on it: what `interp.run(..., resume=)` wants to know."""
        self._run = run
        self._lock = lock
        self._claimed: set[tuple[str, str]] = set()
        self.shared: tuple[str, Path] | None = None
        """For one job of an array: its shard, such as "2/8", and where all jobs keep their streams."""

    @classmethod
    @public()
    def create(
        cls,
        root: Path,
        name: str,
        parameters: object,
        *,
        command: str | None = None,
        seed: int | None = None,
        file: Path | None = None,
    ) -> "Record":
        """A new run in `root/<name>-<UTC time>-<random>/`, however many start at once; it is locked by this process.

        Args:
            root: folder of all runs.
            name: name of the experiment.
            parameters: a dataclass instance of numbers, texts, paths and records of these.
            command: the command line; None: this process's arguments.
            seed: seed of the run, which is recorded.
            file: the experiment file, hashed so that a change is noticed.

        Returns:
            The record, open for writing.

        Raises:
            ValueError: a bad name or parameter.
            OSError: a folder that cannot be made.
        """
        values = fields_of(parameters)
        question, session = question_of(file) if file else "", RunSession.begun(command, file)
        source = None if file is None else str(file)
        run = RunFile(name, source, question, values, defaults_of(type(parameters)), seed, (session,))
        folder = _fresh_folder(root, _checked_name(name))
        try:
            record = cls(folder, run, _run_lock(folder, run))
            record._update()
        except BaseException:
            shutil.rmtree(folder)
            raise
        record.say(f"started {folder.name}")
        return record

    @classmethod
    @public()
    def open(cls, folder: Path) -> "Record":
        """An existing run, for reading; ValueError if the folder is not a run."""
        return cls(folder, RunFile.read(folder))

    @classmethod
    @public()
    def resume(
        cls, folder: Path, parameters: object, *, command: str | None = None, file: Path | None = None
    ) -> "Record":
        """A run that was interrupted or failed, to be gone on with; finished steps are loaded, not computed.

        Code that changed since (another git revision or another experiment file under the same name) is a warning in
        the record and in the log.

        Args:
            folder: the folder of the run.
            parameters: the parameters, equal to those of the run.
            command: the command line that goes on with it.
            file: the experiment's file.

        Returns:
            The record, open for writing.

        Raises:
            ValueError: a folder that is not a run, a run that is finished, in use by another process, or of another
                experiment, or parameters that differ, each with what it was and is.
        """
        lock = _run_lock(folder, RunFile.read(folder))
        try:
            run = RunFile.read(folder)
            if (folder / LOG).exists():
                regular(folder / LOG)
            if file is not None and run.file is not None and file.stem != Path(run.file).stem:
                raise ValueError(f"{folder} is a run of {run.file}, not of {file}")
            if run.state == "finished":
                raise ValueError(f"{folder} is finished: there is nothing to go on with; start a new run")
            RECORD.agree(folder, run.parameters, fields_of(parameters))
            session = RunSession.begun(command, file)
            changed = session.changed_since(run.sessions[-1])
            for place in (folder, *(folder / name for name in (RESULTS, TABLES, FIGURES))):
                clear(place)
            run = dataclasses.replace(
                run,
                state="running",
                error=None,
                sessions=(*run.sessions, session),
                warnings=(*run.warnings, *changed),
            )
            record = cls(folder, run, lock, resumed=True)
            record._update()
            record.say(f"resumed {folder.name}: {len(run.steps)} steps are there already")
            for line in changed:
                record.say(f"warning: {line}")
        except BaseException:
            lock.close()
            raise
        return record

    @property
    def run(self) -> RunFile:
        """The present contents of run.json."""
        return self._run if self._lock is not None else RunFile.read(self.folder)

    @property
    def state(self) -> RunState:
        """State: "running", "finished", "failed" or "interrupted" (nobody works on it any more).

        In a folder that may not be written to nobody can ask for the lock, and a run that was killed still reads as
        running.
        """
        state = self.run.state
        if state == "running" and self._lock is None and not is_locked(self.folder / LOCK):
            return "interrupted"
        return state

    def __str__(self) -> str:
        run = self.run
        names_by_kind = {"steps": list(run.steps), "tables": list(run.tables), "figures": list(run.figures)}
        lines = [f"Record {run.name}: {self.state}, {self.folder}"]
        lines += [f"  {what}: {', '.join(names)}" for what, names in names_by_kind.items() if names]
        return fitted([*lines, *([f"  error: {run.error}"] if run.error else [])])

    def step(self, name: str, compute: Callable[[], T]) -> T:
        """The result called `name`: computed and written if it is not there yet, else loaded.

        Args:
            name: name of the step.
            compute: function that returns an xarray Dataset, a pandas DataFrame or a dict of tensors.

        Returns:
            Always what stands on disk, so that a resumed run cannot see another value than the first; tensors come
            back on the CPU.

        Raises:
            ValueError: a bad or repeated name, or a result that cannot be stored exactly.
            TypeError: a result of another kind.
            OSError: a result that cannot be written, which leaves no part of it.
        """
        self._claim("step", name)
        stored = self._run.steps.get(name)
        if stored is not None:
            self.say(f"step {name}: loaded, computed at {stored.written}")
            return cast("T", self.result(name))
        start = time.monotonic()
        result = encoded(compute())
        seconds = round(time.monotonic() - start, 3)
        files = tuple(f"{RESULTS}/{name}{suffix}" for suffix in result.files)
        for path, data in zip(files, result.files.values(), strict=True):
            write_bytes(self.folder / path, data)
        done = RunStep(result.kind, files, seconds, now())
        self._update(steps={**self._run.steps, name: done})
        self.say(f"step {name}: computed in {seconds:.1f} s")
        return cast("T", self.result(name))

    @public()
    def result(self, name: str) -> object:
        """The stored result of a step; KeyError naming those that there are."""
        steps = self.run.steps
        if name not in steps:
            raise KeyError(f"run {self.folder.name} has no step {name!r}; it has {list(steps)}")
        return read(steps[name].kind, self.folder / steps[name].files[0])

    @public()
    def table(self, name: str, frame: "pd.DataFrame") -> None:
        """Write a table as CSV and Parquet; a resumed run writes it again."""
        self._claim("table", name)
        paths = write_tables({name: frame}, self._subfolder(TABLES))
        files = tuple(f"{TABLES}/{path.name}" for path in paths)
        self._update(tables={**self._run.tables, name: files})

    @public()
    def figure(self, name: str, figure: Drawing) -> None:
        """Write a figure as PNG; a resumed run writes it again."""
        self._claim("figure", name)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=DPI)
        path = f"{FIGURES}/{name}.png"
        write_bytes(self.folder / path, buffer.getvalue())
        self._update(figures={**self._run.figures, name: path})

    @public()
    def say(self, line: str) -> None:
        """Log a line: to this module's logger, and with the time to log.txt."""
        self._require_writing()
        logger.info(line)
        self._write_log(line)

    def _write_log(self, line: str) -> None:
        text = line.rstrip().replace("\n", "\n    ")
        with (self.folder / LOG).open("a", encoding="utf-8") as file:
            file.write(f"{now()} {text}\n")

    def model(self, model: Subject, name: str | None = None) -> None:
        """Note the model by name and hash of its weights; ValueError if the run had other weights by that name."""
        called = name or (model.name if isinstance(model, NamedModel) else "model")
        self._note("models", called, model_hash(model.transformer))

    def data(self, fingerprint: str, name: str = "data") -> None:
        """Note the data by name and fingerprint; ValueError if the run had other data by that name."""
        self._note("data", name, fingerprint)

    def stream(
        self, name: str, questions: SomeQuestions, model: Subject, data: DataSource | Data, **options: Any
    ) -> Results:
        """The answers of `interp.run` over data, kept in this run and continued from an earlier session.

        Notes model and data; keeps every result as the step `name_analysis`, and the rows set aside as a table. In
        one job of an array the work is kept where all jobs find it; a job that does not see the end of it raises
        ShareDoneError, the last one goes on with the whole.

        Args:
            name: name of the stream.
            questions: as `interp.run` takes them.
            model: the model.
            data: as `interp.run` takes it.
            options: further options of `interp.run`.

        Returns:
            `Results`, as `interp.run` gives them.

        Raises:
            ValueError: as `interp.run`.
        """
        self.model(model)
        shard, folder = (None, self.stream_folder(name)) if self.shared is None else self.shared
        if shard is not None:
            self._claim(SHARED_STREAM, name)
            folder = folder / name
        results = run_over(questions, model, data, out=folder, resume=shard is None, shard=shard, **options)
        if not results.complete:
            raise ShareDoneError(f"share {shard} of {name} is done: {results.rows} rows are in so far")
        about = WORK.read(folder)["data"]
        assert isinstance(about, dict)
        self.data(str(about["fingerprint"]), name)
        for analysis, value in results.items():
            self.step(f"{name}_{analysis}", partial(_identity, value))
        if len(results.rejected):
            self.table(f"{name}_rejected", results.rejected)
        self.say(repr(results).splitlines()[0])
        return results

    def check_share(self) -> None:
        """Raise ValueError for one job of an array whose experiment shared nothing: every job has done all of it."""
        if self.shared is not None and not any(kind == SHARED_STREAM for kind, _ in self._claimed):
            raise ValueError(
                f"shard {self.shared[0]} requires an experiment that calls record.stream, whose rows are shared out; "
                "this one did not, so every job did the whole of it: run it once, without a shard"
            )

    def stream_folder(self, name: str) -> Path:
        """A folder inside the run where a streamed analysis keeps its journal: `interp.run(..., out=...)`."""
        self._claim("stream", name)
        return self._subfolder(f"{STREAMS}/{name}")

    def __enter__(self) -> "Record":
        self._require_writing()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._end(error)
        except OSError as cause:
            logger.error(
                "the end of run %s could not be written (%s): it reads as interrupted", self.folder, cause
            )
        finally:
            self.close()

    def close(self) -> None:
        """Release the run's lock without writing how it ended; afterwards the record can only be read."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def how_to_resume(self) -> str:
        """The command that goes on with this run."""
        return shlex.join(["interp", "run", self._run.file or "FILE", "--resume", str(self.folder)])

    def _end(self, error: BaseException | None) -> None:
        """Write how the run ended: first run.json, which may still fit on a disk that is too full for the log."""
        if error is None or isinstance(error, ShareDoneError):
            self._update(state="finished", error=None)
            self.say("finished" if error is None else f"finished: {error}")
            return
        state: RunState = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        reason = self._reason(error)
        self._update(state=state, error=reason)
        # into the file alone: whoever runs the experiment has the error itself
        if state == "failed":
            self._write_log("".join(traceback.format_exception(error)))
        self._write_log(f"{state}: {reason}")

    def _reason(self, error: BaseException) -> str:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            what = f"no room to write {error.filename or 'a file'} ({os.strerror(error.errno)})"
            return f"{what}: make room, then {self.how_to_resume}"
        return " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")

    def _note(self, kind: str, name: str, mark: str) -> None:
        """Write a hash to run.json under a name; raises ValueError if another hash is there by that name."""
        self._require_writing()
        noted: dict[str, str] = getattr(self._run, kind)
        if noted.get(name, mark) != mark:
            raise ValueError(
                f"run {self.folder.name} had other {kind} by the name {name!r}: was {noted[name]}, is {mark}; "
                "start a new run for them"
            )
        if name not in noted:
            self._update(**{kind: {**noted, name: mark}})

    def _claim(self, kind: str, name: str) -> None:
        """Raise ValueError for a name that was used before: its two results would be taken for one another."""
        self._require_writing()
        _checked_name(name)
        if (kind, name) in self._claimed:
            raise ValueError(f"each {kind} of a run requires a name of its own, {name!r} was there before")
        self._claimed.add((kind, name))

    def _require_writing(self) -> None:
        if self._lock is None:
            raise ValueError(f"run {self.folder.name} is open for reading; Record.resume goes on with it")

    def _update(self, **changed: object) -> None:
        self._run = dataclasses.replace(self._run, **changed).write(self.folder)  # type: ignore[arg-type]

    def _subfolder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        return folder


def _checked_name(name: str) -> str:
    """The name, if it can be a file name anywhere; ValueError otherwise."""
    if re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]{0,63}", name) is None:
        raise ValueError(
            "a name is a letter (A to Z, a to z) and up to 63 letters, digits, _ or -, for it becomes a file name; got "
            f"{name!r}"
        )
    return name


def _fresh_folder(root: Path, name: str) -> Path:
    """A new folder of this process only, `<name>-<UTC time>-<random>`."""
    made_folder(root)
    while True:
        folder = root / f"{name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(3)}"
        try:
            folder.mkdir()
        except FileExistsError:
            continue
        return folder


def _run_lock(folder: Path, run: RunFile) -> ExitStack:
    """The lock of a run; waits up to a second, because reading the state of a run takes the lock for a moment."""
    last = run.sessions[-1]
    return locked(
        folder / LOCK, f"process {last.pid} on {last.host} works on {folder}: one at a time", wait=1.0
    )


def _identity(value: T) -> T:
    return value
