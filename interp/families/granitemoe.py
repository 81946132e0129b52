"""Granite MoE: Granite with experts in place of every MLP; the weights of those chosen sum to 1."""

from interp.families import experts, granite, llama_like
from interp.families.spec import Family, Settings, TensorRule
from interp.model.config import ModelConfig, MoE

STORED = {
    "router.weight": ("router.weight", "router.layer.weight"),
    "into": ("experts.gate_up_proj", "input_linear.weight"),
    "out": ("experts.down_proj", "output_linear.weight"),
}
"""Our parameter -> its name in the library's memory, and in files."""


def config(settings: Settings) -> ModelConfig:
    """Our config of a Granite MoE checkpoint."""
    moe = MoE(
        n_experts=settings.integer("num_local_experts", 8),
        top_k=settings.integer("num_experts_per_tok", 2),
        d_mlp=settings.integer("intermediate_size"),
    )
    return granite.multiplied(settings, experts.decoder(settings, moe, granite.DEFAULTS))


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    return (*llama_like.attention_rules(config), *mixture_rules())


def mixture_rules() -> tuple[TensorRule, ...]:
    """The router and the experts of that table."""
    table, theirs = [], f"{experts.BLOCK}block_sparse_moe."
    for ours, (memory, file) in STORED.items():
        name = f"blocks.{{l}}.mlp.{ours}"
        table.append(TensorRule(name, (theirs + memory,), otherwise=TensorRule(name, (theirs + file,))))
    return tuple(table)


FAMILY = Family(
    name="Granite MoE",
    model_types=("granitemoe",),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
