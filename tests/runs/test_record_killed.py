"""Runs killed with SIGKILL, or whose disk fills up, at any moment: they go on, and no step is computed twice."""

import random
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from interp.runs.record import Record
from interp.runs.run_file import RunFile
from tests.forking import attempt
from tests.runs.killed import LARGE, NAMES, expected, five_steps, killed_at, large_step, value_of, with_room

MANY = 8


def after(seconds: float) -> Callable[[], bool]:
    """Whether so many seconds have passed since now."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() >= end


def listed(root: Path) -> set[str]:
    """The steps that run.json names; there is at most one run, for each attempt goes on with the last."""
    return {name for path in root.glob("*/run.json") for name in RunFile.read(path.parent).steps}


def computations(root: Path) -> list[str]:
    path = root / "computed.txt"
    return path.read_text().split() if path.exists() else []


def followed(root: Path, work: Callable[[], None], seconds: Callable[[], float] | None = None) -> int:
    """Attempts until one finishes, each killed after so many seconds; returns how many were killed.

    No step is computed after run.json named it.
    """
    killed = 0
    while True:
        there, before = listed(root), len(computations(root))
        code = attempt(work, after(seconds())) if seconds else attempt(work)
        again = there & set(computations(root)[before:])
        assert again == set(), f"computed again: {again}"
        if code == 0:
            return killed
        assert code == -signal.SIGKILL
        killed += 1
        assert killed < 200
        if ended(root):
            return killed


def ended(root: Path) -> bool:
    """Whether the run wrote its end; it may be killed after that."""
    return any(RunFile.read(path.parent).state == "finished" for path in root.glob("*/run.json"))


def check(root: Path) -> None:
    (folder,) = [path.parent for path in root.glob("*/run.json")]
    record = Record.open(folder)
    assert record.state == "finished"
    for i, name in enumerate(NAMES):
        np.testing.assert_array_equal(value_of(record.result(name)), expected(i))
    assert [p for p in folder.rglob(".*") if p.name != ".lock"] == []
    assert set(computations(root)) == set(NAMES)


@pytest.mark.slow
def test_a_run_killed_at_random_moments_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    (tmp_path / "timed").mkdir()
    assert attempt(partial(len, "")) == 0, "starts the process that the others are forked from"
    begun = time.monotonic()
    assert attempt(partial(five_steps, tmp_path / "timed")) == 0
    whole = time.monotonic() - begun
    generator, killed = random.Random(0), 0
    for i in range(20):
        root = tmp_path / str(i)
        root.mkdir()
        begun, before = time.monotonic(), killed
        killed += followed(
            root, partial(five_steps, root), lambda most=whole: generator.uniform(0.2, 1) * most
        )
        check(root)
        if killed == before:  # a busy machine was slower when the time was taken
            whole = min(whole, time.monotonic() - begun)
        if killed >= MANY:
            return
    pytest.fail(f"{killed} of at least {MANY} attempts were killed: the moments are badly chosen")


@pytest.mark.slow
def test_a_run_killed_at_any_of_its_writes_goes_on_to_the_same_numbers(tmp_path: Path) -> None:
    number, code = 0, -signal.SIGKILL
    while code != 0:
        number += 1
        root = tmp_path / str(number)
        root.mkdir()
        code = attempt(partial(killed_at, root, number))
        folders = [path.parent for path in root.glob("*/run.json")]
        if folders and RunFile.read(folders[0]).state == "running":
            assert Record.open(folders[0]).state == "interrupted"
            assert followed(root, partial(five_steps, root)) == 0
        if folders:
            check(root)
    assert number > 2 * len(NAMES)


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_the_run_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    assert attempt(partial(with_room, LARGE, tmp_path)) == 1
    (folder,) = [path.parent for path in tmp_path.glob("*/run.json")]
    record = Record.open(folder)
    assert record.state == "failed"
    error = record.run.error or ""
    assert "no room to write" in error and "large.safetensors" in error
    assert error.endswith(f"make room, then interp run FILE --resume {folder}")
    assert error in (folder / "log.txt").read_text()
    assert [path.name for path in (folder / "results").iterdir()] == ["small.safetensors"]
    assert attempt(partial(large_step, tmp_path)) == 0
    assert computations(tmp_path) == ["small", "large", "large"]
    large = record.result("large")
    assert isinstance(large, dict) and torch.equal(large["x"], torch.arange(LARGE, dtype=torch.float32))
