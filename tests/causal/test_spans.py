"""Words are found where they stand, whatever the tokenizer makes of them, and every token after them has its role."""

import pytest
import torch

from interp.causal.spans import ROLES, Mention, SpanPlace, roles, spans, within
from interp.data.batch import Batch, Side
from interp.data.text import Text
from tests.tiny import hooked

PROMPT = "When Mary and John went to the shop, John gave a drink to"


def said(text: Text, batch: Batch, where: SpanPlace | list[SpanPlace]) -> list[str]:
    """The text of each row's span."""
    found = spans(text, batch, where)
    return [
        text.tokenizer.decode(row[first:stop].tolist())
        for row, (first, stop) in zip(batch.tokens, found.tolist(), strict=True)
    ]


@pytest.mark.parametrize("side", ["left", "right"])
def test_words_are_found_between_padding(side: Side) -> None:
    text = hooked().text
    batch = text.batch([PROMPT, "The cat sat on the mat"], side=side)
    assert said(text, batch, [Mention("John", 0), "sat on"]) == [" John", " sat on"]
    both = spans(text, batch, [Mention("John", 0), "cat"])
    again = spans(text, batch, [Mention("John", -1), range(0, 2)])
    assert (again[0] > both[0]).all()
    start = int(batch.real[1].int().argmax())
    assert again[1].tolist() == [start, start + 2]


def test_a_word_of_several_tokens_is_covered_from_its_first_to_its_last() -> None:
    text = hooked().text
    for word in ("Zanzibar", "Côte d'Ivoire", "日本", "🙂"):
        batch = text.batch(f"The capital of {word} is")
        (first, stop), pieces = spans(text, batch, word)[0].tolist(), batch.tokens[0].tolist()
        decode = text.tokenizer.decode
        assert decode(pieces[first:stop]).strip() == word
        assert decode(pieces[:first]).endswith("The capital of") or decode(pieces[:first]).endswith("of ")
        assert decode(pieces[stop:]) == " is"
        assert stop - first > 1


def test_a_token_that_holds_any_part_of_the_word_belongs_to_it() -> None:
    text = hooked().text
    batch = text.batch("The capital of France is")
    whole = spans(text, batch, "France")
    for part in ("rance", "Franc"):
        assert torch.equal(spans(text, batch, part), whole)
    assert int(whole[0, 1] - whole[0, 0]) == 1


BAD: dict[str, tuple[type[Exception], SpanPlace | list[SpanPlace], str]] = {
    "missing": (ValueError, "Paul", "must mention the subject 'Paul', got .*When Mary"),
    "empty": (ValueError, "", "must mention the subject ''"),
    "ambiguous": (ValueError, "John", r"occurs 2 times in .*: say which with Mention\('John', index\)"),
    "no such mention": (IndexError, Mention("John", 2), "'John' occurs 2 times in .*got mention 2"),
    "no such token": (IndexError, range(3, 99), "a range of the prompt's .* tokens is required"),
    "empty range": (IndexError, range(3, 3), "is required"),
    "too many": (ValueError, ["John", "Mary"], "one subject per prompt is required, got 2 for 1 prompts"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_found_is_refused_by_name(case: str) -> None:
    error, where, message = BAD[case]
    text = hooked().text
    with pytest.raises(error, match=message):
        spans(text, text.batch(PROMPT), where)


@pytest.mark.parametrize("side", ["left", "right"])
def test_every_token_from_the_subject_on_has_its_role(side: Side) -> None:
    rows = [list(range(1, 10)), list(range(1, 6)), list(range(1, 5))]
    batch = Batch.of(rows, side=side)
    own = torch.tensor([[1, 5], [2, 3], [1, 4]])
    span = own + batch.real.int().argmax(1)[:, None]
    expected = [
        {"first subject": [1], "middle subject": [2, 3], "last subject": [4], "first after": [5],
         "further": [6, 7], "last token": [8]},
        {"last subject": [2], "first after": [3], "last token": [4]},
        {"first subject": [1], "middle subject": [2], "last token": [3]},
    ]  # fmt: skip
    found = roles(batch, span)
    for i, mine in enumerate(expected):
        for r, role in enumerate(ROLES):
            assert found[i, r][batch.real[i]].nonzero()[:, 0].tolist() == mine.get(role, []), (i, role)
    assert not (found & ~batch.real[:, None]).any()
    assert (found.sum(1) <= 1).all() and torch.equal(found[:2, :3].any(1), within(batch, span)[:2])
