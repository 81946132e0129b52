"""What a run logs: lines on stderr from a level on, and in the run's log.txt with time, level and logger."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

OURS = "interp.runs.record"
"""The logger of records, which write their own lines to log.txt."""
Level = Literal["debug", "info", "warning", "error"]


@contextmanager
def on_stderr(level: Level, experiment: str) -> Iterator[None]:
    """Print on stderr, inside the `with`, what is logged from `level` on; loggers are as before afterwards.

    Below warnings only interp and the experiment are printed, not the packages that they use.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OnStderr())
    handler.addFilter(lambda entry: _concerns(entry, experiment))
    root = logging.getLogger()
    before = root.level
    root.setLevel(level.upper())
    try:
        with _attached(handler):
            yield
    finally:
        root.setLevel(before)


@contextmanager
def in_file(file: Path, experiment: str) -> Iterator[None]:
    """Append to a run's log, inside the `with`, what other loggers than the records' let through."""
    handler = logging.FileHandler(file, encoding="utf-8", delay=True)
    handler.setFormatter(_InFile())
    handler.addFilter(lambda entry: entry.name != OURS and _concerns(entry, experiment))
    with _attached(handler):
        yield


@contextmanager
def _attached(handler: logging.Handler) -> Iterator[None]:
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        handler.close()


def _concerns(entry: logging.LogRecord, experiment: str) -> bool:
    """Whether an entry is a warning or worse, of this package, of the experiment, or of the root logger."""
    return entry.levelno >= logging.WARNING or entry.name.partition(".")[0] in ("interp", experiment, "root")


class _OnStderr(logging.Formatter):
    """Lines of records as they are, others with their level."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line if record.name == OURS else f"{record.levelname.lower()}: {line}"


class _InFile(logging.Formatter):
    """Entries with time, level and logger; their further lines are indented, as in all of log.txt."""

    def format(self, record: logging.LogRecord) -> str:
        from interp.runs.provenance import now

        text = super().format(record).replace("\n", "\n    ")
        return f"{now()} {record.levelname.lower()} {record.name}: {text}"
