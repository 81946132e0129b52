"""How far the memory of a process grows beyond the pages of files, which a mapped checkpoint is read into."""

import ctypes
import gc
import threading
from pathlib import Path
from types import TracebackType

MMAP_THRESHOLD = -3
"""The number of this parameter in mallopt(3)."""


class OwnMemory:
    """The largest growth of anonymous memory while it is entered, in bytes, sampled every few milliseconds.

    What earlier calls freed is given back to the system first: what a heap keeps would hide what the next one takes.
    From then on every tensor of a mebibyte is mapped by itself, so that holes which others left in the heap do not
    count.
    """

    def __init__(self, pause: float = 0.005) -> None:
        self._pause, self._stop = pause, threading.Event()
        self.peak = 0

    def __enter__(self) -> "OwnMemory":
        gc.collect()
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, 2**20)
        libc.malloc_trim(0)
        self._before = status("RssAnon")
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(self._pause):
            self.peak = max(self.peak, status("RssAnon") - self._before)


def status(field: str) -> int:
    """A line of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
