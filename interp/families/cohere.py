"""Cohere (Command R): attention and a gated MLP side by side after one norm without beta.

Rotation of neighbouring pairs, a factor on the logits, and in some models a norm of each head's queries and keys.
"""

from dataclasses import replace

from interp.families import llama_like
from interp.families.spec import Family, Settings
from interp.model.config import LayerNorm, ModelConfig, Rotary

THETA = 500_000.0


def config(settings: Settings) -> ModelConfig:
    """Our config of a Cohere checkpoint."""
    converted = body(settings, THETA)
    longest = settings.integer(
        "model_max_length", converted.n_ctx
    )  # name of the context length in the first configs
    per_head = settings.flag("use_qk_norm", False)
    return replace(converted, qk_norm="each" if per_head else None, n_ctx=max(converted.n_ctx, longest))


def body(settings: Settings, theta: float) -> ModelConfig:
    """Config fields that both generations share; theta: the default base of the rotation."""
    defaults = {"max_position_embeddings": 8192, "rope_theta": theta, "tie_word_embeddings": True}
    norm = LayerNorm(settings.real("layer_norm_eps", 1e-5), trained="gamma")
    decoder = llama_like.decoder(settings, defaults, norm=norm)
    assert isinstance(decoder.position, Rotary)
    return replace(
        decoder,
        parallel=True,
        shared_norm=True,
        position=replace(decoder.position, interleaved=True),
        logit_scale=settings.real("logit_scale", 0.0625),
    )


FAMILY = Family(
    name="Cohere",
    model_types=("cohere",),
    config=config,
    rules=llama_like.rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
