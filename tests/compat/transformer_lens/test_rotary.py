"""Rotary positions under every rule, log-n attention: the numbers of TransformerLens 3.9.0, and tables that grow."""

from typing import Any

import pytest
import torch
from torch import Tensor

from interp.compat.transformer_lens.cache import TransformerLensKeyValueCache
from interp.compat.transformer_lens.components import Attention
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer
from tests.compat.oracle.make_rotary import BASE, CASES, CUT, FILE, MASK, TOKENS

SAID: dict[str, Any] = torch.load(FILE, weights_only=True)
LONG: dict[str, Any] = {"n_layers": 1, "d_model": 8, "n_ctx": 6000, "d_head": 4, "n_heads": 2, "act_fn": "relu",
        "positional_embedding_type": "rotary"}  # fmt: skip


def model_of(name: str) -> HookedTransformer:
    model = HookedTransformer(HookedTransformerConfig(**CASES[name])).eval()
    model.load_state_dict(SAID["state"], strict=False)
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_are_theirs(name: str) -> None:
    model, said = model_of(name), SAID[name]
    close: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-9}
    if "yarn" in name or "by parts" in name or "dynamic" in name or name in ("divided", "log n", "qwen"):
        assert not torch.allclose(said["logits"], model_of("plain")(TOKENS), **close)
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS), said["logits"], **close)
        torch.testing.assert_close(model(TOKENS, attention_mask=MASK), said["masked"], **close)
        cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", len(TOKENS))
        full = torch.ones_like(MASK)
        model(TOKENS[:, :CUT], past_kv_cache=cache, attention_mask=full[:, :CUT])
        after = model(TOKENS[:, CUT:], past_kv_cache=cache, attention_mask=full[:, CUT:])
        torch.testing.assert_close(after, said["after"], **close)


def test_what_depends_on_the_length_is_for_evaluation_only() -> None:
    settings = CASES["qwen"]
    trained, plain = (HookedTransformer(HookedTransformerConfig(**s)).train() for s in (settings, BASE))
    plain.load_state_dict(trained.state_dict())
    torch.testing.assert_close(trained(TOKENS), plain(TOKENS))


def part(**changes: Any) -> Attention:
    return Attention(HookedTransformerConfig(**LONG | changes))


def test_a_table_grows_by_doubling_until_the_context_ends() -> None:
    attn, x = part(), torch.randn(1, 1, 2, 4)
    want = attn.calculate_sin_cos_rotary(4, 6000, base=attn.cfg.rotary_base)
    for place, rows in ((2047, 2048), (2048, 4096), (4095, 4096), (4096, 6000)):
        attn.apply_rotary(x, past_kv_pos_offset=place)
        assert attn.rotary_sin.shape == (rows, 4)
        torch.testing.assert_close((attn.rotary_sin, attn.rotary_cos), (want[0][:rows], want[1][:rows]))


def test_a_long_context_widens_the_base_and_a_short_one_brings_it_back() -> None:
    attn = part(use_dynamic_ntk_rope=True, train_seq_length=100).eval()
    before, x = attn.rotary_cos.clone(), torch.randn(1, 350, 2, 4)
    attn.apply_rotary(x)
    torch.testing.assert_close(
        attn.rotary_cos, attn.calculate_sin_cos_rotary(4, 2048, base=10000 * 7.0**2)[1]
    )
    attn.apply_rotary(x[:, :100])
    assert torch.equal(attn.rotary_cos, before)


@pytest.mark.parametrize(
    ("kind", "window", "mask", "want"),
    [
        ("global", None, None, ["11100", "11110", "11111"]),
        ("local", 2, None, ["01100", "00110", "00011"]),
        ("global", None, [1, 1, 0, 1, 1], ["11000", "11010", "11011"]),
    ],
)
def test_scores_are_masked_ahead_beyond_the_window_and_at_padding(
    kind: str, window: int | None, mask: list[int] | None, want: list[str]
) -> None:
    attn = Attention(HookedTransformerConfig(**LONG | {"window_size": window}), attn_type=kind)
    real: Tensor | None = None if mask is None else torch.tensor([mask])
    seen = attn.apply_causal_mask(torch.zeros(1, 2, 3, 5), 2, real).isfinite()
    rows = torch.tensor([[int(cell) for cell in row] for row in want])
    assert torch.equal(seen.int(), rows.int().expand(1, 2, 3, 5))
    with pytest.raises(ValueError, match="3 queries after 1 positions require as many keys, got 5"):
        attn.apply_causal_mask(torch.zeros(1, 2, 3, 5), 1)
