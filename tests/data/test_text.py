"""From text to ids: the beginning-of-sequence token exactly once, and every bad prompt refused by name."""

import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from tokenizers import Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from interp import HookedTransformer
from interp.core.notes import Note, note
from interp.data.batch import Batch
from interp.data.text import Text
from interp.data.tokenizers import BatchTokenizer, SpecialTokenizer, Tokenizer as Tokenizer_
from interp.families.tokenizer import FileTokenizer, HuggingFaceTokenizer
from tests.configs import build
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
    assert text.batch(given).tokens is given.tokens


@pytest.mark.kinds
def test_ids_may_be_numbers_and_arrays_of_any_library(text: Text) -> None:
    wanted = text.batch([[1, 2, 3], [4, 5, 6]]).tokens
    rows = torch.tensor([[1, 2, 3], [4, 5, 6]])
    for each in (
        rows,
        rows.numpy(),
        rows.numpy().astype("uint16"),
        list(rows),
        list(rows.numpy()),
        rows.byte(),
    ):
        assert torch.equal(text.batch(each).tokens, wanted)
    assert torch.equal(text.batch([np.int64(1), torch.tensor(2), 3]).tokens, wanted[:1])
    ragged = text.batch([rows[0], rows[1, :1]])
    assert ragged.keep is not None
    assert ragged.lengths.tolist() == [3, 1]
    for answer in (5, np.int64(5), torch.tensor(5), [np.int64(5)], [torch.tensor(5)], rows[1, 1:2].numpy()):
        assert text.tokens(answer).tolist() == [5]


def test_a_mask_is_no_prompt_and_a_side_is_left_or_right(text: Text) -> None:
    for each in (torch.tensor([[True]]), np.array([[True]]), [True, False], [torch.tensor([True])]):
        with pytest.raises(ValueError, match=r"token ids are required|prompts are required"):
            text.batch(each)
    with pytest.raises(ValueError, match="side must be 'left' or 'right', got 'LEFT'"):
        text.batch(["a"], side="LEFT")  # type: ignore[arg-type]


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
    with pytest.raises(
        ValueError,
        match="one answer for all prompts, or one for each, is required, got 2 answers for 3 prompts",
    ):
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


# --- BOS, said once -----------------------------------------------------------------------------------------------


def adding(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """The same, with its end of text before every text."""
    around = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    around.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=around, eos_token=END)


def notes_of(tokenizer: Tokenizer_, *, prepend_bos: bool = True, d_vocab: int = 400) -> list[str]:
    """What is said as two texts enter, twice."""
    note.cache_clear()
    text = Text(tokenizer, 24, d_vocab)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for _ in range(2):
            text.batch(["The cat", "a"], prepend_bos=prepend_bos)
            text.many(["The cat"], prepend_bos=prepend_bos)
    return [str(each.message) for each in found if each.category is Note]


def test_bos_that_the_models_own_tokenizer_lacks_is_said_once() -> None:
    said = (
        f"texts begin with {END} (BOS) here; this model's own tokenizer would not prepend it; "
        "prepend_bos=False (--prepend-bos False) leaves it out"
    )
    assert notes_of(HuggingFaceTokenizer(gpt2_tokenizer())) == [said]
    assert notes_of(HuggingFaceTokenizer(gpt2_tokenizer()), prepend_bos=False) == []


def test_bos_of_the_tokenizers_own_and_of_our_own_models_are_not_said() -> None:
    assert notes_of(HuggingFaceTokenizer(adding(gpt2_tokenizer()))) == []
    assert notes_of(FileTokenizer(backend(), END)) == []
    demo = HookedTransformer.from_pretrained("demo-attn-2l")
    assert notes_of(demo.text.tokenizer, d_vocab=demo.cfg.d_vocab) == []


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (f"$A {END}", rf"'a' is {re.escape(END)} a here; .* makes a {re.escape(END)} of it"),
        (
            f"{END} $A {END}",
            rf"'a' is {re.escape(END)} a here; .* makes {re.escape(END)} a {re.escape(END)} of it",
        ),
        (
            f"{END} {END} $A",
            rf"'a' is {re.escape(END)} a here; .* makes {re.escape(END)} {re.escape(END)} a of it",
        ),
    ],
)
def test_special_tokens_of_the_tokenizers_own_that_are_not_added_are_said(template: str, said: str) -> None:
    around = Tokenizer.from_str(backend().to_str())
    around.post_processor = processors.TemplateProcessing(single=template, special_tokens=[(END, 0)])
    found = notes_of(HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=around, eos_token=END)))
    assert len(found) == 1 and re.search(said, found[0]), found
    assert "give what the tokenizer returns as the prompt" in found[0]


def test_a_bos_that_the_model_has_no_row_for_is_left_out_and_said() -> None:
    theirs = gpt2_tokenizer()
    theirs.add_special_tokens({"bos_token": "<s>"})
    adapted, d_vocab = HuggingFaceTokenizer(theirs), backend().get_vocab_size()
    assert notes_of(adapted, d_vocab=d_vocab) == [
        f"texts begin without BOS here: token ids must be in [0, {d_vocab - 1}], got {d_vocab}, the tokenizer's '<s>', "
        "which this model has no row for"
    ]
    text = Text(adapted, 24, d_vocab)
    batch = text.batch("The cat")
    assert (batch.tokens.tolist(), batch.bos, text.bos_id, text.eos_id) == ([CAT], False, None, 0)


# --- what encoders expect around a text -------------------------------------------------------------------------------

CLS, SEP, PAD = (backend().get_vocab_size() + i for i in range(3))


def bert_tokenizer(bos: str | None = None) -> PreTrainedTokenizerFast:
    """Writes [CLS] before a text and [SEP] after it, as BERT's does."""
    special = ["[CLS]", "[SEP]", "[PAD]"]
    around = Tokenizer.from_str(backend().to_str())
    around.add_special_tokens(special)
    around.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
    )
    names = dict(zip(("cls_token", "sep_token", "pad_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=around, bos_token=bos, **names)


@pytest.fixture
def around() -> Text:
    return Text(HuggingFaceTokenizer(bert_tokenizer()), n_ctx=24, d_vocab=PAD + 1, special=True)


def test_special_tokens_are_those_that_the_tokenizer_itself_adds(around: Text) -> None:
    batch = around.batch("The cat")
    assert batch.tokens.tolist() == [[CLS, *CAT, SEP]] == [bert_tokenizer()("The cat")["input_ids"]]
    assert not batch.bos, "no BOS was prepended that somebody could cut off"


def test_without_them_a_text_is_its_tokens_alone(around: Text) -> None:
    batch = around.batch("The cat", prepend_bos=False)
    assert batch.tokens.tolist() == [CAT]
    assert not batch.bos


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_stands_outside_the_special_tokens(around: Text, side: str) -> None:
    texts = ["The cat", "The cat sat on the mat"]
    batch, wanted = around.batch(texts, side=side), bert_tokenizer()(texts, padding=True, padding_side=side)
    assert batch.tokens.tolist() == wanted["input_ids"]
    assert batch.keep is not None and batch.keep.long().tolist() == wanted["attention_mask"]
    assert PAD in batch.tokens[0].tolist()
    for row, text in enumerate(texts):
        assert batch.tokens[row][batch.keep[row]].tolist() == around.ids(text)


def test_a_bos_beside_them_is_not_added_again() -> None:
    """Of a tokenizer with a BOS an encoder gets what the tokenizer adds, and a decoder the BOS alone."""
    adapted = HuggingFaceTokenizer(bert_tokenizer(bos=END))
    assert adapted.bos_id == 0
    encoder = Text(adapted, 24, PAD + 1, special=True).batch("The cat")
    assert encoder.tokens.tolist() == [[CLS, *CAT, SEP]]
    assert not encoder.bos
    plain = Text(adapted, 24, PAD + 1).batch("The cat")
    assert plain.tokens.tolist() == [[0, *CAT]]
    assert plain.bos


def test_special_tokens_and_the_text_between_them_survive_the_way_back(around: Text) -> None:
    text = "The cat sat , on  the mat."
    ids = around.ids(text)
    assert around.tokenizer.decode(ids[1:-1]) == text
    assert around.tokenizer.decode(around.ids(text, prepend_bos=False)) == text
    assert around.pieces(ids)[0] == "[CLS]" and around.pieces(ids)[-1] == "[SEP]"
    assert "".join(around.pieces(ids)[1:-1]) == text


def test_a_text_that_writes_them_out_has_them_twice(around: Text) -> None:
    """As Hugging Face's own tokenizer: nothing is taken out of a text."""
    text = "[CLS]The cat[SEP]"
    assert around.ids(text) == [CLS, CLS, *CAT, SEP, SEP] == bert_tokenizer().encode(text)


def test_an_answer_is_a_token_without_any_around_it(around: Text) -> None:
    assert around.single(" cat") == CAT[1]
    assert around.targets([" cat", "[SEP]"], 2).tolist() == [CAT[1], SEP]


def test_special_tokens_count_towards_the_context(around: Text) -> None:
    words = " cat" * 22
    assert around.batch(words).tokens.shape == (1, 24)
    with pytest.raises(ValueError, match="the prompt has 25 tokens, the model's context holds 24"):
        around.batch(words + " cat")
    assert around.batch(words + " cat", prepend_bos=False).tokens.shape == (1, 23)


def test_an_empty_prompt_is_refused_though_it_would_have_special_tokens(around: Text) -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        around.batch("")


def test_a_tokenizer_that_knows_none_gives_bos_alone() -> None:
    file = FileTokenizer(backend(), END)
    assert isinstance(HuggingFaceTokenizer(gpt2_tokenizer()), SpecialTokenizer)
    assert not isinstance(file, SpecialTokenizer)
    batch = Text(file, 24, 400, special=True).batch("The cat")
    assert batch.tokens.tolist() == [[0, *CAT]]
    assert batch.bos


def test_encoders_get_special_tokens_and_decoders_do_not() -> None:
    adapted = HuggingFaceTokenizer(bert_tokenizer(bos=END))
    for name, row in (
        ("masked-lm", [CLS, *CAT, SEP]),
        ("bidirectional", [CLS, *CAT, SEP]),
        ("gpt2", [0, *CAT]),
    ):
        model = HookedTransformer(build(name), adapted)
        model.text.d_vocab = PAD + 1  # these models have fewer tokens; only the text counts here
        assert model.to_tokens("The cat").tolist() == [row]


@given(st.lists(st.text("ab cé", min_size=1) | st.just(END), max_size=8), st.booleans())
def test_texts_encoded_together_are_those_encoded_alone(texts: list[str], prepend_bos: bool) -> None:
    for tokenizer in (HuggingFaceTokenizer(gpt2_tokenizer()), FileTokenizer(backend(), END)):
        text = Text(tokenizer, 12, backend().get_vocab_size())
        assert isinstance(tokenizer, BatchTokenizer)
        assert text.many(texts, prepend_bos=prepend_bos) == [
            text.ids(t, prepend_bos=prepend_bos) for t in texts
        ]
    with pytest.raises(ValueError, match="the prompt is empty"):
        text.many(["a", ""])
