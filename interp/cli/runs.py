"""The commands about experiments: run one into a folder of its own, list the runs, show one, compare two."""

import hashlib
import json
import logging
import re
import shlex
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from interp.cli.opening import Common
from interp.cli.parameters import filled, given_in, listed, merged, of_config, swept
from interp.core.files import named_path

if TYPE_CHECKING:
    from interp.runs.comparison import Difference
    from interp.runs.experiment import BrokenExperimentError, Experiment
    from interp.runs.record import Record

ROOT = Path("runs")
LAST, PAGE = "last", "index.html"
SHARED = "shared"
"""Where the jobs of an array keep their streams."""
FAILED, INTERRUPTED = 1, 130
"""Exit codes."""


@dataclass(frozen=True)
class Run(Common):
    """Run an experiment file into a new folder, or go on with a run that was interrupted or failed."""

    file: Annotated[Path, tyro.conf.Positional]
    """A Python file, say one of experiments/."""
    p: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(aliases=["-p"], metavar="KEY=VALUE")
    ] = ()
    """A parameter of the experiment; may be given several times. One number may have several values, such as
    seed=1,2,3: they are run one after the other.
    """
    config: Path | None = None
    """A YAML, TOML or JSON file of parameters; -p goes before it."""
    dry_run: bool = False
    """Print the parameters of each run, and run nothing."""
    parameters: bool = False
    """List the parameters of the experiment, and run nothing."""
    runs: Path = ROOT
    """Where run folders are made."""
    resume: str | None = None
    """Run to go on with: a folder, the beginning of a name in --runs, or `last` (`last~1`: the one before)."""
    shard: str | None = None
    """One job of an array, such as 2/8 (from 0): streams take that share of the data, the last job does the rest."""

    def run(self) -> int:
        """0, or 1 if the experiment failed and 130 if it was interrupted; the folder is on the last line of stdout."""
        from interp.runs.experiment import BrokenExperimentError, loaded
        from interp.runs.work_folder import Shard

        if self.shard is not None:
            Shard.of(self.shard)
        try:
            with loaded(self.file) as experiment:
                if self.parameters:
                    print(listed(experiment))
                    return 0
                return self._conduct(experiment)
        except BrokenExperimentError as broken:
            _print_import_error(broken, self.file)
            return 1

    def _conduct(self, experiment: "Experiment") -> int:
        """Run the experiment once for each of its values, until one is interrupted; returns the largest exit code."""
        if self.shard is not None and self.resume is not None:
            raise ValueError("--shard goes on by itself where it was: give it again without --resume")
        config = () if self.config is None else of_config(self.config)
        given = swept(experiment, merged(experiment, config, self.p))
        if self.resume is not None and len(given) > 1:
            raise ValueError("--resume goes on with one run, which has one value of each parameter")
        if self.dry_run:
            before = () if self.resume is None else given_in(self._unfinished_run(self.resume))
            for words in given:
                print("\n".join(parameter_lines(filled(experiment, merged(experiment, before, words)))))
            return 0
        if len(given) > 1:
            for words in given:  # a value that does not fit is said before anything is run
                filled(experiment, words)
        codes = [0]
        with on_terminal():
            for words in given:
                codes.append(self._one(experiment, words))
                if codes[-1] == INTERRUPTED:
                    break
        return max(codes)

    def _one(self, experiment: "Experiment", words: tuple[str, ...]) -> int:
        """Create or resume the record of a run, and run the experiment under it; returns the exit code."""
        from interp.runs.record import Record

        command = self._command(words)
        if self.resume is None:
            job = filled(experiment, words)
            seed = getattr(job, "seed", None)
            seed = seed if isinstance(seed, int) else None
            record = Record.create(self.runs, self.file.stem, job, command=command, seed=seed, file=self.file)
            if self.shard is not None:
                record.shared = (self.shard, self.runs / SHARED / share_name(self.file.stem, job))
        else:
            folder = self._unfinished_run(self.resume)
            if _lacks_its_page(record := Record.open(folder), self.file.stem):
                _write_page(record)
                print(folder)
                return 0
            job = filled(experiment, merged(experiment, given_in(folder), words))
            record = Record.resume(folder, job, command=command, file=self.file)
            (folder / PAGE).unlink(missing_ok=True)  # the old page says how the last session ended
        return conduct(experiment, job, record)

    def _command(self, words: tuple[str, ...]) -> str:
        """The command line of one run, the parameters of a config file among its own."""
        options = [word for pair in words for word in ("-p", pair)]
        options += ["--shard", self.shard] if self.shard is not None else []
        options += ["--runs", str(self.runs)] if self.runs != ROOT else []
        options += ["--resume", self.resume] if self.resume is not None else []
        return shlex.join(["interp", "run", str(self.file), *options])

    def _unfinished_run(self, resume: str) -> Path:
        """The folder of the run to resume, by its name or the last one of this experiment."""
        if resume != LAST:
            return _run_folder(resume, self.runs)
        runs = [record for record in _records(self.runs)[0] if record.run.name == self.file.stem]
        if not runs:
            raise ValueError(
                f"--resume last requires a run of {self.file.stem} in {self.runs}, there is none"
            )
        return runs[-1].folder


@dataclass(frozen=True)
class List(Common):
    """List the runs of experiments: when, how they ended, and with which parameters."""

    runs: Path = ROOT
    """Folder of the runs."""
    state: Literal["running", "finished", "failed", "interrupted"] | None = None
    """Only runs in this state."""
    form: Literal["table", "json", "csv"] = "table"
    """"json" and "csv": with every parameter, defaults too, and seconds; what cannot be read is on stderr."""

    def run(self) -> None:
        """Print a line for each run, the oldest first."""
        from interp.runs.folder import changes
        from interp.runs.run_file import duration

        if not named_path(self.runs).is_dir() and self.runs != ROOT:
            raise ValueError(f"the folder of runs is required (--runs), {self.runs} does not exist")
        records, unreadable = _records(self.runs)
        if self.form != "table":
            self._print_all(records)
            for line in unreadable:
                print(line, file=sys.stderr)
            return
        rows = []
        for record in records:
            run, state = record.run, record.state
            changed = [f"{name}={now}" for name, _, now in changes(run.defaults, run.parameters)]
            row = {"run": record.folder.name, "started": run.sessions[0].started, "state": state}
            rows.append({**row, "duration": duration(run.seconds), "parameters": " ".join(changed)})
        shown = [row for row in rows if self.state in (None, row["state"])]
        print(_table(shown) if shown else f"no runs in {self.runs}")
        for line in unreadable:
            print(line)

    def _print_all(self, records: list["Record"]) -> None:
        """Print the runs as JSON or CSV, which has a column for each parameter."""
        from interp.runs.folder import flat

        known = [
            (
                {"run": record.folder.name, "started": record.run.sessions[0].started, "state": record.state,
                 "seconds": record.run.seconds, "error": record.run.error},
                record.run.parameters,
            )
            for record in records
            if self.state in (None, record.state)
        ]  # fmt: skip
        if self.form == "json":
            print(json.dumps([{**about, "parameters": given} for about, given in known], indent=2))
            return
        import pandas as pd

        rows = [
            {**about, **{f"parameters.{name}": value for name, value in flat(given).items()}}
            for about, given in known
        ]
        print(pd.DataFrame(rows).to_csv(index=False), end="")


@dataclass(frozen=True)
class Show(Common):
    """Show one run: parameters, where it comes from, what came out, and its files."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, the beginning of a name in --runs, or `last` (`last~1`: the one before)."""
    runs: Path = ROOT
    """Folder of the runs."""

    def run(self) -> None:
        """Print what run.json and the results say."""
        from interp.runs.record import Record

        for line in record_lines(Record.open(_run_folder(self.name, self.runs))):
            print(line)


@dataclass(frozen=True)
class Compare(Common):
    """Compare two runs: parameters and provenance that differ, and the results' largest differences."""

    first: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """A run folder, the beginning of a name in --runs, or `last` (`last~1`: the one before)."""
    second: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Another one."""
    largest: int = 3
    """Differences named per variable."""
    runs: Path = ROOT
    """Folder of the runs."""

    def run(self) -> None:
        """Print the differences, and what could not be compared."""
        from interp.runs.record import Record

        self.require_some("largest")
        first, second = (Record.open(_run_folder(name, self.runs)) for name in (self.first, self.second))
        for line in compared_runs(first, second, self.largest):
            print(line)


def _print_import_error(broken: "BrokenExperimentError", file: Path) -> None:
    """Print the error of an experiment's file, with the traceback from the file on, and one line that names it."""
    cause = broken.__cause__
    assert cause is not None
    frames = cause.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != str(file.resolve()):
        frames = frames.tb_next
    if frames is not None or isinstance(cause, SyntaxError):
        traceback.print_exception(type(cause), cause, frames)
    print(f"error: {' '.join(str(broken).split())}", file=sys.stderr)


def _table(rows: list[dict[str, str]]) -> str:
    import pandas as pd

    return pd.DataFrame(rows).to_string(index=False)


def _records(root: Path) -> tuple[list["Record"], list[str]]:
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


def _run_folder(name: str, root: Path) -> Path:
    """The folder of a run, by path, by the beginning of its name, or the last one; ValueError naming the candidates."""
    from interp.core.wording import nearest

    named_path(root)
    if not name:
        raise ValueError("a run is required, its name or its folder, got ''")
    if named_path(name).is_dir():
        return Path(name)
    names = [record.folder.name for record in _records(root)[0]]
    fits = [run_name for run_name in names if run_name.startswith(name)]
    if back := re.fullmatch(rf"{LAST}(?:~(\d+))?", name):
        before = int(back[1] or 0)
        fits = names[-1 - before : len(names) - before] if before < len(names) else []
    if not fits:
        hint = (
            nearest(name, {run_name.rsplit("-", 2)[0] for run_name in names})
            if names
            else f"there are none in {root}"
        )
        raise ValueError(
            f"a run is required, got {name!r}: no folder, and no run in {root} begins so; {hint}"
        )
    if len(fits) > 1:
        raise ValueError(f"one run is required, {len(fits)} in {root} begin with {name!r}: {', '.join(fits)}")
    return root / fits[0]


# --- an experiment under its record: its log on the terminal, its end in run.json, its page in the folder -------------


def conduct(experiment: "Experiment", job: object, record: "Record") -> int:
    """Run `main(job, record)` and write the page, whatever happens; returns the exit code.

    The traceback of an experiment that fails is in log.txt and on stderr, with what to type to go on.
    """
    from interp.runs.record import ShareDoneError

    code = 0
    try:
        with record:
            experiment.main(job, record)
            record.check_share()
    except ShareDoneError:
        pass  # the log says so; the last job of the array goes on
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (Exception, SystemExit):
        traceback.print_exc()
        code = FAILED
    _write_page(record)
    if code:
        # a disk may be so full that not even run.json could be written
        why = record.run.error or "its end could not be written"
        print(f"{record.state}: {why}; to go on: {record.how_to_resume}", file=sys.stderr)
    print(record.folder)
    return code


def share_name(name: str, job: object) -> str:
    """The folder of all jobs of an array: the experiment's name and a hash of its parameters."""
    from interp.runs.run_file import fields_of

    values = json.dumps(fields_of(job), sort_keys=True, default=str)
    return f"{name}-{hashlib.sha256(values.encode()).hexdigest()[:8]}"


@contextmanager
def on_terminal() -> Iterator[None]:
    """Print the lines of records inside the `with`; their logger is as before afterwards."""
    logger = logging.getLogger("interp.runs.record")
    handler, level = logging.StreamHandler(sys.stdout), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _lacks_its_page(record: "Record", name: str) -> bool:
    """Whether a run of this experiment is finished, but was killed before its page was written."""
    return record.run.name == name and record.state == "finished" and not (record.folder / PAGE).exists()


def _write_page(record: "Record") -> None:
    """Write the run's page; if the disk has no room for it, print so (the page can be drawn again from the folder)."""
    from interp.core.files import write_atomically
    from interp.pages.run_page import run_page

    text = run_page(record)
    try:
        write_atomically(record.folder / PAGE, lambda path: path.write_text(text, encoding="utf-8"))
    except (OSError, ValueError) as cause:
        print(f"the page could not be written: {cause}", file=sys.stderr)


# --- runs in words: one in full, two beside each other ----------------------------------------------------------------


def parameter_lines(job: object) -> Iterator[str]:
    """The lines of `interp run --dry-run`."""
    from interp.runs.folder import flat
    from interp.runs.run_file import fields_of

    yield "parameters"
    yield from (f"  {name} = {value}" for name, value in flat(fields_of(job)).items())


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
    for path in sorted(record.folder.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            yield f"  {path.relative_to(record.folder)}  {path.stat().st_size:,} bytes"


def compared_runs(first: "Record", second: "Record", largest: int) -> Iterator[str]:
    """The lines of `interp compare`."""
    from interp.runs.comparison import as_dataset, compared
    from interp.runs.folder import changes

    first_run, second_run = first.run, second.run
    yield f"first   {first.folder}: {first.state}"
    yield f"second  {second.folder}: {second.state}"
    for title, ours, theirs in (
        ("parameters", first_run.parameters, second_run.parameters),
        ("provenance", first_run.provenance, second_run.provenance),
    ):
        changed = changes(ours, theirs)
        yield f"{title}: {'differ' if changed else 'the same'}"
        yield from (f"  {name}: {was} -> {now}" for name, was, now in changed)
    for name in dict.fromkeys([*first_run.steps, *second_run.steps]):
        if name not in first_run.steps or name not in second_run.steps:
            yield f"{name}: only in the {'first' if name in first_run.steps else 'second'} run"
            continue
        comparison = compared(
            as_dataset(first.result(name)), as_dataset(second.result(name)), largest=largest
        )
        same = not comparison.largest and not comparison.notes
        yield f"{name}: {'the same' if same else 'differs, largest first'}"
        yield from (f"  {_difference_line(difference)}" for difference in comparison.largest)
        yield from (f"  {line}" for line in comparison.notes)


def _result_lines(record: "Record", name: str) -> Iterator[str]:
    from interp.runs.comparison import as_dataset, headline, main_variables

    result = as_dataset(record.result(name))
    yield f"  {name}: {', '.join(f'{dim} {size}' for dim, size in result.sizes.items()) or 'no dims'}"
    yield from (f"    {variable}: {headline(result, variable)}" for variable in main_variables(result))


def _difference_line(difference: "Difference") -> str:
    place = f" at {difference.where}" if difference.where else ""
    text = (
        f"{difference.variable}{place}: {difference.first} -> {difference.second}, {difference.change:+.4g}"
    )
    if difference.p == difference.p:
        text += f", p {difference.p:.2g}, {difference.p_adjusted:.2g} with all cells tested"
    return text
