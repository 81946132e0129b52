"""How a call ends: it is answered, refused in words of our own, raw (an error that nobody raised on purpose), slow,
or answered and wrong: with NaN or infinity that came of nothing ("nan"), or to what may not be asked ("let in").

A refusal counts where a `raise` statement of the package raised it,
with a kind of error that users are told of, and where
its message names the argument,
the value or the file. Everything else is raw. What a call may take is bounded: processor
time, waiting, memory, and where it writes.
"""

import ast
import contextlib
import dataclasses
import functools
import io
import linecache
import os
import re
import resource
import signal
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import pandas as pd
import torch
import xarray as xr

import interp
from tests.loops import same_seeds

PACKAGE = Path(interp.__file__).parent
TOLD = (
    ValueError,
    KeyError,
    IndexError,
    ArithmeticError,
    FileNotFoundError,
    FileExistsError,
    PermissionError,
)
"""Kinds of errors that tell a user what he got wrong; a TypeError is one where it names an argument nobody has."""
SECONDS = 5.0
"""Of the processor that one call may take: the models are tiny, a valid call takes milliseconds."""
WAITING = 3.0
"""Seconds that a call may sleep without any use of the processor: what a pipe that nobody writes to would take."""
MEMORY = 3 * 2**30
"""Bytes that a call may ask for beyond what the process has."""
Kind = Literal["answered", "refused", "raw", "slow", "nan", "let in"]
FINE = ("answered", "refused")


@dataclass(frozen=True)
class Ending:
    """How a call ended, with what is wrong where it is raw or slow."""

    kind: Kind
    problem: str = ""


@dataclass(frozen=True)
class Case:
    """One call that is to be made, in a folder of its own."""

    family: str
    name: str
    """Of the function, the loader or the command."""
    changed: str
    """Which argument, which damage or which option, in words."""
    call: Callable[[], object]
    words: Callable[[], Sequence[str]]
    """Regular expressions of what a refusal may be recognised by; one of them must occur in its message."""
    callbacks: Callable[[], Sequence[str]] = tuple
    """How the source calls a function of the user's, whose own errors are his."""
    answered: Callable[[], bool] = lambda: False
    """Whether it is known to be answered, so that it is counted and not made."""
    seconds: float = SECONDS
    """Of the processor, at most."""
    wrong: Callable[[object], "Ending | None"] = lambda found: None
    """What is wrong with the answer of a call that ends well."""

    def __str__(self) -> str:
        return f"{self.family} {self.name}({self.changed})"


REFUSED = object()
"""What a call gives that was refused without an error, such as a line that no command understands."""


class TooLong(BaseException):
    """The bound of a call; no `except Exception` may swallow it."""


def ended(case: Case) -> Ending:
    """What becomes of a call within its bounds; the folder it runs in is the caller's to choose."""
    if case.answered():
        return Ending("answered")
    same_seeds()
    problem, kind = "", "answered"
    try:
        with warnings.catch_warnings(), _quiet(), _bounded(case.seconds), _watched() as broken:
            warnings.simplefilter("ignore")
            found = case.call()
            kind = "refused" if found is REFUSED else "answered"
            if kind == "answered" and (wrong := case.wrong(found)):
                kind, problem = wrong.kind, wrong.problem
    except TooLong as error:
        kind, problem = "slow", str(error)
    except Exception as error:
        why = raw(error, case.words(), case.callbacks())
        kind, problem = ("refused", "") if why is None else ("raw", f"{why}: {type(error).__name__}: {error}")
    if broken:
        kind, problem = "raw", f"reaches outside: {broken[0]}"
    return Ending(kind, problem)  # type: ignore[arg-type]


def raw(error: BaseException, words: Sequence[str], callbacks: Sequence[str] = ()) -> str | None:
    """What is wrong with a refusal; None for one of our own, raised on purpose, that names what is wrong."""
    frames = [(each.f_code.co_filename, line) for each, line in traceback.walk_tb(error.__traceback__)]
    ours = [frame for frame in frames if _ours(frame[0])]
    if not ours:
        return "raised outside of the package"
    if {*callbacks} & {*re.findall(r"\w+\(", linecache.getline(*ours[-1]))}:
        return None
    if ours[-1] != frames[-1] or not _raises(*ours[-1]):
        return f"raised from inside {Path(ours[-1][0]).relative_to(PACKAGE)}:{ours[-1][1]}"
    if not isinstance(error, TOLD) and not (isinstance(error, TypeError) and "has no argument" in str(error)):
        return "of another kind"
    return None if any(re.search(word, str(error)) for word in words) else "names nothing"


@functools.cache
def _ours(path: str) -> bool:
    """Whether a file belongs to the package."""
    return Path(path).is_relative_to(PACKAGE)


def _raises(path: str, line: int) -> bool:
    """Whether a line of a file belongs to a statement that raises."""
    return any(first <= line <= last for first, last in _raising(path))


@functools.cache
def _raising(path: str) -> list[tuple[int, int]]:
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    return [(node.lineno, node.end_lineno or 0) for node in ast.walk(tree) if isinstance(node, ast.Raise)]


def unfinite(found: object, at: str = "it") -> Iterator[str]:
    """The places in an answer that hold NaN or infinity, each with what it holds."""
    if isinstance(found, torch.nn.Module):
        found = dict(found.state_dict())
    elif isinstance(found, xr.Dataset | pd.DataFrame):
        found = {name: found[name] for name in found}
    elif dataclasses.is_dataclass(found) and not isinstance(found, type):
        found = {each.name: getattr(found, each.name) for each in dataclasses.fields(found)}
    if isinstance(found, Mapping):
        for name, each in found.items():
            yield from unfinite(each, str(name))
    elif isinstance(found, list | tuple):
        for each in found[:1000]:
            yield from unfinite(each, at)
    elif isinstance(found, torch.Tensor) and (found.is_meta or found.layout is not torch.strided):
        return
    elif isinstance(
        found, float | complex | np.number | np.ndarray | xr.DataArray | pd.Series | torch.Tensor
    ):
        if isinstance(found, torch.Tensor):
            found = (
                found.detach().resolve_conj().to(torch.complex128 if found.is_complex() else torch.float64)
            )
        yield from (f"{what} in {at}" for what in _odd_numbers(np.asarray(found)))


def _odd_numbers(numbers: np.ndarray) -> Iterator[str]:
    if numbers.dtype.kind not in "fc" or np.isfinite(numbers).all():
        return
    yield (
        "nothing finite"
        if not np.isfinite(numbers).any()
        else "NaN"
        if np.isnan(numbers).any()
        else "infinity"
    )
    if np.isinf(numbers).any():
        yield "infinity"


# --- bounds -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _bounded(seconds: float) -> Iterator[None]:
    """TooLong for a call that works longer than this or sleeps; no more than `MEMORY` bytes beyond today's."""
    begin, tick, state = time.process_time(), 0.5, [time.process_time(), 0.0]

    def look(_: int, __: types.FrameType | None) -> None:
        now = time.process_time()
        if now - begin > seconds:
            raise TooLong(f"more than {seconds} s of the processor")
        state[1] = state[1] + tick if now - state[0] < 0.01 else 0.0
        state[0] = now
        if state[1] > WAITING:
            raise TooLong(f"asleep for more than {WAITING} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = signal.signal(signal.SIGALRM, look)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    signal.setitimer(signal.ITIMER_REAL, tick, tick)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        yield


_WRITES = {
    "os.mkdir",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.symlink",
    "os.link",
    "os.chmod",
    "os.truncate",
}
_NEVER = {"socket.connect", "socket.getaddrinfo", "os.system"}
_seen: list[list[str]] = []
"""Of the call that is being made, what it did outside of its folder; empty while none is."""


def _look(event: str, given: tuple[object, ...]) -> None:
    """An audit hook, which Python never takes away again: it only looks while a call is being made."""
    if not _seen:
        return
    if event in _NEVER:
        _seen[-1].append(f"{event} {given[:2]!r}")
    elif event == "open":
        path, _, flags = given
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if isinstance(path, str | bytes | os.PathLike) and writes and not _inside(path):
            _seen[-1].append(f"open {path!r} to write")
    elif event in _WRITES:
        ends = given[1:2] if event in ("os.symlink", "os.link") else given[: 2 if event == "os.rename" else 1]
        paths = [each for each in ends if isinstance(each, str | os.PathLike)]
        _seen[-1].extend(f"{event} {path}" for path in paths if not _inside(path))


def _inside(path: str | bytes | os.PathLike[str]) -> bool:
    """Whether a place belongs to the folder of the calls, or is one that takes and keeps nothing."""
    if os.fspath(path) in (os.devnull,):
        return True
    top = os.environ.get("TMPDIR", "/tmp")
    return os.path.realpath(os.fsdecode(path)).startswith(os.path.realpath(top) + os.sep)


@functools.cache
def _install() -> None:
    sys.addaudithook(_look)


@contextlib.contextmanager
def _watched() -> Iterator[list[str]]:
    _install()
    found: list[str] = []
    _seen.append(found)
    try:
        yield found
    finally:
        _seen.pop()
