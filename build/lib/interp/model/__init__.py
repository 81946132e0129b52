"""The hookable Transformer: config, modules, sites, taps and weight views."""

from interp.model.attention import Memory
from interp.model.block import UsualBlock
from interp.model.config import (
    MLP,
    Alibi,
    AnyConfig,
    Buckets,
    DynamicScaling,
    EncoderDecoderConfig,
    FullSoftmax,
    GatedDelta,
    Latent,
    LayerNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Mamba2,
    ModelConfig,
    MoE,
    NoNorm,
    NoPosition,
    RMSNorm,
    Rotary,
    Router,
    ShortConv,
    Sinusoidal,
    Softmax,
    YarnScaling,
)
from interp.model.encoder_decoder import EncoderDecoder, build
from interp.model.kv_cache import KVCache
from interp.model.loss import mean_next_token_loss, next_token_loss, next_token_loss_of
from interp.model.sites import Site
from interp.model.softmax import Chunks, LogSteps
from interp.model.tap import Edit, Read, Tap, Trace
from interp.model.transformer import Transformer
from interp.model.weights import LayerWeights, Weights

__all__ = [
    "MLP",
    "Alibi",
    "AnyConfig",
    "Buckets",
    "Chunks",
    "DynamicScaling",
    "Edit",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "FullSoftmax",
    "GatedDelta",
    "KVCache",
    "Latent",
    "LayerNorm",
    "LayerWeights",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "LogSteps",
    "LongScaling",
    "Mamba2",
    "Memory",
    "MoE",
    "ModelConfig",
    "NoNorm",
    "NoPosition",
    "RMSNorm",
    "Read",
    "Rotary",
    "Router",
    "ShortConv",
    "Sinusoidal",
    "Site",
    "Softmax",
    "Tap",
    "Trace",
    "Transformer",
    "UsualBlock",
    "Weights",
    "YarnScaling",
    "build",
    "mean_next_token_loss",
    "next_token_loss",
    "next_token_loss_of",
]  # fmt: skip
