"""The work of a run, one window at a time (a pure function of the window), and processes that share the windows.

Each process has the model on a device of its own; on CPUs all have one copy of it together (`parcel`). What a worker
did reaches the parent as bytes, batch by batch; a worker that dies takes at most the batch it was at with it, and
another goes on from there. Threads of the host are shared out, so that two workers on two cores do not fight.
"""

import itertools
import multiprocessing
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch
from jaxtyping import Bool
from torch import Tensor

from interp.core.stats import finite
from interp.core.transfers import Checks, checks_together, to_host
from interp.data.batch import Batch
from interp.data.sources import Rejected
from interp.data.stream import DataSource, Window
from interp.model.transformer import Transformer
from interp.passes.question import BatchValues, NotFiniteError, Questions, merged
from interp.runs.journal import packed_done, unpacked_done
from interp.runs.parcel import Parcel, in_shared_memory, packed
from interp.runs.progress import BatchDone, Partials, Tally

WorkerAnswer = tuple[Partials | None, tuple[Rejected, ...]]
"""Partial results over the good rows of a batch (None if there is none), and the rows set aside."""
EXCERPT = 12
"""Number of tokens of a row set aside that its excerpt shows."""


@dataclass(eq=False)
class Worker:
    """A model with its questions: answers the batches of a window one after the other."""

    questions: Questions
    model: Transformer
    room: int | None = field(default=None, init=False)
    """Most tokens of a pass after memory ran out once; None before."""

    def answers(self, number: int, window: Window, first: int = 0) -> Iterator[BatchDone]:
        """The results of each batch of the window, from batch `first` on.

        Raises:
            MemoryError: if a single row does not fit; everything the analyses raise but for NaN in a row.
        """
        count, aside = len(window.batches), Tally(0, 0, window.cut, window.rejected)
        if not count:
            yield BatchDone(number, 0, True, None, aside)
        for i, batch in enumerate(window.batches[first:], first):
            partials, bad = self._answer(batch)
            notes = self.questions.notes(batch)
            tally = Tally(_text_count(batch) - len(bad), int(batch.lengths.sum()), 0, bad, notes)
            yield BatchDone(number, i, i == count - 1, partials, tally if i else Tally.of((aside, tally)))

    def _answer(self, batch: Batch) -> WorkerAnswer:
        """The answer to a batch, by halves if memory runs out or the model raises NotFiniteError for some row."""
        if self.room is not None and batch.tokens.numel() > self.room and len(batch) > 1:
            return self._answer_in_halves(batch)
        try:
            with checks_together() as checks:
                values = self.questions.values(self.model, batch)
            return self._reduced_answer(batch, values, checks)
        except torch.OutOfMemoryError as cause:
            if len(batch) == 1:
                raise MemoryError(
                    f"one row of {batch.tokens.shape[1]} tokens does not fit into the memory of {self.model.device}: "
                    "shorter rows, fewer questions or a model in a smaller dtype are required"
                ) from cause
            self.room = batch.tokens.numel() // 2
        except NotFiniteError as cause:
            if len(batch) == 1 and batch.documents is None:
                return None, (_rejected_row(batch, 0, str(cause)),)
            if batch.documents is not None:
                raise
        torch.cuda.empty_cache()
        return self._answer_in_halves(batch)

    def _answer_in_halves(self, batch: Batch) -> WorkerAnswer:
        """The answers to both halves of a batch, merged."""
        folded: Partials | None = None
        rejected: tuple[Rejected, ...] = ()
        for half in batch.split((len(batch) + 1) // 2):
            partials, bad = self._answer(half.trimmed())
            rejected += bad
            if partials is not None:
                folded = merged(folded, partials)
        return folded, rejected

    def _reduced_answer(self, batch: Batch, values: BatchValues, checks: Checks) -> WorkerAnswer:
        """The reduction of a batch's values over its good rows, and the rows that are not finite."""
        _check_rows(batch, values)
        rows, tensors = batch.identities(), [x for by_name in values.values() for x in by_name.values()]
        if (partials := self.questions.reduced_if(finite(tensors), values, rows, checks)) is not None:
            return partials, ()
        good, why = self._finite_rows(values)
        if good is None:
            return self.questions.reduced(values, rows), ()
        good = good.cpu()
        rejected = tuple(_rejected_row(batch, i, why) for i in (~good).nonzero()[:, 0].tolist())
        if not bool(good.any()):
            return None, rejected
        good_values = {
            a: {k: v[good.to(v.device)] for k, v in by_name.items()} for a, by_name in values.items()
        }
        return self.questions.reduced(good_values, None if rows is None else rows.cpu()[good]), rejected

    def _finite_rows(self, values: BatchValues) -> tuple[Bool[Tensor, "n"] | None, str]:
        """The mask of rows that are finite where a reduction requires it (None: all), and which values are not finite.

        For a reduction that allows NaN (`refuses_nan` False), only a row that is NaN in all values is masked out.
        """
        good: Tensor | None = None
        culprits = []
        fine_already = to_host({name: finite(by_name.values()) for name, by_name in values.items()})
        for question in self.questions.every:
            if bool(fine_already[question.name]):
                continue
            strict = getattr(question.keep, "refuses_nan", False)
            for name, fine in _good_rows(values[question.name], strict=strict).items():
                if not bool(fine.all()):
                    good = fine if good is None else good & fine
                    culprits.append(f"{question.name}.{name}")
        return good, f"NaN or infinite: {', '.join(culprits)}"


def _good_rows(values: Mapping[str, Tensor], *, strict: bool) -> dict[str, Bool[Tensor, "n"]]:
    """Masks of good rows by value: with `strict`, rows without NaN or infinity; else rows not all NaN, in one mask."""
    flat = {name: value.reshape(len(value), -1) for name, value in values.items() if value[:1].numel()}
    if strict:
        return {name: torch.isfinite(value).all(1) for name, value in flat.items()}
    floats = {name: ~value.isnan().all(1) for name, value in flat.items() if value.is_floating_point()}
    has_number = torch.stack(list(to_host(floats).values())).any(0) if floats else None
    return {} if has_number is None else {", ".join(floats): has_number}


def _check_rows(batch: Batch, values: BatchValues) -> None:
    """Raise ValueError for an analysis that does not give one value per row (in packed batches: per text)."""
    for name, by_name in values.items():
        lengths = sorted({len(value) for value in by_name.values()})
        if lengths != [_text_count(batch)]:
            raise ValueError(
                f"{name} requires one value per row or packed text, {_text_count(batch)}, got {lengths}"
            )


def _text_count(batch: Batch) -> int:
    rows = batch.identities()
    return len(batch) if rows is None else len(rows)


def _rejected_row(batch: Batch, i: int, reason: str) -> Rejected:
    """The entry of a row that is set aside: row `i` of the batch, or text `i` of a packed batch."""
    rows = batch.identities()
    assert rows is not None
    row, shown = int(rows[i]), ""
    if batch.documents is None:
        shown = " ".join(str(int(t)) for t in batch.tokens[i][batch.real[i]][:EXCERPT])
    return Rejected(row, reason, f"ids {shown}" if shown else "")


Due = Callable[[int], int | None]
"""The first batch of a window that is still to do; None if the window is done."""
DEATHS = 3
"""How many workers may die at one window before the run gives up."""
STARTED = b""
"""The message that a worker sends once it has opened its parcel."""
NOT_STARTED = "a worker process could not start"
GUARD = 'A script that starts workers needs `if __name__ == "__main__":` around what it does: each of them imports it'


def all_devices() -> list[torch.device]:
    """All GPUs of the host; without a GPU, "cpu" once for every core."""
    if torch.cuda.is_available():
        return [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [torch.device("cpu")] * len(os.sched_getaffinity(0))


@dataclass(eq=False)
class _Helper:
    """A worker process, and the number of the window that it works on."""

    process: BaseProcess
    pipe: Connection
    device: torch.device
    window: int | None = None
    started: bool = False
    """Whether the process has opened its parcel."""

    @property
    def end(self) -> str:
        """How the dead process ended, in words: its exit code or signal."""
        self.process.join(1)
        code = self.process.exitcode
        if code is None or code >= 0:
            return f"exit code {code}"
        return f"{signal.Signals(-code).name}{' (out of memory?)' if code == -signal.SIGKILL else ''}"


def done_by_processes(
    questions: Questions,
    model: Transformer,
    source: DataSource,
    windows: Iterable[int],
    due: Due,
    devices: Sequence[torch.device],
) -> Iterator[BatchDone]:
    """The results of all batches of the windows, in the order in which the workers finish them.

    The consumer must count each (so that `due` knows it) before it asks for the next. Processes are spawned: analyses
    and model must be picklable (functions by name), and a script needs `if __name__ == "__main__":`.

    Raises:
        RuntimeError: an exception in a worker, with its traceback, for one that cannot start, or where workers die at
            one window again and again.
        ValueError: what cannot be sent.
    """
    try:
        parcel = packed((questions, model, source), in_shared_memory)
    except (AttributeError, TypeError, ValueError, pickle.PicklingError) as cause:
        raise ValueError(
            f"what runs in several processes must be picklable, functions by their names: {cause}"
        ) from cause
    crew = _Crew(parcel, devices)
    reductions = {question.name: question.keep for question in questions.every}
    waiting = iter(windows)
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
                if message == STARTED:
                    helper.started = True
                elif isinstance(message, bytes):
                    done = unpacked_done(message, reductions)
                    yield done
                    if done.last:
                        helper.window = None
                else:
                    assert helper.window is not None
                    waiting = itertools.chain([helper.window], waiting)
                    crew.failed(helper, message)
    finally:
        crew.end()


class _Crew:
    """Worker processes, one per device."""

    def __init__(self, parcel: Parcel, devices: Sequence[torch.device]) -> None:
        self._parcel = parcel
        self._context = multiprocessing.get_context("spawn")
        hosts = sum(device.type == "cpu" for device in devices)
        share = len(os.sched_getaffinity(0)) // max(1, hosts)
        self._threads = max(1, min(torch.get_num_threads(), share))
        self._deaths: dict[int, int] = {}
        """Number of workers that died at each window."""
        self._helpers = [self._start(device) for device in devices]

    def _start(self, device: torch.device) -> _Helper:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_serve, args=(theirs, self._parcel, device, self._threads), daemon=True
        )
        process.start()
        theirs.close()
        return _Helper(process, ours, device)

    def idle(self) -> list[_Helper]:
        """Workers without a window."""
        return [helper for helper in self._helpers if helper.window is None]

    def busy(self) -> bool:
        """Whether any worker has a window."""
        return any(helper.window is not None for helper in self._helpers)

    def give(self, helper: _Helper, window: int, first: int) -> None:
        """Send a window to a worker, from batch `first` on; `ready` reports a worker that is dead."""
        helper.window = window
        try:
            helper.pipe.send((window, first))
        except OSError:
            return

    def ready(self) -> list[_Helper]:
        """Workers that sent a message or died at work; waits for the first of them."""
        by_pipe = {helper.pipe: helper for helper in self._helpers if helper.window is not None}
        return [by_pipe[pipe] for pipe in wait(list(by_pipe)) if isinstance(pipe, Connection)]

    def heard(self, helper: _Helper) -> bytes | str | None:
        """A worker's message: the bytes of a batch's result, the traceback of an exception; None from a dead worker."""
        try:
            message: bytes | str = helper.pipe.recv()
        except (EOFError, OSError):
            return None
        return message

    def failed(self, helper: _Helper, traceback: str | None) -> None:
        """Replace a worker that died; raises RuntimeError if it raised, could not start, or too many died."""
        window = helper.window
        if traceback is not None:
            what = f"window {window} failed in a worker process" if helper.started else NOT_STARTED
            raise RuntimeError(f"{what}:\n{traceback}")
        assert window is not None
        self._deaths[window] = self._deaths.get(window, 0) + 1
        how = helper.end
        if not helper.started and "exit code" in how:
            raise RuntimeError(f"{NOT_STARTED} ({how}); what it wrote to stderr says why. {GUARD}")
        if self._deaths[window] >= DEATHS:
            where = f"at window {window}" if helper.started else "before they could begin"
            raise RuntimeError(f"{DEATHS} worker processes died {where}: {how}")
        self._replace(helper)

    def _replace(self, helper: _Helper) -> None:
        """Start a new process in place of a dead one."""
        helper.pipe.close()
        helper.process.join(1)
        fresh = self._start(helper.device)
        helper.process, helper.pipe, helper.window, helper.started = fresh.process, fresh.pipe, None, False

    def end(self) -> None:
        """Terminate all worker processes."""
        for helper in self._helpers:
            helper.process.terminate()
        for helper in self._helpers:
            helper.process.join()
            helper.pipe.close()


def _serve(
    pipe: Connection,
    parcel: Parcel,
    device: torch.device,
    threads: int,
) -> None:
    """The loop of a worker process: it sends STARTED, then for every window it receives one message per batch."""
    torch.set_num_threads(threads)
    try:
        questions, model, source = parcel.opened()
        worker = Worker(questions, model.to(device))
        pipe.send(STARTED)
        while True:
            number, first = pipe.recv()
            for done in worker.answers(number, source.window(number), first):
                pipe.send(packed_done(done))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        return
    except BaseException:
        pipe.send(traceback.format_exc())
        raise
