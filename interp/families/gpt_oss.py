"""GPT-OSS: a sink per head, YaRN, a window in every other layer, experts with biases and a clamped gate.

Experts are stored `[expert, in, out]`, the gate's and the linear branch's columns alternating; in MXFP4, as the
originals are, they are dequantised at load (`quantised`).
"""

from dataclasses import replace

from einops import rearrange
from torch import Tensor

from interp.families import experts, llama_like
from interp.families.rope import Wording
from interp.families.spec import Family, Settings, TensorRule, transposed
from interp.families.windows import local_layers, window_size
from interp.model.config import ModelConfig, MoE

ALPHA = 1.702
"""Factor inside the gate's sigmoid: `quick_gelu`."""
DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131_072,
    "rope_theta": 150_000.0,
    "rms_norm_eps": 1e-5,
}

WORDING = Wording(
    table={
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 4096,
    }
)  # fmt: skip


def config(settings: Settings) -> ModelConfig:
    """Our config of a GPT-OSS checkpoint."""
    settings.require("hidden_act", "silu", "swish", None)
    settings.require("swiglu_alpha", ALPHA, None)
    top_k = settings.count("num_experts_per_tok", 4)
    moe = MoE(
        n_experts=settings.count("num_local_experts", 128),
        top_k=top_k,
        d_mlp=settings.count("intermediate_size"),
        bias=True,
        router_bias=True,
        clamp=settings.real("swiglu_limit", 7.0),
        linear_offset=1.0,
    )
    body = experts.decoder(settings, moe, DEFAULTS, wording=WORDING)
    bias = settings.flag("attention_bias", True)
    size = window_size(settings, 128)
    window, layers = local_layers(settings, body.n_layers, size, lambda layer: layer % 2 == 0)
    return replace(
        body,
        mlp=replace(moe, act="quick_gelu"),
        sinks=True,
        window=window,
        local_layers=layers,
        qkv_bias=bias,
        out_bias=bias,
    )


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    ours, theirs = "blocks.{l}.", experts.BLOCK
    stored = f"{theirs}mlp.experts."
    return (
        *llama_like.attention_rules(config),
        TensorRule(f"{ours}attn.sinks", (f"{theirs}self_attn.sinks",)),
        TensorRule(f"{ours}mlp.router.weight", (f"{theirs}mlp.router.weight",)),
        TensorRule(f"{ours}mlp.router.bias", (f"{theirs}mlp.router.bias",)),
        TensorRule(f"{ours}mlp.into", (f"{stored}gate_up_proj",), _sorted_columns),
        TensorRule(f"{ours}mlp.into_bias", (f"{stored}gate_up_proj_bias",), _sorted),
        TensorRule(f"{ours}mlp.out", (f"{stored}down_proj",), transposed),
        TensorRule(f"{ours}mlp.out_bias", (f"{stored}down_proj_bias",)),
    )


def _sorted_columns(tensor: Tensor, config: ModelConfig) -> Tensor:
    """`[expert, in, gate and linear alternating]` as `[expert, gates then linears, in]`."""
    return rearrange(tensor, "x d (m two) -> x (two m) d", two=2)


def _sorted(tensor: Tensor, config: ModelConfig) -> Tensor:
    """`[expert, gate and linear alternating]` as `[expert, gates then linears]`."""
    return rearrange(tensor, "x (m two) -> x (two m)", two=2)


FAMILY = Family(
    name="GPT-OSS",
    model_types=("gpt_oss",),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
)
