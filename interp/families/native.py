"""Checkpoints of this package: its own config and parameter names, one safetensors file."""

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from interp.families.spec import Family, Settings, TensorRule
from interp.model.config import AnyConfig, EncoderDecoderConfig, Json, ModelConfig
from interp.model.encoder_decoder import build

MODEL_TYPE = "interp"
BOS = "<|bos|>"
"""The token that begins a sequence, ends a text and pads a row in this package's own tokenizers."""
OPENED = "opened"
"""The key that says what was done to the checkpoint that these weights came from (`Transformer.opened`)."""
_KINDS = {kind.__name__: kind for kind in (ModelConfig, EncoderDecoderConfig)}


def values(config: AnyConfig, opened: Sequence[str] = ()) -> Json:
    """The contents of `config.json`; `kind` marks an encoder-decoder, `opened` is `Transformer.opened`."""
    kind = type(config).__name__
    named = {} if kind == ModelConfig.__name__ else {"kind": kind}
    stored = {OPENED: list(opened)} if opened else {}
    return {"model_type": MODEL_TYPE, **named, **stored, **config.to_dict()}


def opened(values: Mapping[str, object]) -> tuple[str, ...]:
    """The notes about earlier conversions of the checkpoint that a config lists (`Transformer.opened`)."""
    stored = values.get(OPENED)
    return tuple(map(str, stored)) if isinstance(stored, list) else ()


def config(settings: Settings) -> AnyConfig:
    """The config that `values` wrote."""
    settings.require("kind", *_KINDS, None)
    settings.get(OPENED)
    kind = _KINDS[settings.text("kind", ModelConfig.__name__)]
    return kind.from_dict(
        settings.present([*(f.name for f in dataclasses.fields(kind)), *ModelConfig.EARLIER])
    )


def rules(config: AnyConfig) -> tuple[TensorRule, ...]:
    """One rule per parameter, which is stored under its own name; a tied parameter under its first name."""
    with torch.device("meta"):
        parameters = dict(build(config).named_parameters())
    return tuple(TensorRule(name, (name,)) for name in parameters)


FAMILY = Family(name="interp", model_types=(MODEL_TYPE,), config=config, rules=rules, prefix="")
