"""Smeared keys against the formula of Olsson et al. 2022, their limits, and an induction head in one layer."""

from dataclasses import replace

import pytest
import torch

from interp.model import NoNorm, NoPosition, Read, Softmax, Tap
from tests.configs import perturbed, some_tokens
from tests.mixers import MIXERS, build_mixed
from tests.model.test_mask import kept
from tests.tolerances import assert_close

CONFIG = replace(MIXERS["smeared-rotary"], mixer=Softmax(smeared_keys=True), qk_norm=None)
K, SMEARED = Read("blocks.1.attn.hook_k"), Read("blocks.1.attn.hook_smeared_k")


def read(name: str, **how: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    tap = Tap([K, SMEARED])
    build_mixed(name)(some_tokens(), tap, **how)
    return tap.values[K], tap.values[SMEARED]


def test_each_key_is_mixed_with_the_one_before_and_the_first_is_unchanged() -> None:
    k, smeared = read("smeared")
    alpha = build_mixed("smeared").block(1).attn.smear
    for j in range(9):
        for h in range(4):
            share = 1 / (1 + torch.exp(-alpha[h]))
            expected = k[:, j, h] if j == 0 else share * k[:, j, h] + (1 - share) * k[:, j - 1, h]
            assert_close(smeared[:, j, h], expected)


@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_the_key_before_is_that_of_the_kept_token_before(side: str) -> None:
    keep = kept(side)
    k, smeared = read("smeared", keep=keep)
    share = build_mixed("smeared").block(1).attn.smear.sigmoid()[:, None]
    for row in range(3):
        own = k[row, keep[row]]
        expected = own.clone()
        expected[1:] = share * own[1:] + (1 - share) * own[:-1]
        assert_close(smeared[row, keep[row]], expected)


def test_a_share_of_one_is_plain_attention_and_none_moves_keys_by_one() -> None:
    model, plain, tokens = perturbed(CONFIG), perturbed(replace(CONFIG, mixer=Softmax())), some_tokens()
    plain.load_state_dict({n: p for n, p in model.state_dict().items() if not n.endswith("smear")})
    with torch.no_grad():
        for layer in (0, 1):
            model.block(layer).attn.smear.fill_(40.0)
    assert_close(model(tokens), plain(tokens))
    tap = Tap([K, SMEARED])
    with torch.no_grad():
        model.block(1).attn.smear.fill_(-40.0)
    model(tokens, tap)
    assert_close(tap.values[SMEARED][:, 1:], tap.values[K][:, :-1])


def test_layer_with_smeared_keys_matches_the_token_after_an_earlier_copy() -> None:
    """Olsson et al.'s argument 2: keys that carry the token before make a one-layer induction head."""
    period, vocab = 8, 12
    config = replace(
        CONFIG, n_layers=1, n_heads=1, n_kv_heads=1, d_model=vocab, d_head=vocab, n_ctx=24, d_vocab=vocab, mlp=None,
        position=NoPosition(), norm=NoNorm(), mixer=Softmax(smeared_keys=True), attn_scale=40.0,
    )  # fmt: skip
    model = perturbed(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.embed.weight.copy_(torch.eye(vocab))
        model.block(0).attn.qkv.weight.copy_(torch.eye(vocab).repeat(3, 1))
        model.block(0).attn.smear.fill_(-40.0)
    tokens = torch.randperm(vocab, generator=torch.Generator().manual_seed(0))[:period].repeat(2)[None]
    pattern = Read("blocks.0.attn.hook_pattern")
    tap = Tap([pattern])
    model(tokens, tap)
    after_copy = tap.values[pattern].diagonal(1 - period, -2, -1)[0, 0, 1:]  # query i, key i - period + 1
    assert_close(
        after_copy[0], torch.tensor(0.5).double()
    )  # token 0 meets its own unchanged key and that of token 1
    assert (after_copy[1:] > 0.999).all()
