"""Granite 4: Granite's four factors around layers of Mamba-2 or attention, and MLPs with or without experts."""

from dataclasses import replace

from interp.families import experts, granite, granitemoe, llama_like, mamba2
from interp.families.rope import Wording
from interp.families.spec import Family, Settings, TensorRule
from interp.families.table import modules
from interp.model.config import MLP, Mixer, ModelConfig, MoE, NoPosition, Softmax

DEFAULTS = granite.DEFAULTS | {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
ATTENTION, STATES = ("attention", "full_attention"), ("mamba", "linear_attention")
"""What files, and the library in memory, call the two kinds of layers."""


def config(settings: Settings) -> ModelConfig:
    """Our config of a Granite 4 checkpoint."""
    settings.require("hidden_act", "silu", "swish", None)
    settings.require("position_embedding_type", "rope", "nope", None)
    turned = settings.get("position_embedding_type") == "rope"
    body = llama_like.decoder(settings, DEFAULTS, wording=Wording(unused=not turned))
    body = granite.multiplied(settings, body if turned else replace(body, position=NoPosition()))
    states = mamba2.state_space(settings, body)
    kinds: list[Mixer] = [Softmax() if attends else states for attends in _attention(settings, body.n_layers)]
    return llama_like.mixed(replace(body, mlp=_mlp(settings, body)), kinds)


def _mlp(settings: Settings, body: ModelConfig) -> MLP | MoE:
    """The shared MLP, by itself or with experts."""
    assert isinstance(body.mlp, MLP)
    shared, n_experts = (
        settings.count("shared_intermediate_size", 1024),
        settings.integer("num_local_experts", 8),
    )
    top_k = settings.integer("num_experts_per_tok", 2)
    if n_experts == 0:
        return replace(body.mlp, d_mlp=shared)
    return MoE(n_experts, top_k, body.mlp.d_mlp, shared=shared)


def _attention(settings: Settings, n_layers: int) -> list[bool]:
    """Whether each layer attends; ValueError for other kinds of layers or a list of the wrong length."""
    kinds = settings.get("layer_types")
    if kinds is None:
        return [False] * n_layers
    known = (*ATTENTION, *STATES)
    if (
        not isinstance(kinds, list | tuple)
        or len(kinds) != n_layers
        or any(kind not in known for kind in kinds)
    ):
        raise ValueError(f"layer_types requires {n_layers} of {', '.join(known)}, got {kinds!r}")
    return [kind in ATTENTION for kind in kinds]


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    return (*mamba2.hybrid_rules(config, llama_like.attention_rules(config)), *_mlp_rules(config))


def _mlp_rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    mixture = isinstance(config.mlp, MoE)
    ours = "blocks.{l}.mlp.shared." if mixture else "blocks.{l}.mlp."
    names: dict[str, str | tuple[str, ...]] = {"into": "input_linear", "out": "output_linear"}
    shared = modules(names, ours=ours, theirs=f"{experts.BLOCK}shared_mlp.", bias=False)
    return (*shared, *granitemoe.mixture_rules()) if mixture else shared


FAMILY = Family(
    name="Granite 4",
    model_types=("granitemoehybrid",),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
