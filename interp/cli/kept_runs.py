"""The commands about runs that are there: list them with chosen results, show one, compare any number."""

import dataclasses
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from interp.cli.opening import Printing
from interp.core.files import named_path

if TYPE_CHECKING:
    import xarray as xr

    from interp.runs.comparison import Comparison, Difference
    from interp.runs.record import Record

ROOT, LAST = Path("runs"), "last"
WIDEST = 40
"""Characters of a value in a table of runs, after which it is cut; `--json` has all of it."""


@dataclass(frozen=True)
class List(Printing):
    """List the runs of experiments: when, how they ended, with which parameters, and chosen results."""

    runs: Path = ROOT
    """Folder of the runs."""
    state: Literal["running", "finished", "failed", "interrupted"] | None = None
    """Only runs in this state."""
    results: tuple[str, ...] = ()
    """Columns of results, STEP.VARIABLE: a number, or the mean of one that has dims; STEP.VARIABLE:DIM=LABEL,DIM=LABEL
    takes a label of some dims first. Empty where this run has none.
    """
    form: Literal["table", "json", "csv"] = "table"
    """"json" and "csv": with every parameter, defaults too, and seconds; what cannot be read is on stderr."""

    def run(self) -> None:
        """Print a line for each run, the oldest first."""
        if not named_path(self.runs).is_dir() and self.runs != ROOT:
            raise ValueError(f"the folder of runs is required (--runs), {self.runs} does not exist")
        if self.json and self.form == "csv":
            raise ValueError("--json prints JSON: leave --form csv out")
        form = "json" if self.json else self.form
        found, unreadable = records_in(self.runs)
        records = [record for record in found if self.state in (None, record.state)]
        numbers = self._numbers(records)
        if form == "table" and not records:
            print(f"no runs in {self.runs}")
        else:
            print({"table": _listed, "json": _json, "csv": _csv}[form](records, numbers))
        for line in unreadable:
            print(line, file=sys.stdout if form == "table" else sys.stderr)

    def _numbers(self, records: "list[Record]") -> list[dict[str, float | None]]:
        """The chosen results of every run."""
        if not self.results:
            return [{} for _ in records]
        from interp.runs.chosen import ResultChoice, chosen

        return chosen([ResultChoice.of(text) for text in self.results], records)


@dataclass(frozen=True)
class Show(Printing):
    """Show one run: parameters, where it comes from, what came out, and its files."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, the beginning of a name in --runs, or `last` (`last~1`: the one before)."""
    runs: Path = ROOT
    """Folder of the runs."""

    def run(self) -> None:
        """Print what run.json and the results say."""
        from interp.runs.record import Record

        record = Record.open(run_folder(self.name, self.runs))
        self.tell(record_lines(record), lambda: record_value(record))


@dataclass(frozen=True)
class Compare(Printing):
    """Compare runs: parameters and provenance that differ, and how far results are from those of the first."""

    first: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, the beginning of a name in --runs, or `last` (`last~1`: the one before)."""
    others: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN ...")]
    """One more or any number of them. Where all differ in their seed and at least one other parameter, and every
    setting has the same seeds, settings are compared, over their seeds.
    """
    largest: int = 3
    """Differences named per variable."""
    runs: Path = ROOT
    """Folder of the runs."""

    def run(self) -> None:
        """Print the differences, and what could not be compared."""
        from interp.runs.record import Record

        self.require_some("largest")
        if not self.others:
            raise ValueError(f"two runs or more are required, got {self.first} alone")
        records = [Record.open(run_folder(name, self.runs)) for name in (self.first, *self.others)]
        found = RunComparison.of(records, self.largest)
        self.tell(found.lines(), found.value)


def records_in(root: Path) -> "tuple[list[Record], list[str]]":
    """The runs in a folder, the oldest first, and a line for each that cannot be read."""
    from interp.runs.record import Record
    from interp.runs.run_file import NAME

    records, unreadable = [], []
    for path in sorted(root.glob(f"*/{NAME}")):
        try:
            records.append(Record.open(path.parent))
        except ValueError as cause:
            unreadable.append(f"not shown: {cause}")
    return sorted(records, key=lambda record: record.run.sessions[0].started), unreadable


def run_folder(name: str, root: Path) -> Path:
    """The folder of a run, by path, by the beginning of its name, or the last one; ValueError naming the candidates."""
    from interp.core.wording import nearest

    named_path(root)
    if not name:
        raise ValueError("a run is required, its name or its folder, got ''")
    if named_path(name).is_dir():
        return Path(name)
    names = [record.folder.name for record in records_in(root)[0]]
    fits = [run_name for run_name in names if run_name.startswith(name)]
    if back := re.fullmatch(rf"{LAST}(?:~(\d+))?", name):
        before = int(back[1] or 0)
        fits = names[-1 - before : len(names) - before] if before < len(names) else []
    if not fits:
        hint = (
            f"it has {len(names)} runs"
            if back
            else nearest(name, {run_name.rsplit("-", 2)[0] for run_name in names})
            if names
            else f"there are none in {root}"
        )
        raise ValueError(
            f"a run is required, got {name!r}: no folder, and no run in {root} begins so; {hint}"
        )
    if len(fits) > 1:
        raise ValueError(f"one run is required, {len(fits)} in {root} begin with {name!r}: {', '.join(fits)}")
    return root / fits[0]


def about(record: "Record") -> dict[str, object]:
    """What identifies a run and how it ended."""
    run = record.run
    return {"run": record.folder.name, "started": run.sessions[0].started, "state": record.state,
            "seconds": run.seconds, "error": run.error}  # fmt: skip


def _row(record: "Record") -> dict[str, object]:
    """`about`, and every parameter."""
    return {**about(record), "parameters": record.run.parameters}


# --- a list of runs in three forms -----------------------------------------------------------------------------------

Numbers = Sequence[Mapping[str, float | None]]
"""The chosen results of each run, by the text of the choice."""


def _listed(records: "list[Record]", numbers: Numbers) -> str:
    """Lines with the parameters that differ from their defaults."""
    from interp.runs.folder import changes
    from interp.runs.run_file import duration

    lines = []
    for record, values in zip(records, numbers, strict=True):
        run = record.run
        changed = [f"{name}={now}" for name, _, now in changes(run.defaults, run.parameters)]
        started = re.sub(r"\.\d+", "", run.sessions[0].started)
        lines.append(
            {
                "run": record.folder.name,
                "started": started,
                "state": record.state,
                "duration": duration(run.seconds),
            }
            | {name: "" if value is None else f"{value:.4g}" for name, value in values.items()}
            | {"parameters": " ".join(changed)}
        )
    return _table(lines)


def _json(records: "list[Record]", numbers: Numbers) -> str:
    """A list of objects."""
    from interp.cli.as_json import text_of

    results = ({"results": values} if values else {} for values in numbers)
    return text_of([_row(record) | values for record, values in zip(records, results, strict=True)])


def _csv(records: "list[Record]", numbers: Numbers) -> str:
    """A column for each parameter and each result."""
    import pandas as pd

    from interp.runs.folder import flat

    lines = [
        about(record)
        | {f"parameters.{name}": value for name, value in flat(record.run.parameters).items()}
        | {f"results.{name}": value for name, value in values.items()}
        for record, values in zip(records, numbers, strict=True)
    ]
    return str(pd.DataFrame(lines).to_csv(index=False)).rstrip("\n")


# --- one run in words, and as a value ---------------------------------------------------------------------------------


def record_lines(record: "Record") -> Iterator[str]:
    """The lines of `interp show`."""
    from interp.runs.folder import flat
    from interp.runs.run_file import duration

    run, state = record.run, record.state
    yield f"{record.folder}: {state}, {duration(run.seconds)}"
    yield from (f"  {line}" for line in run.question.splitlines()[:1])
    if run.error:
        yield f"  {run.error}"
    if state in ("failed", "interrupted"):
        yield f"  to go on: {record.how_to_resume}"
    yield "parameters"
    yield from (f"  {name} = {value}" for name, value in flat(run.parameters).items())
    yield "provenance"
    yield from (f"  {name} = {value}" for name, value in flat(run.provenance).items())
    yield from (f"  warning: {line}" for line in run.warnings)
    yield "results"
    for name in run.steps:
        yield from _result_lines(record, name)
    yield "files"
    for path in _files(record):
        yield f"  {path.relative_to(record.folder)}  {path.stat().st_size:,} bytes"


def record_value(record: "Record") -> dict[str, object]:
    """What `interp show --json` prints: run.json, a summary of every result, and the files with their sizes."""
    from interp.runs.comparison import as_dataset, main_variables, summary

    results: dict[str, object] = {}
    for name in record.run.steps:
        result = as_dataset(record.result(name))
        variables = {variable: summary(result, variable) for variable in main_variables(result)}
        results[name] = {"sizes": dict(result.sizes), "variables": variables}
    files = {str(path.relative_to(record.folder)): path.stat().st_size for path in _files(record)}
    return {**_row(record), "question": record.run.question, "provenance": record.run.provenance,
            "warnings": record.run.warnings, "results": results, "files": files}  # fmt: skip


def _files(record: "Record") -> list[Path]:
    return [
        path for path in sorted(record.folder.rglob("*")) if path.is_file() and not path.name.startswith(".")
    ]


def _result_lines(record: "Record", name: str) -> Iterator[str]:
    from interp.runs.comparison import as_dataset, headline, main_variables

    result = as_dataset(record.result(name))
    yield f"  {name}: {', '.join(f'{dim} {size}' for dim, size in result.sizes.items()) or 'no dims'}"
    yield from (f"    {variable}: {headline(result, variable)}" for variable in main_variables(result))


# --- any number of runs beside each other ----------------------------------------------------------------------------


@dataclass(frozen=True)
class RunSetting:
    """What is compared: a single run, or the runs of one setting of the parameters with several seeds."""

    name: str
    records: "tuple[Record, ...]"
    """One for each seed, in ascending order of seeds."""

    def results(self, step: str) -> "tuple[xr.Dataset, list[str]]":
        """The result of a step, over seeds where there are several, with notes on what is left out."""
        from interp.runs.comparison import as_dataset, over_seeds

        found = [as_dataset(record.result(step)) for record in self.records]
        if len(found) == 1:
            return found[0], []
        return over_seeds(found, [_seed(record) for record in self.records])


@dataclass(frozen=True)
class RunComparison:
    """Runs beside each other, and the differences of the later settings' results from the first one's."""

    records: "list[Record]"
    settings: list[RunSetting]
    note: str
    """Why runs that differ in their seeds are not compared as repetitions; empty: they are, or there are none."""
    steps: "dict[str, list[Comparison | str]]"
    """By step, for each setting after the first: the comparison, or why there is none."""

    @classmethod
    def of(cls, records: "list[Record]", largest: int) -> "RunComparison":
        """The comparison of some runs."""
        settings, note = settings_of(records)
        names = dict.fromkeys(name for record in records for name in record.run.steps)
        return cls(records, settings, note, {name: _comparisons(name, settings, largest) for name in names})

    @property
    def repeated(self) -> bool:
        """Whether what is compared are settings with several seeds."""
        return len(self.settings[0].records) > 1

    def differing(self, what: Literal["parameters", "provenance"]) -> dict[str, list[str]]:
        """The values in every run of what is not the same in all, as JSON text."""
        from interp.runs.folder import ABSENT, flat

        flats = [flat(getattr(record.run, what)) for record in self.records]
        values = {
            name: [each.get(name, ABSENT) for each in flats]
            for name in {k: 0 for each in flats for k in each}
        }
        return {name: row for name, row in values.items() if len(set(row)) > 1}

    def lines(self) -> Iterator[str]:
        """The lines of `interp compare`."""
        heads = [f"run {i}" for i in range(1, len(self.records) + 1)]
        for head, record in zip(heads, self.records, strict=True):
            yield f"{head}  {record.folder}: {record.state}"
        for what in ("parameters", "provenance"):
            differing = self.differing(what)
            yield f"{what}: {'differ' if differing else 'the same'}"
            if differing:
                rows = [
                    dict(zip(("name", *heads), (name, *map(_cut, row)), strict=True))
                    for name, row in differing.items()
                ]
                yield from (f"  {line}" for line in _table(rows).splitlines())
        if self.note:
            yield self.note
        if self.repeated:
            pairs = len(self.settings[0].records)
            for setting in self.settings:
                yield f"{setting.name}: {', '.join(record.folder.name for record in setting.records)}"
            yield f"settings are compared over the {pairs} seeds; from {pairs} pairs no p is below {2 / 2**pairs:.2g}"
        for step, comparisons in self.steps.items():
            yield from self._step_lines(step, comparisons)

    def _step_lines(self, step: str, comparisons: "list[Comparison | str]") -> Iterator[str]:
        """What differs in one result."""
        alone = len(comparisons) == 1
        for setting, found in zip(self.settings[1:], comparisons, strict=True):
            head = step if alone else f"{step}, {setting.name} and {self.settings[0].name}"
            if isinstance(found, str):
                yield f"{head}: {found}"
                continue
            same = not found.largest and not found.notes
            yield f"{head}: {'the same' if same else 'differs, largest first'}"
            scope = "all cells tested" if alone else f"all cells of {len(comparisons)} comparisons tested"
            yield from (f"  {_difference_line(difference, scope)}" for difference in found.largest)
            yield from (f"  {line}" for line in found.notes)
            for why in dict.fromkeys(found.untested.values()):
                names = [name for name, reason in found.untested.items() if reason == why]
                yield f"  no p for {', '.join(names)}: {why}"

    def value(self) -> dict[str, object]:
        """What `interp compare --json` prints."""
        names = [setting.name for setting in self.settings]
        return {
            "runs": [_row(record) for record in self.records],
            "parameters": _values(self.differing("parameters")),
            "provenance": _values(self.differing("provenance")),
            "settings": {
                each.name: [record.folder.name for record in each.records] for each in self.settings
            },
            "first": names[0],
            "note": self.note,
            "results": {
                step: {
                    name: {"missing": found} if isinstance(found, str) else _comparison_value(found)
                    for name, found in zip(names[1:], comparisons, strict=True)
                }
                for step, comparisons in self.steps.items()
            },
        }


def settings_of(records: "list[Record]") -> tuple[list[RunSetting], str]:
    """What is compared of some runs: the settings, where each was run with the same seeds; else single runs, and why.

    Two runs are of one setting if they differ in the parameter `seed` alone.
    """
    from interp.runs.folder import flat

    single = [RunSetting(f"run {i}", (record,)) for i, record in enumerate(records, 1)]
    groups: dict[str, list[Record]] = {}
    for record in records:
        others = {name: value for name, value in flat(record.run.parameters).items() if name != "seed"}
        groups.setdefault(json.dumps(others, sort_keys=True), []).append(record)
    if len(groups) == 1 or len(groups) == len(records):
        return single, ""
    ordered = [tuple(sorted(group, key=_seed)) for group in groups.values()]
    seeds = [[_seed(record) for record in group] for group in ordered]
    if any(each != seeds[0] or len(set(each)) < len(each) for each in seeds):
        listed = "; ".join(", ".join(map(str, each)) for each in seeds)
        return (
            single,
            f"settings were not all run once with the same seeds ({listed}): single runs are compared",
        )
    return [RunSetting(f"setting {i}", group) for i, group in enumerate(ordered, 1)], ""


def _seed(record: "Record") -> int:
    """The seed of a run; -1 for one without."""
    return -1 if record.run.seed is None else record.run.seed


def _comparisons(step: str, settings: list[RunSetting], largest: int) -> "list[Comparison | str]":
    """The comparison of a step of each later setting with the first one's, or why there is none."""
    from interp.runs.comparison import compared_to_first

    there = [all(step in record.run.steps for record in setting.records) for setting in settings]
    where = ", ".join(setting.name for setting, has in zip(settings, there, strict=True) if has)
    absent = f"only in {where}" if where else "not in every run of a setting"
    if not there[0] or not any(there[1:]):
        return [absent] * (len(settings) - 1)
    results = [setting.results(step) for setting, has in zip(settings, there, strict=True) if has]
    found = iter(compared_to_first([result for result, _ in results], largest=largest))
    notes = iter([notes for _, notes in results[1:]])
    comparisons: list[Comparison | str] = []
    for has in there[1:]:
        if not has:
            comparisons.append(absent)
            continue
        one = next(found)
        left_out = dict.fromkeys([*results[0][1], *next(notes)])
        comparisons.append(dataclasses.replace(one, notes=[*one.notes, *left_out]))
    return comparisons


def _values(texts: Mapping[str, Sequence[str]]) -> dict[str, list[object]]:
    """Values of JSON texts; None for one that a run does not have."""
    from interp.runs.folder import ABSENT

    return {
        name: [None if text == ABSENT else json.loads(text) for text in row] for name, row in texts.items()
    }


def _comparison_value(found: "Comparison") -> dict[str, object]:
    """A comparison as JSON holds it."""
    differences = [{**vars(difference), "change": difference.change} for difference in found.largest]
    return {"differences": differences, "notes": found.notes, "untested": found.untested}


def _difference_line(difference: "Difference", scope: str) -> str:
    place = f" at {difference.where}" if difference.where else ""
    text = (
        f"{difference.variable}{place}: {difference.first} -> {difference.second}, {difference.change:+.4g}"
    )
    if difference.p == difference.p:
        text += f", p {difference.p:.2g}, {difference.p_adjusted:.2g} with {scope}"
    return text


def _cut(text: str) -> str:
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    """Lines with a column for each key of the first row, its name above."""
    columns = [[name, *(row[name] for row in rows)] for name in rows[0]]
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
