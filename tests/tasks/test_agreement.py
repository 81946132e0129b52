"""Minimal pairs: a reader that knows the rule finds the answer in the sentence, and only the evidence differs."""

from typing import get_args

import numpy as np
import pytest

from interp.lab.training import Vocabulary
from interp.tasks import Agreement
from interp.tasks.agreement import MEN, NOUNS, WOMEN, Phenomenon
from tests.tiny import hooked

SEVERAL = {many for _, many in NOUNS}


class Words:
    """A tokenizer of whole words, each with the space before it."""

    bos_id, eos_id, pad_id = 0, None, 0

    def __init__(self) -> None:
        self.known: list[str] = ["<bos>"]

    def encode(self, text: str) -> list[int]:
        words = [f" {word}" if i else word for i, word in enumerate(text.split(" "))] if text else []
        self.known += [word for word in words if word not in self.known]
        return [self.known.index(word) for word in words]

    def decode(self, ids: list[int]) -> str:
        return "".join(self.known[i] for i in ids)

    def piece(self, token: int) -> str:
        return self.known[token]


def right(phenomenon: str, text: str, ending: str) -> bool:
    """What a reader says of a sentence and its ending."""
    words, ending = text.split(), ending.strip()
    if phenomenon == "anaphor_gender":
        return (words[1] in WOMEN) is (ending == "herself") and (words[1] in MEN) is (ending == "himself")
    if phenomenon == "determiner_noun":
        return (words[-1] == "these") is (ending in SEVERAL)
    return (words[1] in SEVERAL) is (ending == "were") and ending in ("was", "were")


@pytest.mark.parametrize("phenomenon", get_args(Phenomenon))
def test_a_reader_finds_the_answer_in_the_sentence(phenomenon: Phenomenon) -> None:
    tokenizer = Words()
    pairs = Agreement(phenomenon, rows=60).pairs(tokenizer)  # type: ignore[arg-type]
    evidence = pairs.columns("evidence")
    for row in range(60):
        answer, wrong = (tokenizer.decode([int(x[row])]) for x in (pairs.answer, pairs.wrong))
        assert right(phenomenon, pairs.clean[row], answer) and not right(phenomenon, pairs.clean[row], wrong)
        assert right(phenomenon, pairs.corrupt[row], wrong) and not right(
            phenomenon, pairs.corrupt[row], answer
        )
        where = np.flatnonzero(pairs.changed[row])
        assert where.tolist() == [int(evidence[row])]
    assert 10 < int((pairs.answer == pairs.answer[0]).sum()) < 50 or phenomenon == "determiner_noun"
    if phenomenon == "distractor_agreement":
        for text in pairs.clean:
            first, second = text.split()[1], text.split()[-1]
            assert (first in SEVERAL) is not (second in SEVERAL)
        assert int(pairs.columns("distractor")[0]) == int(pairs.columns("end")[0])


def test_rows_are_those_of_the_seed() -> None:
    tokenizer = hooked().text.tokenizer
    words = Words()
    one, other = (Agreement("subject_verb", 8, seed).pairs(words) for seed in (0, 1))  # type: ignore[arg-type]
    assert one.clean == Agreement("subject_verb", 8).pairs(words).clean != other.clean  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="agreement requires at least 2 nouns"):
        Agreement("subject_verb").pairs(tokenizer)
    with pytest.raises(ValueError, match="phenomenon must be"):
        Agreement("case")  # type: ignore[arg-type]


def test_a_vocabulary_of_its_texts_has_all_words() -> None:
    tokenizer = Vocabulary.learned(Agreement.texts(), 800).tokenizer
    for phenomenon in get_args(Phenomenon):
        found = Agreement(phenomenon, 40).pairs(tokenizer)
        assert len(set(found.clean)) > 20 and found.keep is None
