"""Several processes that share the windows of a run, each with the model on a device of its own.

What a worker did reaches the parent as bytes, batch by batch; a worker that dies takes at most the batch it was at with
it, and another goes on from there. Threads of the host are shared out, so that two workers on two cores do not fight.
"""

import copy
import itertools
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from interp.data.stream import DataSource
from interp.model.transformer import Transformer
from interp.passes.analysis import Questions
from interp.runs.journal import packed_done, unpacked_done
from interp.runs.progress import Done
from interp.runs.work import Worker

Due = Callable[[int], int | None]
"""The first batch of a window that is still to do; None if the window is done."""
DEATHS = 3
"""How many workers may die at one window before the run gives up."""


def all_devices() -> list[torch.device]:
    """Every GPU; on a host without one its cores, one worker each."""
    if torch.cuda.is_available():
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [torch.device("cpu")] * len(os.sched_getaffinity(0))


@dataclass(eq=False)
class _Helper:
    """A worker process, and the window it is at."""

    process: BaseProcess
    pipe: Connection
    device: torch.device
    window: int | None = None


def done_by_processes(
    questions: Questions,
    model: Transformer,
    source: DataSource,
    windows: Iterable[int],
    due: Due,
    devices: Sequence[torch.device],
) -> Iterator[Done]:
    """What all batches of the windows contribute, in the order in which the workers finish them.

    The consumer must count each (so that `due` knows it) before it asks for the next. Processes are spawned: analyses
    and model must be picklable (functions by name), and a script needs `if __name__ == "__main__":`.
    Errors: RuntimeError for an exception in a worker, with its traceback, or where workers die at one window again
    and again; ValueError for what cannot be sent.
    """
    crew = _Crew((questions, shareable(model), source), devices)
    reductions = {a.name: a.reduction for a in questions.analyses}
    waiting, deaths = iter(windows), dict[int, int]()
    try:
        while True:
            for helper in crew.idle():
                window = next((w for w in waiting if due(w) is not None), None)
                if window is not None:
                    crew.give(helper, window, due(window) or 0)
            if not crew.busy():
                return
            for helper in crew.ready():
                message = crew.heard(helper)
                if isinstance(message, bytes):
                    done = unpacked_done(message, reductions)
                    yield done
                    if done.last:
                        helper.window = None
                    continue
                window = helper.window
                if message is not None:
                    raise RuntimeError(f"window {window} failed in a worker process:\n{message}")
                assert window is not None
                deaths[window] = deaths.get(window, 0) + 1
                if deaths[window] >= DEATHS:
                    raise RuntimeError(f"{DEATHS} worker processes died at window {window}")
                crew.replace(helper)
                waiting = itertools.chain([window], waiting)
    finally:
        crew.end()


class _Crew:
    """As many worker processes as devices."""

    def __init__(
        self, payload: tuple[Questions, Transformer, DataSource], devices: Sequence[torch.device]
    ) -> None:
        self._payload = payload
        self._context = multiprocessing.get_context("spawn")
        hosts = sum(device.type == "cpu" for device in devices)
        share = len(os.sched_getaffinity(0)) // max(1, hosts)
        self._threads = max(1, min(torch.get_num_threads(), share))
        self._helpers = [self._started(device) for device in devices]

    def _started(self, device: torch.device) -> _Helper:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(theirs, *self._payload, device, self._threads), daemon=True
        )
        try:
            process.start()
        except (AttributeError, TypeError, ValueError) as cause:
            raise ValueError(
                f"what runs in several processes must be picklable, functions by their names: {cause}"
            ) from cause
        theirs.close()
        return _Helper(process, ours, device)

    def idle(self) -> list[_Helper]:
        """Workers without a window."""
        return [helper for helper in self._helpers if helper.window is None]

    def busy(self) -> bool:
        """Whether anybody is at work."""
        return any(helper.window is not None for helper in self._helpers)

    def give(self, helper: _Helper, window: int, first: int) -> None:
        """Hand a window over, from batch `first` on; one given to a dead worker is found by `ready`."""
        helper.window = window
        try:
            helper.pipe.send((window, first))
        except OSError:
            return

    def ready(self) -> list[_Helper]:
        """Workers that have something to say, or died at work; waits for the first."""
        by_pipe = {helper.pipe: helper for helper in self._helpers if helper.window is not None}
        return [by_pipe[pipe] for pipe in wait(list(by_pipe)) if isinstance(pipe, Connection)]

    def heard(self, helper: _Helper) -> bytes | str | None:
        """A batch's part, the traceback of an exception, or None from a worker that died."""
        try:
            message: bytes | str = helper.pipe.recv()
        except (EOFError, OSError):
            return None
        return message

    def replace(self, helper: _Helper) -> None:
        """Put a new process in a dead one's place."""
        helper.pipe.close()
        helper.process.join(1)
        fresh = self._started(helper.device)
        helper.process, helper.pipe, helper.window = fresh.process, fresh.pipe, None

    def end(self) -> None:
        """Stop everybody."""
        for helper in self._helpers:
            helper.process.terminate()
        for helper in self._helpers:
            helper.process.join()
            helper.pipe.close()


def shareable(model: Transformer) -> Transformer:
    """The model in the host's shared memory; a copy if it lives on a device."""
    if model.device.type != "cpu":
        return copy.deepcopy(model).cpu().share_memory()
    return model.share_memory()


def _serve(
    pipe: Connection,
    questions: Questions,
    model: Transformer,
    source: DataSource,
    device: torch.device,
    threads: int,
) -> None:
    """A worker's life: windows in, one message per batch out."""
    torch.set_num_threads(threads)
    try:
        worker = Worker(questions, model.to(device))
        while True:
            number, first = pipe.recv()
            for done in worker.answers(number, source.window(number), first):
                pipe.send(packed_done(done))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except BaseException:
        pipe.send(traceback.format_exc())
        raise
