"""GLM-4 (9B and the 0414 models): Llama's layout with neighbouring pairs of half of every head rotated.

Only queries, keys and values have biases; the 0414 models also have a norm after each sublayer.
"""

from dataclasses import replace

from interp.families import llama_like
from interp.families.spec import Family, Settings, TensorRule
from interp.model.config import ModelConfig, Rotary

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1.5625e-7,
    "partial_rotary_factor": 0.5,
}
SANDWICH = {
    "ln1": "input_layernorm",
    "ln1_post": "post_self_attn_layernorm",
    "ln2": "post_attention_layernorm",
    "ln2_post": "post_mlp_layernorm",
}


def config(settings: Settings) -> ModelConfig:
    """Our config of a GLM-4 checkpoint."""
    body = llama_like.decoder(settings, DEFAULTS)
    assert isinstance(body.position, Rotary)
    return replace(
        body,
        position=replace(body.position, interleaved=True),
        norm_place="sandwich" if settings.get("model_type") == "glm4" else "pre",
        qkv_bias=settings.flag("attention_bias", True),
        out_bias=False,
    )


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    norms = SANDWICH if config.norm_place == "sandwich" else None
    return (
        *llama_like.attention_rules(config, norms=norms),
        *llama_like.mlp_rules(config, "mlp.gate_up_proj"),
    )


FAMILY = Family(
    name="GLM-4",
    model_types=("glm", "glm4"),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
