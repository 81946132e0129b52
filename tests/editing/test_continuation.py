"""Continuations against a loop that feeds one text at a time, the n-gram entropy against counting by hand."""

import math

import numpy as np
import pytest
import torch

from interp import HookedTransformer
from interp.editing import Continuation, ngram_entropy
from tests.tiny import CORPUS, hooked

OPENINGS = ["The capital of France is", "The cat"]


def slow_ngram_entropy(words: list[str]) -> float:
    """As in the code of ROME: weights 2/3 and 4/3, then the mean."""
    entropies = []
    for n, weight in ((2, 2 / 3), (3, 4 / 3)):
        grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
        shares = np.array([grams.count(gram) for gram in sorted(set(grams))]) / len(grams)
        entropies.append(weight * np.sum(-shares * np.log(shares) / np.log(2)))
    return float(np.mean(entropies))


def slow_greedy(model: HookedTransformer, opening: str, length: int) -> str:
    """The most probable token again and again, the whole text anew for each."""
    tokens = model.to_tokens(opening)
    while tokens.shape[1] < length:
        best = model.transformer(tokens)[0, -1].argmax()
        tokens = torch.cat((tokens, best[None, None]), 1)
    bos = model.text.bos_id
    return model.text.tokenizer.decode([i for i in tokens[0].tolist() if i != bos])


@pytest.mark.parametrize("seed", range(3))
def test_the_entropy_is_that_of_counted_ngrams(seed: int) -> None:
    words = np.random.default_rng(seed).choice(["a", "b", "c1", ".", ","], 40).tolist()
    assert ngram_entropy(" ".join(words)) == pytest.approx(slow_ngram_entropy(words), rel=1e-12)


def test_words_are_letters_and_digits_together_and_every_other_visible_character() -> None:
    text = "In Zürich, 2 cats\nsat: 'Well_done!'"
    words = ["In", "Zürich", ",", "2", "cats", "sat", ":", "'", "Well_done", "!", "'"]
    assert ngram_entropy(text) == pytest.approx(slow_ngram_entropy(words), rel=1e-12)


def test_the_entropy_has_its_closed_forms() -> None:
    """n words that never repeat: log2(n - 1) / 3 + 2 log2(n - 2) / 3; two words in turn: about one bit."""
    every = " ".join(f"w{i}" for i in range(50))
    assert ngram_entropy(every) == pytest.approx(math.log2(49) / 3 + 2 * math.log2(48) / 3)
    assert ngram_entropy("a b " * 500) == pytest.approx(1, abs=1e-3)
    assert ngram_entropy("no " * 30) == ngram_entropy("one") == ngram_entropy("") == 0


def test_greedy_texts_are_those_of_a_loop_and_equally_long() -> None:
    model = hooked()
    found = Continuation(length=20, top_k=1).texts(model, OPENINGS)
    assert found == [slow_greedy(model, opening, 20) for opening in OPENINGS]
    assert len({len(model.text.batch(o).tokens[0]) for o in OPENINGS}) == 2, "the openings differ in length"


def slow_sampled(model: HookedTransformer, openings: list[str], how: Continuation, turn: int) -> list[str]:
    """Every text on its own, all of it anew for each token, the dice of all texts thrown together."""
    texts = [model.to_tokens(opening)[0].tolist() for opening in openings]
    dice = torch.Generator().manual_seed(how.seed + turn)
    for _ in range(how.length - min(map(len, texts))):
        logits = torch.stack([model.transformer(torch.tensor([ids]))[0, -1] for ids in texts])
        best = logits.topk(how.top_k).indices
        shares = torch.zeros_like(logits).scatter(1, best, logits.gather(1, best).softmax(-1))
        for ids, new in zip(texts, torch.multinomial(shares, 1, generator=dice), strict=True):
            ids.append(int(new))
    bos = model.text.bos_id
    return [model.text.tokenizer.decode([i for i in ids[: how.length] if i != bos]) for ids in texts]


@pytest.mark.parametrize("turn", [0, 3])
def test_sampled_texts_are_those_of_a_loop_with_the_same_dice(turn: int) -> None:
    model, how = hooked(), Continuation(length=20, top_k=3, seed=5)
    found = how.texts(model, OPENINGS, turn=turn)
    assert found == slow_sampled(model, OPENINGS, how, turn)
    assert found == how.texts(model, OPENINGS, turn=turn) != how.texts(model, OPENINGS, turn=turn + 1)
    assert found != Continuation(length=20, top_k=1).texts(model, OPENINGS)


def test_what_leaves_no_room_is_refused() -> None:
    model = hooked()
    with pytest.raises(ValueError, match="openings shorter than 5 tokens are required, the longest has"):
        Continuation(length=5).texts(model, [CORPUS[1]])
    with pytest.raises(ValueError, match="do not fit the context"):
        Continuation(length=model.cfg.n_ctx + 1).texts(model, OPENINGS)
    with pytest.raises(ValueError, match="top_k >= 1 is required, got 0"):
        Continuation(top_k=0, length=20).texts(model, OPENINGS)
