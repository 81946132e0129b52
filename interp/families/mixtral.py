"""Mixtral: Mistral with experts in place of every MLP; the weights of those chosen sum to 1."""

from dataclasses import replace

from interp.families import experts, llama_like
from interp.families.spec import Family, Settings, TensorRule
from interp.families.windows import window_size
from interp.model.config import ModelConfig, MoE

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-5,
}


def config(settings: Settings) -> ModelConfig:
    """Our config of a Mixtral checkpoint."""
    moe = MoE(
        n_experts=settings.count("num_local_experts", 8),
        top_k=settings.count("num_experts_per_tok", 2),
        d_mlp=settings.count("intermediate_size"),
    )
    body = experts.decoder(settings, moe, DEFAULTS, biases=())
    return replace(body, window=window_size(settings, None))


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table; w1 is the gate, w3 the linear branch, w2 what writes."""
    return experts.rules(config, "block_sparse_moe", ("w1", "w3", "w2"))


FAMILY = Family(
    name="Mixtral",
    model_types=("mixtral",),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
