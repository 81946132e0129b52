"""The two tokenizer libraries behind one interface: which tokens serve as what, and that no text is lost."""

from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from interp.families.tokenizer import FileTokenizer, HuggingFaceTokenizer
from tests.tiny import CORPUS, END, backend, gpt2_tokenizer

TEXTS = ("The cat sat , on the mat .", "  two  spaces", "Zoë naïve 日本語 🙂\n\ttabs", f"a{END}b")


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    backend().save(str(path))
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_texts_round_trip_exactly(text: str, stored: Path) -> None:
    for tokenizer in (HuggingFaceTokenizer(gpt2_tokenizer()), FileTokenizer.read(stored, END)):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert len(ids) > 1


def test_both_libraries_give_the_same_ids(stored: Path) -> None:
    both = HuggingFaceTokenizer(gpt2_tokenizer()), FileTokenizer.read(stored, END)
    for text in TEXTS:
        assert both[0].encode(text) == both[1].encode(text)


def test_half_of_a_surrogate_pair_is_refused_with_its_place(stored: Path) -> None:
    for tokenizer in (HuggingFaceTokenizer(gpt2_tokenizer()), FileTokenizer.read(stored, END)):
        with pytest.raises(ValueError, match="half of a surrogate pair at 1"):
            tokenizer.encode("a\ud83d")
    with pytest.raises(ValueError, match="half of a surrogate pair at 0"):
        HuggingFaceTokenizer(gpt2_tokenizer()).with_special("\udcff")


def test_pieces_join_to_the_text() -> None:
    tokenizer = HuggingFaceTokenizer(gpt2_tokenizer())
    pieces = [tokenizer.piece(i) for i in tokenizer.encode(CORPUS[0])]
    assert "".join(pieces) == CORPUS[0]
    assert " the" in pieces


def test_the_end_of_text_serves_as_beginning_and_padding_where_there_is_none() -> None:
    tokenizer = HuggingFaceTokenizer(gpt2_tokenizer())
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 0, 0)


def test_special_tokens_of_its_own_are_used() -> None:
    theirs = gpt2_tokenizer()
    theirs.add_special_tokens({"bos_token": "<s>", "pad_token": "<pad>"})
    tokenizer = HuggingFaceTokenizer(theirs)
    assert tokenizer.bos_id == theirs.convert_tokens_to_ids("<s>")
    assert tokenizer.pad_id == theirs.convert_tokens_to_ids("<pad>")
    assert tokenizer.eos_id == 0
    assert len({tokenizer.bos_id, tokenizer.pad_id, tokenizer.eos_id}) == 3


def test_a_tokenizer_without_special_tokens_has_none() -> None:
    tokenizer = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend()))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (None, None, 0)


def test_encoding_adds_nothing_even_where_the_tokenizer_would() -> None:
    adding = tokenizers.Tokenizer.from_str(backend().to_str())
    adding.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    theirs = PreTrainedTokenizerFast(tokenizer_object=adding, eos_token=END)
    assert theirs.encode("The cat")[0] == 0
    assert HuggingFaceTokenizer(theirs).encode("The cat") == theirs.encode("The cat")[1:]
    assert FileTokenizer(adding, END).encode("The cat") == theirs.encode("The cat")[1:]


def test_a_sentencepiece_token_keeps_its_leading_space() -> None:
    metaspace = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    metaspace.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace.decoder = decoders.Metaspace()
    metaspace.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>"], show_progress=False)
    )
    tokenizer = HuggingFaceTokenizer(PreTrainedTokenizerFast(tokenizer_object=metaspace))
    ids = tokenizer.encode("The cat")
    assert "".join(tokenizer.piece(i) for i in ids) == " The cat"
    assert tokenizer.decode(ids[-1:]).startswith(" ") is False, "which is why piece() exists"


def test_a_file_without_the_token_that_begins_a_sequence_is_refused(stored: Path) -> None:
    with pytest.raises(ValueError, match=r"no token '<\|bos\|>' to begin a sequence with"):
        FileTokenizer.read(stored, "<|bos|>")
