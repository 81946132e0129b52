"""The command that runs an experiment into a folder of its own, or goes on with a run."""

import hashlib
import json
import shlex
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from interp.cli.kept_runs import LAST, ROOT, about, records_in, run_folder
from interp.cli.logs import Level, in_file, on_stderr
from interp.cli.opening import Printing
from interp.cli.parameters import described, filled, given_in, listed, merged, of_config, swept

if TYPE_CHECKING:
    from interp.runs.experiment import BrokenExperimentError, Experiment
    from interp.runs.record import Record

PAGE = "index.html"
SHARED = "shared"
"""Where the jobs of an array keep their streams."""
FAILED, INTERRUPTED = 1, 130
"""Exit codes."""


@dataclass(frozen=True)
class Run(Printing):
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
    log_level: Level = "info"
    """What is printed on stderr of what interp and the experiment log; warnings of any package from "warning" on. The
    run's log.txt has the same, with times, and always what the record says.
    """

    def run(self) -> int:
        """0, or 1 if the experiment failed and 130 if it was interrupted; the folder is on the last line of stdout."""
        from interp.runs.experiment import BrokenExperimentError, loaded
        from interp.runs.work_folder import Shard

        if self.shard is not None:
            Shard.of(self.shard)
        try:
            with loaded(self.file) as experiment:
                if self.parameters:
                    self.tell([listed(experiment)], lambda: described(experiment))
                    return 0
                return self._conduct(experiment)
        except BrokenExperimentError as broken:
            _print_import_error(broken, self.file, debug=self.debug)
            return FAILED

    def _conduct(self, experiment: "Experiment") -> int:
        """Run the experiment once for each of its values, until one is interrupted; returns the largest exit code."""
        from interp.runs.record import Record
        from interp.runs.run_file import fields_of

        if self.shard is not None and self.resume is not None:
            raise ValueError("--shard goes on by itself where it was: give it again without --resume")
        config = () if self.config is None else of_config(self.config)
        given = swept(experiment, merged(experiment, config, self.p))
        if self.resume is not None and len(given) > 1:
            raise ValueError("--resume goes on with one run, which has one value of each parameter")
        if self.dry_run:
            before = () if self.resume is None else given_in(self._unfinished_run(self.resume))
            jobs = [filled(experiment, merged(experiment, before, words)) for words in given]
            self.tell(
                (line for job in jobs for line in parameter_lines(job)),
                lambda: [fields_of(job) for job in jobs],
            )
            return 0
        if len(given) > 1:
            for words in given:  # a value that does not fit is said before anything is run
                filled(experiment, words)
        codes, ended = [0], []
        with on_stderr(self.log_level, self.file.stem):
            for words in given:
                code, folder = self._one(experiment, words)
                codes.append(code)
                ended.append(folder)
                if not self.json:
                    print(folder, flush=True)
                if code == INTERRUPTED:
                    break
        if self.json:
            self.tell((), lambda: [about(Record.open(folder)) for folder in ended])
        return max(codes)

    def _one(self, experiment: "Experiment", words: tuple[str, ...]) -> tuple[int, Path]:
        """Create or resume the record of a run, and run the experiment under it; returns the exit code and folder."""
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
                return 0, folder
            job = filled(experiment, merged(experiment, given_in(folder), words))
            record = Record.resume(folder, job, command=command, file=self.file)
            (folder / PAGE).unlink(missing_ok=True)  # the old page says how the last session ended
        return conduct(experiment, job, record, debug=self.debug), record.folder

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
            return run_folder(resume, self.runs)
        runs = [record for record in records_in(self.runs)[0] if record.run.name == self.file.stem]
        if not runs:
            raise ValueError(
                f"--resume last requires a run of {self.file.stem} in {self.runs}, there is none"
            )
        return runs[-1].folder


def _print_import_error(broken: "BrokenExperimentError", file: Path, *, debug: bool) -> None:
    """Print in one line what an experiment's file raised on import, and where; with `debug` the traceback before it."""
    cause = broken.__cause__
    assert cause is not None
    if debug:
        traceback.print_exception(cause)
    where = line_in(file, cause)
    print(f"error: {' '.join(str(broken).split())}{f' ({where})' if where else ''}", file=sys.stderr)


def line_in(file: Path, error: BaseException) -> str:
    """The innermost line of a file that an error came through: its number, function and text; empty if none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == str(file.resolve())]
    return f"line {own[-1].lineno}, in {own[-1].name}: {own[-1].line}" if own else ""


# --- an experiment under its record: its log on the terminal, its end in run.json, its page in the folder -------------


def conduct(experiment: "Experiment", job: object, record: "Record", *, debug: bool = False) -> int:
    """Run `main(job, record)` and write the page, whatever happens; returns the exit code.

    Of an experiment that fails stderr has the line of its file, the error, where its traceback is, and what to type to
    go on; the traceback itself is in log.txt, and with `debug` on stderr too.
    """
    from interp.runs.record import LOG, ShareDoneError

    code, file = 0, experiment.file
    try:
        with record, in_file(record.folder / LOG, file.stem):
            experiment.main(job, record)
            record.check_share()
    except ShareDoneError:
        pass  # the log says so; the last job of the array goes on
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (Exception, SystemExit) as cause:
        code = FAILED
        if debug:
            traceback.print_exc()
        if where := line_in(file, cause):
            print(f"{file}, {where}", file=sys.stderr)
    _write_page(record)
    if code:
        # a disk may be so full that not even run.json could be written
        why = record.run.error or "its end could not be written"
        log = f"; traceback: {record.folder / LOG}" if code == FAILED else ""
        print(f"{record.state}: {why}{log}; to go on: {record.how_to_resume}", file=sys.stderr)
    return code


def share_name(name: str, job: object) -> str:
    """The folder of all jobs of an array: the experiment's name and a hash of its parameters."""
    from interp.runs.run_file import fields_of

    values = json.dumps(fields_of(job), sort_keys=True, default=str)
    return f"{name}-{hashlib.sha256(values.encode()).hexdigest()[:8]}"


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


def parameter_lines(job: object) -> Iterator[str]:
    """The lines of `interp run --dry-run`."""
    from interp.runs.folder import flat
    from interp.runs.run_file import fields_of

    yield "parameters"
    yield from (f"  {name} = {value}" for name, value in flat(fields_of(job)).items())
