"""Runs that die: what the tests of workers, Ray and kills run in processes of their own, which import it from here."""

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

import interp
from interp import Batch, HookedTransformer
from interp.data.sources import open_source
from interp.data.stream import Stream
from interp.families import fill
from interp.model import Trace, Transformer
from interp.passes.observe import Subject
from interp.passes.question import ByRow, Question
from interp.runs import Results, journal as journals
from tests.runs import killed
from tests.runs.running import ASKED, ByPosition, Kept, Norms, _norms, agree, norms_by
from tests.tiny import hooked

ROOT = Path(__file__).parents[2]
TEXTS = [("The cat sat on the mat. " * 3)[: 3 + 7 * i % 31] for i in range(60)]
TEXTS[17] = ""
LEAST = 8_000
"""Bytes of a journal that are folded up: several times in a run of these texts."""


@cache
def model() -> HookedTransformer:
    """The same weights in every process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return hooked.__wrapped__("gpt2")


def stream() -> Stream:
    return Stream(open_source(TEXTS), model().text, tokens_per_batch=64, rows_per_window=7)


def batches() -> list[Batch]:
    return [batch for w in range(stream().windows or 0) for batch in stream().window(w).batches]


def whole() -> Results:
    """What an uninterrupted run in one process and one thread gives."""
    torch.set_num_threads(1)
    return interp.run(ASKED, model(), stream(), bootstrap=30)


@dataclass(frozen=True)
class Deadly(Question):
    """The norms; the process that comes to this row dies, once if there is a file to remember it by."""

    row: int
    flag: str = ""
    name = "norms"

    def bind(self, model: Subject) -> ByRow:
        return norms_by(partial(_deadly, row=self.row, flag=self.flag))


@dataclass(frozen=True)
class Failing(Question):
    """The norms, but for a row that cannot be done."""

    row: int
    name = "norms"

    def bind(self, model: Subject) -> ByRow:
        return norms_by(partial(_failing, row=self.row))


class Trap:
    """What springs where it is unpickled."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return _sprung, (self.how,)


@dataclass(frozen=True)
class Trapped(Question):
    """The norms, but no other process can open the question: it "raises" there, or "exits"."""

    how: str
    name = "norms"

    def bind(self, model: Subject) -> ByRow:
        return norms_by(partial(_trapped, trap=Trap(self.how)))


@dataclass(frozen=True)
class Noted(Question):
    """The norms; a line for every batch computed."""

    log: Path
    name = "norms"

    def bind(self, model: Subject) -> ByRow:
        return norms_by(partial(_noted, log=self.log))


# --- what a process does before it is killed ----------------------------------------------------------------------


def go_on(folder: Path, log: Path) -> None:
    """Go on with the run in the folder, or begin it, as a user's script would."""
    torch.set_num_threads(1)  # a forked process has no other threads to share the work with
    journals._LEAST = LEAST
    asked = [Noted(log), Kept(), ByPosition()]
    interp.run(asked, model(), stream(), out=folder, bootstrap=30, resume=(folder / "work.json").exists())


def die_at_rename(number: int, folder: Path, log: Path) -> None:
    """Go on, and die when the n-th finished file is about to take its name."""
    killed.die_at_rename(number)
    go_on(folder, log)


def die_at_write(number: int, folder: Path, log: Path) -> None:
    """Go on, and die halfway through the n-th entry of the journal."""
    dying_at_write(number)
    go_on(folder, log)


def dying_at_write(number: int) -> None:
    """From now on: SIGKILL halfway through the n-th entry of the journal."""
    write_all, count = journals._write_all, 0

    def counted(file: int, data: bytes) -> None:
        nonlocal count
        count += 1
        if count == number:
            os.write(file, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write_all(file, data)

    journals._write_all = counted


def without_room(limit: int, folder: Path, log: Path) -> None:
    """Go on where no file may grow beyond a limit; what the run says is left in `said.txt`."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        go_on(folder, log)
    except OSError as error:
        (log.parent / "said.txt").write_text(str(error))
        sys.exit(3)


def on_ray(folder: Path) -> None:
    """Two runs on a Ray of two actors of this machine, one of which is killed in the second run."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        expected = whole()
        asked = [Norms(), Kept(), ByPosition()]
        agree(interp.run(asked, model(), stream(), bootstrap=30, engine="ray"), expected)
        row, flag = int(stream().window(3).batches[1].row[0]), folder / "died"  # type: ignore[index]
        asked[0] = Deadly(row, str(flag))
        agree(interp.run(asked, model(), stream(), bootstrap=30, engine="ray"), expected)
        assert flag.exists(), "nobody was killed"
        from tests.runs.opened import opened_from, rows

        fill.MAPPED_FROM = 0
        opened = opened_from(folder / "model", "llama")
        assert opened.files, "parameters are views of the file"
        agree(interp.run([Norms()], opened, rows(), engine="ray"), interp.run([Norms()], opened, rows()))
        try:
            interp.run([Trapped("raises")], opened, rows(), engine="ray")
        except Exception as error:
            if "the trap sprang" not in str(error):
                raise
        else:
            raise AssertionError("an actor started that cannot")
    finally:
        ray.shutdown()


def alone(arguments: list[str], seconds: float) -> tuple[int, str]:
    """A Python process and all its children, which cannot outlive the time they have; exit code and what it said."""
    child = subprocess.Popen(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        said, _ = child.communicate()
        said += f"\nkilled after {seconds} s"
    return child.returncode, said


def _deadly(trace: Trace, batch: Batch, model: Transformer, row: int, flag: str) -> Mapping[str, Tensor]:
    assert batch.row is not None
    if row in batch.row.tolist() and _first(flag):
        os.kill(os.getpid(), signal.SIGKILL)
    return _norms(trace, batch, model, None)


def _first(flag: str) -> bool:
    """Whether nobody was here before."""
    if not flag:
        return True
    try:
        os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _sprung(how: str) -> None:
    if how == "exits":
        os._exit(3)
    raise ArithmeticError("the trap sprang")


def _trapped(trace: Trace, batch: Batch, model: Transformer, trap: Trap) -> Mapping[str, Tensor]:
    return _norms(trace, batch, model, None)


def _failing(trace: Trace, batch: Batch, model: Transformer, row: int) -> Mapping[str, Tensor]:
    assert batch.row is not None
    if row in batch.row.tolist():
        raise ArithmeticError(f"row {row} cannot be done")
    return _norms(trace, batch, model, None)


def _noted(trace: Trace, batch: Batch, model: Transformer, log: Path) -> Mapping[str, Tensor]:
    assert batch.row is not None
    with log.open("a") as file:
        file.write(f"{batch.row.tolist()}\n")
    time.sleep(0.002)
    return _norms(trace, batch, model, None)


if __name__ == "__main__":
    on_ray(Path(sys.argv[1]))
