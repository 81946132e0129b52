"""Runs over data killed with SIGKILL, or whose disk fills up, at any moment: they go on to the same bits.

At most the batch at which a run died is computed twice, and none is counted twice.
"""

import random
import signal
import time
from collections import Counter
from functools import cache, partial
from pathlib import Path

import pytest

import interp
from interp.runs import Results
from tests.forking import attempt
from tests.runs.killing import (
    TEXTS,
    Noted,
    batches,
    die_at_rename,
    die_at_write,
    go_on,
    model,
    stream,
    whole,
    without_room,
)
from tests.runs.running import ByPosition, Kept, agree

NO_ROOM = 3

expected = cache(whole)


def computed(log: Path) -> Counter[str]:
    """How often each batch was computed, by its rows."""
    return Counter(log.read_text().splitlines() if log.exists() else [])


def read_back(folder: Path, log: Path) -> Results:
    """The results of a finished run, which has nothing left to compute."""
    before = computed(log)
    asked = [Noted(log), Kept(), ByPosition()]
    found = interp.run(asked, model(), stream(), out=folder, bootstrap=30, resume=True)
    assert computed(log) == before
    return found


def assert_whole(folder: Path, log: Path, deaths: int) -> None:
    """The bits of a run that was never killed, each row once, and at most one batch done again for each death."""
    found, times = read_back(folder, log), computed(log)
    agree(found, expected())
    assert sorted([*found["kept"].prompt.values, *found.rejected.row]) == list(range(len(TEXTS)))
    assert set(times) == {f"{batch.row.tolist()}" for batch in batches()}  # type: ignore[union-attr]
    assert times.total() - len(times) <= deaths


@pytest.mark.slow
def test_a_run_killed_at_random_moments_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """A few batches further each time, and a little later: while it computes, writes or folds."""
    folder, log, generator, deaths = tmp_path / "run", tmp_path / "log", random.Random(1), 0

    def ripe() -> bool:
        if computed(log).total() < most:
            return False
        time.sleep(generator.uniform(0, 0.006))
        return True

    while True:
        most = computed(log).total() + generator.randint(0, 5)
        if (code := attempt(partial(go_on, folder, log), ripe)) == 0:
            break
        assert code == -signal.SIGKILL
        deaths += 1
        assert deaths < 100, "it gets nowhere"
    assert deaths >= 3, "it was hardly killed"
    assert_whole(folder, log, deaths)


@pytest.mark.slow
@pytest.mark.parametrize("at", ["rename", "write"])
def test_a_run_killed_at_every_step_of_writing_goes_on_to_the_same_bits(at: str, tmp_path: Path) -> None:
    """Every attempt dies one step later than the last: halfway through an entry, or with a snapshot not yet named."""
    folder, log, deaths = tmp_path / "run", tmp_path / "log", 0
    dying = die_at_rename if at == "rename" else die_at_write
    while (code := attempt(partial(dying, 1 + deaths, folder, log))) != 0:
        assert code == -signal.SIGKILL
        deaths += 1
        assert deaths < 100, "it gets nowhere"
    assert deaths >= 4, "it was hardly killed"
    left = {path.name for path in folder.iterdir() if path.suffix in {".journal", ".snapshot"}}
    assert len(left) <= 2, f"what dead processes left is still there: {left}"
    assert_whole(folder, log, deaths)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [500, 3_000, 12_000])
def test_a_full_disk_is_said_and_loses_nothing(limit: int, tmp_path: Path) -> None:
    folder, log = tmp_path / "run", tmp_path / "log"
    assert attempt(partial(without_room, limit, folder, log)) == NO_ROOM
    assert "File too large" in (tmp_path / "said.txt").read_text()
    done = computed(log).total()
    assert attempt(partial(without_room, limit, folder, log)) == NO_ROOM, "there is still no room"
    assert computed(log).total() <= done + 1, "what was done is not lost"
    assert attempt(partial(go_on, folder, log)) == 0
    assert_whole(folder, log, deaths=2)
