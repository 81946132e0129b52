"""Sentences as rows: the determined tokens spell the answer, and what is held out is never trained on."""

import pytest

from interp import tasks
from interp.lab.training.sentences import Sentences
from interp.lab.training.vocabulary import Vocabulary
from interp.tasks.examples import Place
from interp.zoo.demos import WEIGHTS

VOCABULARY = Vocabulary.read(WEIGHTS / "demo-4l" / "tokenizer.json")
SENTENCES: dict[str, dict[str, str]] = {
    "names": {
        s.text: s.answer
        for place in (Place(2, 4), Place(2, None))
        for s in tasks.IndirectObjects(40, held_out=place.step is None).sentences(place.generator)
    },
    "facts": {p.text: p.answer for p in tasks.fact_prompts()}
    | {p.text: p.answer for p in tasks.fact_prompts(tasks.HELD_OUT_PHRASINGS)},
}


@pytest.mark.parametrize("step", [4, None])
@pytest.mark.parametrize("name", SENTENCES)
def test_the_determined_tokens_are_the_answer(name: str, step: int | None) -> None:
    data = Sentences(tasks.IndirectObjects() if name == "names" else tasks.Facts(), VOCABULARY)
    found = data.batch(Place(2, step), 40)
    assert found.determined is not None
    decode = VOCABULARY.tokenizer.decode
    for tokens, real, asked in zip(found.batch.tokens, found.batch.real, found.determined, strict=True):
        text = decode(tokens[real][1:].tolist())
        assert tokens[0] == VOCABULARY.tokenizer.bos_id
        assert decode(tokens[1:][asked].tolist()) == SENTENCES[name][text]


def test_held_out_phrasings_and_pairs_are_in_no_training_row() -> None:
    for data in (Sentences(tasks.IndirectObjects(), VOCABULARY), Sentences(tasks.Facts(), VOCABULARY)):
        held, *trained = (data.batch(Place(0, step), 64).batch for step in (None, *range(20)))
        rows = {
            tuple(row[keep].tolist()) for b in trained for row, keep in zip(b.tokens, b.real, strict=True)
        }
        assert not rows & {
            tuple(row[keep].tolist()) for row, keep in zip(held.tokens, held.real, strict=True)
        }


def test_a_sentence_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of at most 9 tokens are required, '.*' has \d+"):
        Sentences(tasks.IndirectObjects(), VOCABULARY, width=9).batch(Place(0, 0), 3)


def test_a_run_goes_on_only_with_the_same_task() -> None:
    usual = Sentences(tasks.Facts(rows=7, seed=3), VOCABULARY).description
    assert usual == Sentences(tasks.Facts(held_out=True), VOCABULARY).description
    capitals = tasks.Facts(phrasings={"capital": ["{subject}'s capital is"]})
    others = [tasks.IndirectObjects(), capitals, tasks.IndirectObjects(names=("Mary", "Tom"))]
    described = [str(Sentences(task, VOCABULARY).description) for task in others]
    assert len({str(usual), *described}) == 4
