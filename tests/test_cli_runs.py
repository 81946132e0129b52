"""Experiments on the command line: run, go on, list, show and compare, with what a user may get wrong."""

import copy
import json
import logging
import re
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from interp import Part
from interp.cli import main, runs
from interp.cli.parameters import filled
from interp.runs.comparison import compared
from interp.runs.experiment import loaded
from interp.runs.record import Record
from interp.zoo.groundtruth import INDUCTION, PREVIOUS

EXPERIMENT = '''"""Does it add up?

A longer story.
"""
from dataclasses import dataclass, field
from pathlib import Path

import xarray as xr

from interp.runs.record import Record

PLAN = Path(__file__).with_suffix(".plan")


@dataclass(frozen=True)
class Inner:
    scale: float = 0.5
    """How much."""


@dataclass(frozen=True)
class Job:
    steps: int = 3
    """How many."""
    words: tuple[str, ...] = ()
    twice: bool = False
    seed: int = 5
    inner: Inner = field(default_factory=Inner)


def main(job: Job, record: Record) -> None:
    value = job.steps * job.inner.scale
    record.step("first", lambda: xr.Dataset({"x": value, "x_low": value - 1, "x_high": value + 1}))
    record.say("halfway")
    plan = PLAN.read_text()
    if plan == "fail":
        raise ArithmeticError("mine")
    if plan == "stop":
        raise KeyboardInterrupt
    record.step("second", lambda: xr.Dataset({"y": ("i", [1.0, 2.0 * value])}))
'''
SYNTAX = ["-p", "steps=4", "-p", "inner.scale=0.25", "-p", "words=a b", "-p", "words=--c", "-p", "twice=True"]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "adding.py"
    path.write_text(EXPERIMENT)
    plan(path, "go")
    return path


def plan(file: Path, what: str) -> None:
    file.with_suffix(".plan").write_text(what)


def ran(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[list[str], str]:
    """The lines on stdout of a command that ends with this code, and its stderr."""
    assert main(list(argv)) == code
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err


def folder_of(lines: list[str]) -> Path:
    assert re.fullmatch(r"runs/adding-\d{8}T\d{6}Z-[0-9a-f]{6}", lines[-1])
    return Path(lines[-1])


def test_a_sequence_that_is_given_stands_in_place_of_the_default(tmp_path: Path) -> None:
    path = tmp_path / "sequences.py"
    path.write_text(
        """from collections.abc import Sequence
from dataclasses import dataclass, field
from interp.runs.record import Record

@dataclass(frozen=True)
class Inner:
    layers: list[int] = field(default_factory=lambda: [7, 8])

@dataclass(frozen=True)
class Job:
    depths: tuple[float, ...] = (0.1, 0.2)
    pair: tuple[int, int] = (1, 2)
    words: tuple[str, ...] = ()
    perhaps: tuple[float, ...] | None = (1.0, 2.0)
    heads: Sequence[int] = (3, 4)
    inner: Inner = field(default_factory=Inner)

def main(job: Job, record: Record) -> None: ...
"""
    )
    for given, wanted in (
        ([], ((0.1, 0.2), (1, 2), (), [7, 8])),
        (["depths=0.5"], ((0.5,), (1, 2), (), [7, 8])),
        (["depths=0.1", "depths=0.2", "words=a"], ((0.1, 0.2), (1, 2), ("a",), [7, 8])),
        (["inner.layers=3"], ((0.1, 0.2), (1, 2), (), [3])),
    ):
        with loaded(path) as experiment:
            job = filled(experiment, given)
        assert (job.depths, job.pair, job.words, job.inner.layers) == wanted  # type: ignore[attr-defined]
    for given, wanted in (
        ([], ((1.0, 2.0), [3, 4])),
        (["perhaps=0.5"], ((0.5,), [3, 4])),
        (["perhaps=0.5", "perhaps=3", "heads=1"], ((0.5, 3.0), [1])),
        (["perhaps=None", "heads=3", "heads=4", "heads=5"], (None, [3, 4, 5])),
    ):
        with loaded(path) as experiment:
            job = filled(experiment, given)
        assert (job.perhaps, list(job.heads)) == wanted  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("word", "value"), [("true", True), ("True", True), ("false", False), ("False", False)]
)
def test_truth_values_are_taken_as_they_are_listed(word: str, value: bool, file: Path) -> None:
    with loaded(file) as experiment:
        assert filled(experiment, [f"twice={word}", "steps=1"]).twice is value  # type: ignore[attr-defined]


def test_a_run_is_a_folder_with_typed_parameters_results_log_and_page(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, err = ran(capsys, "run", str(file), *SYNTAX)
    assert len(lines) == 1 and "halfway" in err.splitlines()
    record = Record.open(folder_of(lines))
    run = record.run
    assert run.parameters == {
        "steps": 4, "words": ["a b", "--c"], "twice": True, "seed": 5, "inner": {"type": "Inner", "scale": 0.25}
    }  # fmt: skip
    assert (run.state, run.seed, run.question) == ("finished", 5, "Does it add up?\n\nA longer story.")
    found = record.result("second")
    assert isinstance(found, xr.Dataset) and found.y.values.tolist() == [1.0, 2.0]
    assert "Does it add up?" in (record.folder / "index.html").read_text()
    assert "halfway" in (record.folder / "log.txt").read_text()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.yaml", "steps: 4\nwords: [a b, --c]\ntwice: true\ninner: {scale: 0.25}\n"),
        ("config.toml", 'steps = 4\nwords = ["a b", "--c"]\ntwice = true\n[inner]\nscale = 0.25\n'),
        ("config.json", '{"steps": 4, "words": ["a b", "--c"], "twice": true, "inner": {"scale": 0.25}}'),
    ],
)
def test_a_config_file_is_the_same_as_its_parameters_on_the_command_line(
    file: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    Path(name).write_text(text)
    by_hand, by_file, other = (
        Record.open(folder_of(ran(capsys, "run", str(file), *given)[0])).run
        for given in (SYNTAX, ("--config", name), ("--config", name, "-p", "steps=7", "-p", "words=x"))
    )
    assert by_file.parameters == by_hand.parameters
    commands = [sorted(run.sessions[0].command.split(" -p ")[1:]) for run in (by_file, by_hand)]
    assert commands[0] == commands[1], "the record needs no file"
    assert other.parameters == {**by_hand.parameters, "steps": 7, "words": ["x"]}


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("c.yaml", "- 1\n", "must hold a table of parameters, it holds list"),
        ("c.yaml", "a: [", "c.yaml cannot be read: while parsing"),
        ("c.toml", "a = ", "c.toml cannot be read: Invalid value"),
        ("c.json", "{", "c.json"),
        ("c.txt", "", "--config takes a .yaml, .toml or .json file, got c.txt"),
        ("c.yaml", "stebs: 1", "has no parameter 'stebs'; nearest: steps"),
        ("c.yaml", "words: []", "'words' is an empty list"),
        ("c.yaml", "steps: [1, 2]", "parameter 'steps' holds one value, it was given 2"),
    ],
)
def test_a_config_file_that_is_none_is_one_line_and_no_run(
    file: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, why: str
) -> None:
    Path(name).write_text(text)
    _, err = ran(capsys, "run", str(file), "--config", name, code=2)
    assert why in err and err.count("\n") == 1 and not Path("runs").exists()


def test_several_values_are_run_one_after_the_other_until_one_is_interrupted(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, _ = ran(capsys, "run", str(file), "-p", "seed=1,2,3", "-p", "words=a,b")
    folders = [line for line in lines if line.startswith("runs/")]
    found = [Record.open(Path(folder)).run for folder in folders]
    assert [run.parameters["seed"] for run in found] == [1, 2, 3] == [run.seed for run in found]
    assert all(run.parameters["words"] == ["a,b"] for run in found)
    assert ["seed=1,2,3" in run.sessions[0].command for run in found] == [False] * 3
    plan(file, "fail")
    lines, _ = ran(capsys, "run", str(file), "-p", "steps=1,2", code=1)
    assert sum(line.startswith("runs/") for line in lines) == 2, (
        "one that fails does not keep the next from running"
    )
    plan(file, "stop")
    lines, _ = ran(capsys, "run", str(file), "-p", "steps=1,2", code=130)
    assert sum(line.startswith("runs/") for line in lines) == 1
    _, err = ran(capsys, "run", str(file), "-p", "steps=1,2", "-p", "seed=3,4", code=2)
    assert "one parameter may have several values, got steps, seed" in err
    _, err = ran(capsys, "run", str(file), "-p", "steps=1,x", code=2)
    assert "steps" in err
    _, err = ran(capsys, "run", str(file), "-p", "steps=1,2", "--resume", "last", code=2)
    assert "--resume goes on with one run" in err


def test_a_dry_run_says_every_parameter_and_makes_no_folder(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, _ = ran(capsys, "run", str(file), "-p", "seed=1,2", "--dry-run")
    assert lines.count("parameters") == 2 and "  seed = 1" in lines and "  seed = 2" in lines
    assert lines.count("  inner.scale = 0.5") == 2 and not Path("runs").exists()


def test_experiments_error_is_her_line_the_log_has_the_traceback_and_the_run_resumes(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(file, "fail")
    lines, err = ran(capsys, "run", str(file), "-p", "steps=4", code=1)
    folder = folder_of(lines)
    text = (folder / "log.txt").read_text()
    assert "Traceback (most recent call last)" in text and "ArithmeticError: mine" in text
    at = 1 + EXPERIMENT.splitlines().index('        raise ArithmeticError("mine")')
    assert err.splitlines()[-2:] == [
        f'{file}, line {at}, in main: raise ArithmeticError("mine")',
        f"failed: ArithmeticError: mine; traceback: {folder}/log.txt; to go on: interp run {file} --resume {folder}",
    ]
    assert "Traceback" not in err
    assert "ArithmeticError: mine" in (folder / "index.html").read_text()
    plan(file, "stop")
    _, err = ran(capsys, "run", str(file), "--resume", str(folder), code=130)
    assert f"interrupted: KeyboardInterrupt; to go on: interp run {file} --resume {folder}" in err
    plan(file, "go")
    lines, err = ran(capsys, "run", str(file), "--resume", "last")
    assert folder_of(lines) == folder
    assert any(line.startswith("step first: loaded") for line in err.splitlines())
    record = Record.open(folder)
    assert (record.state, len(record.run.sessions), record.run.parameters["steps"]) == ("finished", 3, 4)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b"def main(:\n", "SyntaxError: invalid syntax"),
        (b"x = 1\x00\n", "source code string cannot contain null bytes"),
        (b"x = '\xe9'\n", "SyntaxError: (unicode error) 'utf-8' codec can't decode"),
        (b"raise ValueError('mine')\n", "ValueError: mine"),
        (b"import sys\nsys.exit(0)\n", "SystemExit: 0"),
    ],
)
def test_an_experiment_that_cannot_be_imported_ends_in_one_line(
    text: bytes, error: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_bytes(text)
    lines, err = ran(capsys, "run", str(file), code=1)
    assert lines == [] and "importlib" not in err
    (line,) = err.splitlines()
    assert line.startswith(f"error: {file} cannot be imported: ") and error in line


def test_an_error_on_import_is_her_line_with_debug_its_traceback_and_makes_no_folder(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text("def inner():\n    raise ValueError('mine')\n\n\ninner()\n")
    one = f"error: {file} cannot be imported: ValueError: mine (line 2, in inner: raise ValueError('mine'))"
    assert ran(capsys, "run", str(file), code=1) == ([], f"{one}\n")
    lines, err = ran(capsys, "run", str(file), "--debug", code=1)
    assert lines == [] and err.startswith("Traceback") and err.endswith(f"ValueError: mine\n{one}\n")
    assert not Path("runs").exists()


def test_a_log_level_says_what_is_on_stderr_and_the_log_has_it_with_the_time(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = '    record.say("halfway")\n'
    logs = "".join(f"    logging.getLogger({name}).{how}('{how} of ' + {name})\n" for name, how in LOGGED)
    quiet = "    logging.getLogger('other').info('info of other')\n"
    file.write_text(EXPERIMENT.replace(said, f"    import logging\n{said}{logs}{quiet}"))
    root = logging.getLogger()
    before = root.level, [*root.handlers]
    for level, shown in (("debug", 5), ("info", 4), ("warning", 2), ("error", 1)):
        lines, err = ran(capsys, "run", str(file), "--log-level", level)
        found = [line for line in err.splitlines() if re.match("debug|info|warning|error", line)]
        assert found == [f"{how}: {how} of {OWN.get(name, name[1:-1])}" for name, how in LOGGED[5 - shown :]]
        assert ("halfway" in err.splitlines()) == (level in ("debug", "info"))
        log = (folder_of(lines) / "log.txt").read_text().splitlines()
        assert sum(line.endswith(" halfway") for line in log) == 1, "at every level, and once"
        for line in found:
            how, message = line.split(": ", 1)
            assert sum(bool(re.fullmatch(rf"\S+ {how} \S+: {message}", each)) for each in log) == 1
        assert len([line for line in log if " of " in line]) == shown and "info of other" not in err
    assert before == (root.level, root.handlers), "as before the command"


OWN = {"__name__": "adding"}
LOGGED = (("__name__", "debug"), ("__name__", "info"), ("'interp.core'", "info"), ("'other'", "warning"),
          ("'other'", "error"))  # fmt: skip
"""What the experiment logs, by logger, from the least level on; infos of other packages are not ours to print."""


def test_the_parameters_are_listed_with_types_defaults_and_meaning(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, _ = ran(capsys, "run", str(file), "--parameters")
    assert lines[0] == "Does it add up?"
    assert "  -p steps=...  int, default 3. How many." in lines
    assert "  -p inner.scale=...  float, default 0.5. How much." in lines
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["-p", "stesp=4"], "has no parameter 'stesp'; nearest: steps"),
        (["-p", "inner=4"], "has no parameter 'inner'; nearest: inner.scale"),
        (["-p", "steps"], "-p requires key=value, got 'steps'"),
        (["-p", "steps=x"], "Error parsing --steps: invalid literal for int() with base 10: 'x'"),
        (["-p", "twice=maybe"], "invalid choice 'maybe'"),
        (["-p", "words=a\udcff"], r"a parameter must be text that UTF-8 can hold, got 'a\udcff'"),
        (["-p", "steps=1", "-p", "steps=2"], "parameter 'steps' holds one value, it was given 2"),
        (["--resume", "last"], "--resume last requires a run of adding in runs, there is none"),
        (["--resume", "nowhere"], "a run is required, got 'nowhere'"),
        (["--resume", ""], "a run is required, its name or its folder, got ''"),
        (["--resume", "."], "the folder of a run of an experiment is required, . has no run.json"),
        (["--shard", ""], "a shard such as 0/8 is required, got ''"),
        (["--shard", "1/2/3"], "a shard such as 0/8 is required, got '1/2/3'"),
        (["--shard=-1/2"], "a shard such as 0/8 is required, got '-1/2'"),
        (["--shard", "2/2"], "a shard i/n with 0 <= i < n is required, got 2/2"),
        (["--shard", "0/0", "--parameters"], "a shard i/n with 0 <= i < n is required, got 0/0"),
    ],
)
def test_what_is_wrong_is_one_line_and_no_folder(
    argv: list[str], message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, err = ran(capsys, "run", str(file), *argv, code=2)
    assert lines == [] and message in err
    assert err.startswith("error: ") and len(err.splitlines()) == 1
    assert not Path("runs").exists()


def test_a_shard_of_an_experiment_that_shares_no_rows_is_refused(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, err = ran(capsys, "run", str(file), "--shard", "0/2", code=1)
    assert "shard 0/2 requires an experiment that calls record.stream" in err
    assert Record.open(folder_of(lines)).state == "failed"
    assert ran(capsys, "run", str(file), "--resume", "last")[0][-1] == lines[-1]


def test_a_required_parameter_is_asked_for(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(EXPERIMENT.replace("steps: int = 3", "steps: int"))
    _, err = ran(capsys, "run", str(file), code=2)
    assert "requires -p steps=..., it has no default" in err


def test_a_file_whose_main_takes_no_record_is_refused(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(EXPERIMENT.replace("job: Job, record: Record", "job: Job"))
    _, err = ran(capsys, "run", str(file), code=2)
    assert "an experiment requires main(job: Parameters, record: Record)" in err


def test_resume_refuses_other_parameters_and_finished_runs(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(file, "fail")
    ran(capsys, "run", str(file), "-p", "steps=4", "-p", "words=a", code=1)
    _, err = ran(capsys, "run", str(file), "--resume", "last", "-p", "steps=5", code=2)
    assert "another run of an experiment: steps: was 4, is 5; a new folder is required" in err
    plan(file, "go")
    ran(capsys, "run", str(file), "--resume", "last", "-p", "words=a")
    _, err = ran(capsys, "run", str(file), "--resume", "last", code=2)
    assert "is finished: there is nothing to go on with" in err


def test_a_run_that_was_killed_before_its_page_gets_it_on_resume(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page of an earlier session that failed is not taken for it."""
    plan(file, "fail")
    folder = folder_of(ran(capsys, "run", str(file), code=1)[0])
    assert "failed" in (folder / "index.html").read_text()
    plan(file, "go")
    with monkeypatch.context() as patch:
        patch.setattr(runs, "_write_page", lambda record: sys.exit("killed"))
        with pytest.raises(SystemExit):
            main(["run", str(file), "--resume", "last"])
    assert Record.open(folder).state == "finished" and not (folder / "index.html").exists()
    capsys.readouterr()
    plan(file, "fail")  # nothing is computed again
    assert folder_of(ran(capsys, "run", str(file), "--resume", "last")[0]) == folder
    assert "finished" in (folder / "index.html").read_text()
    _, err = ran(capsys, "run", str(file), "--resume", "last", code=2)
    assert "is finished: there is nothing to go on with" in err


@pytest.mark.slow
@pytest.mark.kinds
def test_no_run_file_however_malformed_breaks_the_list(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every entry of run.json, at every depth, taken away or replaced by things of other kinds."""
    good = folder_of(ran(capsys, "run", str(file))[0])
    values = json.loads((good / "run.json").read_text())
    texts = ["", "[]", "3", "null", "[" * 100_000, "\x00", '"text"', json.dumps(values)[:-1]]
    for path in paths(values):
        texts += [json.dumps(changed(values, path, *new)) for new in ((), *((each,) for each in ODD))]
    for number, text in enumerate(texts):
        folder = Path(f"runs/odd-{number:04d}")
        folder.mkdir()
        (folder / "run.json").write_text(text)
    Path("runs/a-folder/run.json").mkdir(parents=True)
    Path("runs/latin/").mkdir()
    Path("runs/latin/run.json").write_bytes(b"\xff\xfe{")
    lines, _ = ran(capsys, "list")
    shown = {line.split()[0] for line in lines if not line.startswith("not shown: ")}
    assert good.name in shown
    named = sum(any(f"odd-{n:04d}" in line for line in lines) for n in range(len(texts)))
    assert named == len(texts) > 300
    assert folder_of([str(Record.open(good).folder)]) == good
    ran(capsys, "list", "--state", "finished")
    lines, _ = ran(capsys, "show", good.name)
    assert lines[0].startswith(f"{good}: finished")


ODD: tuple[object, ...] = (None, 3, -1.5, "x", [], {}, [[]], {"a": 1}, True)


def paths(value: object, above: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """The way to everything in a JSON value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, each in inside for path in [(*above, key), *paths(each, (*above, key))]]


def changed(value: object, path: tuple[object, ...], *new: object) -> object:
    """The value with another one at the end of this way, or without that entry."""
    copied = copy.copy(value)
    assert isinstance(copied, dict | list)
    if len(path) > 1:
        copied[path[0]] = changed(copied[path[0]], path[1:], *new)  # type: ignore[index, call-overload]
    elif new:
        copied[path[0]] = new[0]  # type: ignore[index, call-overload]
    else:
        del copied[path[0]]  # type: ignore[arg-type]
    return copied


def test_list_shows_how_runs_ended_and_what_is_not_default(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = folder_of(ran(capsys, "run", str(file), "-p", "steps=4")[0])
    plan(file, "fail")
    second = folder_of(ran(capsys, "run", str(file), code=1)[0])
    Path("runs/broken").mkdir()
    Path("runs/broken/run.json").write_text("{")
    lines, _ = ran(capsys, "list")
    rows = {line.split()[0]: line for line in lines}
    assert "finished" in rows[first.name] and rows[first.name].endswith(" steps=4")
    assert "failed" in rows[second.name] and "steps" not in rows[second.name]
    assert any(line.startswith("not shown: ") and "runs/broken/run.json" in line for line in lines)
    lines, _ = ran(capsys, "list", "--state", "failed")
    assert any(second.name in line for line in lines) and not any(first.name in line for line in lines)
    _, err = ran(capsys, "list", "--runs", "nowhere", code=2)
    assert "the folder of runs is required (--runs), nowhere does not exist" in err


def test_list_as_json_and_csv_has_every_parameter(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (folder_of(ran(capsys, "run", str(file), "-p", f"steps={n}")[0]) for n in (4, 5))
    Path("runs/broken").mkdir()
    Path("runs/broken/run.json").write_text("{")
    lines, err = ran(capsys, "list", "--form", "json")
    rows = {row["run"]: row for row in json.loads("\n".join(lines))}
    assert set(rows) == {first.name, second.name} and "runs/broken/run.json" in err
    one = rows[first.name]
    assert one["state"] == "finished" and one["parameters"] == Record.open(first).run.parameters
    assert one["seconds"] == Record.open(first).run.seconds and one["error"] is None
    lines, _ = ran(capsys, "list", "--form", "csv")
    Path("list.csv").write_text("\n".join(lines))
    table = pd.read_csv("list.csv").set_index("run")
    assert table.loc[second.name, "parameters.steps"] == 5 and table.loc[first.name, "parameters.seed"] == 5


def test_the_run_before_the_last_has_a_name(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [Path("runs") / f"adding-{i}" for i in range(3)]
    for i, folder in enumerate(folders):  # the beginnings of runs are a second apart at least
        made = folder_of(ran(capsys, "run", str(file), "-p", f"steps={i}")[0])
        text = (made / "run.json").read_text()
        made.rename(folder)
        started = json.loads(text)["sessions"][0]["started"]
        (folder / "run.json").write_text(text.replace(started, f"2026-01-0{i + 1}T00:00:00+00:00"))
    for back, name in ((0, "last"), (0, "last~0"), (1, "last~1"), (2, "last~2")):
        lines, _ = ran(capsys, "show", name)
        assert f"  steps = {2 - back}" in lines
    _, err = ran(capsys, "show", "last~3", code=2)
    assert "a run is required, got 'last~3'" in err


def test_show_says_parameters_provenance_results_and_files(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = folder_of(ran(capsys, "run", str(file))[0])
    lines, _ = ran(capsys, "show", folder.name[:-3])
    assert lines[0].startswith(f"{folder}: finished, ")
    for line in (
        "  steps = 3",
        "  inner.scale = 0.5",
        "    x: 1.5 [0.5, 2.5]",
        "    y: largest 3 at i 1; mean 2 of 2",
    ):
        assert line in lines
    assert any(line.startswith("  results/first.nc  ") for line in lines)
    assert any(line.startswith("  versions.torch = ") for line in lines)
    ran(capsys, "run", str(file))
    _, err = ran(capsys, "show", "adding", code=2)
    assert "one run is required, 2 in runs begin with 'adding': " in err
    _, err = ran(capsys, "show", "addnig", code=2)
    assert "no run in runs begins so; nearest: adding" in err


def test_compare_says_which_parameters_and_results_differ(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = (folder_of(ran(capsys, "run", str(file), "-p", f"steps={steps}")[0]) for steps in (2, 4))
    lines, _ = ran(capsys, "compare", str(first), second.name)
    for line in (
        "parameters: differ",
        "  name   run 1  run 2",
        "  steps  2      4",
        "  x: 1 [0, 2] -> 2 [1, 3], +1",
        "  y at i 1: 2 -> 4, +2",
    ):
        assert line in lines
    lines, _ = ran(capsys, "compare", str(first), str(first))
    assert lines[2:] == [
        "parameters: the same",
        "provenance: the same",
        "first: the same",
        "second: the same",
    ]


def repeated(file: Path, capsys: pytest.CaptureFixture[str], *runs: str) -> list[Path]:
    """Runs of an experiment with rows and a seed, one for each "shift seed"."""
    file.write_text(ROWS)
    given = [each.split() for each in runs]
    return [
        folder_of(ran(capsys, "run", str(file), "-p", f"shift={x}", "-p", f"seed={y}")[0]) for x, y in given
    ]


ROWS = '''"""How far?"""
from dataclasses import dataclass

import numpy as np
import xarray as xr

from interp.runs.record import Record


@dataclass(frozen=True)
class Job:
    shift: float = 0.0
    seed: int = 0


def main(job: Job, record: Record) -> None:
    noise = np.random.default_rng(job.seed).normal(size=(5, 2))
    rows = {"loss": (("prompt", "head"), noise + [job.shift, 0.0]), "word": ("head", ["a", "b"])}
    record.step("rows", lambda: xr.Dataset(rows, coords={"prompt": range(5), "head": [3, 7]}))
    if job.shift:
        record.step("alone", lambda: xr.Dataset({"x": job.shift}))
'''


def test_any_number_of_runs_is_compared_with_the_first(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = repeated(file, capsys, "0 1", "0.5 1", "2 1")
    lines, _ = ran(capsys, "compare", *map(str, folders))
    assert [line.split()[0:3] for line in lines[:3]] == [
        ["run", f"{i}", f"{folders[i - 1]}:"] for i in (1, 2, 3)
    ]
    assert lines[3:6] == ["parameters: differ", "  name   run 1  run 2  run 3", "  shift  0.0    0.5    2.0"]
    first, second, third = (Record.open(folder).result("rows") for folder in folders)
    alone = [compared(first, other).largest[0] for other in (second, third)]  # type: ignore[arg-type]
    assert [each.p for each in alone] == [2 / 2**5] * 2
    for i, each in zip((2, 3), alone, strict=True):
        at = lines.index(f"rows, run {i} and run 1: differs, largest first")
        p = min(1.0, 2 * each.p_adjusted)  # Holm: the smaller of two, and the other one not below it
        assert lines[at + 1] == (
            f"  loss at head 3, mean of 5 prompts: {each.first} -> {each.second}, {each.change:+.4g}, p 0.062, "
            f"{p:.2g} with all cells of 2 comparisons tested"
        )
    assert "alone, run 2 and run 1: only in run 2, run 3" in lines
    value = json.loads("\n".join(ran(capsys, "compare", *map(str, folders), "--json")[0]))
    assert value["parameters"] == {"shift": [0.0, 0.5, 2.0]}
    found = value["results"]["rows"]["run 3"]["differences"][0]
    assert found["change"] == alone[1].change and found["p_adjusted"] == 2 * alone[1].p_adjusted
    assert found["first"] == {"value": alone[1].first.value, "low": None, "high": None}


def test_settings_that_were_run_with_the_same_seeds_are_compared_over_them(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [f"{shift} {seed}" for seed in (2, 1, 3) for shift in (0, 1)]
    folders = repeated(file, capsys, *runs)
    lines, _ = ran(capsys, "compare", *map(str, folders))
    assert f"setting 1: {', '.join(folders[i].name for i in (2, 0, 4))}" in lines, "in the order of seeds"
    assert "settings are compared over the 3 seeds; from 3 pairs no p is below 0.25" in lines
    results = [Record.open(folder).result("rows") for folder in folders]
    first, second = (
        np.mean([results[i].loss.values[:, 0].mean() for i in at]) for at in ((0, 2, 4), (1, 3, 5))
    )  # type: ignore[attr-defined]
    (line,) = [line for line in lines if "head 3" in line]
    assert line.startswith(
        f"  loss at head 3, mean of 3 seeds: {first:.4g} -> {second:.4g}, +1, p 0.25, 0.25 with"
    )
    assert "  word: texts have no mean over seeds" in lines and "alone: only in setting 2" in lines
    lines, _ = ran(capsys, "compare", *map(str, folders[:3]))
    assert (
        "settings were not all run once with the same seeds (1, 2; 2): single runs are compared" in lines
    ) and "rows, run 3 and run 1: differs, largest first" in lines
    _, err = ran(capsys, "compare", str(folders[0]), code=2)
    assert "two runs or more are required" in err


def test_numbers_without_rows_get_no_p_and_that_is_said(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [folder_of(ran(capsys, "run", str(file), "-p", f"steps={n}")[0]) for n in (1, 2, 3)]
    lines, _ = ran(capsys, "compare", *map(str, folders))
    assert not any(", p " in line for line in lines)
    no_p = "it has no rows (row, prompt, example), and these are not several settings with the same seeds"
    assert lines.count(f"  no p for x: {no_p}") == 2 == lines.count(f"  no p for y: {no_p}")


def test_chosen_results_are_columns_in_every_form(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [folder_of(ran(capsys, "run", str(file), "-p", f"steps={n}")[0]) for n in (1, 2)]
    plan(file, "fail")
    folders.append(folder_of(ran(capsys, "run", str(file), "-p", "steps=3", code=1)[0]))
    names = ("first.x", "second.y", "second.y:i=1")  # a number; a mean over what is left; a cell
    wanted = [(0.5, 1.0, 1.0), (1.0, 1.5, 2.0), (1.5, None, None)]
    lines, _ = ran(capsys, "list", "--results", *names)
    head, *rows = lines
    starts = [head.index(f"  {name}  ") + 2 for name in (*names, "parameters")[:3]]
    by_run = {row.split()[0]: [row[at:].split("  ")[0].strip() for at in starts] for row in rows}
    for folder, values in zip(folders, wanted, strict=True):
        assert by_run[folder.name] == ["" if value is None else f"{value:.4g}" for value in values]
    for argv in (("--form", "json"), ("--json",)):
        lines, _ = ran(capsys, "list", "--results", *names, *argv)
        found = {row["run"]: row for row in json.loads("\n".join(lines))}
        for folder, values in zip(folders, wanted, strict=True):
            assert tuple(found[folder.name]["results"].values()) == values
    assert found[folders[2].name]["state"] == "failed" and found[folders[2].name]["seconds"] >= 0
    lines, _ = ran(capsys, "list", "--results", *names, "--form", "csv")
    Path("list.csv").write_text("\n".join(lines))
    table = pd.read_csv("list.csv").set_index("run")
    for folder, values in zip(folders, wanted, strict=True):
        for name, value in zip(names, values, strict=True):
            there = table.loc[folder.name, f"results.{name}"]
            assert pd.isna(there) if value is None else there == value


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("frist.x", "has no step 'frist'; nearest: first; it has first, second"),
        ("first.z", "first has no variable 'z'; no name is close; it has x, x_low, x_high"),
        ("second.y:j=1", "y has no dim 'j'; no name is close; it has i"),
        ("second.y:i=7", "i has no label '7'; no name is close; it has 0, 1"),
        ("second", "a result is STEP.VARIABLE or STEP.VARIABLE:DIM=LABEL,..., got 'second'"),
        ("second.y:i", "a result is STEP.VARIABLE or STEP.VARIABLE:DIM=LABEL,..., got 'second.y:i'"),
    ],
)
def test_a_result_that_no_run_has_is_refused_in_words(
    name: str, message: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ran(capsys, "run", str(file))
    plan(file, "fail")
    ran(capsys, "run", str(file), code=1)
    lines, err = ran(capsys, "list", "--results", name, code=2)
    assert lines == [] and message in err


def test_json_of_runs_has_the_numbers_that_are_printed(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one,) = json.loads("".join(ran(capsys, "run", str(file), "--json")[0]))
    assert one["state"] == "finished" and Path("runs", one["run"]).is_dir()
    assert json.loads("".join(ran(capsys, "run", str(file), "--json", "--dry-run")[0]))[0]["steps"] == 3
    listed = json.loads("".join(ran(capsys, "run", str(file), "--json", "--parameters")[0]))
    assert {"name": "steps", "type": "int", "default": "3", "doc": "How many."} in listed
    shown = json.loads("".join(ran(capsys, "show", "last", "--json")[0]))
    assert shown["results"]["first"]["variables"]["x"]["largest"] == {"value": 1.5, "low": 0.5, "high": 2.5}
    y = shown["results"]["second"]["variables"]["y"]
    assert (y["largest"]["value"], y["where"], y["mean"], y["count"]) == (3.0, "i 1", 2.0, 2)
    assert shown["files"]["run.json"] == Path("runs", one["run"], "run.json").stat().st_size
    _, err = ran(capsys, "list", "--json", "--form", "csv", code=2)
    assert "--json prints JSON" in err


@pytest.mark.slow
def test_the_experiment_that_names_every_head_finds_the_planted_heads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = Path(__file__).parents[1] / "experiments" / "name_every_head.py"
    out, err = ran(capsys, "run", str(file), "-p", "model=groundtruth-induction", "--runs", str(tmp_path))
    record, lines = Record.open(Path(out[-1])), err.splitlines()
    previous, induction = (str(Part("head", *where)) for where in (PREVIOUS, INDUCTION))
    assert any(line.startswith(f"{previous} previous token: previous_token 1.00 ") for line in lines)
    assert any(line.startswith(f"{induction} induction: induction 1.00 ") for line in lines)
    assert any(line.startswith("no sentences: ") for line in lines)
    heads = record.result("heads")
    assert isinstance(heads, xr.Dataset)
    planted = float(heads.value.sel(score="induction", layer=INDUCTION[0], head=INDUCTION[1]))
    assert planted > 0.95
    named = pd.read_parquet(record.folder / "tables" / "named.parquet").set_index("part")
    assert named.loc[induction, "value"] == planted
    assert (record.folder / record.run.figures["heads"]).read_bytes().startswith(b"\x89PNG")
    assert list(record.run.models) == ["groundtruth-induction"]
