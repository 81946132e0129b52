"""Our own checkpoints: our config and our parameter names, one safetensors file."""

import dataclasses

import torch

from interp.families.spec import Family, Rule, Settings
from interp.model.config import ModelConfig
from interp.model.transformer import Transformer

MODEL_TYPE = "interp"
BOS = "<|bos|>"
"""The token that begins a sequence, ends a text and pads a row in our own tokenizers."""


def config(settings: Settings) -> ModelConfig:
    """The config as `ModelConfig.to_dict` wrote it."""
    return ModelConfig.from_dict(settings.present([f.name for f in dataclasses.fields(ModelConfig)]))


def rules(config: ModelConfig) -> tuple[Rule, ...]:
    """Every parameter under its own name."""
    with torch.device("meta"):
        parameters = dict(Transformer(config).named_parameters())
    return tuple(Rule(name, (name,)) for name in parameters)


FAMILY = Family(name="interp", model_types=(MODEL_TYPE,), config=config, rules=rules, prefix="")
