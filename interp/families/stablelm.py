"""StableLM: Llama's layout with LayerNorms and a quarter of every head rotated.

In StableLM 2 12B attention and MLP stand side by side after one norm, and each head's queries and keys are normed.
"""

from dataclasses import replace

from interp.families import llama_like
from interp.families.spec import Family, Settings, TensorRule
from interp.model.config import LayerNorm, ModelConfig

DEFAULTS = {"num_key_value_heads": 32, "max_position_embeddings": 4096, "partial_rotary_factor": 0.25}


def config(settings: Settings) -> ModelConfig:
    """Our config of a StableLM checkpoint."""
    width, heads = settings.count("hidden_size"), settings.count("num_attention_heads")
    settings.require("head_dim", width // heads, None)
    parallel = settings.flag("use_parallel_residual", False)
    norm = LayerNorm(settings.real("layer_norm_eps", 1e-5))
    return replace(
        llama_like.decoder(settings, DEFAULTS, norm=norm, biases=()),
        parallel=parallel,
        shared_norm=parallel,
        qk_norm="each" if settings.flag("qk_layernorm", False) else None,
        qkv_bias=settings.flag("use_qkv_bias", False),
    )


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table; each head's norm is a module of its own."""
    table = llama_like.rules(replace(config, qk_norm=None))
    if config.qk_norm is None:
        return table
    sides = {"q": config.n_heads, "k": config.kv_heads}
    return (*table, *(
        TensorRule(f"blocks.{{l}}.attn.{part}_norm.norm.weight", tuple(
            f"model.layers.{{l}}.self_attn.{part}_layernorm.norms.{head}.weight" for head in range(heads)
        ))
        for part, heads in sides.items()
    ))  # fmt: skip


FAMILY = Family(
    name="StableLM",
    model_types=("stablelm",),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
