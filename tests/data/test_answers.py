"""An answer whose other spelling is a token too is pointed out where the prompt asks for that one."""

import warnings
from pathlib import Path

import pytest

import interp
from interp.attention import AttentionEntropy
from interp.causal import AttributionPatch, Patch
from interp.core import notes
from interp.core.viewer import notes_of
from interp.data import Pairs
from interp.data.answers import Spacing
from interp.data.sources import open_source
from interp.data.stream import Stream
from interp.data.text import Text
from interp.lenses import BackwardLens, LogitLens, Patchscope
from interp.passes.question import Question
from interp.residual import Attribute
from interp.tokens import TokenAttribution
from tests.tiny import hooked


@pytest.fixture(scope="module")
def text() -> Text:
    return hooked().text


def pair(text: Text) -> str:
    """A word that is one token with a space and another without it."""
    for i in range(text.d_vocab):
        word = text.pieces([i])[0]
        if word[:1] == " " and word[1:].isalpha() and Spacing.of(text, word) is not None:
            return word[1:]
    raise AssertionError("the tokenizer has no such word")


def said(text: Text, answer: object, prompt: str) -> list[str]:
    found = Spacing.of(text, answer)  # type: ignore[arg-type]
    return [] if found is None else list(found.notes(text.batch(prompt)))


def test_answer_without_space_after_a_word_is_pointed_out(text: Text) -> None:
    word = pair(text)
    (note,) = said(text, word, "The cat sat")
    assert note == (
        f"the answer {word!r} has no leading space, and the prompt ends in a word: it is taken as it is, and "
        f"{' ' + word!r} is another token"
    )
    assert not said(text, f" {word}", "The cat sat")


def test_of_another_answer_it_is_said_again_and_of_the_same_one_once(text: Text) -> None:
    words = [word for word in text.pieces(range(text.d_vocab)) if word[:1] == " " and word[1:].isalpha()]
    pairs = [word[1:] for word in words if Spacing.of(text, word) is not None][:2]
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
    assert Spacing.of(text, 3, None) is None
    assert Spacing.of(Text(None, 8, 30), 3) is None


def test_a_question_says_it_where_its_answers_meet_the_prompts(text: Text) -> None:
    model, word = hooked(), pair(text)
    notes.note.cache_clear()
    with pytest.warns(interp.Note, match="it is taken as it is, and .* is another token"):
        interp.attribute(model, "The cat sat", word)


def questions(answer: str) -> list[Question]:
    """Questions about prompts that bring this answer."""
    of_tokens = TokenAttribution(answer, method="relp")
    return [Attribute(answer), LogitLens(answer=answer), BackwardLens(answer), of_tokens]


def test_results_of_questions_with_the_answer_alone_say_it_in_their_notes(text: Text) -> None:
    model, word = hooked(), pair(text)
    prompts = ["The cat sat", 'He said "', "on the mat and on"]
    found = interp.run([*questions(word), AttentionEntropy()], model, prompts)
    (note,) = said(text, word, "The cat sat")
    told = {name: note in notes_of(result) for name, result in found.items()}
    assert told == {name: name != "attention_entropy" for name in found}
    fine = interp.run(questions(f" {word}"), model, prompts)
    assert not [text for result in fine.values() for text in notes_of(result) if "another token" in text]


def test_several_questions_with_one_answer_give_one_warning(text: Text) -> None:
    word = pair(text)
    notes.note.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        interp.run(questions(word), hooked(), ["The cat sat", "The cat sat on"])
    assert sum("another token" in str(each.message) for each in caught) == 1


def test_questions_that_watch_a_metric_say_it_of_the_answer_of_the_metric(text: Text) -> None:
    word = pair(text)
    metric = interp.logit_difference(word, 7)
    pairs = Pairs(["The cat sat"], ["The dog sat"])
    found = interp.run([Patch("z", metric=metric), AttributionPatch("z", metric=metric)], hooked(), pairs)
    (note,) = said(text, word, "The cat sat")
    assert [note in notes_of(result) for result in found.values()] == [True, True]


def test_note_is_made_whatever_part_of_the_data_and_whoever_did_it(text: Text, tmp_path: Path) -> None:
    """A job of an array does the window in question, another process takes it in from the folder."""
    word, model = pair(text), hooked()
    rows = open_source(["He said (", "3 + (", "The cat sat", "a ("])
    prompts = Stream(rows, text, tokens_per_batch=16, rows_per_window=1)
    for share in ("0/2", "1/2"):
        interp.run([Attribute(word)], model, prompts, out=tmp_path, shard=share)
    notes.note.cache_clear()
    with pytest.warns(interp.Note, match="another token"):
        found = interp.run([Attribute(word)], model, prompts, out=tmp_path, resume=True)
    assert list(notes_of(found["attribute"])) == said(text, word, "The cat sat")


def test_patchscope_reads_its_answer_at_the_end_of_the_target_prompt(text: Text) -> None:
    word = pair(text)
    for target, prompt in (("He said (", "The cat sat"), ("The cat sat", "He said (")):
        found = interp.run([Patchscope(target, answer=word)], hooked(), [prompt])["patchscope"]
        assert list(notes_of(found)) == said(text, word, target)


def test_gradient_factors_which_are_no_dataset_say_it_as_a_warning(text: Text) -> None:
    notes.note.cache_clear()
    with pytest.warns(interp.Note, match="another token"):
        interp.lenses.gradient_factors(hooked(), ["The cat sat"], pair(text), matrices=["W_out"])


def test_an_alignment_says_it_of_the_base_prompts_that_it_exchanges_in(text: Text) -> None:
    model, word = hooked(), pair(text)
    bases, sources = ["The cat sat on"] * 4, ["The dog sat on"] * 4
    found = interp.causal.align(
        model, bases, sources, answer=word, layers=[0], pos=[2], method="pca", nulls=()
    )
    assert list(notes_of(found)) == said(text, word, bases[0]) != []
