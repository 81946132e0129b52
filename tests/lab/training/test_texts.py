"""Packed texts: every token once per epoch, no text sees another, and files come in as they are."""

from collections import Counter
from pathlib import Path

import pytest
import torch

from interp.data.batch import Batch
from interp.lab.training.losses import logits
from interp.lab.training.texts import PackedTexts
from interp.lab.training.vocabulary import Vocabulary
from interp.tasks.examples import Examples, Place
from tests.configs import build
from tests.tolerances import assert_close

LINES = [f"{i}: the cat sat on the mat and saw {i * i} dogs" for i in range(60)]
VOCABULARY = Vocabulary.learned(LINES, 300)
TEXTS = [[0, *VOCABULARY.tokenizer.encode(line)] for line in LINES]
DATA = PackedTexts(TEXTS, VOCABULARY, width=16)


def test_an_epoch_has_every_token_once_but_for_the_last_part_of_a_row() -> None:
    trained = TEXTS[:57]
    assert DATA.tokens == sum(map(len, trained)) and DATA.rows == DATA.tokens // 16
    whole = DATA.batch(Place(0, 0), DATA.rows).batch
    assert whole.keep is None and whole.documents is not None
    seen = Counter(whole.tokens.flatten().tolist())
    every = Counter(token for text in trained for token in text)
    assert seen <= every and (every - seen).total() == DATA.tokens % 16


def test_texts_of_a_row_are_stretches_and_the_next_row_goes_on() -> None:
    whole = DATA.batch(Place(0, 0), DATA.rows).batch
    assert whole.documents is not None
    stretches: dict[int, list[int]] = {}
    for tokens, documents in zip(whole.tokens.tolist(), whole.documents.tolist(), strict=True):
        assert documents == sorted(documents)
        for token, document in zip(tokens, documents, strict=True):
            stretches.setdefault(document, []).append(token)
    *complete, last = stretches.values()
    assert all(text in TEXTS for text in complete) and any(last == text[: len(last)] for text in TEXTS)
    assert len({tuple(text) for text in complete}) == len(complete) == 56


def test_texts_of_one_row_do_not_see_each_other() -> None:
    model = build("gpt2")
    row = PackedTexts([[1, 2, 3, 4, 5]] * 6 + [[7, 8, 9]] * 8, VOCABULARY, width=16, held_out=0.5)
    examples = row.batch(Place(0, None), 1)
    found = logits(model, examples)
    for start in (0, 3, 6):
        assert_close(found[0, start : start + 3], model(torch.tensor([[7, 8, 9]]))[0])
    joined = logits(model, Examples(Batch(examples.batch.tokens)))
    assert (joined[0, 3:6] - found[0, 3:6]).abs().max() > 1e-3


def test_rows_are_the_same_however_steps_are_cut_and_epochs_differ() -> None:
    n = DATA.rows
    fours = torch.cat([DATA.batch(Place(0, step), 4).batch.tokens for step in range(n // 2)])
    assert torch.equal(DATA.batch(Place(0, 0), 2 * n).batch.tokens[: len(fours)], fours)
    both = DATA.batch(Place(0, 0), 2 * n).batch.tokens
    assert not torch.equal(both[:n], both[n:])
    assert torch.equal(DATA.batch(Place(0, 1), n).batch.tokens, both[n:])
    assert not torch.equal(DATA.batch(Place(1, 0), n).batch.tokens, both[:n])


def test_held_out_texts_are_the_last_ones() -> None:
    kept = DATA.batch(Place(0, None), 100).batch
    joined = [token for text in TEXTS[57:] for token in text]
    assert kept.tokens.flatten().tolist() == joined[: len(joined) // 16 * 16]


def test_file_is_read_by_line_and_long_lines_split_with_a_beginning_each(
    tmp_path: Path,
) -> None:
    path = tmp_path / "texts.txt"
    path.write_text("\n".join(LINES) + "\n")
    whole = PackedTexts(TEXTS, VOCABULARY, width=40)
    assert (
        max(map(len, TEXTS)) <= 40
        and PackedTexts.of(path, VOCABULARY, width=40).description == whole.description
    )
    pieces = [[0, *text[i : i + 7]] for text in (text[1:] for text in TEXTS) for i in range(0, len(text), 7)]
    expected = PackedTexts([piece for piece in pieces if len(piece) > 1], VOCABULARY, width=8)
    assert PackedTexts.of(path, VOCABULARY, width=8).description == expected.description


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="row 1 cannot be trained on: the row is empty"):
        PackedTexts.of(["good", ""], VOCABULARY, width=8)
    with pytest.raises(ValueError, match="fill a row of 500"):
        PackedTexts(TEXTS, VOCABULARY, width=500)
    with pytest.raises(ValueError, match="token ids below 300 are required, got 300"):
        PackedTexts([*TEXTS, [0, 300, 1, 1]], VOCABULARY, width=2, held_out=0.01)
    with pytest.raises(ValueError, match=r"held_out in \(0, 1\)"):
        PackedTexts(TEXTS, VOCABULARY, width=8, held_out=0.0)


def test_a_vocabulary_encodes_every_text_and_comes_back_from_its_file(tmp_path: Path) -> None:
    text = "naïve 猫 \x00 the cat"
    assert VOCABULARY.tokenizer.decode(VOCABULARY.tokenizer.encode(text)) == text
    assert VOCABULARY.size == 300 and VOCABULARY.tokenizer.bos_id == 0
    (tmp_path / "tokenizer.json").write_text(VOCABULARY.json, encoding="utf-8")
    assert Vocabulary.read(tmp_path / "tokenizer.json") == VOCABULARY
    with pytest.raises(ValueError, match="at least 257 tokens"):
        Vocabulary.learned(LINES, 256)
    other = VOCABULARY.json.replace("<|bos|>", "<s>")
    with pytest.raises(ValueError, match=r"has no token '<\|bos\|>'"):
        Vocabulary(other).tokenizer  # noqa: B018
