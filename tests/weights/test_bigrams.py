"""The direct path against a corpus: by a slow loop over tokens, and on models whose table is known."""

import itertools
import math
from collections import Counter

import pytest
import torch
import xarray as xr
from torch import Tensor

import interp
from interp.core import tiles
from interp.data.batch import Batch
from interp.model import ModelConfig, NoNorm, Transformer
from interp.model.weights import Weights
from interp.weights import BigramTable, bigram_table
from tests.batches import in_batches
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
    table = bigram_table(model, tokens, folded=folded)
    pairs = Counter((int(a), int(b)) for row in tokens for a, b in itertools.pairwise(row))
    n = sum(pairs.values())
    unigram = torch.zeros(D_VOCAB).double()
    for (_, b), count in pairs.items():
        unigram[b] += count / n
    w = Weights(model)
    totals: Counter[tuple[str, str]] = Counter()
    for place, token in enumerate(table.token_id.values.tolist()):
        p = torch.tensor([pairs[token, b] for b in range(D_VOCAB)]).double()
        count = int(p.sum())
        p = p / count
        x = model(torch.tensor([[token]]), stop=0)[0, 0] - position(model)
        if folded:
            beta = 0 if model.ln_final.bias is None else model.ln_final.bias
            x = (model.ln_final(x) - beta) * model.config.logit_scale
        q = (x @ w.W_U).softmax(-1)
        cell = table.isel(token=place)
        kl, kl_u = (float(torch.where(p > 0, p * (p / o).log(), 0.0).sum()) for o in (q, unigram))
        assert set(cell.n.values.tolist()) == {count}
        for key, value in {
            ("value", "kl"): kl, ("null", "kl"): kl_u, ("value", "correlation"): pearson(p, q),
            ("null", "correlation"): pearson(p, unigram),
        }.items():  # fmt: skip
            assert float(cell[key[0]].sel(score=key[1])) == pytest.approx(value, rel=1e-8, abs=1e-8)
            totals[key] += count * value / n  # type: ignore[assignment]
    for (name, score), value in totals.items():
        mean = table[{"value": "overall", "null": "null_overall"}[name]].sel(score=score)
        assert float(mean) == pytest.approx(value, rel=1e-8, abs=1e-8)
    assert sorted(table.token_id.values.tolist()) == sorted({a for a, _ in pairs})


def position(model: Transformer) -> Tensor | float:
    """What position 0 adds to the stream."""
    return 0.0 if model.pos_embed is None else model.pos_embed.weight[0]


def zero_layers(table: Tensor) -> Transformer:
    """A model whose direct path is this table of logits."""
    v = len(table)
    config = ModelConfig(1, v, 1, 4000, v, mlp=None, norm=NoNorm(), final_norm=False)
    model = Transformer(config).double().requires_grad_(False)
    model.embed.weight.copy_(torch.eye(v))
    assert model.unembed is not None
    model.unembed.weight.copy_(table.T)
    return model


def test_a_model_that_is_the_bigram_table_has_no_divergence_left() -> None:
    tokens = torch.randint(0, 5, (4000,), generator=torch.Generator().manual_seed(0))
    counts = torch.zeros(5, 5).double()
    for a, b in itertools.pairwise(tokens):
        counts[a, b] += 1
    found = bigram_table(zero_layers(counts.log()), tokens, folded=False)
    assert float(found.overall.sel(score="kl")) == pytest.approx(0, abs=1e-12)
    assert found.value.sel(score="correlation").values.tolist() == pytest.approx([1.0] * 5)


def test_the_unigram_baseline_is_the_mutual_information_of_neighbours() -> None:
    """0 1 0 1 ...: the first of two tells the second, log 2 nats."""
    found = bigram_table(zero_layers(torch.zeros(3, 3)), torch.tensor([0, 1] * 50 + [0]))
    assert float(found.null_overall.sel(score="kl")) == pytest.approx(math.log(2))
    assert float(found.overall.sel(score="kl")) == pytest.approx(math.log(3))
    assert bool(found.value.sel(score="correlation").isnull().all())


def test_rows_are_not_joined() -> None:
    found = bigram_table(build("gpt2"), torch.tensor([[1, 2], [3, 4]]))
    assert found.token_id.values.tolist() == [1, 3] and found.token.values.tolist() == ["<1>", "<3>"]


def test_the_split_into_batches_padding_and_packing_change_no_bit() -> None:
    texts = [row[: 24 - 3 * i].tolist() for i, row in enumerate(some_tokens(rows=6, n=24))]
    expected = bigram_table(build("gpt2"), texts)
    for same in (
        bigram_table(build("gpt2"), in_batches(build("gpt2"), texts, 2)),
        bigram_table(build("gpt2"), Batch.of(texts, side="left")),
        bigram_table(build("gpt2"), Batch.packed(texts, 24)),
        interp.run([BigramTable()], build("gpt2"), texts)["bigram_table"],
        interp.run([BigramTable()], build("gpt2"), iter(texts))["bigram_table"],
    ):
        xr.testing.assert_identical(same, expected)


def test_what_is_no_corpus_is_refused() -> None:
    model = build("gpt2")
    with pytest.raises(ValueError, match=r"at least two tokens are required, got no two neighbours"):
        bigram_table(model, torch.zeros(3, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match=rf"must be in \[0, {D_VOCAB - 1}\], got {D_VOCAB}"):
        bigram_table(model, torch.tensor([1, D_VOCAB]))
    with pytest.raises(ValueError, match="masked-LM head"):
        bigram_table(build("masked-lm"), torch.tensor([1, 2]))
