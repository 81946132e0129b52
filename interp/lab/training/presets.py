"""Which model to train: a config from a JSON or TOML file, or a small one by name that fits the data."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from interp.core.boundary import public
from interp.core.files import json_object
from interp.core.wording import nearest
from interp.families.load import config_of
from interp.lab.training.losses import TrainingData
from interp.model.config import MLP, AnyConfig, EncoderDecoderConfig, ModelConfig, RMSNorm, Rotary, Sinusoidal


@public()
def attention_only(n_layers: int, d_vocab: int, n_ctx: int) -> ModelConfig:
    """The config of a small model of attention without MLPs and with rotary positions, 64 wide, 4 heads.

    Args:
        n_layers: number of blocks.
        d_vocab: size of the vocabulary.
        n_ctx: the longest row, in tokens.

    Returns:
        `ModelConfig`.
    """
    return ModelConfig(
        n_layers=n_layers, d_model=64, n_heads=4, n_ctx=n_ctx, d_vocab=d_vocab, position=Rotary()
    )


def gpt(d_vocab: int, n_ctx: int) -> ModelConfig:
    """GPT-2's shape: 4 layers, 128 wide, 8 heads, learned positions."""
    return ModelConfig(
        n_layers=4, d_model=128, n_heads=8, n_ctx=n_ctx, d_vocab=d_vocab, mlp=MLP(512, act="gelu_new")
    )


def llama(d_vocab: int, n_ctx: int) -> ModelConfig:
    """Llama's shape: 4 layers, 128 wide, 8 heads with 4 of keys, rotary, gated MLPs, RMSNorm, no biases."""
    return ModelConfig(
        n_layers=4, d_model=128, n_heads=8, n_kv_heads=4, n_ctx=n_ctx, d_vocab=d_vocab, position=Rotary(),
        norm=RMSNorm(), mlp=MLP(344, act="silu", gated=True, bias=False), qkv_bias=False, out_bias=False,
    )  # fmt: skip


PRESETS: Mapping[str, Callable[[int, int], ModelConfig]] = MappingProxyType(
    {
        "attention-1l": lambda d_vocab, n_ctx: attention_only(1, d_vocab, n_ctx),
        "attention-2l": lambda d_vocab, n_ctx: attention_only(2, d_vocab, n_ctx),
        "gpt-4l": gpt,
        "llama-4l": llama,
    }
)
"""Name -> the config for a vocabulary and a context length."""


@public()
def encoder_decoder(
    d_vocab: int, n_ctx: int, *, d_model: int = 64, n_heads: int = 4, n_layers: int = 2
) -> EncoderDecoderConfig:
    """The config of the first Transformer, small: sinusoidal positions, ReLU, but norms before sublayers.

    Args:
        d_vocab: size of the vocabulary.
        n_ctx: the longest row of either side, in tokens.
        d_model: width of the residual stream.
        n_heads: heads per layer.
        n_layers: blocks per side.

    Returns:
        `EncoderDecoderConfig`.

    Source:
        Vaswani et al. 2017.
    """
    side = ModelConfig(
        n_layers=n_layers, d_model=d_model, n_heads=n_heads, n_ctx=n_ctx, d_vocab=d_vocab,
        position=Sinusoidal(), mlp=MLP(4 * d_model, act="relu"), embed_scale=d_model**0.5,
    )  # fmt: skip
    return EncoderDecoderConfig(
        replace(side, causal=False, unembed=False), replace(side, cross_attention=True)
    )


@public()
def config_for(model: str, data: TrainingData) -> AnyConfig:
    """The config of a preset, as large as the data requires, or of a `.json` or `.toml` file.

    A file holds the fields of `ModelConfig` (nested records with their class name under `kind`), or is a
    `config.json` of any family that can be loaded.

    Args:
        model: a name of `PRESETS`, or the path of a file.
        data: the training data, whose vocabulary and width count.

    Returns:
        `ModelConfig` or `EncoderDecoderConfig`.

    Raises:
        ValueError: an unknown name or field, or a file whose vocabulary or context is smaller than the data's.
        FileNotFoundError: no such file.
    """
    path = Path(model)
    if path.suffix not in (".json", ".toml"):
        if model not in PRESETS:
            raise ValueError(
                f"unknown model {model!r}, {nearest(model, PRESETS)}; presets: {', '.join(PRESETS)}; else "
                "the path of a .json or .toml file is required"
            )
        return PRESETS[model](data.d_vocab, data.width)
    values = json_object(path) if path.suffix == ".json" else tomllib.loads(path.read_text(encoding="utf-8"))
    config = config_of(values)[1] if "model_type" in values else ModelConfig.from_dict(values)
    check_fits(config, data)
    return config


def check_fits(config: AnyConfig, data: TrainingData) -> None:
    """ValueError if the data has more token ids, or longer rows, than the model."""
    for side in (config.encoder, config.decoder) if isinstance(config, EncoderDecoderConfig) else (config,):
        if side.d_vocab < data.d_vocab or side.n_ctx < data.width:
            raise ValueError(
                f"a model for {data.d_vocab} token ids and rows of {data.width} is required, this one has "
                f"{side.d_vocab} and a context of {side.n_ctx}"
            )
