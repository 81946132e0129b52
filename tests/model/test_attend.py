"""Fused and observed attention are one function; scores and pattern are what their names say."""

import pytest
import torch
from torch import Tensor

from interp.model import Alibi, Buckets, Read, Rotary, Tap
from interp.model.attention import Mask, attend
from tests.configs import CONFIGS, build, some_tokens
from tests.loops import over
from tests.model.slow import slow_scale
from tests.model.slow_position import score_bias
from tests.tolerances import TOLERANCES, assert_close

EVERY = over("name", CONFIGS)
PATTERN, SCORES, Z = (f"blocks.1.attn.hook_{part}" for part in ("pattern", "attn_scores", "z"))
LEFT_PADDED = torch.arange(9) >= torch.tensor([[0], [2], [5]])


def values_of(
    name: str, *names: str, keep: Tensor | None = None, dtype: torch.dtype = torch.float64
) -> list[Tensor]:
    """Logits, then the value of each site."""
    tap = Tap([Read(site) for site in names])
    logits = build(name, dtype)(some_tokens(), tap, keep=keep)
    return [logits, *(tap.values[read] for read in tap.reads)]


@pytest.mark.slow
@EVERY
@over("dtype", TOLERANCES)
@over("keep", [None, LEFT_PADDED])
def test_fused_and_observed_attention_give_the_same_z_and_logits(
    name: str, dtype: torch.dtype, keep: Tensor | None
) -> None:
    first, second = "blocks.0.attn.hook_z", Z
    fused = values_of(name, first, second, keep=keep, dtype=dtype)
    both = [f"blocks.{layer}.attn.hook_{part}" for layer in (0, 1) for part in ("pattern", "attn_scores")]
    observed = values_of(name, first, second, *both, keep=keep, dtype=dtype)
    for one, other in zip(fused, observed[:3], strict=True):
        assert one.dtype == dtype
        assert_close(other, one)


@EVERY
def test_observing_one_layer_leaves_the_values_of_the_other(name: str) -> None:
    fused = values_of(name, "blocks.0.attn.hook_z", Z)
    observed = values_of(name, "blocks.0.attn.hook_z", Z, PATTERN)
    assert torch.equal(observed[1], fused[1])


@EVERY
def test_pattern_rows_are_a_softmax_with_sink_and_zero_where_forbidden(name: str) -> None:
    """exp(score) / (sum of exp(score) + exp(sink)): rows sum to 1, with a sink to less."""
    _, pattern, scores = values_of(name, PATTERN, SCORES)
    sinks = build(name).blocks[1].attn.sinks
    extra = torch.zeros(4, 1, dtype=torch.float64) if sinks is None else sinks.exp()[:, None]
    total = scores.exp().sum(-1)
    assert_close(pattern.sum(-1), total / (total + extra))
    assert bool((pattern.sum(-1) < 1 - 1e-6).all()) is (sinks is not None)
    assert torch.equal(pattern == 0, scores == -torch.inf)
    assert_close(pattern, scores.exp() / (total + extra)[..., None])
    assert torch.isfinite(scores).all() == (not CONFIGS[name].causal)


@EVERY
def test_score_is_the_scaled_capped_biased_product_of_query_and_key(name: str) -> None:
    config, parameters = CONFIGS[name], dict(build(name).named_parameters())
    rot = "rot_" if isinstance(config.position, Rotary) else ""
    _, scores, q, k = values_of(name, SCORES, f"blocks.1.attn.hook_{rot}q", f"blocks.1.attn.hook_{rot}k")
    for h in range(config.n_heads):
        g = h * config.kv_heads // config.n_heads
        product = torch.einsum("bqe,bke->bqk", q[:, :, h], k[:, :, g]) * slow_scale(config, 1)
        if config.attn_softcap is not None:
            product = config.attn_softcap * (product / config.attn_softcap).tanh()
        if isinstance(config.position, Alibi | Buckets):
            bias = [[float(score_bias(parameters, config, h, i, j)) for j in range(9)] for i in range(9)]
            product = product + torch.tensor(bias, dtype=torch.float64)
        seen = scores[:, h] > -torch.inf
        assert_close(scores[:, h][seen], product[seen])


@EVERY
def test_z_is_the_pattern_times_the_values(name: str) -> None:
    config = CONFIGS[name]
    _, pattern, v, z = values_of(name, PATTERN, "blocks.1.attn.hook_v", Z)
    for h in range(config.n_heads):
        g = h * config.kv_heads // config.n_heads
        assert_close(z[:, :, h], pattern[:, h] @ v[:, :, g])


@EVERY
def test_padded_keys_get_no_attention_and_blind_queries_give_none(name: str) -> None:
    _, pattern, z = values_of(name, PATTERN, Z, keep=LEFT_PADDED)
    hidden = ~LEFT_PADDED[:, None, None, :].expand_as(pattern)
    assert (pattern[hidden] == 0).all()
    if CONFIGS[name].causal:
        blind = ~LEFT_PADDED
        assert (pattern.transpose(1, 2)[blind] == 0).all()
        assert (z[blind] == 0).all()


def test_half_precision_softmax_runs_in_float32() -> None:
    """A thousand equal scores: summed in bfloat16, the pattern would miss one by percents."""
    q = torch.zeros(1, 1000, 1, 4, dtype=torch.bfloat16)
    tap = Tap([Read(PATTERN, via=lambda p: p[..., -1, :].double().sum(-1))])
    tap.open(CONFIGS["gpt2"], 0, None)
    attend(q, q, q, Mask(causal=True, allowed=None), 1.0, tap.scope(1))
    assert abs(tap.values[tap.reads[0]].item() - 1) < 5e-3
