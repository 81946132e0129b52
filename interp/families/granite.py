"""Granite: Llama's layout with a factor on the embeddings, the scores, what every sublayer adds, and the logits."""

from dataclasses import replace

from interp.families import llama_like
from interp.families.spec import Family, Settings
from interp.model.config import ModelConfig

DEFAULTS = {"max_position_embeddings": 2048}


def config(settings: Settings) -> ModelConfig:
    """Our config of a Granite checkpoint."""
    return multiplied(settings, llama_like.decoder(settings, DEFAULTS, biases=llama_like.BOTH))


def multiplied(settings: Settings, body: ModelConfig) -> ModelConfig:
    """The family's config with the four factors that the checkpoint's config names."""
    return replace(
        body,
        embed_scale=settings.real("embedding_multiplier", 1.0),
        attn_scale=settings.real("attention_multiplier", 1.0),
        residual_scale=settings.real("residual_multiplier", 1.0),
        logit_scale=1 / settings.positive("logits_scaling", 1.0),
    )


FAMILY = Family(
    name="Granite",
    model_types=("granite",),
    config=config,
    rules=llama_like.rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
