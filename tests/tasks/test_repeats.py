"""Rows of repeated random tokens: they repeat, none occurs twice in a period, and no kernel reaches a copy."""

import pytest
import torch

from interp import tasks
from interp.core import memory
from interp.core.kinds import MOST_COUNT
from interp.runs.memory import LiveBytes
from interp.tasks import RepeatedTokens

OF_ROWS = (
    "Agreement",
    "DocstringArguments",
    "Facts",
    "GreaterThan",
    "IndirectObjects",
    "ListCopy",
    "RepeatedTokens",
)


def test_no_distance_of_the_kernel_reaches_a_copy_or_what_followed_it() -> None:
    assert RepeatedTokens().farthest == 16
    assert RepeatedTokens(period=6).farthest == 4 and RepeatedTokens(period=2).farthest == 0


def test_repeated_rows_have_distinct_tokens_and_really_repeat() -> None:
    tokens = RepeatedTokens(period=5, repeats=3, rows=40).tokens(9, bos=4)
    assert (tokens[:, 0] == 4).all() and (tokens[:, 1:] != 4).all()
    body = tokens[:, 1:].view(40, 3, 5)
    assert (body == body[:, :1]).all()
    assert all(len(set(row.tolist())) == 5 for row in body[:, 0])
    assert set(tokens.unique().tolist()) == set(range(9))


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="40 distinct tokens besides BOS are required"):
        RepeatedTokens(period=40).tokens(31, 0)
    with pytest.raises(ValueError, match="period and repeats of at least 2"):
        RepeatedTokens(repeats=1)


@pytest.mark.parametrize("task", OF_ROWS)
def test_more_rows_than_anybody_could_draw_are_refused(task: str) -> None:
    with pytest.raises(ValueError, match=f"{task}: rows must be a whole number up to {MOST_COUNT}, got"):
        getattr(tasks, task)(rows=999_999_999_999)


@pytest.mark.parametrize("field", ["period", "repeats"])
def test_rows_longer_than_anybody_could_draw_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"RepeatedTokens: {field} must be a whole number up to"):
        RepeatedTokens(**{field: 10**12})


def test_rows_that_do_not_fit_into_memory_are_refused_undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 * 10**9)
    monkeypatch.setattr(torch, "randperm", lambda *_, **__: pytest.fail("drawn"))
    with pytest.raises(
        ValueError, match=r"^10000000 rows of 101 tokens \(RepeatedTokens: rows\): 10 GB of memory"
    ):
        RepeatedTokens(rows=10**7).tokens(100, 0)


def test_a_row_keeps_only_what_was_drawn_of_the_vocabulary() -> None:
    """A view of each permutation would hold the whole vocabulary for every row: 400 kB for 200 bytes."""
    with LiveBytes() as live:
        tokens = RepeatedTokens(rows=400).tokens(20_000, 0)
    assert live.peak < 8 * 20_000 * 40 < 8 * 20_000 * 400
    assert tokens.shape == (400, 101)
