"""Qwen2 and Qwen2.5: Llama's layout with biases on queries, keys and values, and optional windows in later layers."""

from dataclasses import replace

from interp.families import llama_like
from interp.families.spec import Family, Settings
from interp.families.windows import from_layer
from interp.model.config import ModelConfig


def config(settings: Settings) -> ModelConfig:
    """Our config of a Qwen2 checkpoint."""
    body = llama_like.decoder(
        settings, {"num_key_value_heads": 32, "max_position_embeddings": 32_768}, biases=()
    )
    window, layers = from_layer(settings, body.n_layers)
    return replace(body, qkv_bias=True, out_bias=False, window=window, local_layers=layers)


FAMILY = Family(
    name="Qwen2",
    model_types=("qwen2",),
    config=config,
    rules=llama_like.rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
