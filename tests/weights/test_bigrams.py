"""The direct path against a corpus: by a slow loop over tokens, and on models whose table is known."""

import itertools
import math
from collections import Counter

import pytest
import torch
from torch import Tensor

from interp.core import tiles
from interp.model import ModelConfig, NoNorm, Transformer
from interp.model.weights import Weights
from interp.weights.bigrams import bigram_table
from interp.weights.head_circuits import Circuits
from tests.configs import D_VOCAB, build, some_tokens


def pearson(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a, b)))[0, 1])


@pytest.mark.parametrize("tile", [40, 2**24])
@pytest.mark.parametrize(
    ("name", "folded"), [("gpt2", False), ("gpt2", True), ("llama-gqa", True), ("olmo2", True)]
)
def test_every_token_is_compared_as_a_slow_loop_compares_it(
    monkeypatch: pytest.MonkeyPatch, name: str, folded: bool, tile: int
) -> None:
    monkeypatch.setattr(tiles, "TILE", tile)
    model, tokens = build(name), some_tokens(rows=6, n=24)
    table = bigram_table(Circuits(model, folded=folded), tokens)
    pairs = Counter((int(a), int(b)) for row in tokens for a, b in itertools.pairwise(row))
    n = sum(pairs.values())
    unigram = torch.zeros(D_VOCAB).double()
    for (_, b), count in pairs.items():
        unigram[b] += count / n
    w = Weights(model)
    totals: Counter[str] = Counter()
    for token in table.token.values.tolist():
        p = torch.tensor([pairs[token, b] for b in range(D_VOCAB)]).double()
        count = int(p.sum())
        p = p / count
        x = model(torch.tensor([[token]]), stop=0)[0, 0] - position(model)
        if folded:
            beta = 0 if model.ln_final.bias is None else model.ln_final.bias
            x = (model.ln_final(x) - beta) * model.config.logit_scale
        q = (x @ w.W_U).softmax(-1)
        cell = table.sel(token=token)
        kl, kl_u = (float(torch.where(p > 0, p * (p / o).log(), 0.0).sum()) for o in (q, unigram))
        assert int(cell["count"]) == count
        for key, value in {
            "kl": kl, "kl_unigram": kl_u, "correlation": pearson(p, q), "correlation_unigram": pearson(p, unigram),
        }.items():  # fmt: skip
            assert float(cell[key]) == pytest.approx(value, rel=1e-8, abs=1e-8)
            totals[key] += count * value / n  # type: ignore[assignment]
    for key, value in totals.items():
        assert float(table[f"{key}_mean"]) == pytest.approx(value, rel=1e-8, abs=1e-8)
    assert sorted(table.token.values.tolist()) == sorted({a for a, _ in pairs})


def position(model: Transformer) -> Tensor | float:
    """What position 0 adds to the stream."""
    return 0.0 if model.pos_embed is None else model.pos_embed.weight[0]


def zero_layers(table: Tensor) -> Circuits:
    """A model whose direct path is this table of logits."""
    v = len(table)
    config = ModelConfig(1, v, 1, 4, v, mlp=None, norm=NoNorm(), final_norm=False)
    model = Transformer(config).double().requires_grad_(False)
    model.embed.weight.copy_(torch.eye(v))
    assert model.unembed is not None
    model.unembed.weight.copy_(table.T)
    return Circuits(model)


def test_a_model_that_is_the_bigram_table_has_no_divergence_left() -> None:
    tokens = torch.randint(0, 5, (4000,), generator=torch.Generator().manual_seed(0))
    counts = torch.zeros(5, 5).double()
    for a, b in itertools.pairwise(tokens):
        counts[a, b] += 1
    found = bigram_table(zero_layers(counts.log()), tokens)
    assert float(found.kl_mean) == pytest.approx(0, abs=1e-12)
    assert found.correlation.values.tolist() == pytest.approx([1.0] * 5)


def test_the_unigram_baseline_is_the_mutual_information_of_neighbours() -> None:
    """0 1 0 1 ...: the first of two tells the second, log 2 nats."""
    found = bigram_table(zero_layers(torch.zeros(3, 3)), torch.tensor([0, 1] * 50 + [0]))
    assert float(found.kl_unigram_mean) == pytest.approx(math.log(2))
    assert float(found.kl_mean) == pytest.approx(math.log(3))
    assert bool(found.correlation.isnull().all())


def test_rows_are_not_joined() -> None:
    found = bigram_table(Circuits(build("gpt2")), torch.tensor([[1, 2], [3, 4]]))
    assert found.token.values.tolist() == [1, 3]


def test_what_is_no_corpus_is_refused() -> None:
    circuits = Circuits(build("gpt2"))
    with pytest.raises(ValueError, match=r"at least two tokens are required, got \[3, 1\]"):
        bigram_table(circuits, torch.zeros(3, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=rf"must be in \[0, {D_VOCAB - 1}\], got 1 to {D_VOCAB}"):
        bigram_table(circuits, torch.tensor([1, D_VOCAB]))
    with pytest.raises(ValueError, match="masked-LM head"):
        bigram_table(Circuits(build("masked-lm")), torch.tensor([1, 2]))
