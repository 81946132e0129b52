"""The config: checked once, frozen, and through JSON and back without losing or inventing a field."""

import dataclasses
import json
import re

import pytest

from interp.model import MLP, ModelConfig, NoPosition, Rotary
from tests.configs import CONFIGS
from tests.loops import over

SMALL = {"n_layers": 1, "d_model": 8, "n_heads": 2, "n_ctx": 4, "d_vocab": 5}


@over("name", CONFIGS)
def test_json_round_trip_gives_the_same_config(name: str) -> None:
    text = json.dumps(CONFIGS[name].to_dict())
    assert ModelConfig.from_dict(json.loads(text)) == CONFIGS[name]


def test_the_written_config_has_every_field() -> None:
    assert set(CONFIGS["gpt2"].to_dict()) == {field.name for field in dataclasses.fields(ModelConfig)}


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"n_head": 2}, "ModelConfig has no field 'n_head'; nearest: n_heads"),
        ({"position": {"kind": "Rotery"}}, "unknown record 'Rotery'; nearest: Rotary"),
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
        ({"n_layers": 0}, "n_layers >= 1, got 0"),
        ({"d_head": 0}, "d_head >= 1, got 0"),
        ({"d_vocab": -1}, "d_vocab >= 1, got -1"),
        ({"position": Rotary(dim=3)}, "an even rotary dim in [2, 4], got 3"),
        ({"position": Rotary(dim=6)}, "an even rotary dim in [2, 4], got 6"),
        ({"position": Rotary(), "d_head": 5}, "an even rotary dim in [2, 5], got 5"),
    ],
)
def test_impossible_sizes_are_refused_with_what_arrived(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"ModelConfig requires {message}")):
        ModelConfig(**{**SMALL, **change})


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
    assert ModelConfig(**SMALL).score_scale(1) == 0.5
    assert ModelConfig(**SMALL, attn_scale=0.25).score_scale(1) == 0.25
    assert [ModelConfig(**SMALL, scale_by_layer=True).score_scale(layer) for layer in (0, 3)] == [0.5, 0.125]
