"""An experiment under its record: its log on the terminal, its end in run.json, its page in the folder."""

import logging
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from interp.runs.experiment import Experiment
    from interp.runs.record import Record

FAILED, INTERRUPTED = 1, 130


def conduct(experiment: "Experiment", job: object, record: "Record") -> int:
    """Run `main(job, record)` and write the page, whatever happens; returns the exit code.

    The traceback of an experiment that fails is in log.txt and on stderr, with what to type to go on.
    """
    from interp.runs.record import ShareDoneError

    code = 0
    try:
        with record:
            experiment.main(job, record)
    except ShareDoneError:
        pass  # the log says so; the last job of the array goes on
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (Exception, SystemExit):
        traceback.print_exc()
        code = FAILED
    _write_page(record)
    if code:
        print(f"{record.state}: {_error(record)}; to go on: {record.how_to_resume}", file=sys.stderr)
    print(record.folder)
    return code


def share_name(name: str, job: object) -> str:
    """The folder of all jobs of an array: the experiment's name and a hash of its parameters."""
    import hashlib
    import json

    from interp.runs.run_file import fields_of

    values = json.dumps(fields_of(job), sort_keys=True, default=str)
    return f"{name}-{hashlib.sha256(values.encode()).hexdigest()[:8]}"


@contextmanager
def on_terminal() -> Iterator[None]:
    """What records say is printed; their logger is as before afterwards."""
    logger = logging.getLogger("interp.runs.record")
    handler, level = logging.StreamHandler(sys.stdout), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _write_page(record: "Record") -> None:
    """The page is drawn from the folder, so a disk without room for it costs nothing else."""
    from interp.core.results import write_atomically
    from interp.pages.run_page import run_page

    text = run_page(record)
    try:
        write_atomically(record.folder / "index.html", lambda path: path.write_text(text, encoding="utf-8"))
    except OSError as cause:
        print(f"the page could not be written: {cause}", file=sys.stderr)


def _error(record: "Record") -> str:
    """Why the run ended; a disk so full that run.json could not say it leaves the run as if killed."""
    return record.run.error or "its end could not be written"
