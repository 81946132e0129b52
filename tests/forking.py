"""Processes that a test may kill, look into or fill: forked from one that has everything imported, and no threads.

A fresh interpreter needs seconds for PyTorch and what comes with it, a fork milliseconds. What a test says about
killing, memory or several processes is as true of a fork; what it says about imports needs a fresh interpreter.
"""

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

import torch.multiprocessing

T = TypeVar("T")
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.warm"])  # here alone: the last list replaces those before it
PATIENCE = 60.0


def attempt(work: Callable[[], object], until: Callable[[], bool] = lambda: False) -> int:
    """Do it in a process of its own, killed as soon as `until`; the exit code, negative for a signal."""
    child, start = PROCESSES.Process(target=work), time.monotonic()
    child.start()
    while child.is_alive() and not until():
        child.join(0.002)
        assert time.monotonic() - start < PATIENCE, "the process hangs"
    child.kill()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def forked(work: Callable[..., T], *arguments: object) -> T:
    """What a function returns in a process of its own; AssertionError with the traceback if it raises."""
    ours, theirs = PROCESSES.Pipe()
    child = PROCESSES.Process(target=_told, args=(theirs, work, arguments))
    child.start()
    theirs.close()
    assert ours.poll(PATIENCE), "the process hangs"
    found, error = ours.recv()
    child.join()
    assert error is None, error
    return found


def together(work: Callable[..., None], *arguments: object, processes: int) -> None:
    """Call a function in several processes at once, each with its rank first; raises what one of them raises."""
    torch.multiprocessing.start_processes(work, arguments, processes, start_method="forkserver")


def executed(code: str) -> None:
    """Code as a script would run it; for `forked`."""
    exec(compile(code, "<script>", "exec"), {"__name__": "__main__"})


def _told(pipe: Connection, work: Callable[..., object], arguments: tuple[object, ...]) -> None:
    try:
        pipe.send((work(*arguments), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        sys.exit(1)
