"""Streaming text: the pieces join to the whole text, and no piece shows half a character."""

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st
from tokenizers import decoders
from torch import Tensor

from interp import Batch
from interp.families.tokenizer import HuggingFaceTokenizer
from interp.passes import HookPoint, Sampling
from interp.passes.generate import UNDECODED, stops_of, text_pieces
from tests.tiny import END, gpt2_tokenizer, hooked

TOKENIZER = HuggingFaceTokenizer(gpt2_tokenizer())
WRITTEN = st.characters(exclude_characters=UNDECODED, codec="utf-8")


class SentencePieces:
    """Decodes like Llama's first tokenizer: words carry their space, which the first one loses; 0 to 255 are bytes."""

    words = ("\u2581the", "\u2581cat", "s", "\u2581")
    bos_id = eos_id = None
    pad_id = 0

    def __init__(self) -> None:
        self._decoder = decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode([f"<0x{i:02X}>" if i < 256 else self.words[i - 256] for i in ids])

    def piece(self, token: int) -> str:
        return self.decode([token])


@given(st.text(WRITTEN, max_size=12), st.text(WRITTEN, max_size=12))
def test_pieces_of_any_text_are_whole_characters_and_join_to_it(before: str, text: str) -> None:
    for tokenizer in (TOKENIZER, SentencePieces()):
        prompt, ids = tokenizer.encode("." + before), tokenizer.encode(text)
        pieces = list(text_pieces(ids, tokenizer, prompt))
        assert "".join(pieces) == text
        assert not any(UNDECODED in piece for piece in pieces)
        assert all(pieces), "no piece is empty"


@given(st.lists(st.integers(0, 399), max_size=12), st.lists(st.integers(0, 399), max_size=12))
def test_pieces_of_any_tokens_join_to_their_text(prompt: list[int], ids: list[int]) -> None:
    """Whatever bytes they are: what never becomes a character is shown in the end, as decoding all at once shows it."""
    whole = "".join(text_pieces(prompt + ids, TOKENIZER))
    assert whole == TOKENIZER.decode(prompt + ids)
    before = TOKENIZER.decode(prompt).rstrip(UNDECODED) if prompt else ""
    assert before + "".join(text_pieces(ids, TOKENIZER, prompt)) == whole


def test_a_character_of_several_tokens_comes_with_its_last_byte() -> None:
    ids = TOKENIZER.encode("a🙂b")
    assert len(ids) == 6, "four bytes, four tokens"
    shown = []
    for n in range(1, 7):
        shown.append("".join(p for p in text_pieces(iter(ids[:n]), TOKENIZER) if UNDECODED not in p))
    assert shown == ["a", "a", "a", "a", "a🙂", "a🙂b"]
    assert list(text_pieces(ids, TOKENIZER)) == ["a", "🙂", "b"]
    assert list(text_pieces(ids[2:], TOKENIZER, ids[:2])) == ["🙂", "b"], "begun in the prompt"


def test_the_bytes_of_a_text_that_breaks_off_are_shown_in_the_end() -> None:
    ids = TOKENIZER.encode("a🙂")[:3]
    assert list(text_pieces(ids, TOKENIZER)) == ["a", UNDECODED]


def test_leading_spaces_stay_where_a_token_alone_would_lose_them() -> None:
    pieces = list(text_pieces([256, 257, 258, 259, 257], SentencePieces(), [256]))
    assert pieces == [" the", " cat", "s", " ", " cat"]
    assert SentencePieces().decode([257]) == "cat"


# --- the model's own methods --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [None, Sampling(2.0, seed=4)])
def test_a_model_streams_the_text_that_it_generates(sampling: Sampling | None) -> None:
    model, prompt = hooked(), "The cat sat"
    pieces = list(model.stream(prompt, 12, sampling=sampling, repetition_penalty=1.2))
    whole = model.to_texts(model.generate(prompt, 12, sampling=sampling, repetition_penalty=1.2))[0]
    assert prompt + "".join(pieces) == whole
    assert len(pieces) > 1


def test_a_padded_prompt_streams_as_the_prompt_alone() -> None:
    model = hooked()
    padded = model.to_batch(["The cat", "The cat sat on the mat and"], padding_side="left")
    assert padded.keep is not None
    row = Batch(padded.tokens[:1], padded.keep[:1], bos=True)
    assert list(model.stream(row, 6)) == list(model.stream("The cat", 6))


def test_several_prompts_cannot_be_streamed_as_one_text() -> None:
    with pytest.raises(ValueError, match="one prompt is required, got 2"):
        hooked().stream(["The cat", "The dog"])


def test_hooks_at_the_call_apply_to_the_whole_stream() -> None:
    model = hooked()

    def always_7(value: Tensor, hook: HookPoint) -> None:
        value[..., 7] = 1e6

    with model.hooks([("unembed.hook_out", always_7)]):
        pieces = model.stream("The cat", 4)
    assert "".join(pieces) == TOKENIZER.piece(7) * 4


def test_a_text_ends_with_any_of_the_stop_tokens() -> None:
    model = hooked()
    text = model.generate("The cat", 8, stop_at_eos=False).tokens[0, -8:].tolist()
    new = [i for i, token in enumerate(text) if token not in text[:i]]
    first, later = text[new[1]], text[new[2]]
    for stop in ([first, later], (model.to_string(later), first), first, model.to_string(first)):
        batch = model.generate("The cat", 8, stop=stop, stop_at_eos=False)
        assert batch.tokens[0].tolist()[-1] == first
        assert "".join(model.stream("The cat", 8, stop=stop)) == model.to_string(
            text[: text.index(first) + 1]
        )


def test_ids_end_a_row_as_tokens_and_texts_as_a_rule() -> None:
    text, end = hooked().text, hooked().text.eos_id
    assert stops_of(text, (), eos=True) == ({end}, None)
    assert stops_of(text, (), eos=False) == (set(), None)
    ids, ends = stops_of(text, [3, " cat"], eos=True)
    assert ids == {3, end} and ends is not None
    before, cat, sat = (text.ids(piece, prepend_bos=False) for piece in ("The", " cat", " sat"))
    assert [*map(ends(before), [*sat, *cat])] == [False] * len(sat) + [True]
    assert not any(map(ends([*before, *cat]), sat)), "what stands in the prompt ends nothing"
    _, ends = stops_of(text, END, eos=False)
    assert end is not None and ends is not None
    assert [*map(ends(before), [*cat, end])] == [False] * len(cat) + [True], "the text of a special token"
    with pytest.raises(
        ValueError, match=r"texts, token ids or functions of the new text, got 1.5 among them"
    ):
        stops_of(text, [3, 1.5], eos=False)  # type: ignore[list-item]
