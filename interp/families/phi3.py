"""Phi-3 (and Phi-4): Llama's layout stored fused, q, k, v in one matrix and gate, up in another; LongRoPE."""

from dataclasses import replace

from interp.families import llama_like
from interp.families.rope import Wording
from interp.families.spec import Family, Settings, TensorRule
from interp.families.windows import window_size
from interp.model.config import ModelConfig

DEFAULTS = {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0}
WORDING = Wording(original=4096, longrope=("longrope", "su", "yarn"))  # its names in older files


def config(settings: Settings) -> ModelConfig:
    """Our config of a Phi-3 checkpoint."""
    body = llama_like.decoder(settings, DEFAULTS, biases=(), wording=WORDING)
    return replace(body, window=window_size(settings, None))


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    attention = llama_like.attention_rules(config, "self_attn.qkv_proj")
    return (*attention, *llama_like.mlp_rules(config, "mlp.gate_up_proj"))


FAMILY = Family(
    name="Phi-3",
    model_types=("phi3",),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
