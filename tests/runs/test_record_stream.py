"""Streams in a record: kept, gone on with, noted; and the jobs of an array that share one."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
import xarray as xr

import interp
from interp.cli import main
from interp.runs import memory
from interp.runs.record import Record, ShareDoneError
from interp.runs.workers import Worker
from tests.forking import PATIENCE, PROCESSES
from tests.runs.running import ASKED, Norms
from tests.tiny import hooked

TEXTS = [("The cat sat on the mat. " * 3)[: 3 + 7 * i % 31] for i in range(600)]
EXPERIMENT = '''
"""How large is the stream?"""
from dataclasses import dataclass
from tests.runs.running import Kept, Norms
from tests.runs.test_record_stream import TEXTS
from tests.tiny import hooked

@dataclass(frozen=True)
class Job:
    rows: int = 600

def main(job, record):
    found = record.stream("norms", [Norms(), Kept()], hooked("gpt2"), TEXTS[: job.rows], bootstrap=50)
    record.say(f"mean {float(found['norms'].value)!r}")

main.__annotations__["job"] = Job
from interp.runs.record import Record
main.__annotations__["record"] = Record
'''


def share(folder: Path, shard: str, most: int) -> None:
    """One of two jobs, on a host with room for so many tokens."""
    torch.set_num_threads(1)  # a forked process has no other threads to share the work with
    memory.MOST_ON_HOST = most
    interp.run([Norms()], hooked("gpt2"), TEXTS, out=folder, shard=shard)


@dataclass(frozen=True)
class Nothing:
    """No parameters."""


def streamed(record: Record) -> interp.runs.Results:
    return record.stream("all", ASKED, hooked("gpt2"), [*TEXTS[:40], ""])


def interrupted(root: Path) -> tuple[Record, interp.runs.Results]:
    """A run that ended after its stream."""
    record = Record.create(root, "x", Nothing())
    found = streamed(record)
    record.close()
    return record, found


@pytest.mark.slow
def test_a_stream_is_kept_with_its_model_data_results_and_rejected_rows(tmp_path: Path) -> None:
    with Record.create(tmp_path, "x", Nothing()) as record:
        found = streamed(record)
    plain = interp.run(ASKED, hooked("gpt2"), [*TEXTS[:40], ""])
    there = Record.open(record.folder)
    assert set(there.run.steps) == {"all_norms", "all_kept", "all_by_position"}
    for name, value in plain.items():
        stored = there.result(f"all_{name}")
        assert isinstance(stored, xr.Dataset)
        xr.testing.assert_identical(stored, value)
        xr.testing.assert_identical(found[name], value)
    assert list(there.run.data) == ["all"] and list(there.run.models) == ["gpt2"]
    assert list(there.run.tables) == ["all_rejected"]
    assert "40 rows, " in (record.folder / "log.txt").read_text()


@pytest.mark.slow
def test_a_resumed_record_does_not_run_a_finished_stream_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, first = interrupted(tmp_path)
    monkeypatch.setattr(Worker, "_answer", None)
    with Record.resume(record.folder, Nothing()) as again:
        found = streamed(again)
    xr.testing.assert_identical(found["kept"], first["kept"])


def test_other_data_are_refused_on_resume(tmp_path: Path) -> None:
    record, _ = interrupted(tmp_path)
    with (
        pytest.raises(ValueError, match=r"data\.fingerprint: was"),
        Record.resume(record.folder, Nothing()) as again,
    ):
        again.stream("all", ASKED, hooked("gpt2"), TEXTS[:30])


def test_a_job_of_an_array_ends_with_its_share_and_the_last_goes_on(tmp_path: Path) -> None:
    whole = interp.run([Norms()], hooked("gpt2"), TEXTS)
    for i in (2, 0, 1):
        with Record.create(tmp_path, "x", Nothing()) as record:
            record.shared = (f"{i}/3", tmp_path / "shared")
            ask = partial(record.stream, "all", [Norms()], hooked("gpt2"), TEXTS)
            if i == 1:
                xr.testing.assert_identical(ask()["norms"], whole["norms"])
            else:
                with pytest.raises(ShareDoneError, match=f"share {i}/3 of all is done"):
                    ask()


@pytest.mark.slow
def test_a_share_that_ends_early_reads_as_finished(tmp_path: Path) -> None:
    record = Record.create(tmp_path, "x", Nothing())
    record.shared = ("0/3", tmp_path / "shared")
    with pytest.raises(ShareDoneError), record:
        record.stream("all", [Norms()], hooked("gpt2"), TEXTS)
    assert Record.open(record.folder).state == "finished"
    assert "share 0/3 of all is done" in (record.folder / "log.txt").read_text()


@pytest.mark.slow
def test_shards_on_the_command_line_give_the_numbers_of_one_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sizes.py"
    file.write_text(EXPERIMENT)
    for shard in ("1/2", "0/2"):
        assert main(["run", str(file), "--runs", str(tmp_path / "runs"), "--shard", shard]) == 0
    assert main(["run", str(file), "--runs", str(tmp_path / "runs")]) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mean ")]
    assert len(said) == 2 and said[0] == said[1]
    assert main(["run", str(file), "--runs", str(tmp_path), "--shard", "0/2", "--resume", "last"]) == 2
    assert "without --resume" in capsys.readouterr().err


@pytest.mark.slow
def test_the_first_of_two_jobs_that_start_together_decides_on_the_batches(tmp_path: Path) -> None:
    """Each measures the memory that is free; what the other has written counts."""
    jobs = [
        PROCESSES.Process(target=share, args=(tmp_path / "run", f"{i}/2", most))
        for i, most in enumerate((64, 256))
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(PATIENCE)
    assert [job.exitcode for job in jobs] == [0, 0]
    found = interp.run([Norms()], hooked("gpt2"), TEXTS, out=tmp_path / "run", resume=True)
    assert found.rows == len(TEXTS)
