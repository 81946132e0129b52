"""The folder of a run over data: what is asked of which model and data, the journals, and at the end the results.

work.json                   what decides the numbers; a run that differs in it is refused
main.0.journal ...          progress of a process, or `shard-2-of-8...` of one job of an array
heads.nc, heads.parquet     results, once everything is done
rejected.parquet            the rows set aside, with the reason
"""

import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import TYPE_CHECKING

from torch import Tensor, nn

from interp.model.config import Json
from interp.model.transformer import Transformer
from interp.passes.analysis import Analysis, Questions
from interp.passes.together import one_after_another, writes
from interp.runs.folder import FolderKind, locked, write_bytes
from interp.runs.journal import Journal, numbers_in
from interp.runs.progress import Done, Progress
from interp.runs.provenance import bytes_of, model_hash
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
        """Its consecutive share of so many windows."""
        return range(count * self.index // self.count, count * (self.index + 1) // self.count)


@dataclass(frozen=True)
class WorkFolder:
    """An open folder: this process's journal, and what all others have finished."""

    journal: Journal
    others: Progress
    writes: bool = True
    """False in processes that share a spread model with the one that writes the journal."""

    def take(self, done: Done) -> None:
        """Count one batch as done, and write it if this is the process that does."""
        if self.writes:
            self.journal.write(done)
        else:
            self.journal.progress.add(done)

    def due(self, window: int) -> int | None:
        """The first batch of a window that is still to do; None if somebody has finished it."""
        return None if window in self.others.tree else self.journal.progress.due(window)

    def together(self) -> Progress:
        """Everything that is done, by whomever."""
        found = Progress()
        found.include(self.others)
        found.include(self.journal.progress)
        return found


def work_of(questions: Questions, model: Transformer, data: Json) -> Json:
    """All that decides the numbers of a run, as JSON."""
    asked = {a.name: described(a) for a in questions.analyses}
    network = {"model_sha256": model_hash(model), "dtype": str(model.dtype), "edits": described(model.edits)}
    work = {**network, "data": data, "analyses": asked}
    found: Json = json.loads(json.dumps(work, default=repr))
    return found


@contextmanager
def opened(
    folder: Path, questions: Questions, model: Transformer, shard: Shard | None
) -> Iterator[WorkFolder]:
    """The folder for one process, which holds its lock until it leaves.

    Errors: ValueError while another process is working on the same share.
    """
    name = MAIN if shard is None else f"shard-{shard.index}-of-{shard.count}"
    reductions = {a.name: a.reduction for a in questions.analyses}
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
    """ValueError while somebody is at work whose windows may be ours: the whole run, or an array of another size."""
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


def described(value: object) -> object:
    """A value as JSON, the same in every process: functions by name, partial ones by what they hold, tensors by hash.

    A function without a name of its own (a lambda, one made inside of another) is described by its code and by what it
    closes over, too.
    """
    if isinstance(value, Tensor):
        digest = hashlib.sha256(bytes_of(value)).hexdigest()[:16]
        return f"tensor {value.dtype} {list(value.shape)} {digest}"
    if isinstance(value, functools.partial):
        return {"of": described(value.func), "args": described(value.args), **_each(value.keywords)}
    if isinstance(value, Analysis):
        return _each({f.name: getattr(value, f.name) for f in fields(value) if f.name != "finish"})
    if is_dataclass(value) and not isinstance(value, type):
        return {
            "of": type(value).__qualname__,
            **_each({f.name: getattr(value, f.name) for f in fields(value)}),
        }
    if isinstance(value, Mapping):
        return _each(value)
    if isinstance(value, list | tuple):
        return [described(each) for each in value]
    if isinstance(value, nn.Module):
        return {"of": repr(value), **_each(value.state_dict())}
    if value is None or isinstance(value, str | int | float):
        return value
    if callable(value):
        name = (
            f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        )
        return _local(name, value) if isinstance(value, FunctionType) and "<" in name else name
    return repr(value) if type(value).__repr__ is not object.__repr__ else type(value).__qualname__


def _local(name: str, function: FunctionType) -> dict[str, object]:
    """A function that others may share their name with."""
    code = function.__code__
    held = zip(code.co_freevars, function.__closure__ or (), strict=True)
    closed = {name: cell.cell_contents for name, cell in held if cell.cell_contents is not function}
    digest = hashlib.sha256(code.co_code + repr(_constants(code)).encode()).hexdigest()[:16]
    return {"of": name, "code": digest, **_each({**closed, "defaults": function.__defaults__})}


def _constants(code: CodeType) -> list[object]:
    """The constants and names of a function's code, those of functions in it included."""
    found: list[object] = list(code.co_names)
    for each in code.co_consts:
        found.append(_constants(each) if isinstance(each, CodeType) else each)
        if isinstance(each, frozenset):  # whose order is another one in every process
            found[-1] = sorted(map(repr, each))
    return found


def _each(values: Mapping[str, object]) -> dict[str, object]:
    return {str(name): described(value) for name, value in values.items()}
