"""A run folder: made once, computed once, refused to whoever would mix two runs, and whole wherever it was killed."""

import dataclasses
import errno
import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import pytest
import torch
import xarray as xr

from interp import HookedTransformer
from interp.runs.provenance import model_hash
from interp.runs.record import Record
from interp.runs.run_file import RunFile
from tests.configs import CONFIGS, perturbed


@dataclass(frozen=True)
class Inner:
    scale: float = 0.5
    name: str | None = None


@dataclass(frozen=True)
class Job:
    steps: int = 3
    where: Path = Path("here")
    inner: Inner = Inner()


def started(root: Path, job: Job = Job(), **options: object) -> Record:
    return Record.create(root, "trial", job, command="interp run trial.py", seed=3, **options)  # type: ignore[arg-type]


def never() -> xr.Dataset:
    pytest.fail("computed again")


# --- a run from its start to its end ---------------------------------------------------------------------------------


def test_a_new_run_says_what_was_asked_and_by_which_code(tmp_path: Path) -> None:
    file = tmp_path / "trial.py"
    file.write_text('"""Why?"""\n')
    with started(tmp_path / "runs", Job(steps=5), file=file) as record:
        assert re.fullmatch(r"trial-\d{8}T\d{6}Z-[0-9a-f]{6}", record.folder.name)
        assert (record.state, record.resumed) == ("running", False)
    found = json.loads((record.folder / "run.json").read_text())
    assert found["parameters"] == {
        "steps": 5,
        "where": "here",
        "inner": {"type": "Inner", "scale": 0.5, "name": None},
    }
    assert found["defaults"]["steps"] == 3
    assert (found["question"], found["seed"], found["state"]) == ("Why?", 3, "finished")
    (session,) = found["sessions"]
    assert session["versions"]["torch"] == torch.__version__
    assert Record.open(record.folder).state == "finished"


def test_runs_that_start_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        records = list(pool.map(lambda _: started(tmp_path), range(24)))
    assert len({record.folder for record in records}) == len(list(tmp_path.iterdir())) == 24


def test_a_step_is_computed_once_and_loaded_afterwards(tmp_path: Path) -> None:
    values = {
        "scores": xr.Dataset({"x": ("head", [1.0, float("nan")])}, attrs={"unit": "logits"}),
        "rows": pd.DataFrame({"a": [1, 2], "w": ["x", None]}),
        "weights": {"w": torch.tensor([1.5], dtype=torch.bfloat16)},
    }
    record = started(tmp_path)
    first = {name: record.step(name, lambda value=value: value) for name, value in values.items()}  # type: ignore[misc]
    record.close()
    with Record.resume(record.folder, Job()) as again:
        assert again.resumed
        second = {name: again.step(name, never) for name in values}
    for found in (first, second):
        xr.testing.assert_identical(found["scores"], values["scores"])
        pd.testing.assert_frame_equal(found["rows"], values["rows"])
        assert torch.equal(found["weights"]["w"], values["weights"]["w"])
    assert len(RunFile.read(record.folder).sessions) == 2
    with pytest.raises(KeyError, match=r"has no step 'other'; it has \['scores', 'rows', 'weights'\]"):
        Record.open(record.folder).result("other")


def test_tables_figures_and_streams_are_files_of_the_folder(tmp_path: Path) -> None:
    figure = plt.figure()
    with started(tmp_path) as record:
        record.table("named", pd.DataFrame({"x": [0.1]}))
        record.figure("map", figure)
        folder = record.stream_folder("corpus")
    plt.close(figure)
    assert folder == record.folder / "streams" / "corpus" and folder.is_dir()
    assert pd.read_csv(record.folder / "tables/named.csv").x.tolist() == [0.1]
    assert pd.read_parquet(record.folder / "tables/named.parquet").x.tolist() == [0.1]
    assert (record.folder / "figures/map.png").read_bytes().startswith(b"\x89PNG")
    assert record.run.figures == {"map": "figures/map.png"}


def test_lines_go_to_the_log_with_time_and_to_the_logger_not_to_stdout(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "interp.runs.record"), started(tmp_path) as record:
        record.say("one\ntwo")
    assert "one\ntwo" in caplog.messages
    lines = (record.folder / "log.txt").read_text().splitlines()
    (at,) = [i for i, line in enumerate(lines) if line.endswith(" one")]
    assert (
        re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00 one$", lines[at])
        and lines[at + 1] == "    two"
    )
    assert capsys.readouterr().out == ""


def run_into(record: Record, error: BaseException) -> None:
    with record:
        raise error


def test_an_error_ends_the_run_as_failed_with_its_traceback_in_the_log(tmp_path: Path) -> None:
    record = started(tmp_path)
    with pytest.raises(ArithmeticError, match="mine"):
        run_into(record, ArithmeticError("mine"))
    assert (record.state, record.run.error) == ("failed", "ArithmeticError: mine")
    assert "Traceback (most recent call last)" in (record.folder / "log.txt").read_text()
    with Record.resume(record.folder, Job()) as again:
        assert (again.state, again.run.error) == ("running", None)


def test_an_interruption_is_no_failure(tmp_path: Path) -> None:
    record = started(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run_into(record, KeyboardInterrupt())
    assert record.state == "interrupted"


def test_a_run_that_nobody_works_on_any_more_was_interrupted(tmp_path: Path) -> None:
    record = started(tmp_path)
    assert Record.open(record.folder).state == "running"
    record.close()
    assert RunFile.read(record.folder).state == "running"
    assert Record.open(record.folder).state == "interrupted"


def test_unwritable_end_hides_no_error_and_reads_as_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: RunFile, folder: Path) -> RunFile:
        raise OSError(errno.ENOSPC, "No space left on device")

    record = started(tmp_path)
    monkeypatch.setattr(RunFile, "write", full)
    with pytest.raises(ArithmeticError, match="mine"):
        run_into(record, ArithmeticError("mine"))
    assert "could not be written" in caplog.text
    assert record.state == "interrupted"


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "a/b", "../a", "1st", ".hidden", "a b", "x" * 65, "ä"])
def test_a_name_that_is_no_file_name_is_refused(name: str, tmp_path: Path) -> None:
    with started(tmp_path) as record, pytest.raises(ValueError, match=r"a name is a letter .* and up to 63"):
        record.step(name, never)
    with pytest.raises(ValueError, match="a name is a letter"):
        Record.create(tmp_path, name, Job())


def test_the_same_name_twice_is_refused_for_each_kind(tmp_path: Path) -> None:
    value, figure = xr.Dataset({"x": 1.0}), plt.figure()
    made: list[Callable[[Record], object]] = [
        lambda record: record.step("a", lambda: value),
        lambda record: record.table("a", pd.DataFrame({"x": [1]})),
        lambda record: record.figure("a", figure),
        lambda record: record.stream_folder("a"),
    ]
    with started(tmp_path) as record:
        for make in made:
            make(record)
            with pytest.raises(ValueError, match="requires a name of its own, 'a' was there before"):
                make(record)
    plt.close(figure)


def test_other_parameters_are_refused_each_with_what_it_was_and_is(tmp_path: Path) -> None:
    record = started(tmp_path)
    record.close()
    job = Job(steps=4, inner=Inner(name="x"))
    with pytest.raises(ValueError, match=r'steps: was 3, is 4; inner\.name: was null, is "x"; a new folder'):
        Record.resume(record.folder, job)
    Record.resume(record.folder, Job()).close()


@dataclass(frozen=True)
class Renamed:
    steps: int = 3
    where: Path = Path("here")
    outer: int = 1


def test_parameters_that_came_or_went_are_named(tmp_path: Path) -> None:
    record = started(tmp_path)
    record.close()
    with pytest.raises(
        ValueError, match=r"inner\.scale: was 0\.5, is \(absent\); .*outer: was \(absent\), is 1"
    ):
        Record.resume(record.folder, Renamed())


def test_finished_other_and_simultaneous_runs_are_refused(tmp_path: Path) -> None:
    file, other = tmp_path / "trial.py", tmp_path / "other.py"
    for path in (file, other):
        path.write_text("x = 1\n")
    record = started(tmp_path / "runs", file=file)
    with pytest.raises(ValueError, match=r"process \d+ on .* works on .*: one at a time"):
        Record.resume(record.folder, Job(), file=file)
    record.close()
    with pytest.raises(ValueError, match=r"is a run of .*trial\.py, not of .*other\.py"):
        Record.resume(record.folder, Job(), file=other)
    with Record.resume(record.folder, Job(), file=file):
        pass
    with pytest.raises(ValueError, match="is finished: there is nothing to go on with"):
        Record.resume(record.folder, Job(), file=file)


def test_a_refused_run_is_not_kept_locked_or_changed(tmp_path: Path) -> None:
    record = started(tmp_path)
    record.close()
    before = (record.folder / "run.json").read_bytes()
    with pytest.raises(ValueError, match="holds another run of an experiment: steps"):
        Record.resume(record.folder, Job(steps=9))
    assert (record.folder / "run.json").read_bytes() == before
    Record.resume(record.folder, Job()).close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "has no run.json"),
        ("{", "cannot be read"),
        ('{"model": "m", "files": []}', "must be of the format 'interp experiment run, 1', got None"),
        ("[]", "must hold a JSON object, got list"),
        ("\x00", "cannot be read"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    for attempt in (lambda: Record.open(tmp_path), lambda: Record.resume(tmp_path, Job())):
        with pytest.raises(
            ValueError, match=f"the folder of a run of an experiment is required, .*{message}"
        ):
            attempt()
    assert not (tmp_path / ".lock").exists()


def test_a_run_file_of_another_version_says_which_keys_differ(tmp_path: Path) -> None:
    record = started(tmp_path)
    record.close()
    values = json.loads((record.folder / "run.json").read_text())
    (record.folder / "run.json").write_text(json.dumps(values | {"colour": "red"}))
    with pytest.raises(ValueError, match=r"of another version of interp: RunFile differs in \['colour'\]"):
        Record.open(record.folder)


def test_a_run_open_for_reading_cannot_be_written(tmp_path: Path) -> None:
    with started(tmp_path) as record:
        pass
    for reader in (record, Record.open(record.folder)):
        with pytest.raises(ValueError, match=r"is open for reading; Record\.resume goes on with it"):
            reader.step("a", never)
        with pytest.raises(ValueError, match="is open for reading"):
            reader.say("a")


@pytest.mark.parametrize("job", [3, Job, {"steps": 3}])
def test_parameters_are_a_dataclass_instance(job: object, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="parameters must be a dataclass instance"):
        Record.create(tmp_path / "runs", "trial", job)
    assert not (tmp_path / "runs").exists()


@dataclass(frozen=True)
class Wide:
    what: object


def test_a_parameter_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match="a parameter must be a number, text, path or record of these, got Tensor"
    ):
        Record.create(tmp_path, "trial", Wide(torch.zeros(1)))


# --- model, data, code -----------------------------------------------------------------------------------------------


def test_a_run_that_cannot_be_written_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="texts of whole characters are required, got"):
        Record.create(tmp_path, "trial", Job(), command="interp run \udcff.py")
    assert list(tmp_path.iterdir()) == []


def test_another_model_by_the_same_name_is_refused_on_resume(tmp_path: Path) -> None:
    network = perturbed(CONFIGS["gpt2"])
    model = HookedTransformer(network, name="mine")
    record = started(tmp_path)
    record.model(model)
    record.model(model, "twin")
    assert record.run.models == {"mine": model_hash(network), "twin": model_hash(network)}
    record.close()
    with torch.no_grad():
        next(network.parameters()).view(-1)[0] += 1
    with Record.resume(record.folder, Job()) as again:
        with pytest.raises(
            ValueError, match=r"had other models by the name 'mine': was [0-9a-f]{64}, is [0-9a-f]{64}"
        ):
            again.model(model)
        again.model(model, "new")


def test_other_data_by_the_same_name_is_refused_on_resume(tmp_path: Path) -> None:
    record = started(tmp_path)
    record.data("abc")
    record.close()
    with Record.resume(record.folder, Job()) as again:
        again.data("abc")
        with pytest.raises(ValueError, match="had other data by the name 'data': was abc, is abd"):
            again.data("abd")


def test_code_that_changed_since_is_a_warning_in_the_record_and_the_log(tmp_path: Path) -> None:
    file = tmp_path / "trial.py"
    file.write_text("x = 1\n")
    record = started(tmp_path / "runs", file=file)
    record.close()
    Record.resume(record.folder, Job(), file=file).close()
    assert Record.open(record.folder).run.warnings == ()
    file.write_text("x = 2\n")
    with Record.resume(record.folder, Job(), file=file) as again:
        (warning,) = again.run.warnings
    assert warning.startswith("changed since the last session: file_sha256 was ")
    assert f"warning: {warning}" in (record.folder / "log.txt").read_text()


def test_the_time_between_sessions_is_not_counted() -> None:
    def session(started: str, last: str) -> dict[str, object]:
        return {"started": f"2026-01-01T{started}+00:00", "last": f"2026-01-01T{last}+00:00"}

    with_times = [session("10:00:00", "10:00:07"), session("12:00:00", "12:01:00")]
    rest = {"command": "", "pid": 1, "host": "", "platform": "", "versions": {}}
    from interp.runs.run_file import RunSession

    sessions = tuple(
        RunSession(**times, **rest, git_revision=None, git_dirty=None, file_sha256=None)  # type: ignore[arg-type]
        for times in with_times
    )
    run = RunFile("a", None, "", {}, {}, None, sessions)
    assert run.seconds == 67
    assert dataclasses.replace(run, sessions=sessions[:1]).seconds == 7
