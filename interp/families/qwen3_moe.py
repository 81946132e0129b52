"""Qwen3-MoE: Qwen3 with experts in place of every MLP; models with plain MLPs in some layers are refused."""

from dataclasses import replace

from interp.families import experts, llama_like
from interp.families.spec import Family, Settings, TensorRule
from interp.families.windows import window_size
from interp.model.config import ModelConfig, MoE

DEFAULTS = {"num_key_value_heads": 4, "max_position_embeddings": 32_768}


def config(settings: Settings) -> ModelConfig:
    """Our config of a Qwen3-MoE checkpoint."""
    settings.require("decoder_sparse_step", 1, None)
    if plain := settings.get("mlp_only_layers"):
        raise ValueError(f"Qwen3-MoE: config asks for mlp_only_layers={plain!r}, supported: none")
    moe = MoE(
        n_experts=settings.count("num_local_experts", settings.count("num_experts", 128)),
        top_k=settings.count("num_experts_per_tok", 8),
        d_mlp=settings.count("moe_intermediate_size", 768),
        renormalise=settings.flag("norm_topk_prob", False),
    )
    size = window_size(settings, 4096)
    window = size if settings.flag("use_sliding_window", False) else None
    body = experts.decoder(settings, moe, DEFAULTS)
    return replace(body, qk_norm="head", window=window)


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    return experts.rules(config, "mlp")


FAMILY = Family(
    name="Qwen3-MoE",
    model_types=("qwen3_moe",),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
