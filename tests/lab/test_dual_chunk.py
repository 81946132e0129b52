"""Dual chunk attention against a loop over pairs, its index table, and the merge of three softmaxes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interp.lab import DualChunk, dual_chunk
from interp.lab.dual_chunk import query_places
from interp.model import DynamicScaling, ModelConfig, Read, Rotary, Softmax, Tap
from tests.configs import perturbed, some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.tolerances import assert_close

KIND = DualChunk(10, 8)
CONFIG = replace(MIXERS["dual-chunk"], mixer=KIND, n_ctx=64, position=Rotary(100.0), qkv_bias=True)
PATTERN, SCORES, Z = (f"blocks.0.attn.hook_{site}" for site in ("pattern", "attn_scores", "z"))


def relative(kind: DualChunk, n: int) -> Tensor:
    """The relative position at which query i meets key j, `[i, j]`, by the cases of the paper."""
    s, c = kind.chunk, kind.length
    table = torch.zeros(n, n, dtype=torch.int64)
    for i in range(n):
        for j in range(i + 1):
            back = i // s - j // s
            query = i % s if back == 0 else min(i % s + s, c) if back == 1 else c
            table[i, j] = query - j % s
    return table


def by_table(kind: DualChunk, n: int) -> Tensor:
    places, chunk = (
        torch.stack(query_places(kind, torch.arange(n)[None]))[:, 0],
        torch.arange(n) // kind.chunk,
    )
    back = (chunk[:, None] - chunk).clamp(0, 2)
    return (places[back, torch.arange(n)[:, None]] - torch.arange(n) % kind.chunk).tril()


@over("kind", [KIND, DualChunk(6, 6), DualChunk(12, 6), DualChunk(1, 1)])
@over("n", [1, 5, 8, 17, 40])
def test_relative_positions_are_those_of_the_index_table(kind: DualChunk, n: int) -> None:
    table = by_table(kind, n)
    assert torch.equal(table, relative(kind, n))
    assert int(table.min()) >= 0 and int(table.max()) <= kind.length
    i, j = torch.arange(n)[:, None], torch.arange(n)
    exact = (i >= j) & ((i // kind.chunk == j // kind.chunk) | (i - j <= kind.length - kind.chunk))
    assert torch.equal(table[exact], (i - j)[exact])


def rotated(x: Tensor, place: int) -> Tensor:
    """`x` `[8]` turned pair by pair (first half, second half) by place * 100^(-2i/8)."""
    angle = place * 100.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
    first, second = x.double().chunk(2)
    return torch.cat((first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()))


@pytest.mark.parametrize("n", [1, 8, 9, 16, 27])
def test_the_mixer_is_the_loop_over_pairs_of_positions(n: int) -> None:
    config = replace(CONFIG, n_layers=1, d_head=8)
    model, tokens = perturbed(config), some_tokens(2, n)
    sites = [Read(f"blocks.0.attn.hook_{site}") for site in ("q", "k", "v", "z", "pattern")]
    tap = Tap(sites)
    model(tokens, tap)
    q, k, v, z, pattern = (tap.values[read] for read in sites)
    table = relative(KIND, n)
    for b in range(2):
        for h in range(4):
            g = h // 2
            for i in range(n):
                scores = torch.stack(
                    [rotated(q[b, i, h], int(table[i, j])) @ k[b, j, g].double() for j in range(i + 1)]
                )
                weights = (scores * config.score_scale(0)).softmax(0)
                # the model's angles are float32: see Rotation.at
                torch.testing.assert_close(pattern[b, h, i, : i + 1], weights, rtol=1e-5, atol=1e-6)
                torch.testing.assert_close(z[b, i, h], weights @ v[b, : i + 1, g], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", [1, 7, 8])
def test_texts_up_to_one_chunk_are_plain_rotary_attention(n: int) -> None:
    ours, plain = perturbed(CONFIG), perturbed(replace(CONFIG, mixer=Softmax()))
    plain.load_state_dict(ours.state_dict())
    tokens = some_tokens(n=n)
    assert torch.equal(ours(tokens), plain(tokens))
    assert_close(ours(tokens, Tap([Read(PATTERN)])), plain(tokens))


@over("run", [1, 3, 8, 256])
@over("n", [9, 16, 17, 40])
def test_run_by_run_is_all_at_once(n: int, run: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dual_chunk, "RUN", run)
    model, tokens = perturbed(CONFIG), some_tokens(n=n)
    assert_close(model(tokens, Tap([Read(PATTERN)])), model(tokens))
    assert_close(model(tokens, keep=torch.ones_like(tokens, dtype=torch.bool)), model(tokens))


def test_one_softmax_is_three_merged_by_their_log_sum_exp() -> None:
    model, tokens, n = perturbed(CONFIG), some_tokens(n=30), 30
    reads = [Read(SCORES), Read(Z), Read("blocks.0.attn.hook_v")]
    tap = Tap(reads)
    model(tokens, tap)
    scores, z, v = (tap.values[read] for read in reads)
    values = v.transpose(1, 2).repeat_interleave(2, 1)
    chunk = torch.arange(n) // KIND.chunk
    back = (chunk[:, None] - chunk).clamp(0, 2)
    parts, sizes = [], []
    for which in range(3):
        own = scores.masked_fill(back != which, -torch.inf)
        size = own.logsumexp(-1)
        parts.append((own.softmax(-1).nan_to_num(0.0)) @ values)
        sizes.append(size)
    share = torch.stack(sizes).softmax(0)
    merged = (share[..., None] * torch.stack(parts)).sum(0)
    assert_close(merged.transpose(1, 2), z)


def test_the_cache_keeps_keys_rotated_within_their_chunk() -> None:
    model, tokens = build_mixed("dual-chunk"), some_tokens()
    reads = [Read("blocks.0.attn.hook_rot_k"), Read("blocks.0.attn.hook_k")]
    tap = Tap(reads)
    model(tokens, tap)
    turned, raw = (tap.values[read] for read in reads)
    assert_close(turned[:, ::3], raw[:, ::3])  # position 0 of every chunk of 3
    assert not torch.allclose(turned[:, 1::3], raw[:, 1::3])


CONTRADICTIONS: dict[str, tuple[dict[str, object], str]] = {
    "later keys": ({"causal": False}, "a causal model under DualChunk"),
    "moving frequencies": (
        {"position": Rotary(scaling=DynamicScaling(2.0, 16))},
        "do not depend on the length",
    ),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_what_contradicts_dual_chunks_is_refused(case: str) -> None:
    changes, message = CONTRADICTIONS[case]
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**{f: getattr(CONFIG, f) for f in CONFIG.__dataclass_fields__}, **changes})


def test_a_length_beyond_two_chunks_is_refused() -> None:
    with pytest.raises(ValueError, match="length <= 2 chunk"):
        DualChunk(17, 8)
