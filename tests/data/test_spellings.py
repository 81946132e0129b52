"""An answer whose other spelling is a token too is pointed out where the prompt asks for that one."""

import warnings

import pytest

import interp
from interp.core import notes
from interp.data.batch import Text
from interp.data.spellings import Spellings
from tests.tiny import hooked


@pytest.fixture(scope="module")
def text() -> Text:
    return hooked().text


def pair(text: Text) -> str:
    """A word that is one token with a space and another without it."""
    for i in range(text.d_vocab):
        word = text.pieces([i])[0]
        if word[:1] == " " and word[1:].isalpha() and Spellings.of(text, word) is not None:
            return word[1:]
    raise AssertionError("the tokenizer has no such word")


def said(text: Text, answer: object, prompt: str) -> list[str]:
    notes.note.cache_clear()
    found = Spellings.of(text, answer)  # type: ignore[arg-type]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if found is not None:
            found.check(text.batch(prompt))
    return [str(each.message) for each in caught if "answer" in str(each.message)]


def test_an_answer_without_space_after_a_word_is_pointed_out_and_one_with_it_is_not(text: Text) -> None:
    word = pair(text)
    (note,) = said(text, word, "The cat sat")
    assert note == (
        f"the answer {word!r} has no leading space, and the prompt ends in a word: it is taken as it is, and "
        f"{' ' + word!r} is another token"
    )
    assert not said(text, f" {word}", "The cat sat")


def test_of_another_answer_it_is_said_again_and_of_the_same_one_once(text: Text) -> None:
    words = [word for word in text.pieces(range(text.d_vocab)) if word[:1] == " " and word[1:].isalpha()]
    pairs = [word[1:] for word in words if Spellings.of(text, word) is not None][:2]
    assert len(pairs) == 2
    notes.note.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for word in (pairs[0], pairs[1], pairs[0]):
            interp.attribute(hooked(), "The cat sat", word)
    told = [str(each.message) for each in caught if "another token" in str(each.message)]
    assert [message.split("'")[1] for message in told] == pairs


def test_after_a_space_it_is_the_other_way_round(text: Text) -> None:
    word = pair(text)
    assert not said(text, word, "The cat sat ")
    assert len(said(text, [f" {word}"], "The cat sat ")) == 1


@pytest.mark.parametrize("prompt", ['He said "', "3 + (", "a\n"])
def test_after_a_quote_a_bracket_or_a_line_either_may_be_meant(text: Text, prompt: str) -> None:
    word = pair(text)
    assert not said(text, word, prompt) and not said(text, f" {word}", prompt)


def test_ids_and_words_of_one_spelling_are_never_asked_about(text: Text) -> None:
    assert Spellings.of(text, 3, None) is None
    assert Spellings.of(Text(None, 8, 30), 3) is None


def test_a_question_says_it_where_its_answers_meet_the_prompts(text: Text) -> None:
    model, word = hooked(), pair(text)
    notes.note.cache_clear()
    with pytest.warns(interp.Note, match="it is taken as it is, and .* is another token"):
        interp.attribute(model, "The cat sat", word)
