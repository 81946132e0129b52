"""The card's measures against slow loops and planted answers, on models small enough to check by hand."""

import numpy as np
import pytest
import torch
from torch import Tensor

from interp import tasks
from interp.model import MLP, ModelConfig, Read, Tap, Transformer
from interp.zoo import measure

BOS = 0
WORDS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ .,'"


def encode(text: str) -> list[int]:
    return [1 + WORDS.index(letter) for letter in text]


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(
        n_layers=2,
        d_model=32,
        n_heads=4,
        n_ctx=128,
        d_vocab=len(WORDS) + 1,
        mlp=MLP(d_mlp=64, act="gelu_new"),
    )
    model = Transformer(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def greedy(model: Transformer, tokens: list[int], count: int) -> list[int]:
    for _ in range(count):
        with torch.no_grad():
            tokens = [*tokens, int(model(torch.tensor([tokens]))[0, -1].argmax())]
    return tokens[-count:]


def test_completes_is_true_exactly_where_greedy_decoding_writes_the_answer(model: Transformer) -> None:
    prompts = ["a", "the cat", "Who goes there", "abc abc"]
    written = ["".join(WORDS[i - 1] for i in greedy(model, [BOS, *encode(p)], 3)) for p in prompts]
    pairs = [*zip(prompts, written, strict=True), (prompts[0], "Q" + written[0][1:])]
    expected = [True] * 4 + [written[0][0] == "Q"]
    assert measure.completes(model, encode, BOS, pairs).tolist() == expected


def test_answer_margin_is_the_logit_difference_at_the_first_difference(model: Transformer) -> None:
    sentences = [
        tasks.IndirectObject("Mary", "Martin", "park", "kite", tasks.TEMPLATES[0], first)
        for first in (True, False)
    ]
    margins = measure.answer_margins(model, encode, BOS, sentences)
    for sentence, margin in zip(sentences, margins, strict=True):
        logits = model(torch.tensor([[BOS, *encode(sentence.prompt + " Mar")]]))[0, -1]
        torch.testing.assert_close(margin, (logits[encode("y")] - logits[encode("t")])[0])


def slow_prefix_matching(pattern_qk: Tensor, tokens: list[int]) -> float:
    sums = []
    for query in range(1, len(tokens)):
        targets = [j for j in range(2, query + 1) if tokens[j - 1] == tokens[query]]
        if targets:
            sums.append(sum(float(pattern_qk[query, j]) for j in targets))
    return sum(sums) / len(sums)


def test_induction_scores_equal_a_loop_over_queries_and_targets(model: Transformer) -> None:
    tokens = tasks.RepeatedTokens(9, 4, 3).tokens(40, bos=BOS, generator=np.random.default_rng(0))
    scores = measure.induction_scores(model, tokens, period=9)
    for layer in range(2):
        tap = Tap(reads=[Read(f"blocks.{layer}.attn.hook_pattern")])
        model(tokens, tap)
        pattern = tap.values[tap.reads[0]]
        for head in range(4):
            rows = [slow_prefix_matching(pattern[b, head], tokens[b].tolist()) for b in range(3)]
            assert float(scores[layer, head]) == pytest.approx(np.mean(rows), abs=1e-5)


def test_in_context_learning_score_is_the_late_loss_less_the_early_one() -> None:
    losses = torch.zeros(5, 127)
    losses[:, 119], losses[:, 19] = 2.0, 3.0
    assert measure.in_context_learning_score(losses, late=120, early=20) == -1.0


def test_windows_with_stride_20_show_the_same_token_at_both_indices() -> None:
    rows = measure.prose_windows(torch.arange(1, 1000), width=128, stride=20, bos=BOS)
    assert (rows[:, 0] == BOS).all()
    assert torch.equal(rows[:-5, 120], rows[5:, 20])


def test_too_little_prose_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 127 tokens are required for one row, got 50"):
        measure.prose_windows(torch.arange(50), width=128, stride=20, bos=BOS)


def test_losses_do_not_depend_on_the_batch_split(model: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(1, 50, (7, 20), generator=torch.Generator().manual_seed(0))
    whole = measure.token_losses(model, tokens)
    monkeypatch.setattr(measure, "BATCH", 2)
    torch.testing.assert_close(measure.token_losses(model, tokens), whole)
