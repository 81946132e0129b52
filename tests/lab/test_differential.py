"""Differential attention against loops over heads and tokens, and the identities of its pattern."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from interp.lab import Differential
from interp.lab.differential import DifferentialAttention, lambda_init
from interp.model import ModelConfig, Read, Rotary, Softmax, Tap, Transformer
from tests.configs import perturbed, some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.model.slow_position import rotated
from tests.tolerances import assert_close

NAMES = [name for name, config in MIXERS.items() if isinstance(config.mixers[0], Differential)]


def recorded(model: Transformer, tokens: Tensor, *sites: str, layer: int = 0) -> dict[str, Tensor]:
    """Sites of a block's attention by their last word."""
    reads = {site: Read(f"blocks.{layer}.attn.{site}") for site in sites}
    tap = Tap(list(reads.values()))
    model(tokens, tap)
    return {site: tap.values[read] for site, read in reads.items()}


def slow_pattern(q: Tensor, k: Tensor, i: int, config: ModelConfig) -> Tensor:
    """softmax over the visible j of q_i . k_j / sqrt(width), q and k `[p e]` of one half of a head."""
    last = i + 1 if config.causal else len(q)
    narrow = replace(
        config, d_head=q.shape[-1], mixer=Softmax()
    )  # the rotation of a head as wide as half of one
    q, k = rotated(narrow, 0, q), rotated(narrow, 0, k)
    scores = torch.stack([q[i] @ k[j] for j in range(last)]) / math.sqrt(q.shape[-1])
    return torch.cat((scores.exp() / scores.exp().sum(), torch.zeros(len(q) - last, dtype=q.dtype)))


@pytest.mark.parametrize("name", NAMES)
@over("n", [1, 2, 9])
def test_z_is_that_of_a_loop_over_heads_and_tokens(name: str, n: int) -> None:
    model, config = build_mixed(name), MIXERS[name]
    attn, kind = model.block(0).attn, config.mixers[0]
    assert isinstance(attn, DifferentialAttention) and isinstance(kind, Differential)
    seen = recorded(model, some_tokens(1, n), "hook_q", "hook_k", "hook_v", "hook_pattern", "hook_z")
    q, k, v = (seen[f"hook_{x}"][0] for x in "qkv")
    half, p = config.head_width // 2, dict(attn.named_parameters())
    share = (
        math.exp(p["lambda_q1"] @ p["lambda_k1"]) - math.exp(p["lambda_q2"] @ p["lambda_k2"]) + lambda_init(0)
    )
    gamma = p["z_norm.norm.weight"]
    for h in range(config.n_heads):
        g = h // (config.n_heads // config.kv_heads)
        for i in range(n):
            first = slow_pattern(q[:, h, :half], k[:, g, :half], i, config)
            second = slow_pattern(q[:, h, half:], k[:, g, half:], i, config)
            row = first - share * second
            assert_close(seen["hook_pattern"][0, h, i], row)
            z = row @ v[:, g]
            z = z / (z.pow(2).mean() + kind.eps).sqrt() * gamma * (1 - lambda_init(0))
            assert_close(seen["hook_z"][0, i, h], z)


def test_the_first_lambdas_are_those_of_the_paper() -> None:
    assert [round(lambda_init(layer), 4) for layer in range(3)] == [0.2, 0.3555, 0.4707]
    assert lambda_init(40) == pytest.approx(0.8, abs=1e-5)


def test_lambda_begins_near_its_start_and_differs_by_layer() -> None:
    torch.manual_seed(0)
    model = Transformer(replace(MIXERS["differential"], d_model=256, n_heads=4, d_head=64))
    shares = [model.block(layer).attn.share() for layer in range(2)]  # type: ignore[operator]
    for layer, share in enumerate(shares):
        assert abs(float(share.detach()) - lambda_init(layer)) < 0.5
        std = torch.cat([p for n, p in model.block(layer).attn.named_parameters() if "lambda" in n]).std()
        assert 0.07 < float(std) < 0.13


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_the_pattern_sum_to_one_minus_lambda(name: str) -> None:
    model = build_mixed(name)
    attn = model.block(0).attn
    assert isinstance(attn, DifferentialAttention)
    seen = recorded(model, some_tokens(), "hook_pattern", "hook_pattern_1", "hook_pattern_2")
    rows = seen["hook_pattern"].sum(-1)
    assert_close(rows, (1 - attn.share()).expand_as(rows))
    for half in ("hook_pattern_1", "hook_pattern_2"):
        assert_close(seen[half].sum(-1), torch.ones_like(rows))
    assert_close(seen["hook_pattern"], seen["hook_pattern_1"] - attn.share() * seen["hook_pattern_2"])


def variant(**changes: Tensor | float) -> Transformer:
    """The same model but for these parameters of its first layer's lambda."""
    torch.manual_seed(0)
    model = perturbed(MIXERS["differential"], torch.float64, 3)
    attn = model.block(0).attn
    for name, value in changes.items():
        parameter = dict(attn.named_parameters())[name]
        parameter.copy_(torch.as_tensor(value, dtype=torch.float64).expand_as(parameter))
    return model


def equal_halves(model: Transformer) -> Transformer:
    """Second halves of queries and keys made equal to the first."""
    for parameter in (model.block(0).attn.qkv.weight, model.block(0).attn.qkv.bias):
        rows = parameter.unflatten(0, (3, 4, 2, -1))
        rows[:2, :, 1] = rows[:2, :, 0]
    return model


def test_with_equal_branches_the_result_does_not_depend_on_lambda() -> None:
    """Up to eps: the norm has no scale, and the pattern is (1 - lambda) times that of softmax attention."""
    found = []
    for value in (0.0, 0.1):
        model = equal_halves(variant(lambda_q1=value, lambda_k1=1.0, lambda_q2=0.0))
        seen = recorded(model, some_tokens(), "hook_pattern", "hook_pattern_1", "hook_z")
        share = model.block(0).attn.share()  # type: ignore[operator]
        assert_close(seen["hook_pattern"], (1 - share) * seen["hook_pattern_1"])
        found.append((share, seen["hook_z"]))
    assert found[0][0] != found[1][0] and max(share for share, _ in found) < 1
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-3, atol=1e-3)


def test_without_lambda_it_is_softmax_attention_then_the_norm() -> None:
    lost = math.log(lambda_init(0) + 1)  # exp(0) - exp(log(1 + start)) + start = 0
    half = MIXERS["differential"].head_width // 2
    model = variant(lambda_q1=0.0, lambda_q2=lost / half, lambda_k2=1.0)
    attn = model.block(0).attn
    assert isinstance(attn, DifferentialAttention)
    assert float(attn.share()) == pytest.approx(0, abs=1e-12)
    seen = recorded(model, some_tokens(), "hook_pattern", "hook_pattern_1", "hook_v", "hook_z")
    assert_close(seen["hook_pattern"], seen["hook_pattern_1"])
    plain = torch.einsum("bhqk,bkhe->bqhe", seen["hook_pattern_1"], seen["hook_v"])
    assert_close(seen["hook_z"], (1 - lambda_init(0)) * attn.z_norm(plain))


def test_parameters_are_those_of_softmax_attention_and_five_vectors() -> None:
    config = replace(MIXERS["differential"], d_head=6)
    count = [
        sum(p.numel() for p in Transformer(replace(config, mixer=mixer)).block(0).attn.parameters())
        for mixer in (Differential(), Softmax())
    ]
    assert count[0] - count[1] == 4 * 3 + 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_head": 7}, "an even d_head"),
        ({"d_head": 6, "position": Rotary()}, "half a head"),
        ({"d_head": 8, "position": Rotary(dim=6)}, "half a head"),
        ({"qk_norm": "head"}, "no qk_norm under Differential"),
        ({"window": 4}, "no window under Differential"),
    ],
)
def test_configs_that_contradict_it_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MIXERS["differential"], **changes)  # type: ignore[arg-type]
