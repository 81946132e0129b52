"""What has no aligned pair or no single-token answer is refused by name."""

import pytest

from interp.zoo import groundtruth, pairs, tasks
from interp.zoo.pair_rows import Pair, pairs_of
from interp.zoo.pair_tokens import Row, row_of
from interp.zoo.pairs import copy, docstring_arguments, facts, greater_than, indirect_objects
from tests.zoo.speakers import demo, tiny, words_with_bos


def test_words_that_are_several_tokens_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"at least 5 names .* got 2 \['Mary', 'John'\]: 'Tom' is \[.*, .*\]"
    ):
        indirect_objects(tiny(), 3, corruption="abc")
    with pytest.raises(ValueError, match=r"at least 1 places .* got 0 \[\]: 'store' is \[.* and 2 more$"):
        indirect_objects(tiny(), 3)
    with pytest.raises(ValueError, match=r"at least 11 words that are single tokens .* 'Tom' is \[' ', 'T'"):
        pairs.repeated_sequences(groundtruth.Alphabet(), 3)
    with pytest.raises(ValueError, match="at least 7 words"):
        copy(groundtruth.Alphabet(), 3)
    with pytest.raises(ValueError, match="docstring_arguments requires at least 9 argument names"):
        docstring_arguments(tiny(), 3)


def test_years_of_other_tokens_are_named() -> None:
    with pytest.raises(ValueError, match=r"at least 1 nouns .*'war' is"):
        greater_than(demo(), 3)
    with pytest.raises(ValueError, match=r"here ' 1743' is \['', '1', '7', '4', '3'\]"):
        greater_than(words_with_bos(), 3)


def test_facts_that_do_not_fit_are_named_with_their_tokens() -> None:
    same = [tasks.Fact("capital", "France", "Paris"), tasks.Fact("capital", "Italy", "Paris")]
    with pytest.raises(ValueError, match=r"got none among 2: 'France' is \[.*\], 'Paris' is \[.*\]; 'Italy'"):
        facts(demo(), 3, table=same)
    with pytest.raises(ValueError, match="required for the relation 'river'"):
        facts(demo(), 3, table=[tasks.Fact("river", "France", "Seine")])
    with pytest.raises(ValueError, match="no fact of the relation 'capitol'; nearest: capital"):
        facts(demo(), 3, phrasings={"capitol": ["The capital of {subject} is"]})
    with pytest.raises(ValueError, match=r"phrasing requires {subject}, got 'The capital is'"):
        facts(demo(), 3, phrasings={"capital": ["The capital is"]})
    with pytest.raises(ValueError, match="a list of phrasings of 'capital'"):
        facts(demo(), 3, phrasings={"capital": "The capital of {subject} is"})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: indirect_objects(demo(), 0), "n of at least 1"),
        (lambda: pairs.repeated_sequences(demo(), 2, period=2), "at least 3 tokens"),
        (lambda: pairs.repeated_sequences(demo(), 2, period=3, ids=[0, 1, 2, 3]), "4 different ids .* got 3"),
        (lambda: copy(demo(), 2, words=1), "at least 2 words"),
    ],
)
def test_layouts_without_a_question_are_refused(call: object, message: str) -> None:
    assert callable(call)
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
    twin = Row(other.text, (*clean.ids[:-1], clean.ids[-1] + 1), clean.columns)
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
    found = facts(demo(), 20)
    with pytest.raises(ValueError, match=r"'subject' is 2 to . tokens long"):
        found.columns("subject")
    with pytest.raises(KeyError, match="no role 'subjekt'; nearest: subject"):
        found.columns("subjekt")
