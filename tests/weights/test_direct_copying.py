"""The copying score: +1 for a copier, -1 for its opposite, chance for noise, equal to a loop over tokens."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import interp
from interp import HookedTransformer
from interp.model import ModelConfig, NoNorm, NoPosition, Transformer
from interp.model.weights import Weights
from interp.tasks import RepeatedTokens
from interp.weights.copying import chance_copying, copying_scores, raised_share
from tests.configs import D_VOCAB, build, perturbed
from tests.tolerances import assert_close, student95

DATA = RepeatedTokens(period=6, repeats=3, rows=5)
PLAIN = ModelConfig(
    1, D_VOCAB, 3, 24, D_VOCAB, d_head=D_VOCAB, norm=NoNorm(), final_norm=False, position=NoPosition(),
    qkv_bias=False, out_bias=False,
)  # fmt: skip


def written_by_hand(outs: list[Tensor]) -> Transformer:
    """One layer; tokens are unit vectors on both ends, values are the identity, W_O is as given."""
    model = Transformer(PLAIN).requires_grad_(False)
    one = torch.eye(D_VOCAB)
    assert model.unembed is not None
    model.embed.weight.copy_(one)
    model.unembed.weight.copy_(one)
    for head, out in enumerate(outs):
        model.block(0).attn.part("v")[0][head].copy_(one)
        model.block(0).attn.out.weight[:, head * D_VOCAB : (head + 1) * D_VOCAB].copy_(out.T)
    return model


def test_copier_scores_one_anti_copier_minus_one_and_a_silent_head_chance() -> None:
    one = torch.eye(D_VOCAB)
    table = interp.heads(HookedTransformer(written_by_hand([one, -one, 0 * one])), repeats=DATA)
    found = table.sel(layer=0, score="copying")
    assert found.value.values.tolist() == pytest.approx([1.0, -1.0, chance_copying(6)])
    assert found.null.values.tolist() == pytest.approx([chance_copying(6)] * 3)
    assert table.value.sel(layer=0, score="copying_weights").values[:2].tolist() == pytest.approx([1.0, -1.0])


def test_a_share_of_the_rise_is_scored_as_defined() -> None:
    logits = torch.tensor([[2.0, 1.0, -5.0], [0.0, 3.0, -1.0], [1.0, 1.0, -1.0]])
    assert raised_share(logits, -0.5).tolist() == pytest.approx([4 * 2 / 5 - 1, 1.0, -1.0])
    assert raised_share(-torch.ones(2, 2), -0.5).tolist() == [-0.5, -0.5]


def test_chance_is_that_of_gaussian_logits() -> None:
    both = (
        (math.pi - math.log(2)) / 5 / (2 * math.pi)
    )  # quarter plane of E[a / (2 a + b)], in polar coordinates
    assert chance_copying(2) == pytest.approx(4 * (1 / 8 + both) / (3 / 4) - 1, abs=1e-6)
    drawn = torch.randn(20_000, 25, 25, generator=torch.Generator().manual_seed(0))
    found = raised_share(drawn[:, :1].expand(-1, 25, -1), chance_copying(25)).mean(-1)
    assert abs(float(found.mean()) - chance_copying(25)) < 4 * float(found.std()) / 20_000**0.5


def slow_copying(model: HookedTransformer, tokens: Tensor, layer: int, head: int) -> Tensor:
    """Head outputs for one-hot attention, each part of the path applied forwards at some positive scale; per row."""
    network, weights = model.transformer, Weights(model.transformer)
    v = model.run_with_cache(tokens, f"blocks.{layer}.attn.hook_v")[1]["v", layer]
    norm = network.block(layer).post_norm("attn_out")
    rows = []
    for row in range(len(tokens)):
        ratios = []
        for i in range(1, 7):
            out = v[row, i, int(weights.kv_head()[head])] @ weights.layer(layer).W_O[head]
            out = out if norm is None else norm.frozen(out, torch.tensor([0.7]).to(out))
            logits = network.ln_final.frozen(out, torch.tensor([2.5]).to(out)) @ weights.W_U
            raised = (logits - logits.mean()).relu()
            own, total = raised[tokens[row, i]], raised[tokens[row, 1:7]].sum()
            ratios.append(float(4 * own / (own + total) - 1) if total > 0 else chance_copying(6))
        rows.append(sum(ratios) / len(ratios))
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-gqa", "gemma2", "olmo2", "attention-only-rotary", "granite-moe"]
)
def test_the_score_is_that_of_the_direct_path_token_by_token(name: str) -> None:
    model = HookedTransformer(build(name))
    table = interp.heads(model, repeats=DATA)
    tokens = DATA.tokens(D_VOCAB, 0)
    for layer in range(2):
        for head in (0, 3):
            rows = slow_copying(model, tokens, layer, head)
            cell = table.sel(layer=layer, head=head, score="copying")
            half = student95(len(rows)) * float(rows.std()) / len(rows) ** 0.5
            assert float(cell.value) == pytest.approx(float(rows.mean()), rel=1e-9)
            assert float(cell.high) == pytest.approx(float(rows.mean()) + half, rel=1e-5)


def test_the_score_depends_on_the_product_of_values_and_output_only() -> None:
    config = replace(build("llama-gqa").config, mlp=None)
    model = perturbed(config)
    other = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    mix = torch.randn(config.head_width, config.head_width, generator=generator, dtype=torch.float64)
    for layer in range(2):
        attn = other.block(layer).attn
        values = attn.part("v")[0]
        values.copy_(torch.einsum("ged,ef->gfd", values.clone(), mix))
        out = attn.out.weight.unflatten(1, (config.n_heads, -1)).clone()
        attn.out.weight.copy_(torch.einsum("dhe,fe->dhf", out, mix.inverse()).flatten(1))
    tables = [interp.heads(HookedTransformer(m), repeats=DATA) for m in (model, other)]
    for name in ("copying", "copying_weights"):
        one, two = (torch.tensor(table.value.sel(score=name).values).double() for table in tables)
        assert_close(one, two, torch.float32)


def test_half_precision_is_scored_in_float32() -> None:
    model = copy.deepcopy(build("llama-gqa")).bfloat16()
    values = list(torch.randn(2, 2, 6, 2, 10).bfloat16())
    tokens = DATA.tokens(D_VOCAB, 0)[:2, 1:7]
    narrow = copying_scores(values, tokens, model)
    wide = copying_scores([v.float() for v in values], tokens, copy.deepcopy(model).float())
    assert narrow.dtype == torch.float32
    assert_close(narrow, wide, torch.bfloat16)
