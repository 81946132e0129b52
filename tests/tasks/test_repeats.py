"""Rows of repeated random tokens: they repeat, none occurs twice in a period, and no kernel reaches a copy."""

import pytest

from interp.tasks import RepeatedTokens


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
