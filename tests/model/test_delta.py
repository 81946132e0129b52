"""The gated delta net and the short convolution against slow loops, token by token."""

import pytest
import torch
from torch import Tensor

from interp.model import Read, Tap
from interp.model.delta import gated_delta
from interp.model.short_conv import ShortConvMixer
from tests.configs import some_tokens
from tests.loops import over
from tests.mixers import build_mixed
from tests.tolerances import assert_close


def operands(n: int = 11) -> tuple[Tensor, ...]:
    """Queries, keys, values, strengths and logs of decay of 2 rows, 3 heads and n tokens."""
    draw = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 3, n, size, generator=draw, dtype=torch.float64) for size in (3, 3, 2))
    strength, decay = (torch.rand(2, 3, n, generator=draw, dtype=torch.float64) for _ in range(2))
    return q, k / k.norm(dim=-1, keepdim=True), v, strength, -2 * decay


def by_hand(q: Tensor, k: Tensor, v: Tensor, strength: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """Yang et al. 2024, equation 10, one head and one token at a time: S (a (I - b k k^T)) + b v k^T."""
    out, last = torch.zeros_like(v), torch.zeros(2, 3, 3, 2, dtype=v.dtype)
    for b in range(2):
        for h in range(3):
            s = torch.zeros(2, 3, dtype=v.dtype)
            for i in range(q.shape[2]):
                key, beta = k[b, h, i], strength[b, h, i]
                forget = decay[b, h, i].exp() * (torch.eye(3, dtype=v.dtype) - beta * torch.outer(key, key))
                s = s @ forget + beta * torch.outer(v[b, h, i], key)
                out[b, h, i] = s @ q[b, h, i]
            last[b, h] = s.T
    return out, last


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunks_give_what_the_recurrence_gives(chunk: int) -> None:
    for found, expected in zip(gated_delta(*operands(), chunk=chunk), by_hand(*operands()), strict=True):
        assert_close(found, expected)


def test_a_state_goes_on_where_it_was_left() -> None:
    first, state = gated_delta(*(x[:, :, :5] for x in operands()), chunk=3)
    second, after = gated_delta(*(x[:, :, 5:] for x in operands()), chunk=3, state=state)
    expected, last = by_hand(*operands())
    assert_close(torch.cat((first, second), 2), expected)
    assert_close(after, last)


def test_packed_texts_do_not_see_each_other() -> None:
    text = torch.tensor([[0] * 5 + [1] * 6] * 2)
    found, _ = gated_delta(*operands(), chunk=4, same=text[:, :, None] == text[:, None, :])
    for part in (slice(0, 5), slice(5, 11)):
        assert_close(found[:, :, part], by_hand(*(x[:, :, part] for x in operands()))[0])


def test_a_strong_decay_leaves_no_trace_and_no_nan() -> None:
    q, k, v, strength, decay = operands()
    decay[:, :, 6] = -1e4
    found, _ = gated_delta(q, k, v, strength, decay, chunk=4)
    assert_close(found[:, :, 6:], by_hand(*(x[:, :, 6:] for x in (q, k, v, strength, decay)))[0])


@over("row", range(3))
def test_a_short_convolution_is_a_loop_over_the_tokens_before(row: int) -> None:
    model = build_mixed("short-conv")
    attn = model.block(0).attn
    assert isinstance(attn, ShortConvMixer) and attn.bias is not None
    x = model.block(0).ln1(model.embed(some_tokens()))[row]
    first, second, channels = attn.into(x).chunk(3, -1)
    inner, found = first * channels, []
    for i in range(len(x)):
        mixed = attn.bias.clone()
        for t in range(3):
            if i - 2 + t >= 0:
                mixed = mixed + attn.kernel[t] * inner[i - 2 + t]
        found.append(attn.out(mixed * second[i]))
    tap = Tap([read := Read("blocks.0.hook_attn_out")])
    model(some_tokens(), tap)
    assert_close(tap.values[read][row], torch.stack(found))
