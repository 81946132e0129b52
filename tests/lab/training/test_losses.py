"""Losses and scores against slow loops over tokens, and packed rows against each text alone."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from interp.data.batch import Batch
from interp.lab.training.losses import logits, mean_loss, scores
from interp.lab.training.presets import encoder_decoder
from interp.model import EncoderDecoder
from interp.tasks import SequencePairs
from interp.tasks.examples import Examples, Place
from tests.configs import build, some_tokens
from tests.tolerances import assert_close

MODEL = build("llama-gqa")
TEXTS = [[1, 5, 7, 9, 3], [1, 8, 8], [1, 4, 6, 2, 12, 30, 11]]


def losses(text: list[int]) -> list[float]:
    """The loss of each token of one text after the first, the text alone."""
    found = MODEL(torch.tensor([text]))[0].log_softmax(-1)
    return [-float(found[i, token]) for i, token in enumerate(text[1:])]


def test_packed_texts_have_the_loss_of_each_alone() -> None:
    packed = Examples(Batch.packed(TEXTS, 8))
    every = [loss for text in TEXTS for loss in losses(text)]
    assert_close(mean_loss(MODEL, packed), torch.tensor(sum(every) / len(every), dtype=torch.float64))
    assert scores(MODEL, packed)["held_out_loss"] == pytest.approx(sum(every) / len(every))


def test_only_the_determined_tokens_count_if_so_asked() -> None:
    batch = Batch.of(TEXTS)
    determined = torch.zeros(3, 6, dtype=torch.bool)
    determined[0, 2] = determined[2, 5] = determined[2, 0] = True
    wanted = [losses(TEXTS[0])[2], losses(TEXTS[2])[5], losses(TEXTS[2])[0]]
    found = mean_loss(MODEL, Examples(batch, determined), determined_only=True)
    assert float(found) == pytest.approx(sum(wanted) / 3)


def test_accuracy_counts_the_largest_logits_however_rows_are_split() -> None:
    tokens = some_tokens(7, 12)
    determined = torch.rand(7, 11, generator=torch.Generator().manual_seed(0)) < 0.4
    found = MODEL(tokens).argmax(-1)
    for row in range(4):  # in each of these rows the last token is what the model says
        tokens[row, -1] = found[row, -2]
        determined[row, -1] = True
    asked = [(r, i) for r in range(7) for i in range(11) if determined[r, i]]
    hits = [int(MODEL(tokens[r : r + 1, : i + 1])[0, i].argmax()) == int(tokens[r, i + 1]) for r, i in asked]
    assert 4 <= sum(hits) < len(hits)
    examples = Examples(Batch(tokens), determined)
    each = [scores(MODEL, examples, rows_at_once=n) for n in (1, 3, 7)]
    assert [found["accuracy"] for found in each] == [sum(hits) / len(hits)] * 3
    assert each[0]["held_out_loss"] == pytest.approx(each[2]["held_out_loss"])


def test_padding_of_a_pair_changes_nothing() -> None:
    torch.manual_seed(0)
    data = SequencePairs(9, 2, 5)
    model = EncoderDecoder(encoder_decoder(9, 7, d_model=16, n_heads=2, n_layers=1)).double()
    found = data.batch(Place(0, 0), 6)
    assert found.source is not None
    each = []
    for row in range(6):
        n = int(found.source.lengths[row])
        source, target = found.source.tokens[row : row + 1, :n], found.batch.tokens[row : row + 1, : n + 1]
        each.append(F.cross_entropy(model(source, target)[0, :-1], target[0, 1:], reduction="sum"))
    assert_close(mean_loss(model, found), sum(each, torch.zeros(())) / found.source.lengths.sum())


def test_what_does_not_fit_is_refused() -> None:
    pairs = SequencePairs(9, 2, 5).batch(Place(0, 0), 2)
    with pytest.raises(ValueError, match="one stack of layers has no sources to read"):
        logits(MODEL, pairs)
    with pytest.raises(ValueError, match="an encoder-decoder requires sources; the data has none"):
        logits(EncoderDecoder(encoder_decoder(9, 7, d_model=16, n_heads=2)), replace(pairs, source=None))
    with pytest.raises(ValueError, match="data that says which tokens the context determines"):
        mean_loss(MODEL, Examples(Batch(some_tokens())), determined_only=True)
    with pytest.raises(ValueError, match=r"one column per token after the first, \[3, 8\], got \[3, 9\]"):
        Examples(Batch(some_tokens()), torch.ones(3, 9, dtype=torch.bool))
    nothing = Examples(Batch(some_tokens()), torch.zeros(3, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"got 24, 0 determined"):
        scores(MODEL, nothing)
    assert math.isnan(float(mean_loss(MODEL, nothing, determined_only=True)))
