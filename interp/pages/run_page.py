"""The page of an experiment's run, drawn from its folder: one HTML file with its figures inside, fetching nothing."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from datetime import datetime

import pandas as pd

from interp.core.boundary import public
from interp.pages.templates import environment, own
from interp.runs.comparison import as_dataset, headline, main_variables
from interp.runs.folder import flat
from interp.runs.record import LOG, Record
from interp.runs.run_file import NAME, RunFile, duration
from interp.views.writing import short

SHOWN_ROWS, SHOWN_LINES = 20, 40


@dataclass(frozen=True)
class Figure:
    """A picture as text that a page can hold."""

    name: str
    file: str
    png: str


@dataclass(frozen=True)
class TableHead:
    """The first rows of a table as they are written, and where all of it is."""

    name: str
    files: tuple[str, ...]
    columns: list[str]
    rows: list[list[str]]
    total: int
    numeric: list[bool]


@dataclass(frozen=True)
class StepInWords:
    """A step in words: its dims, and a line for each variable."""

    name: str
    files: tuple[str, ...]
    dims: str
    lines: list[tuple[str, str]]


@public()
def run_page(record: Record) -> str:
    """The page of a run as HTML: parameters, outcome, figures, tables, results, log, and provenance.

    Raises:
        OSError: if a file that the run lists is not there any more.
    """
    run = record.run
    title, _, rest = run.question.partition("\n\n")
    template = environment().get_template("run.html")
    return template.render(
        css=own("report.css"),
        run=run,
        folder=record.folder.name,
        title=" ".join(title.split()),
        rest="\n\n".join(" ".join(part.split()) for part in rest.split("\n\n")),
        resume=record.how_to_resume if record.state in ("failed", "interrupted") else "",
        facts=_facts(record, run),
        given={name for name, value in flat(run.parameters).items() if flat(run.defaults).get(name) != value},
        parameters=flat(run.parameters),
        figures=[_figure(record, name) for name in run.figures],
        tables=[_table(record, name) for name in run.tables],
        results=[_result(record, name) for name in run.steps],
        log=_tail(record),
        provenance=flat(run.provenance),
        run_json=(record.folder / NAME).read_text(encoding="utf-8"),
    )


def _facts(record: Record, run: RunFile) -> list[tuple[str, str]]:
    first = run.sessions[0]
    return [
        ("state", record.state),
        ("started", f"{datetime.fromisoformat(first.started):%Y-%m-%d %H:%M:%S} UTC"),
        ("worked", duration(run.seconds)),
        ("sessions", str(len(run.sessions))),
        ("seed", "none" if run.seed is None else str(run.seed)),
        ("machine", run.sessions[-1].host),
    ]


def _figure(record: Record, name: str) -> Figure:
    file = record.run.figures[name]
    return Figure(name, file, base64.b64encode((record.folder / file).read_bytes()).decode())


def _table(record: Record, name: str) -> TableHead:
    paths = record.run.tables[name]
    frame = pd.read_parquet(record.folder / next(path for path in paths if path.endswith(".parquet")))
    rows = [[_cell(value) for value in row] for row in frame.head(SHOWN_ROWS).itertuples(index=False)]
    numeric = [pd.api.types.is_numeric_dtype(dtype) for dtype in frame.dtypes]
    return TableHead(name, paths, [str(column) for column in frame.columns], rows, len(frame), numeric)


def _cell(value: object) -> str:
    """Four digits are enough to read; the files have them all."""
    if isinstance(value, float):
        return short(value, 4)
    return "–" if value is None else str(value)


def _result(record: Record, name: str) -> StepInWords:
    value = as_dataset(record.result(name))
    dims = ", ".join(f"{dim} {size}" for dim, size in value.sizes.items()) or "one number each"
    lines = [(each, headline(value, each)) for each in main_variables(value)]
    return StepInWords(name, record.run.steps[name].files, dims, lines)


def _tail(record: Record) -> str:
    path = record.folder / LOG
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return "\n".join(lines[-SHOWN_LINES:])
