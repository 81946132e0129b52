"""Olsson et al. 2022, argument 2: one layer cannot do induction, unless its keys see the token before."""

import pytest
import torch
from torch import Tensor

from interp.core.patterns import induction_score
from interp.model import Edit, ModelConfig, NoNorm, NoPosition, Read, Tap, Transformer, next_token_loss
from interp.tasks import RepeatedTokens

V, GAIN = 64, 60.0
DATA = RepeatedTokens(rows=4)
PATTERN = "blocks.0.attn.hook_pattern"


def matching_head() -> Transformer:
    """One head that looks for keys equal to the current token and predicts the token it finds there."""
    config = ModelConfig(
        n_layers=1, d_model=2 * V, n_heads=1, d_head=V, n_ctx=DATA.length, d_vocab=V, position=NoPosition(),
        norm=NoNorm(), final_norm=False, qkv_bias=False, out_bias=False, attn_scale=1.0,
    )  # fmt: skip
    model = Transformer(config).requires_grad_(False)
    token, prediction = torch.eye(2 * V).split(V)
    model.embed.weight.copy_(token)
    model.block(0).attn.qkv.weight.copy_(torch.cat((GAIN * token, token, token)))
    model.block(0).attn.out.weight.copy_(prediction.T)
    model.unembed.weight.copy_(GAIN * prediction)
    return model


def smeared(share: float) -> Edit:
    """k_j becomes (1 - share) k_j + share k_{j-1}; the first key stays."""

    def change(k: Tensor) -> Tensor:
        before = torch.cat((k[:, :1], k[:, :-1]), 1)
        return (1 - share) * k + share * before

    return Edit("blocks.0.attn.hook_k", change)


def induction_and_loss(edits: list[Edit]) -> tuple[float, float]:
    """The induction score, and the mean loss from the second copy on, in nats."""
    model, tokens = matching_head(), DATA.tokens(V, 0)
    tap = Tap([Read(PATTERN)], edits)
    loss = next_token_loss(model(tokens, tap), tokens)
    score = induction_score(tap.values[Read(PATTERN)], DATA.period)
    return float(score.mean()), float(loss[:, DATA.period + 1 :].mean())


def test_with_the_key_of_the_token_before_one_layer_does_induction() -> None:
    score, loss = induction_and_loss([smeared(1.0)])
    assert score == pytest.approx(1.0, abs=1e-5)
    assert loss < 1e-5


def test_without_it_the_same_head_looks_at_copies_and_predicts_them() -> None:
    score, loss = induction_and_loss([])
    assert score < 1e-5
    assert loss > GAIN / 2


def test_a_key_smeared_half_and_half_is_torn_between_both() -> None:
    """Equal scores: a query on its k-th copy has k keys of its own token and k - 1 that follow one."""
    score, _ = induction_and_loss([smeared(0.5)])
    copies = torch.arange(1, DATA.repeats)  # earlier copies of the queries that are scored
    assert score == pytest.approx(float((copies / (2 * copies + 1)).mean()), abs=1e-3)
