"""The config: checked once, frozen, and through JSON and back without losing or inventing a field."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Mapping

import pytest
import torch

from interp.model import (
    MLP,
    Alibi,
    Buckets,
    ModelConfig,
    MoE,
    NoPosition,
    Rotary,
    Softmax,
    build as build_network,
)
from interp.model.config import DynamicScaling, Llama3Scaling, LongScaling, YarnScaling
from tests.configs import CONFIGS
from tests.loops import over

SMALL = {"n_layers": 1, "d_model": 8, "n_heads": 2, "n_ctx": 4, "d_vocab": 5}


@over("name", CONFIGS)
def test_json_round_trip_gives_the_same_config(name: str) -> None:
    text = json.dumps(CONFIGS[name].to_dict())
    assert ModelConfig.from_dict(json.loads(text)) == CONFIGS[name]


def test_the_written_config_has_every_field() -> None:
    """But for the dictionaries, which are no part of the arithmetic."""
    fields = {field.name for field in dataclasses.fields(ModelConfig)}
    assert set(CONFIGS["gpt2"].to_dict()) == fields - {"features"}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"n_head": 2}, "ModelConfig has no field 'n_head'; nearest: n_heads"),
        ({"position": {"kind": "Rotarry"}}, "unknown record 'Rotarry'; nearest: Rotary"),
        ({"position": {"base": 3.0}}, "unknown record None"),
        ({"position": {"kind": "Rotary", "theta": 1e4}}, "Rotary has no field 'theta'"),
        ({"mlp": {"kind": "MLP", "d_mlp": 4, "gate": True}}, "MLP has no field 'gate'; nearest: gated"),
    ],
)
def test_unknown_keys_are_refused_by_name(extra: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig.from_dict({**SMALL, **extra})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_heads": 3}, "n_heads to divide d_model when d_head is not given, got 3 and 8"),
        ({"n_kv_heads": 3, "n_heads": 4}, "n_kv_heads to divide n_heads, got 3 and 4"),
        ({"window": 0}, "window >= 1, got 0"),
        ({"n_layers": -1}, "n_layers in [0, 10000], got -1"),
        ({"d_head": 0}, "d_head >= 1, got 0"),
        ({"d_vocab": -1}, "d_vocab >= 1, got -1"),
        (
            {"position": Alibi(rounded=True), "causal": False},
            "a causal model for Alibi(scaled=False, rounded=True)",
        ),
        (
            {"position": Rotary(), "mixer": Softmax(rotated=False)},
            "no rotary positions under Softmax in every layer, which does not rotate",
        ),
        ({"position": Rotary(dim=3)}, "an even rotary dim in [2, 4], got 3"),
        ({"position": Rotary(dim=6)}, "an even rotary dim in [2, 4], got 6"),
        ({"position": Rotary(), "d_head": 5}, "an even rotary dim in [2, 5], got 5"),
        ({"n_layers": 10_001}, "n_layers in [0, 10000], got 10001"),
        ({"attn_scale": -1.0}, "attn_scale finite and above 0, got -1.0"),
        ({"attn_softcap": 0.0}, "attn_softcap finite and above 0, got 0.0"),
        ({"logit_softcap": -30.0}, "logit_softcap finite and above 0, got -30.0"),
        ({"embed_scale": float("inf")}, "embed_scale up to 1e+30, got inf"),
        ({"residual_scale": float("nan")}, "a number as residual_scale, got nan"),
        ({"residual_scale": float("inf")}, "residual_scale up to 1e+30, got inf"),
        ({"logit_scale": 0.0}, "logit_scale finite and above 0, got 0.0"),
    ],
)
def test_impossible_sizes_are_refused_with_what_arrived(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"ModelConfig requires {message}")):
        ModelConfig(**{**SMALL, **change})


@pytest.mark.kinds
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": "false"}, "ModelConfig: causal must be bool, got 'false'"),
        ({"parallel": 1}, "ModelConfig: parallel must be bool, got 1"),
        ({"n_layers": True}, "ModelConfig: n_layers must be int, got True"),
        ({"n_layers": 2.0}, "ModelConfig: n_layers must be int, got 2.0"),
        ({"window": "3"}, "ModelConfig: window must be int or None, got '3'"),
        ({"d_head": "3"}, "ModelConfig: d_head must be int or None, got '3'"),
        ({"attn_scale": "x"}, "ModelConfig: attn_scale must be float or None, got 'x'"),
        ({"logit_scale": None}, "ModelConfig: logit_scale must be float, got None"),
        ({"mlp": {"kind": "MLP", "d_mlp": "8"}}, "MLP: d_mlp must be int, got '8'"),
        ({"mlp": {"kind": "MLP", "d_mlp": 8, "act": "swish"}}, "got 'swish' (str); nearest: silu"),
        ({"mlp": {"kind": "MLP", "d_mlp": 8, "bias": "false"}}, "MLP: bias must be bool, got 'false'"),
        ({"norm": {"kind": "LayerNorm", "eps": "a"}}, "LayerNorm: eps must be float, got 'a'"),
        ({"norm": {"kind": "RMSNorm", "eps": -1.0}}, "RMSNorm requires eps finite and 0 or more, got -1.0"),
        ({"position": {"kind": "Rotary", "base": "x"}}, "Rotary: base must be float, got 'x'"),
        ({"position": {"kind": "Rotary", "base": 0}}, "Rotary requires base finite and above 0, got 0"),
        ({"position": {"kind": "Learned", "offset": -4}}, "Learned requires offset finite and 0 or more, got -4"),
        ({"mixer": {"kind": "Softmax", "score": "dots"}}, "Softmax: score must be one of 'dot', 'cosine', 'additive'"),
    ],
)  # fmt: skip
def test_a_value_of_another_kind_or_out_of_range_is_named_with_its_field(
    change: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ModelConfig.from_dict({**SMALL, **change})


def test_head_width_and_key_heads_follow_from_the_model_where_not_given() -> None:
    config = ModelConfig(**SMALL)
    assert (config.d_head, config.n_kv_heads, config.rotary_dim) == (4, 2, 0)
    assert ModelConfig(**SMALL, position=Rotary()).rotary_dim == 4
    assert ModelConfig(**SMALL, position=Rotary(dim=2)).rotary_dim == 2


def test_a_config_is_a_value() -> None:
    one, other = (ModelConfig(**SMALL, mlp=MLP(4), position=NoPosition()) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.n_layers = 2  # type: ignore[misc]


def test_the_score_scale_is_the_root_of_the_head_width_unless_given() -> None:
    deep = {**SMALL, "n_layers": 4}
    assert ModelConfig(**deep).score_scale(1) == 0.5
    assert ModelConfig(**deep, attn_scale=0.25).score_scale(1) == 0.25
    assert [ModelConfig(**deep, scale_by_layer=True).score_scale(layer) for layer in (0, 3)] == [0.5, 0.125]


# --- numbers and positions that no pass could use ---------------------------------------------------------------------


@over("name", ["logit_softcap", "attn_softcap", "attn_scale", "embed_scale", "residual_scale", "logit_scale"])
def test_factors_and_caps_beyond_what_a_product_holds_are_refused(name: str) -> None:
    for value in (1e300, 1.1e30, math.inf):
        with pytest.raises(ValueError, match=rf"ModelConfig requires {name} up to 1e\+30"):
            ModelConfig(1, 16, 2, 64, 12, **{name: value})


def test_the_clamp_of_experts_must_be_finite_and_above_0() -> None:
    for clamp in (-math.inf, math.inf, -99.0, 0.0):
        with pytest.raises(ValueError, match="MoE requires clamp"):
            MoE(4, 2, 8, clamp=clamp)


def test_buckets_that_a_distance_would_miss_are_refused() -> None:
    for buckets in (Buckets(8, 2), Buckets(8, 4), Buckets(1, 8), Buckets(0, 8), Buckets(8, -99)):
        with pytest.raises(ValueError, match="Buckets requires n_buckets >= 2 and a max_distance above"):
            ModelConfig(1, 16, 2, 64, 12, position=buckets)
    with pytest.raises(ValueError, match="Buckets requires n_buckets >= 4"):
        ModelConfig(1, 16, 2, 64, 12, position=Buckets(2, 8), causal=False)
    for buckets, causal in ((Buckets(2, 2), True), (Buckets(8, 5), True), (Buckets(4, 2), False)):
        model = build_network(ModelConfig(1, 16, 2, 64, 12, position=buckets, causal=causal))
        assert bool(model(torch.arange(12).repeat(5)[None]).isfinite().all())


SCALINGS: Mapping[str, Callable[[], object]] = {
    "original_n_ctx >= 1": lambda: DynamicScaling(2.0, 0),
    "Llama3Scaling requires original_n_ctx >= 1": lambda: Llama3Scaling(2.0, 1.0, 4.0, 0),
    "0 < low_freq_factor < high_freq_factor, got 4.0 and 1.0": lambda: Llama3Scaling(2.0, 4.0, 1.0, 8),
    "0 < low_freq_factor < high_freq_factor, got 4.0 and 4.0": lambda: Llama3Scaling(2.0, 4.0, 4.0, 8),
    "YarnScaling requires original_n_ctx >= 1": lambda: YarnScaling(2.0, 0, 1.0),
    "YarnScaling requires beta_slow": lambda: YarnScaling(2.0, 8, 1.0, beta_slow=0.0),
    "a base other than 1 for YarnScaling": lambda: Rotary(1.0, scaling=YarnScaling(2.0, 8, 1.0)),
    "LongScaling requires as many divisors above 0": lambda: LongScaling((1.0, 0.0), (1.0, 1.0), 8, 1.0),
    "a rotary dim above 2 for DynamicScaling": lambda: ModelConfig(
        1, 16, 2, 64, 12, position=Rotary(dim=2, scaling=DynamicScaling(2.0, 8))
    ),
    "a divisor of LongScaling for each of 4 pairs, got 1": lambda: ModelConfig(
        1, 16, 2, 64, 12, position=Rotary(scaling=LongScaling((1.0,), (1.0,), 8, 1.0))
    ),
}


@over("words", SCALINGS)
def test_a_rotary_scaling_that_no_pass_could_use_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SCALINGS[words]()
