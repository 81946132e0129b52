"""Rows of repeated random tokens: they repeat, none occurs twice in a period, and no kernel reaches a copy."""

import math

import pytest
import torch

from interp import tasks
from interp.core import memory
from interp.core.kinds import MOST_COUNT
from interp.runs.memory import LiveBytes
from interp.tasks import (
    InContextRegression,
    Place,
    RepeatedSequences,
    RepeatedTokens,
    RepeatingChain,
    SequencePairs,
)

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
    with pytest.raises(ValueError, match="vocab must hold 40 distinct tokens besides BOS"):
        RepeatedTokens(period=40).tokens(31, 0)
    with pytest.raises(ValueError, match="period and repeats of at least 2"):
        RepeatedTokens(repeats=1)


@pytest.mark.parametrize("task", OF_ROWS)
def test_more_rows_than_anybody_could_draw_are_refused(task: str) -> None:
    with pytest.raises(
        ValueError, match=rf"{task}: rows must be a whole number (up|from 1) to {MOST_COUNT}, got"
    ):
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


def test_what_no_row_can_begin_with_or_be_drawn_from_is_refused() -> None:
    rows = RepeatedTokens(4, 2, 2)
    for bos in (math.nan, -99, 1.7, 10**9, True):
        with pytest.raises(ValueError, match="tokens: bos must be a whole number from 0 to"):
            rows.tokens(50, bos=bos)
    with pytest.raises(ValueError, match="tokens: vocab must be"):
        rows.tokens(math.inf)


@pytest.mark.parametrize("task", OF_ROWS)
def test_seeds_and_rows_below_what_numpy_draws_by_are_refused(task: str) -> None:
    with pytest.raises(ValueError, match=f"{task}: seed must be a whole number from 0 on, got -1"):
        getattr(tasks, task)(seed=-1)
    with pytest.raises(ValueError, match=r"rows must be a whole number from 1|one row are required"):
        getattr(tasks, task)(rows=-99)


@pytest.mark.parametrize(
    "task",
    ["AssociativeRecall", "InContextRegression", "SequencePairs", "RepeatedSequences", "RepeatingChain"],
)
def test_a_batch_is_drawn_at_a_place_and_has_a_row(task: str) -> None:
    with pytest.raises(ValueError, match="batch: place must be Place, got None"):
        getattr(tasks, task)().batch(None, 3)
    with pytest.raises(ValueError, match="batch: rows must be a whole number from 1 to"):
        getattr(tasks, task)().batch(Place(0, 1), 0)
    with pytest.raises(ValueError, match="Place: seed must be a whole number from 0 on, got -1"):
        Place(-1, 1)


def test_sequences_beyond_the_memory_are_refused_before_they_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**33)
    refused = {
        "RepeatingChain: d_vocab": lambda: RepeatingChain(d_vocab=10**7).batch(Place(0, 1), 4),
        "tokens of InContextRegression": lambda: InContextRegression(examples=10**7).batch(Place(0, 1), 8),
        "tokens of RepeatedSequences": lambda: RepeatedSequences(width=10**8).batch(Place(0, 1), 8),
        "tokens of SequencePairs": lambda: SequencePairs(high=10**7).batch(Place(0, 1), 100),
        "d_vocab, rows, examples": lambda: RepeatedSequences(d_vocab=10**8).batch(Place(0, 1), 100),
    }
    for words, draw in refused.items():
        with pytest.raises(ValueError, match=rf"{words}.*GB of memory are required, 8.6 GB are free"):
            draw()
