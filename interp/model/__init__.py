"""The hookable Transformer: config, modules, sites, taps and weight views."""

from interp.model.config import (
    MLP,
    LayerNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NoNorm,
    NoPosition,
    RMSNorm,
    Rotary,
)
from interp.model.kv_cache import KVCache
from interp.model.sites import Site
from interp.model.tap import Edit, Read, Tap, Trace
from interp.model.transformer import Transformer, mean_next_token_loss, next_token_loss
from interp.model.weights import LayerWeights, Weights

__all__ = [
    "MLP",
    "Edit",
    "KVCache",
    "LayerNorm",
    "LayerWeights",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "ModelConfig",
    "NoNorm",
    "NoPosition",
    "RMSNorm",
    "Read",
    "Rotary",
    "Site",
    "Tap",
    "Trace",
    "Transformer",
    "Weights",
    "mean_next_token_loss",
    "next_token_loss",
]
