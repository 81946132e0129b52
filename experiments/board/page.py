"""The page of the board: which method of circuit discovery knows known circuits, in tables without a script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from interp.pages.templates import environment, own
from interp.views.writing import short

if TYPE_CHECKING:
    import xarray as xr

LESS: Final = ("cmd", "passes", "seconds")
"""The scores of which less is better."""
COSTS: Final = ("passes", "seconds")
"""Those that are no share."""
NEEDED: Final = ("value", "low", "high", "found", "programs", "each")


@dataclass(frozen=True)
class Cell:
    """A number as it is written, its interval, and how dark it stands, from 0 to 1."""

    text: str
    interval: str = ""
    dark: float = 0.0


@dataclass(frozen=True)
class Table:
    """Rows of cells, each with its name and what it means."""

    columns: list[str]
    rows: list[tuple[str, str, list[Cell]]]


def board_page(result: xr.Dataset) -> str:
    """The page of `experiments.board.benchmark`: the methods, what makes edges hard to find, and program by program.

    One HTML file that opens from disk and fetches nothing; every table's numbers are those of the result.
    Errors: ValueError for anything that is not a result of the board.

    Example:
        >>> methods = {"eap": experiments.board.METHODS["eap"]}
        >>> found = experiments.board.benchmark(["two_hop"], methods=methods, seeds=1, pairs=4)
        >>> board_page(found).startswith("<!doctype html>")
        True
    """
    if missing := [name for name in NEEDED if name not in result]:
        raise ValueError(f"result must be one of experiments.board.benchmark, this one has no {missing[0]!r}")
    ranked = result.value.sel(score="auroc").to_series().sort_values(ascending=False)
    methods = [str(name) for name in ranked.index]
    scores = [str(name) for name in result.score.values]
    return environment("experiments.board").get_template("board.html").render(
        css=own("report.css"),
        facts=_facts(result),
        interval=result.attrs["interval"],
        leader=(methods[0], short(float(ranked.iloc[0]), 2)),
        meanings=[(name, str(result.attrs[f"score {name}"]), name in LESS) for name in scores],
        board=_board(result, methods, scores),
        modes=_modes(result, methods),
        programs=[(name, _programs(result, methods, name)) for name in scores if name not in COSTS],
    )  # fmt: skip


def _facts(result: xr.Dataset) -> list[tuple[str, str]]:
    programs = len(set(result.program.values.tolist()))
    return [
        ("methods", str(result.sizes["attribution"])),
        ("programs", str(programs)),
        ("models", str(result.sizes["case"])),
    ]


def _board(result: xr.Dataset, methods: Sequence[str], scores: Sequence[str]) -> Table:
    """A row for each method, the best AUROC first."""
    rows = []
    for method in methods:
        mine = result.sel(attribution=method)
        cells = [
            _cell(score, *(float(mine[end].sel(score=score)) for end in ("value", "low", "high")))
            for score in scores
        ]
        rows.append((method, "", cells))
    return Table(list(scores), rows)


def _modes(result: xr.Dataset, methods: Sequence[str]) -> Table:
    """A row for each kind of edge: the share of such edges that each method finds."""
    rows = []
    for mode in result.mode.values.tolist():
        n = int(result.programs.sel(mode=mode))
        share = [float(result.found.sel(attribution=method, mode=mode)) for method in methods]
        meaning = f"{result.attrs[f'mode {mode}']} ({n} {'program' if n == 1 else 'programs'})"
        rows.append((str(mode), meaning, [_cell("found", value) for value in share]))
    return Table(list(methods), rows)


def _programs(result: xr.Dataset, methods: Sequence[str], score: str) -> Table:
    """A row for each program: the mean over its models."""
    means = result.each.sel(score=score).groupby("program").mean("case")
    rows = [
        (
            str(name),
            "",
            [_cell(score, float(means.sel(program=name, attribution=method))) for method in methods],
        )
        for name in sorted(means.program.values.tolist())
    ]
    return Table(list(methods), rows)


def _cell(score: str, value: float, low: float = float("nan"), high: float = float("nan")) -> Cell:
    """A cell as dark as its share is good; costs are not shaded."""
    if value != value:
        return Cell("–")
    dark = 0.0 if score in COSTS else min(1.0, max(0.0, 1 - value if score in LESS else value))
    interval = "" if low != low else f"{_share(low)} to {_share(high)}"
    return Cell(short(value, 2) if score in COSTS else _share(value), interval, round(dark, 3))


def _share(value: float) -> str:
    """Two digits, and no minus before a zero."""
    return f"{round(value, 2) + 0.0:.2f}"
