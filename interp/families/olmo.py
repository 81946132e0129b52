"""OLMo 1: Llama's layout with norms that have no weights, and queries, keys and values clipped in some models."""

from dataclasses import replace

from interp.families import llama_like
from interp.families.spec import Family, Settings
from interp.model.config import LayerNorm, ModelConfig, Softmax


def config(settings: Settings) -> ModelConfig:
    """Our config of an OLMo 1 checkpoint."""
    norm = LayerNorm(1e-5, trained="nothing")
    body = llama_like.decoder(settings, {"max_position_embeddings": 2048}, norm=norm)
    return replace(body, mixer=Softmax(clip=settings.optional("clip_qkv", None)))


FAMILY = Family(
    name="OLMo",
    model_types=("olmo",),
    config=config,
    rules=llama_like.rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
