"""Qwen3-Next: three layers of a gated delta net to one of gated attention, and experts with a shared one.

The matrices of a delta net are stored key head by key head, each its query, key, values and gates. The further layers
that predict several tokens at once (`mtp`) are left out, as in Hugging Face's model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from einops import rearrange
from torch import Tensor

from interp.families import experts, llama_like
from interp.families.rope import USUAL, Wording
from interp.families.spec import Family, Settings, TensorRule, in_layers
from interp.families.table import modules
from interp.families.windows import full_layers
from interp.model.config import GatedDelta, ModelConfig, MoE, RMSNorm, Softmax

DEFAULTS = {
    "num_key_value_heads": 2,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "partial_rotary_factor": 0.25,
}
DELTA = f"{experts.BLOCK}linear_attn."
OURS = "blocks.{l}.attn."
MORE_TOKENS = (r"mtp\..*", r"model\.mtp\..*")
"""Weights of the layers that predict several tokens at once."""


def config(settings: Settings) -> ModelConfig:
    """Our config of a Qwen3-Next checkpoint."""
    settings.require("decoder_sparse_step", 1, None)
    if plain := settings.get("mlp_only_layers"):
        raise ValueError(f"Qwen3-Next: config asks for mlp_only_layers={plain!r}, supported: none")
    settings.get("intermediate_size")  # of layers without experts, of which there are none
    return hybrid(settings, decoder(settings, renormalise=settings.flag("norm_topk_prob", True)))


def decoder(settings: Settings, *, renormalise: bool, wording: Wording = USUAL) -> ModelConfig:
    """The config without its delta nets: experts with a shared one."""
    moe = MoE(
        n_experts=settings.count("num_experts"),
        top_k=settings.count("num_experts_per_tok"),
        d_mlp=settings.count("moe_intermediate_size"),
        renormalise=renormalise,
        shared=settings.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return replace(plain(settings, DEFAULTS | {"intermediate_size": 1}, wording), mlp=moe)


def plain(settings: Settings, defaults: Mapping[str, int | float], wording: Wording = USUAL) -> ModelConfig:
    """Llama's arithmetic with norms that store gamma - 1, and normed queries and keys."""
    settings.require("hidden_act", "silu", "swish", None)
    norm = RMSNorm(settings.real("rms_norm_eps", 1e-6), unit_offset=True)
    body = llama_like.decoder(settings, defaults, norm=norm, wording=wording)
    return replace(body, qk_norm="head")


def hybrid(settings: Settings, body: ModelConfig) -> ModelConfig:
    """The config with its mixers: a gated delta net, and in every fourth layer (or as `layer_types` says) attention."""
    every = settings.count("full_attention_interval", 4)
    full = full_layers(settings, body.n_layers, lambda layer: (layer + 1) % every == 0)
    delta = GatedDelta(
        key_heads=settings.count("linear_num_key_heads", 16),
        value_heads=settings.count("linear_num_value_heads", 32),
        d_key=settings.count("linear_key_head_dim", 128),
        d_value=settings.count("linear_value_head_dim", 128),
        kernel=settings.count("linear_conv_kernel_dim", 4),
        eps=settings.real("rms_norm_eps", 1e-6),
    )
    kinds = [Softmax(gate=True) if attends else delta for attends in full]
    return llama_like.mixed(body, kinds)


def rules(config: ModelConfig) -> tuple[TensorRule, ...]:
    """The weight table."""
    stored = f"{DELTA}in_proj_qkvz.weight"
    into = (
        TensorRule(f"{OURS}into.weight", (stored,), _queries_keys_values),
        TensorRule(f"{OURS}gate.weight", (stored,), _gates),
        TensorRule(f"{OURS}rates.weight", (f"{DELTA}in_proj_ba.weight",), _rates),
    )
    return (*hybrid_rules(config, into), *expert_rules())


def hybrid_rules(config: ModelConfig, into: Sequence[TensorRule]) -> tuple[TensorRule, ...]:
    """The weight table without the MLPs; `into`: the rules of a delta net's input maps."""
    delta = (
        *into,
        TensorRule(f"{OURS}kernel", (f"{DELTA}conv1d.weight",), _kernel),
        TensorRule(f"{OURS}rate", (f"{DELTA}A_log",)),
        TensorRule(f"{OURS}step", (f"{DELTA}dt_bias",)),
        *modules({"read_norm": "norm", "out": "out_proj"}, ours=OURS, theirs=DELTA, bias=False),
    )
    table = llama_like.attention_rules(config)
    of_table = tuple(rule for rule in table if ".attn." not in rule.ours)
    shared = tuple(rule for rule in table if ".attn." in rule.ours)
    gated = tuple(
        replace(rule, layout=_without_gates) if rule.ours.startswith(f"{OURS}qkv") else rule
        for rule in shared
    )
    kinds = ("weight", "bias") if config.qkv_bias else ("weight",)
    gated += tuple(
        TensorRule(f"{OURS}gate.{kind}", (f"{experts.BLOCK}self_attn.q_proj.{kind}",), _attention_gates)
        for kind in kinds
    )
    places = {GatedDelta: delta, Softmax: gated}
    all_rules = of_table
    for kind, some in places.items():
        all_rules += in_layers(some, [i for i, mixer in enumerate(config.mixers) if isinstance(mixer, kind)])
    return all_rules


def expert_rules() -> tuple[TensorRule, ...]:
    """The rules of the experts, stored fused or one by one, and of the shared expert."""
    return (
        *experts.mixture_rules("mlp"),
        *experts.gated_rules("mlp.shared", "mlp.shared_expert."),
        TensorRule("blocks.{l}.mlp.shared_gate.weight", (f"{experts.BLOCK}mlp.shared_expert_gate.weight",)),
    )


def _delta(config: ModelConfig) -> GatedDelta:
    return next(mixer for mixer in config.mixers if isinstance(mixer, GatedDelta))


def _parts(tensor: Tensor, config: ModelConfig) -> tuple[Tensor, ...]:
    """Queries, keys, values and gates, `[key head, rows, d_model]` each, of a matrix stored key head by key head."""
    kind = _delta(config)
    values = kind.value_heads // kind.key_heads * kind.d_value
    return rearrange(tensor, "(j e) d -> j e d", j=kind.key_heads).split(
        [kind.d_key, kind.d_key, values, values], 1
    )


def _queries_keys_values(tensor: Tensor, config: ModelConfig) -> Tensor:
    return torch.cat([part.flatten(0, 1) for part in _parts(tensor, config)[:3]])


def _gates(tensor: Tensor, config: ModelConfig) -> Tensor:
    return _parts(tensor, config)[3].flatten(0, 1)


def _rates(tensor: Tensor, config: ModelConfig) -> Tensor:
    """Rows stored by key head (its strengths, then its decays), reordered: all strengths, then all decays."""
    return rearrange(tensor, "(j two n) d -> (two j n) d", j=_delta(config).key_heads, two=2)


def _kernel(tensor: Tensor, config: ModelConfig) -> Tensor:
    return rearrange(tensor, "f 1 t -> t f")


def _of_heads(tensor: Tensor, config: ModelConfig) -> Tensor:
    """The query tensor as `[head, 2, d_head, ...]` (query, then gate)."""
    return rearrange(tensor, "(h two e) ... -> h two e ...", two=2, h=config.n_heads, e=config.head_width)


def _without_gates(tensor: Tensor, config: ModelConfig) -> Tensor:
    """The queries in a tensor of each head's query and gate; keys and values as they are."""
    with_gates = tensor.shape[:1] == (2 * config.n_heads * config.head_width,)
    return _of_heads(tensor, config)[:, 0].flatten(0, 1) if with_gates else tensor


def _attention_gates(tensor: Tensor, config: ModelConfig) -> Tensor:
    return _of_heads(tensor, config)[:, 1].flatten(0, 1)


FAMILY = Family(
    name="Qwen3-Next",
    model_types=("qwen3_next",),
    config=config,
    rules=rules,
    prefix="model.",
    duplicates=llama_like.duplicates,
    buffers=llama_like.BUFFERS,
    unused=MORE_TOKENS,
)
