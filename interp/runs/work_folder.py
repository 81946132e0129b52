"""The folder of a run over data: the questions, the model and data, the journals, and at the end the results.

work.json                   what decides the numbers; a run that differs in it is refused
main.0.journal ...          progress of a process, or `shard-2-of-8...` of one job of an array
heads.nc, heads.parquet     results, once everything is done
rejected.parquet            the rows set aside, with the reason
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from interp.model.config import Json
from interp.model.transformer import Transformer
from interp.passes.question import Questions
from interp.passes.together import one_after_another, writes
from interp.runs.fingerprint import fingerprint, incomparable
from interp.runs.folder import FolderKind, locked, write_bytes
from interp.runs.journal import Journal, numbers_in
from interp.runs.progress import BatchDone, Progress
from interp.runs.provenance import model_hash
from interp.runs.step_files import encoded

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

WORK = FolderKind("run over data", "work.json", "interp run over data, 1", unmarked=True)
MAIN = "main"


@dataclass(frozen=True)
class Shard:
    """One of several jobs that share the windows: number `index` of `count`, from 0."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise ValueError(f"a shard i/n with 0 <= i < n is required, got {self.index}/{self.count}")

    @classmethod
    def of(cls, given: "str | Shard") -> "Shard":
        """The shard of a text such as `"2/8"`; raises ValueError for any other text."""
        if isinstance(given, Shard):
            return given
        index, slash, count = given.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal()):
            raise ValueError(f"a shard such as 0/8 is required, got {given!r}")
        return cls(int(index), int(count))

    def windows(self, count: int) -> range:
        """The numbers of the shard's consecutive windows out of `count`."""
        return range(count * self.index // self.count, count * (self.index + 1) // self.count)


@dataclass(frozen=True)
class WorkFolder:
    """An open work folder: this process's journal, and the progress that all other processes have finished."""

    journal: Journal
    others: Progress
    writes: bool = True
    """False in processes that share a spread model with the one that writes the journal."""

    def take(self, done: BatchDone) -> None:
        """Count one batch as done, and write it to the journal if this process writes."""
        if self.writes:
            self.journal.write(done)
        else:
            self.journal.progress.add(done)

    def due(self, window: int) -> int | None:
        """The first batch of a window that is still to do; None if the window is finished."""
        return None if window in self.others.tree else self.journal.progress.due(window)

    def together(self) -> Progress:
        """The progress of this and of all other processes together."""
        progress = Progress()
        progress.include(self.others)
        progress.include(self.journal.progress)
        return progress


def work_of(questions: Questions, model: Transformer, data: Json) -> Json:
    """All that decides the numbers of a run, as JSON."""
    fingerprints = {question.name: fingerprint(question) for question in questions.every}
    network = {
        "model_sha256": model_hash(model),
        "dtype": str(model.dtype),
        "edits": fingerprint(model.edits),
    }
    work = {**network, "data": data, "analyses": fingerprints}
    as_json: Json = json.loads(json.dumps(work, default=repr))
    return as_json


def check_comparable(parameters: Json) -> None:
    """Raise ValueError if something that decides the numbers has no fingerprint to compare it by later."""
    if odd := list(incomparable(parameters)):
        raise ValueError(
            "several processes, or a run that is gone on with, must ask the same, and that cannot be told of "
            f"{odd[0]}: use values that can be compared (numbers, texts, tensors, records of these), or a new folder"
        )


@contextmanager
def opened(
    folder: Path, questions: Questions, model: Transformer, shard: Shard | None
) -> Iterator[WorkFolder]:
    """A context with the folder opened for one process, which holds the lock of its share until the end.

    Raises:
        ValueError: while another process is working on the same share.
    """
    name = MAIN if shard is None else f"shard-{shard.index}-of-{shard.count}"
    reductions = {question.name: question.keep for question in questions.every}
    first = writes(model)
    with _share_lock(folder, name) if first else nullcontext():
        with one_after_another(model):
            if first:
                _check_alone(folder, name)
            others = Progress()
            for other_name, number in numbers_in(folder).items():
                if other_name != name:
                    theirs = Journal.open(folder, other_name, reductions, read_only=True, number=number)
                    others.include(theirs.progress)
            journal = Journal.open(folder, name, reductions, read_only=not first)
        yield WorkFolder(journal, others, first)


def _share_lock(folder: Path, name: str) -> ExitStack:
    """The lock of one process's share of the windows."""
    file = folder / f".{name}.lock"
    return locked(file, f"another process is working on this run, {file} is locked")


def _check_alone(folder: Path, name: str) -> None:
    """Raise ValueError while another process works on windows that may belong to this one.

    That is a process that does the whole run, or a shard of an array of another size.
    """
    for file in folder.glob(".*.lock"):
        other_name = file.name.removeprefix(".").removesuffix(".lock")
        if name.rpartition("-of-")[2] != other_name.rpartition("-of-")[2]:
            with _share_lock(folder, other_name):
                pass


def write_results(folder: Path, results: "Mapping[str, xr.Dataset]", rejected: "pd.DataFrame") -> None:
    """Write every result as netCDF and tidy Parquet, and a table of the rows set aside, each file in one step."""
    for name, value in {**results, "rejected": rejected}.items():
        for suffix, data in encoded(value).files.items():
            write_bytes(folder / f"{name}{suffix}", data)
