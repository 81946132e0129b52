"""Mamba-2 against the recurrence of its paper, token by token, and the sites against their definitions."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from interp.model import Edit, Mamba2, Read, Tap, Weights
from interp.model.edits import Zero
from interp.model.mamba2 import Mamba2Mixer, state_space
from tests.configs import some_tokens
from tests.loops import over
from tests.mixers import build_mixed
from tests.tolerances import assert_close

STATES = ("mamba2", "mamba2-softmax")
"""Models whose first layer is Mamba-2: with two groups, and with one, step limits and runs of two value heads."""


def operands(n: int = 11) -> tuple[Tensor, ...]:
    """C, B, x and logs of decay of 2 rows, 2 groups of 2 heads and n tokens."""
    draw = torch.Generator().manual_seed(5)
    q, k = (torch.randn(2, 2, n, 3, generator=draw, dtype=torch.float64) for _ in range(2))
    v = torch.randn(2, 4, n, 5, generator=draw, dtype=torch.float64)
    return q, k, v, -2 * torch.rand(2, 4, n, generator=draw, dtype=torch.float64)


def by_hand(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """h_t = a_t h_(t-1) + B_t x_t, y_t = C_t h_t, one head and one token at a time."""
    out, last = torch.zeros_like(v), torch.zeros(2, 4, 3, 5, dtype=v.dtype)
    for b in range(2):
        for head in range(4):
            h = torch.zeros(3, 5, dtype=v.dtype)
            for t in range(q.shape[2]):
                h = decay[b, head, t].exp() * h + torch.outer(k[b, head // 2, t], v[b, head, t])
                out[b, head, t] = q[b, head // 2, t] @ h
            last[b, head] = h
    return out, last


@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_chunks_give_what_the_recurrence_gives(chunk: int) -> None:
    for found, expected in zip(state_space(*operands(), chunk=chunk), by_hand(*operands()), strict=True):
        assert_close(found, expected)


def test_a_state_goes_on_where_it_was_left() -> None:
    first, state = state_space(*(x[:, :, :5] for x in operands()), chunk=3)
    second, after = state_space(*(x[:, :, 5:] for x in operands()), chunk=3, state=state)
    expected, last = by_hand(*operands())
    assert_close(torch.cat((first, second), 2), expected)
    assert_close(after, last)


@pytest.mark.parametrize("strong", [-1e4, -torch.inf])
def test_a_strong_decay_leaves_no_trace_and_no_nan(strong: float) -> None:
    q, k, v, decay = operands()
    decay[:, :, 6] = strong
    v.requires_grad_(True)
    found, _ = state_space(q, k, v, decay.requires_grad_(True), chunk=4)
    assert_close(found[:, :, 6:], by_hand(*(x[:, :, 6:] for x in (q, k, v, decay)))[0])
    assert all(torch.isfinite(x).all() for x in torch.autograd.grad(found.square().sum(), (v, decay)))


def test_long_forgotten_tokens_cost_no_precision() -> None:
    """A sum of all logs up to a token, from which another is taken, would lose three digits here."""
    q, k, v, decay = (x.float() for x in operands())
    decay[:, :, 1] = -1e4
    found, _ = state_space(q, k, v, decay, chunk=64)
    assert_close(found, by_hand(*(x.double() for x in (q, k, v, decay)))[0].float())


def slow_mixer(attn: Mamba2Mixer, x: Tensor) -> dict[str, Tensor]:
    """What each site of one row holds, `x` its normed stream: the paper's recurrence, a token and a head at a time."""
    kind = attn.kind
    inner, keys = kind.value_heads * kind.d_value, kind.key_heads * kind.d_key
    channels = attn.into(x)
    found: dict[str, list[Tensor]] = {name: [] for name in ("channels_out", "step", "read", "z")}
    h = torch.zeros(kind.value_heads, kind.d_key, kind.d_value, dtype=x.dtype)
    for t in range(len(x)):
        mixed = torch.zeros_like(channels[0]) if attn.bias is None else attn.bias.clone()
        for i in range(kind.kernel):
            if t - i >= 0:
                mixed = mixed + attn.kernel[kind.kernel - 1 - i] * channels[t - i]
        values, keys_t, queries = F.silu(mixed).split([inner, keys, keys])
        step = (F.softplus(attn.rates(x[t]) + attn.step)).clamp(kind.step_min, kind.step_max or torch.inf)
        y = []
        for n in range(kind.value_heads):
            group = n // (kind.value_heads // kind.key_heads)
            own = values[n * kind.d_value : (n + 1) * kind.d_value]
            b, c = (part[group * kind.d_key : (group + 1) * kind.d_key] for part in (keys_t, queries))
            h[n] = (-attn.rate[n].exp() * step[n]).exp() * h[n] + step[n] * torch.outer(b, own)
            y.append(c @ h[n] + attn.skip[n] * own)
        gated = torch.cat(y) * F.silu(attn.gate(x[t]))
        z = [part / (part.square().mean() + kind.eps).sqrt() for part in gated.chunk(kind.key_heads)]
        gamma = attn.gated_norm.weight
        assert gamma is not None
        for name, value in zip(found, (mixed, step, torch.stack(y), torch.cat(z) * gamma), strict=True):
            found[name].append(value)
    return {f"blocks.0.attn.hook_{name}": torch.stack(values) for name, values in found.items()}


@over("name", STATES)
@over("row", range(3))
def test_a_layer_is_the_papers_recurrence_over_the_tokens(name: str, row: int) -> None:
    model = build_mixed(name)
    attn = model.block(0).attn
    assert isinstance(attn, Mamba2Mixer)
    sites = [Read(f"blocks.0.attn.hook_{site}") for site in ("channels_out", "step", "read", "z")]
    tap = Tap([stream := Read("blocks.0.ln1.hook_normalized"), *sites])
    model(some_tokens(), tap)
    expected = slow_mixer(attn, tap.values[stream][row])
    for read in sites:
        assert_close(tap.values[read][row].flatten(1), expected[read.site].flatten(1))


def test_step_size_edit_changes_decay_and_input_a_decay_edit_decay_alone() -> None:
    """With steps of 0 nothing is written, so that D x is all; without decay all is a sum over the tokens so far."""
    model, attn = build_mixed("mamba2"), "blocks.0.attn.hook_"
    mixer = model.block(0).attn
    assert isinstance(mixer, Mamba2Mixer)
    reads = [Read(f"{attn}{site}") for site in ("read", "memory_q", "memory_k", "memory_v", "step")]

    def seen(site: str) -> list[Tensor]:
        tap = Tap(reads, [Edit(f"{attn}{site}", Zero())])
        model(some_tokens(), tap)
        return [tap.values[each] for each in reads]

    found, _, _, v, _ = seen("step")
    assert_close(found, mixer.skip[:, None] * v)
    found, q, k, v, step = seen("log_decay")
    groups = mixer.kind.value_heads // mixer.kind.key_heads
    q, k = (x.repeat_interleave(groups, 2) for x in (q, k))
    weights = torch.einsum("bpnr,bqnr,bqn->bnpq", q, k, step).tril()
    assert_close(found, torch.einsum("bnpq,bqnf->bpnf", weights, v) + mixer.skip[:, None] * v)


def test_w_o_of_layers_of_different_widths_is_asked_for_by_layer() -> None:
    weights = Weights(build_mixed("mamba2-softmax"))
    assert [tuple(weights.layer(i).W_O.shape) for i in range(2)] == [(4, 14, 24), (4, 10, 24)]
    with pytest.raises(AttributeError, match=r"no W_O of one shape in all layers: ask `layer\(i\)`"):
        _ = weights.W_O


def test_step_limits_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match=r"step_min <= step_max, got 0\.5 and 0\.1"):
        Mamba2(1, 4, 5, 6, step_min=0.5, step_max=0.1)
