"""Gemma 2: norms on both sides of every sublayer, soft-capped scores and logits, a window in every other layer."""

from dataclasses import replace

from interp.families import gemma, llama_like
from interp.families.spec import Family, Settings
from interp.families.windows import local_layers, window_size
from interp.model.config import ModelConfig

DEFAULTS = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
}


def config(settings: Settings) -> ModelConfig:
    """Our config of a Gemma 2 checkpoint."""
    body = gemma.body(settings, DEFAULTS, act="hidden_activation")
    size = window_size(settings, 4096)
    window, layers = local_layers(settings, body.n_layers, size, lambda layer: layer % 2 == 0)
    return replace(
        body,
        norm_place="sandwich",
        attn_scale=settings.positive("query_pre_attn_scalar", 256.0) ** -0.5,
        attn_softcap=settings.optional("attn_logit_softcapping", 50.0),
        logit_softcap=settings.optional("final_logit_softcapping", 30.0),
        window=window,
        local_layers=layers,
    )


FAMILY = Family(
    name="Gemma 2",
    model_types=("gemma2",),
    config=config,
    rules=llama_like.rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
