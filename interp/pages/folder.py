"""A folder that appears whole or not at all: filled under a temporary name next to its own, then renamed."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from interp.causal import EdgeGraph
from interp.circuits import Circuit, CircuitProtocol, GraphPrompt, write_attribution_graph
from interp.core.boundary import public
from interp.core.files import named_path, removing_at_signals
from interp.core.results import write_tables
from interp.pages.corrupted import METHOD
from interp.pages.render import page
from interp.pages.report import Report
from interp.pages.view_circuit import STEPS
from interp.passes.metrics import logit_difference
from interp.runs.folder import write_json

if TYPE_CHECKING:
    import pandas as pd

RUN = "run.json"
"""The file that identifies a folder of a report; its `files` lists everything that was written there."""
GRAPH = "attribution_graph.json"
"""The circuit that the page draws, as a file for other viewers of attribution graphs."""


@public()
def write_report(report: Report, folder: Path, *, csv: bool = False) -> None:
    """Fill an empty folder with `index.html`, `run.json`, every table as Parquet, the drawn graph if any.

    Of composition and of edges, which grow with the square of the number of heads, the report has the strongest 20 000
    rows; `cut` in `run.json` says of how many.

    Args:
        report: the report.
        folder: an empty folder.
        csv: whether to write every table as CSV too.

    Raises:
        OSError: a file that cannot be written.
    """
    cut = {name: table.attrs["of"] for name, table in report.tables.items() if is_cut(table)}
    written = [*write_tables(report.tables, folder, csv=csv), *write_graph(report, folder)]
    names = sorted([*(path.name for path in written), "index.html", RUN])
    write_json(folder / RUN, {**report.provenance, "files": names, **({"cut": cut} if cut else {})})
    (folder / "index.html").write_text(page(report), encoding="utf-8")


def is_cut(table: pd.DataFrame) -> bool:
    """Whether a table has only the strongest rows."""
    return bool(table.attrs.get("of", 0) > len(table))


def write_graph(report: Report, folder: Path) -> list[Path]:
    """Write the edges that the page can draw as an attribution graph; nothing for a page without edges."""
    table, contrast = report.tables.get("edges"), report.contrast
    if table is None or contrast is None:
        return []
    shown = table.head(STEPS[-1])
    wrong = None if contrast.wrong is None else contrast.wrong.token
    metric = logit_difference(contrast.answer.token, wrong)
    how = CircuitProtocol(metric.name, metric.unit, METHOD, "top_n", "resample", n=1)
    scores = dict(zip(shown.edge, shown.value.tolist(), strict=True))
    circuit = Circuit(EdgeGraph.of(report.config), scores, report.about.name, report.question.prompt, how)
    tokens = tuple(report.tables["tokens"].token)
    prompt = GraphPrompt(report.question.prompt, tokens, contrast.answer.token, contrast.answer.prob, wrong)
    write_attribution_graph(circuit, prompt, folder / GRAPH)
    return [folder / GRAPH]


@public()
@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """An empty folder to fill; on leaving without an exception it takes the name (and the place) of `folder`.

    The temporary folder is made on entering, so a place that cannot be written to is known before any work is done.

    Raises:
        ValueError: if `folder` is a file or holds anything that a run of ours did not write.
        OSError: if it, or the folder above it, cannot be written to. After an error everything is as it was before.
    """
    target = named_path(folder).resolve()
    _refuse_foreign(target)
    made = _make_parents(target.parent)
    try:
        fresh = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}."))
    except OSError as cause:
        _remove(made)
        raise OSError(f"cannot write to {target.parent}: {cause.strerror}") from cause

    def undo() -> None:
        shutil.rmtree(fresh, ignore_errors=True)
        _remove(made)

    try:
        with removing_at_signals(undo):
            yield fresh
        fresh.chmod(0o755)
        _swap(fresh, target)
    except BaseException:
        undo()
        raise


def _refuse_foreign(target: Path) -> None:
    if not target.exists():
        return
    if not target.is_dir():
        raise ValueError(f"the output must be a folder, {target} is a file")
    if target == Path.cwd():
        raise ValueError(f"the output must be a folder of its own, {target} is the working folder")
    if foreign := sorted({p.name for p in target.iterdir()} - _ours(target / RUN)):
        raise ValueError(
            f"{target} holds files that are not ours ({foreign[0]}); give a new or an empty folder, or one that an "
            f"earlier report wrote"
        )


def _ours(run: Path) -> set[str]:
    """The names that the run file of an earlier report lists, itself included; empty if there is none."""
    try:
        values = json.loads(run.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return set()
    files = values.get("files") if isinstance(values, dict) else None
    return {RUN, *map(str, files)} if isinstance(files, list) else set()


def _make_parents(parent: Path) -> list[Path]:
    """Create the folders above the target; returns those that were not there, innermost first."""
    missing = [p for p in (parent, *parent.parents) if not p.exists()]
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        _remove(missing)
        raise OSError(f"cannot make the folder {parent}: {cause.strerror}") from cause
    return missing


def _remove(folders: list[Path]) -> None:
    for folder in folders:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _swap(fresh: Path, target: Path) -> None:
    """Rename `fresh` to `target`; what stood there goes, but not before the new one is in place."""
    old = fresh.with_name(f"{fresh.name}.old")
    if target.exists():
        os.replace(target, old)
    try:
        os.replace(fresh, target)
    except OSError:
        if old.exists():
            os.replace(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)
