"""Llama 1 to 3.x: rotary positions (half-split), RMSNorm, SwiGLU, grouped key/value heads."""

from interp.families import llama_like
from interp.families.spec import Family, Settings
from interp.model.config import ModelConfig

rules = llama_like.rules
duplicates = llama_like.duplicates


def config(settings: Settings) -> ModelConfig:
    """Our config of a Llama checkpoint."""
    return llama_like.decoder(settings, {"max_position_embeddings": 2048}, biases=llama_like.BOTH)


FAMILY = Family(
    name="Llama",
    model_types=("llama",),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=duplicates,
    buffers=llama_like.BUFFERS,
)
