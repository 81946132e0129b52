"""Qwen3.5, text: Qwen3-Next's layers with plain MLPs or with experts, the matrices of a delta net stored one by one.

Its rotary table also tells the positions of images apart; in a text all of them are the same. Checkpoints of the whole
model, with its vision tower, are wrapped.
"""

from dataclasses import replace

from interp.families import llama_like, qwen3_next
from interp.families.qwen3_next import DELTA, OURS
from interp.families.rope import Wording
from interp.families.spec import Settings, TensorRule
from interp.model.config import ModelConfig

DEFAULTS = qwen3_next.DEFAULTS | {"num_key_value_heads": 4}
WORDING = Wording(same_for_texts=("mrope_section", "mrope_interleaved"))


def config(settings: Settings) -> ModelConfig:
    """Our config of a Qwen3.5 text checkpoint."""
    settings.present(("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"))  # of layers that are left out
    if settings.text("model_type", "qwen3_5_text") == "qwen3_5_moe_text":
        body = qwen3_next.decoder(settings, renormalise=True, wording=WORDING)
    else:
        body = qwen3_next.plain(settings, DEFAULTS, WORDING)
    return qwen3_next.hybrid(settings, body)


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    sources = {"into": ("in_proj_qkv",), "gate": ("in_proj_z",), "rates": ("in_proj_b", "in_proj_a")}
    into = [
        TensorRule(f"{OURS}{ours}.weight", tuple(f"{DELTA}{name}.weight" for name in theirs))
        for ours, theirs in sources.items()
    ]
    dense = getattr(config.mlp, "n_experts", None) is None
    mlps = llama_like.mlp_rules(config) if dense else qwen3_next.expert_rules()
    return (*qwen3_next.hybrid_rules(config, into), *mlps)


FAMILY = replace(
    qwen3_next.FAMILY,
    name="Qwen3.5",
    model_types=("qwen3_5_text", "qwen3_5_moe_text"),
    config=config,
    rules=rules,
)
