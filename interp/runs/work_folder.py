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
        """From `"2/8"`; ValueError for anything else."""
        if isinstance(given, Shard):
            return given
        index, slash, count = given.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal()):
            raise ValueError(f"a shard such as 0/8 is required, got {given!r}")
        return cls(int(index), int(count))

    def windows(self, count: int) -> range:
        """The shard's consecutive share of so many windows."""
        return range(count * self.index // self.count, count * (self.index + 1) // self.count)


@dataclass(frozen=True)
class WorkFolder:
    """An open folder: this process's journal, and what all others have finished."""

    journal: Journal
    others: Progress
    writes: bool = True
    """False in processes that share a spread model with the one that writes the journal."""

    def take(self, done: BatchDone) -> None:
        """Count one batch as done, and write it if this is the process that does."""
        if self.writes:
            self.journal.write(done)
        else:
            self.journal.progress.add(done)

    def due(self, window: int) -> int | None:
        """The first batch of a window that is still to do; None if the window is finished."""
        return None if window in self.others.tree else self.journal.progress.due(window)

    def together(self) -> Progress:
        """Everything that is done, by whomever."""
        found = Progress()
        found.include(self.others)
        found.include(self.journal.progress)
        return found


def work_of(questions: Questions, model: Transformer, data: Json) -> Json:
    """All that decides the numbers of a run, as JSON."""
    fingerprints = {each.name: fingerprint(each) for each in questions.every}
    network = {
        "model_sha256": model_hash(model),
        "dtype": str(model.dtype),
        "edits": fingerprint(model.edits),
    }
    work = {**network, "data": data, "analyses": fingerprints}
    found: Json = json.loads(json.dumps(work, default=repr))
    return found


def check_comparable(parameters: Json) -> None:
    """ValueError for things that decide a number and cannot be compared later."""
    if odd := list(incomparable(parameters)):
        raise ValueError(
            "several processes, or a run that is gone on with, must ask the same, and that cannot be told of "
            f"{odd[0]}: use values that can be compared (numbers, texts, tensors, records of these), or a new folder"
        )


@contextmanager
def opened(
    folder: Path, questions: Questions, model: Transformer, shard: Shard | None
) -> Iterator[WorkFolder]:
    """The folder for one process, which has its lock until it leaves.

    Raises:
        ValueError: while another process is working on the same share.
    """
    name = MAIN if shard is None else f"shard-{shard.index}-of-{shard.count}"
    reductions = {each.name: each.keep for each in questions.every}
    first = writes(model)
    with _share(folder, name) if first else nullcontext():
        with one_after_another(model):
            if first:
                _alone(folder, name)
            others = Progress()
            for other, number in numbers_in(folder).items():
                if other != name:
                    theirs = Journal.open(folder, other, reductions, read_only=True, number=number)
                    others.include(theirs.progress)
            journal = Journal.open(folder, name, reductions, read_only=not first)
        yield WorkFolder(journal, others, first)


def _share(folder: Path, name: str) -> ExitStack:
    """The lock of one process's share of the windows."""
    file = folder / f".{name}.lock"
    return locked(file, f"another process is working on this run, {file} is locked")


def _alone(folder: Path, name: str) -> None:
    """ValueError while another process works on windows that may belong to this one.

    The other process does the whole run, or a shard of an array of another size.
    """
    for file in folder.glob(".*.lock"):
        other = file.name.removeprefix(".").removesuffix(".lock")
        if name.rpartition("-of-")[2] != other.rpartition("-of-")[2]:
            with _share(folder, other):
                pass


def write_results(folder: Path, results: "Mapping[str, xr.Dataset]", rejected: "pd.DataFrame") -> None:
    """Every result as netCDF and tidy Parquet, and the rows set aside; each file whole or not at all."""
    for name, value in {**results, "rejected": rejected}.items():
        for suffix, data in encoded(value).files.items():
            write_bytes(folder / f"{name}{suffix}", data)
