"""GLM-4.5 to 4.7 (mixture of experts): Llama's layout with half of every head rotated and DeepSeek V3's experts."""

from dataclasses import replace

from interp.families import experts, llama_like
from interp.families.deepseek import sigmoids
from interp.families.spec import Family, Settings, TensorRule
from interp.model.config import ModelConfig, MoE

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 0.5,
}


def config(settings: Settings) -> ModelConfig:
    """Our config of a GLM-4.5 checkpoint."""
    d_mlp = settings.count("moe_intermediate_size", 1408)
    moe = MoE(
        n_experts=settings.count("n_routed_experts", 128),
        top_k=settings.count("num_experts_per_tok", 8),
        d_mlp=d_mlp,
        renormalise=settings.flag("norm_topk_prob", True),
        router=sigmoids(settings, groups=1, top_groups=1, factor=1.0),
        shared=d_mlp * settings.count("n_shared_experts", 1),
    )
    settings.present(experts.PREDICTORS)
    body = experts.decoder(settings, moe, DEFAULTS, experts.first_dense(settings, 1))
    return replace(body, qk_norm="head" if settings.flag("use_qk_norm", False) else None, out_bias=False)


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    return (*llama_like.attention_rules(config), *experts.shared_rules(config))


FAMILY = Family(
    name="GLM-4.5",
    model_types=("glm4_moe",),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
    wide=(r"blocks\.\d+\.mlp\.(router\.weight|correction)",),
    unused=(
        r"model\.layers\.(46|92)\..*",
    ),  # the predictor of a second token, which transformers leaves out too
)
