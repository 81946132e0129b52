"""Mistral: Llama's layout, with a sliding window in every layer of the first models."""

from dataclasses import replace

from interp.families import llama_like
from interp.families.spec import Family, Settings
from interp.families.windows import window_size
from interp.model.config import ModelConfig


def config(settings: Settings) -> ModelConfig:
    """Our config of a Mistral checkpoint."""
    body = llama_like.decoder(
        settings, {"num_key_value_heads": 8, "max_position_embeddings": 131_072}, biases=()
    )
    return replace(body, window=window_size(settings, 4096))


FAMILY = Family(
    name="Mistral",
    model_types=("mistral",),
    config=config,
    rules=llama_like.rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
