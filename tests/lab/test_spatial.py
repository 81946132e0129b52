"""Spatial gating and token mixing against loops over the tokens, and what is refused of them."""

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from interp.lab import SpatialGating, TokenMixing
from interp.lab.spatial import SpatialGatingUnit, TokenMixer
from interp.model import ModelConfig, Read, Tap, Transformer, Weights
from tests.configs import perturbed, some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.tolerances import assert_close

BASE = MIXERS["spatial-gating"]


def seen_in(model: Transformer, tokens: Tensor, *names: str) -> list[Tensor]:
    reads = [Read(f"blocks.1.{name}") for name in names]
    tap = Tap(reads)
    model(tokens, tap)
    return [tap.values[read] for read in reads]


def model_with(config: ModelConfig) -> Transformer:
    torch.manual_seed(1)
    return perturbed(config)


@over("causal", [True, False])
@over("n", [1, 2, 9])
def test_spatial_gating_is_the_loop(n: int, causal: bool) -> None:
    """gMLP, figure 1: the channels in two halves after GELU, one normed and mixed over positions, then multiplied."""
    model = model_with(replace(BASE, causal=causal))
    x, z = seen_in(model, some_tokens(2, n), "ln1.hook_normalized", "attn.hook_z")
    unit = model.block(1).attn
    assert isinstance(unit, SpatialGatingUnit)
    shift = unit.shift.view(24, 4)
    for b in range(2):
        u = F.gelu(x[b] @ unit.gate.weight.T + unit.gate.bias)
        half = F.gelu(x[b] @ unit.v.weight.T + unit.v.bias)
        centred = half - half.mean(-1, keepdim=True)
        normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        v = (normed * unit.gating_norm.weight + unit.gating_norm.bias).unflatten(-1, (4, 10))
        for i, h in itertools.product(range(n), range(4)):
            seen = range(i + 1 if causal else n)
            mixed = shift[i, h] + sum((unit.spatial[i, h, j] * v[j, h] for j in seen), torch.zeros(10))
            assert_close(z[b, i, h], mixed * u[i].view(4, 10)[h])


def test_it_begins_as_the_gate_alone() -> None:
    """Section 2.1: weights near 0 and biases of 1 make the unit nearly the identity at first."""
    torch.manual_seed(0)
    model = Transformer(BASE).double()
    z, gate = seen_in(model, some_tokens(), "attn.hook_z", "attn.hook_gate")
    assert float(((z - gate).norm() / gate.norm()).detach()) < 0.2


def test_its_pattern_is_the_same_for_every_text() -> None:
    (pattern,) = seen_in(build_mixed("spatial-gating"), some_tokens(), "attn.hook_pattern")
    assert bool((pattern == pattern[:1]).all()) and bool((pattern.triu(1) == 0).all())
    assert bool((pattern < 0).any())


@over("n", [1, 2, 9])
def test_token_mixing_is_the_loop(n: int) -> None:
    """MLP-Mixer, equation 1: U = W_2 gelu(W_1 X) of the normed X, transposed, channel by channel."""
    model = model_with(MIXERS["token-mixing"])
    x, out = seen_in(model, some_tokens(2, n), "ln1.hook_normalized", "hook_attn_out")
    mixer = model.block(1).attn
    assert isinstance(mixer, TokenMixer)
    for b, channel in itertools.product(range(2), range(24)):
        hidden = [
            F.gelu(mixer.first_bias[r] + sum((mixer.first[r, j] * x[b, j, channel] for j in range(n)), torch.zeros(())))
            for r in range(7)
        ]  # fmt: skip
        for i in range(n):
            wanted = mixer.second_bias[i] + sum(
                (mixer.second[i, r] * hidden[r] for r in range(7)), torch.zeros(())
            )
            assert_close(out[b, i, channel], wanted)


@over("name", ["spatial-gating", "spatial-gating-bidirectional", "token-mixing"])
def test_texts_may_be_packed_and_padded_at_once(name: str) -> None:
    model, tokens = build_mixed(name), some_tokens()
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2, 2]).expand(3, -1)
    keep = torch.tensor([[1, 1, 0, 1, 0, 1, 1, 1, 1]], dtype=torch.bool).expand(3, -1)
    packed = model(tokens, documents=documents, keep=keep)
    for text in range(3):
        real = (documents[0] == text) & keep[0]
        assert_close(packed[:, real], model(tokens[:, real]))


def test_what_they_have_not_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="causal=False under TokenMixing"):
        replace(BASE, mixer=TokenMixing(4), d_head=None)
    with pytest.raises(ValueError, match="n_heads \\* d_head = d_model under TokenMixing"):
        replace(BASE, mixer=TokenMixing(4), causal=False)
    with pytest.raises(ValueError, match="hidden >= 1"):
        TokenMixing(0)
    for name in ("spatial-gating", "token-mixing"):
        with pytest.raises(AttributeError, match="has no"):
            _ = Weights(build_mixed(name)).OV
    with pytest.raises(ValueError, match="no qk_norm and no rotary positions"):
        replace(BASE, mixer=SpatialGating(), qk_norm="head")
