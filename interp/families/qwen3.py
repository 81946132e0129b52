"""Qwen3: Llama's layout with each head's queries and keys normed, and a head width of its own."""

from dataclasses import replace

from interp.families import llama_like
from interp.families.spec import Family, Settings
from interp.families.windows import from_layer
from interp.model.config import ModelConfig

DEFAULTS = {"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32_768}


def config(settings: Settings) -> ModelConfig:
    """Our config of a Qwen3 checkpoint."""
    body = llama_like.decoder(settings, DEFAULTS)
    window, layers = from_layer(settings, body.n_layers)
    return replace(body, qk_norm="head", window=window, local_layers=layers)


FAMILY = Family(
    name="Qwen3",
    model_types=("qwen3",),
    config=config,
    rules=llama_like.rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
