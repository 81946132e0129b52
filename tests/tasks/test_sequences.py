"""Every generator against a reader who finds the answer in the row itself, token by token."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interp.lab.training.losses import TrainingData
from interp.tasks import (
    AssociativeRecall,
    InContextRegression,
    RepeatedSequences,
    RepeatingChain,
    SequencePairs,
)
from interp.tasks.examples import Place

REPEATS = RepeatedSequences(d_vocab=20, width=30, low=3, high=9)
RECALL = AssociativeRecall(d_vocab=21, pairs=5, queries=3)
REGRESSION = InContextRegression(d_vocab=12, inputs=3, examples=4)
CHAIN = RepeatingChain(d_vocab=7, width=40, low=5, high=15)
ALL = [REPEATS, CHAIN, RECALL, REGRESSION, SequencePairs(9, 2, 5), SequencePairs(9, 2, 5, backwards=True)]


def repeated(row: list[int]) -> dict[int, int]:
    """Column -> the token that must stand there: from the first token that came before on, what followed it."""
    period = next(n for n in range(1, len(row)) if row[1 + n] == row[1])
    return {i: row[i - period] for i in range(1 + period, len(row))}


def recalled(row: list[int]) -> dict[int, int]:
    pairs = dict(zip(row[1:11:2], row[2:11:2], strict=True))
    return {i + 1: pairs[row[i]] for i in range(11, len(row), 2)}


def regressed(row: list[int]) -> dict[int, int]:
    hidden = row[1:4].index(row[4])
    return {i + 3: row[i + hidden] for i in range(5, len(row), 4)}


@pytest.mark.parametrize(
    ("data", "reader"), [(REPEATS, repeated), (RECALL, recalled), (REGRESSION, regressed)]
)
def test_what_is_determined_can_be_read_off_the_row(
    data: TrainingData, reader: Callable[[list[int]], dict[int, int]]
) -> None:
    found = data.batch(Place(3, 5), 50)
    assert found.determined is not None
    assert found.batch.tokens.shape == (50, data.width)
    assert int(found.batch.tokens.max()) < data.d_vocab and (found.batch.tokens[:, 0] == 0).all()
    for row, mask in zip(found.batch.tokens.tolist(), found.determined.tolist(), strict=True):
        answers = reader(row)
        assert [i + 1 for i, here in enumerate(mask) if here] == sorted(answers)
        assert all(row[i] == token for i, token in answers.items())
        assert 0 not in row[1:]


def test_chain_repeats_and_its_first_copies_have_the_chains_chances() -> None:
    found = CHAIN.batch(Place(1, 2), 4000)
    assert found.determined is not None
    tokens, counts = found.batch.tokens, torch.zeros(7, 7)
    periods = (~found.determined).sum(1)
    assert set(periods.tolist()) == set(range(5, 16))
    for row, period in zip(tokens, periods.tolist(), strict=True):
        assert torch.equal(row[1 + period :], row[1:-period])
        counts.index_put_((row[:period], row[1 : 1 + period]), torch.ones(()), accumulate=True)
    assert not counts[:, 0].any()
    share = counts[:, 1:] / counts.sum(1, keepdim=True)
    often = counts.sum(1) > 3000
    assert often.sum() >= 4
    torch.testing.assert_close(share[often], torch.tensor(CHAIN.chain).float()[often], atol=0.03, rtol=0)


def test_periods_cover_their_range_and_no_token_comes_twice_in_one() -> None:
    tokens = REPEATS.batch(Place(0, 0), 300).batch.tokens.tolist()
    periods = [min(repeated(row)) - 1 for row in tokens]
    assert set(periods) == set(range(REPEATS.low, REPEATS.high + 1))
    assert all(len(set(row[1 : 1 + n])) == n for row, n in zip(tokens, periods, strict=True))


def test_keys_and_values_are_of_different_halves_and_keys_differ() -> None:
    for row in RECALL.batch(Place(0, 0), 50).batch.tokens.tolist():
        assert max(row[1::2]) <= 10 < min(row[2::2])
        assert len(set(row[1:11:2])) == 5 and len(set(row[11::2])) == 3


def test_the_hidden_coordinate_is_any_of_them() -> None:
    tokens = REGRESSION.batch(Place(0, 0), 100).batch.tokens.tolist()
    assert {row[1:4].index(row[4]) for row in tokens} == {0, 1, 2}


@pytest.mark.parametrize("backwards", [False, True])
def test_a_target_is_its_source_between_start_and_end(backwards: bool) -> None:
    found = SequencePairs(9, 2, 5, backwards).batch(Place(1, 1), 200)
    assert found.source is not None and found.determined is not None
    rows = [found.source.tokens, found.source.real, found.batch.tokens, found.batch.real, found.determined]
    lengths = set()
    for source, real, target, kept, asked in zip(*(each.tolist() for each in rows), strict=True):
        said = [token for token, keep in zip(source, real, strict=True) if keep]
        told = [token for token, keep in zip(target, kept, strict=True) if keep]
        assert said[-1] == 1 and min(said[:-1]) >= 2
        assert told == [0, *(said[-2::-1] if backwards else said[:-1]), 1]
        assert sum(asked) == len(told) - 1 == sum(kept[1:]) and asked == kept[1:]
        assert not any(source[len(said) :] + target[len(told) :])
        lengths.add(len(said) - 1)
    assert lengths == {2, 3, 4, 5}


@pytest.mark.parametrize("data", ALL, ids=repr)
def test_rows_depend_on_their_place_alone(data: TrainingData) -> None:
    def tokens(place: Place) -> Tensor:
        return data.batch(place, 8).batch.tokens

    first = tokens(Place(0, 7))
    tokens(Place(0, 3))
    assert torch.equal(tokens(Place(0, 7)), first)
    others = [tokens(place) for place in (Place(0, None), Place(0, 0), Place(0, 8), Place(1, 7), Place(7, 0))]
    assert not any(torch.equal(other, first) for other in others)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: RepeatedSequences(d_vocab=8, low=4, high=8),
            "more than 8 ids for the longest period, got 8",
        ),
        (lambda: RepeatedSequences(width=20, low=4, high=19), "a width of 21 or more"),
        (lambda: RepeatingChain(width=20, high=19), "a width of 21 or more"),
        (lambda: RepeatingChain(concentration=0.0), "a concentration above 0"),
        (lambda: AssociativeRecall(d_vocab=9, pairs=5), "pairs <= 4"),
        (lambda: AssociativeRecall(pairs=2, queries=3), "1 to 2 queries, got 3"),
        (lambda: InContextRegression(inputs=1), "2 inputs"),
        (lambda: SequencePairs(low=5, high=4), "1 <= low <= high, got 5 and 4"),
    ],
)
def test_tasks_that_cannot_be_are_refused(make: Callable[[], TrainingData], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
