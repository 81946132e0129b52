"""Gemma: Llama's layout with embeddings times sqrt(d_model), norms stored as gamma - 1, and a tanh-GELU gate."""

from collections.abc import Mapping
from dataclasses import replace

from interp.families import llama_like
from interp.families.rope import USUAL, Wording
from interp.families.spec import Family, Settings
from interp.model.config import MLP, ModelConfig, RMSNorm

DEFAULTS = {"num_key_value_heads": 16, "head_dim": 256, "max_position_embeddings": 8192}


def body(
    settings: Settings, defaults: Mapping[str, int | float], *, act: str, wording: Wording = USUAL
) -> ModelConfig:
    """Config fields that all generations of Gemma share. act: key of the non-linearity; wording: of the rotation."""
    settings.require("use_bidirectional_attention", False, None)
    missing = {"tie_word_embeddings": True, **defaults}
    decoder = llama_like.decoder(settings, missing, act=(act, "gelu_pytorch_tanh"), wording=wording)
    assert isinstance(decoder.norm, RMSNorm)
    norm = replace(decoder.norm, unit_offset=True)
    return replace(decoder, norm=norm, embed_scale=decoder.d_model**0.5)


def config(settings: Settings) -> ModelConfig:
    """Our config of a Gemma checkpoint; the first release's `gelu` always meant the tanh approximation."""
    converted = body(settings, DEFAULTS, act="hidden_act")
    assert isinstance(converted.mlp, MLP)
    mlp = replace(converted.mlp, act="gelu_new") if converted.mlp.act == "gelu" else converted.mlp
    return replace(converted, mlp=mlp)


FAMILY = Family(
    name="Gemma",
    model_types=("gemma",),
    config=config,
    rules=llama_like.rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
