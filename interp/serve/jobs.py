"""One computation at a time: others wait their turn, and a page's newer question stops its older one."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

from interp.serve.session import Stopped

T = TypeVar("T")
MOST_WAITING = 16


class BusyError(RuntimeError):
    """Too many computations wait already."""


class JobQueue:
    """Runs computations one after the other in a thread of its own."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="interp-serve")
        self._flags: dict[str, Event] = {}
        self._waiting = 0

    async def run(self, tab: str, work: Callable[[Event], T]) -> T | None:
        """What `work` returns, or None where it was stopped; `work` looks at its flag and raises `Stopped`.

        Errors: BusyError if too many wait; whatever `work` raises.
        """
        if self._waiting >= MOST_WAITING:
            raise BusyError(f"{MOST_WAITING} computations wait already")
        self.stop(tab)
        flag = self._flags[tab] = Event()

        def turn() -> T | None:
            try:
                return None if flag.is_set() else work(flag)
            except Stopped:
                return None

        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, turn)
        finally:
            flag.set()  # also where nobody waits for the answer any more
            self._waiting -= 1
            if self._flags.get(tab) is flag:
                del self._flags[tab]

    def stop(self, tab: str) -> bool:
        """Stop what a page waits for; whether there was anything."""
        flag = self._flags.get(tab)
        if flag is not None:
            flag.set()
        return flag is not None

    def close(self) -> None:
        """Stop everything."""
        for flag in self._flags.values():
            flag.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
