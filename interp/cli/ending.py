"""How a command ends early: Ctrl-C is one line, and output that nobody reads is no error of ours.

Nothing slow is imported, so that a Ctrl-C finds this in place however early it comes.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

REFUSED, SIGNALLED = 2, 128
"""Exit codes: for what a user can put right, and the one that a signal's number is added to."""


def ended_by(work: Callable[[], int]) -> int:
    """The exit code of a command: that of `work`, or that of the Ctrl-C or of the closed pipe that ended it."""
    with _streams():
        try:
            try:
                return work()
            finally:
                sys.stdout.flush()  # here, where its errors are still the command's
        except BaseException as cause:
            if is_interrupt(cause):
                print("interrupted", file=sys.stderr)
                # Python notes an interrupt that passed through exec, as dataclasses use it, forgets it at the next
                # one, and would kill `python -m interp` by SIGINT in place of this code.
                exec("pass")
                return SIGNALLED + signal.SIGINT
            if not isinstance(cause, OSError):
                raise
            _discard_output()
            if isinstance(cause, BrokenPipeError):
                return SIGNALLED + signal.SIGPIPE
            print(f"error: {cause}", file=sys.stderr)  # such as a full disk that the help goes to
            return REFUSED


def is_interrupt(error: BaseException | None) -> bool:
    """Whether an error is a Ctrl-C, or what a library made of one (an import that failed, say)."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


@contextmanager
def _streams() -> Iterator[None]:
    """Print to nowhere where the caller closed stdout or stderr (`>&-`), for which Python has None."""
    before = sys.stdout, sys.stderr
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout, sys.stderr = (nowhere if stream is None else stream for stream in before)
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def _discard_output() -> None:
    """Let what is left in the buffer of stdout go nowhere, so that Python does not fail on it once more at its end."""
    with suppress(OSError, ValueError, AttributeError):  # a stdout that is no file has no such buffer
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
