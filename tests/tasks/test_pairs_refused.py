"""What has no aligned pair or no single-token answer is refused by name."""

from collections.abc import Callable

import pytest

from interp.tasks import (
    DocstringArguments,
    Fact,
    Facts,
    GreaterThan,
    IndirectObjects,
    ListCopy,
    RepeatedTokens,
)
from interp.tasks.pairs import Pair, WordRow, pairs_of, row_of
from interp.zoo.groundtruth import Alphabet
from tests.tasks.speakers import demo, tiny, words_with_bos


def test_words_that_are_several_tokens_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"at least 5 names .* got 2 \['Mary', 'John'\]: 'Tom' is \[.*, .*\]"
    ):
        IndirectObjects(3).pairs(tiny(), corruption="abc")
    with pytest.raises(ValueError, match=r"at least 1 places .* got 0 \[\]: 'store' is \[.* and 2 more$"):
        IndirectObjects(3).pairs(tiny())
    with pytest.raises(ValueError, match=r"at least 11 words that are single tokens .* 'Tom' is \[' ', 'T'"):
        RepeatedTokens(10, 2).pairs(Alphabet())
    with pytest.raises(ValueError, match="at least 7 words"):
        ListCopy(3).pairs(Alphabet())
    with pytest.raises(ValueError, match="docstring_arguments requires at least 9 argument names"):
        DocstringArguments(3).pairs(tiny())


def test_years_of_other_tokens_are_named() -> None:
    with pytest.raises(ValueError, match=r"at least 1 nouns .*'war' is"):
        GreaterThan(3).pairs(demo())
    with pytest.raises(ValueError, match=r"here ' 1743' is \['', '1', '7', '4', '3'\]"):
        GreaterThan(3).pairs(words_with_bos())


def test_facts_that_do_not_fit_are_named_with_their_tokens() -> None:
    same = Fact("capital", "France", "Paris"), Fact("capital", "Italy", "Paris")
    with pytest.raises(ValueError, match=r"got none among 2: 'France' is \[.*\], 'Paris' is \[.*\]; 'Italy'"):
        Facts(3, table=same).pairs(demo())
    with pytest.raises(ValueError, match="required for the relation 'river'"):
        Facts(table=(Fact("river", "France", "Seine"),)).pairs(demo())
    with pytest.raises(ValueError, match="no fact of the relation 'capitol'; nearest: capital"):
        Facts(phrasings={"capitol": ["The capital of {subject} is"]})
    with pytest.raises(ValueError, match=r"phrasing requires {subject}, got 'The capital is'"):
        Facts(phrasings={"capital": ["The capital is"]})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: IndirectObjects(0), "rows must be a whole number from 1 to"),
        (lambda: IndirectObjects(templates=()), "words for every field"),
        (lambda: ListCopy(0).pairs(demo()), "rows must be a whole number from 1 to"),
        (lambda: ListCopy(words=1), "at least 2 words"),
        (lambda: RepeatedTokens(2, 2).pairs(demo()), "at least 3 tokens"),
        (lambda: RepeatedTokens(3, 3).pairs(demo()), "two copies"),
        (lambda: RepeatedTokens(3, 2).pairs(demo(), ids=[0, 1, 2, 3]), "4 different ids .* got 3"),
    ],
)
def test_layouts_without_a_question_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_rows_that_are_not_aligned_never_become_pairs() -> None:
    clean = row_of(demo(), "The capital of {subject} is", {"subject": "France"})
    longer = row_of(demo(), "The capital of {subject} is", {"subject": "Kazakhstan"})
    other = row_of(demo(), "The capital of {subject} was", {"subject": "France"})
    for twin, message in (
        (longer, "same tokens at the same columns"),
        (clean, "must differ, and only at subject"),
    ):
        with pytest.raises(ValueError, match=message):
            pairs_of("facts", [Pair(clean, twin, 1, 2, clean.columns, "one")], changes=("subject",))
    twin = WordRow(other.text, (*clean.ids[:-1], clean.ids[-1] + 1), clean.columns)
    with pytest.raises(ValueError, match="only at subject"):
        pairs_of("facts", [Pair(clean, twin, 1, 2, clean.columns, "one")], changes=("subject",))


def test_rows_of_other_columns_need_another_group() -> None:
    rows = [
        Pair(found, row_of(demo(), template, {"name": "Tom"}), 1, 2, found.columns, group="one")
        for template in ("When {name} is", "Then {name} is", "Today we saw {name} is")
        for found in [row_of(demo(), template, {"name": "Mary"})]
    ]
    assert len(pairs_of("names", rows[:2], changes=("name",))) == 2
    with pytest.raises(ValueError, match="one group must have every role at the same columns, got 'one'"):
        pairs_of("names", rows, changes=("name",))


def test_a_role_of_several_tokens_has_no_one_column() -> None:
    found = Facts(20).pairs(demo())
    with pytest.raises(ValueError, match=r"'subject' is 2 to . tokens long"):
        found.columns("subject")
    with pytest.raises(KeyError, match="no role 'subjekt'; nearest: subject"):
        found.columns("subjekt")
