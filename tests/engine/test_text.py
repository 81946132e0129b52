"""From text to ids: the beginning-of-sequence token exactly once, and every bad prompt refused by name."""

import re

import pytest
import torch

from interp.engine.batch import Batch
from interp.engine.text import Text
from interp.families.tokenizer import HuggingFaceTokenizer
from tests.tiny import END, backend, gpt2_tokenizer

CAT = backend().encode("The cat").ids


@pytest.fixture
def text() -> Text:
    return Text(HuggingFaceTokenizer(gpt2_tokenizer()), n_ctx=24, d_vocab=backend().get_vocab_size())


def test_bos_is_prepended_once_and_the_batch_says_so(text: Text) -> None:
    batch = text.batch("The cat")
    assert batch.tokens.tolist() == [[0, *CAT]]
    assert batch.bos


def test_a_text_that_begins_with_bos_does_not_get_a_second_one(text: Text) -> None:
    batch = text.batch([f"{END}The cat", "The cat"])
    assert batch.tokens.tolist() == [[0, *CAT], [0, *CAT]]
    assert batch.bos
    assert text.batch(f"{END}{END}The cat").tokens.tolist() == [[0, 0, *CAT]], (
        "what the text says twice stays"
    )


def test_bos_can_be_switched_off(text: Text) -> None:
    batch = text.batch("The cat", prepend_bos=False)
    assert batch.tokens.tolist() == [CAT]
    assert not batch.bos


def test_ids_are_taken_as_they_are(text: Text) -> None:
    for ids in (torch.tensor([5, 6]), torch.tensor([[5, 6]])):
        batch = text.batch(ids)
        assert batch.tokens.tolist() == [[5, 6]]
        assert not batch.bos
    given = Batch(torch.tensor([[5, 6]]), bos=True)
    assert text.batch(given) is given


def test_a_tokenizer_without_bos_prepends_nothing_and_says_so() -> None:
    tokenizer = HuggingFaceTokenizer(gpt2_tokenizer())
    tokenizer.bos_id = None
    batch = Text(tokenizer, 24, 400).batch("The cat")
    assert batch.tokens.tolist() == [CAT]
    assert not batch.bos


@pytest.mark.parametrize("side", ["left", "right"])
def test_texts_of_different_lengths_are_padded_and_masked(text: Text, side: str) -> None:
    batch = text.batch(["The cat", "The cat sat on the mat"], side=side)
    assert batch.keep is not None
    assert batch.tokens[0][batch.keep[0]].tolist() == [0, *CAT]
    assert batch.keep[:, 0].tolist() == [side == "right", True]


def test_a_single_token_is_its_id_and_never_bos(text: Text) -> None:
    assert text.single(" cat") == CAT[1]
    assert text.single(END) == 0


def test_a_text_of_several_tokens_is_refused_with_them(text: Text) -> None:
    with pytest.raises(
        ValueError, match=re.escape("'The cat' must be a single token, got 2: ['The', ' cat']")
    ):
        text.single("The cat")
    with pytest.raises(ValueError, match="'' must be a single token, got 0"):
        text.single("")


def test_one_answer_serves_all_rows_or_each_has_its_own(text: Text) -> None:
    cat = CAT[1]
    assert text.targets(" cat", 3).tolist() == [cat] * 3
    assert text.targets([" cat", 7], 2).tolist() == [cat, 7]
    assert text.targets(torch.tensor([3, 4]), 2).tolist() == [3, 4]
    assert text.targets(7, 2).tolist() == [7, 7]


def test_answers_that_do_not_fit_are_refused(text: Text) -> None:
    with pytest.raises(ValueError, match="one answer per prompt is required, got 2 answers for 3 prompts"):
        text.targets([" cat", " dog"], 3)
    with pytest.raises(ValueError, match=re.escape(f"in [0, {text.d_vocab - 1}], got {text.d_vocab}")):
        text.targets(text.d_vocab, 1)
    with pytest.raises(ValueError, match="must be a single token"):
        text.targets("The cat", 1)


def test_pieces_are_the_texts_of_the_tokens(text: Text) -> None:
    assert text.pieces([0, *CAT]) == [END, "The", " cat"]
    assert Text(None, 24, 400).pieces([3, 5]) == ["<3>", "<5>"]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        (["The cat", ""], "the prompt is empty"),
        ([], "at least one prompt is required"),
        ("cat" * 40, "tokens, the model's context holds 24"),
        (torch.zeros(1, 25, dtype=torch.long), "the prompt has 25 tokens, the model's context holds 24"),
        (torch.tensor([[4000]]), "must be in [0, 327], got 4000"),
        (torch.tensor([[-1]]), "got -1"),
        (torch.zeros(1, 0, dtype=torch.long), "at least one token id"),
    ],
    ids=["empty", "one-empty", "none", "long-text", "long-ids", "id-too-large", "negative-id", "no-ids"],
)  # fmt: skip
def test_a_bad_prompt_is_refused(text: Text, prompt: object, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        text.batch(prompt)


def test_a_model_without_a_tokenizer_says_so_when_given_text() -> None:
    text = Text(None, 24, 400)
    with pytest.raises(ValueError, match="this model has no tokenizer: pass token ids"):
        text.batch("The cat")
    assert text.batch(torch.tensor([1, 2])).tokens.tolist() == [[1, 2]]
    assert (text.bos_id, text.eos_id) == (None, None)
