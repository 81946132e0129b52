"""Our model in TransformerLens' layout: a state dict and config that its HookedTransformer (until 3.9) takes."""

from __future__ import annotations

from dataclasses import replace

import torch
from einops import rearrange
from torch import Tensor

from interp.compat import hooked_layout
from interp.core.boundary import public
from interp.hooked import HookedTransformer
from interp.model.config import (
    MLP,
    Alibi,
    FullSoftmax,
    LayerNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    MoE,
    NoNorm,
    RMSNorm,
    Rotary,
    Softmax,
    UsualBlock,
    YarnScaling,
)
from interp.model.experts import Experts
from interp.model.norm import Normalize
from interp.model.transformer import Transformer
from interp.model.weights import LayerWeights, Weights

ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_new", "relu": "relu", "silu": "silu"}


@public()
def to_hooked_state(model: HookedTransformer | Transformer) -> tuple[dict[str, Tensor], dict[str, object]]:
    """State dict in TransformerLens' layout, and the fields of its HookedTransformerConfig (names of 3.9).

    `HookedTransformer(HookedTransformerConfig(**config)).load_state_dict(state, strict=False)` there computes the
    same logits; what strict loading would miss are its masks and tables. The scale of the embedding goes into W_E, a
    tied unembedding is written out, biases that the model lacks are zeros.

    Args:
        model: the model.

    Returns:
        The state dict and the config's fields; neither shares memory with the model.

    Raises:
        ValueError: a model that TransformerLens cannot express; the message names what.
    """
    transformer = model.transformer if isinstance(model, HookedTransformer) else model
    config = transformer.config
    if reason := inexpressible(transformer):
        raise ValueError(f"TransformerLens cannot express {reason}")
    weights = Weights(transformer)
    scale = torch.tensor(config.embed_scale, dtype=weights.W_E.dtype, device=weights.W_E.device)
    state = {"embed.W_E": weights.W_E * scale, "unembed.W_U": weights.W_U, "unembed.b_U": weights.b_U}
    if isinstance(config.position, Learned):
        state["pos_embed.W_pos"] = weights.W_pos
    elif isinstance(config.position, Alibi):  # there it exists, and nothing reads it
        state["pos_embed.W_pos"] = weights.W_E.new_zeros(config.n_ctx, config.d_model)
    state |= _norms(transformer)
    for layer in range(config.n_layers):
        state |= {f"blocks.{layer}.{n}": w for n, w in _block(transformer, weights, layer).items()}
    state = {name: w.detach().clone().contiguous() for name, w in state.items()}
    return state, {**_fields(config), "dtype": transformer.dtype}


def inexpressible(model: Transformer) -> str | None:
    """The first thing a HookedTransformer cannot do, None if there is none."""
    config, norm, mlp = model.config, model.config.norm, model.config.mlp
    learned = not isinstance(config.position, Learned) or config.position.offset == 0
    scaling = config.position.scaling if isinstance(config.position, Rotary) else None
    local = config.local_position
    rms = isinstance(norm, RMSNorm)
    reasons = {
        "a model without an unembedding": not config.unembed,
        f"position={config.position}": not learned
        or not (isinstance(config.position, Learned | Rotary) or config.position == Alibi()),
        f"alibi with n_heads={config.n_heads} and causal={config.causal}": isinstance(config.position, Alibi)
        and (bool(config.n_heads & (config.n_heads - 1)) or not config.causal),
        f"scaling={scaling}": not isinstance(scaling, LinearScaling | Llama3Scaling | YarnScaling | None),
        f"local_position={local}": config.window is not None and local_fields(config) is None,
        f"norm_place={config.norm_place!r} with norm={norm}": config.norms_sum
        or (config.norm_place != "pre" and not rms),
        "norm_place='output' without qk_norm='width'": config.norm_place == "output"
        and config.qk_norm != "width",
        "norm_place='sandwich' with qk_norm='width'": config.norm_place == "sandwich"
        and config.qk_norm == "width",
        f"final_norm={config.final_norm} with norm={norm}": not config.final_norm
        and not isinstance(norm, NoNorm),
        "qk_norm='width' where heads together are not d_model wide": config.qk_norm == "width"
        and config.n_heads * config.head_width != config.d_model,
        f"embed_norm with norm={norm} and position={config.position}": config.embed_norm
        and (not isinstance(norm, LayerNorm) or isinstance(config.position, Learned)),
        f"qk_norm={config.qk_norm!r} with norm={norm}": config.qk_norm is not None
        and (not rms or config.qk_norm == "each"),
        "a window without causal=True": config.window is not None and not config.causal,
        f"mixer={config.mixer}": config.mixer != Softmax(),
        f"output={config.output}": config.output != FullSoftmax(),
        "cross_attention": config.cross_attention,
        f"block={config.block}": config.block != UsualBlock(),
        f"n_token_types={config.n_token_types}": config.n_token_types > 0,
        f"mlm_head={config.mlm_head!r}": config.mlm_head is not None,
        f"residual_scale={config.residual_scale}": config.residual_scale != 1,
        f"logit_scale={config.logit_scale}": config.logit_scale != 1,
        f"act={getattr(mlp, 'act', None)!r}": isinstance(mlp, MLP | MoE) and mlp.act not in ACTIVATIONS,
        f"mlp={mlp}": not isinstance(mlp, MLP | MoE | None)
        or (isinstance(mlp, MoE) and mlp != _plain_experts(mlp)),
        "biases of a gated MLP's b_gate and b_in": _has_gate_bias(model),
        f"norm={norm} in {model.dtype}": rms and norm.unit_offset and model.dtype.itemsize < 4,  # type: ignore[union-attr]
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def local_fields(config: ModelConfig) -> dict[str, object] | None:
    """Their fields for the rotation of layers with the window; None where they cannot say it.

    There it differs in the base, and lacks linear scaling (always) and YaRN (if told so).
    """
    position = config.position
    if not isinstance(position, Rotary):
        return {}
    local = config.local_position or position
    shared = position.scaling
    yarn = isinstance(shared, YarnScaling) and local.scaling is None
    if isinstance(shared, LinearScaling) or yarn:
        shared = None
    if local != replace(position, base=local.base, scaling=shared):
        return None
    base = None if local.base == position.base else local.base
    return {"rotary_base_local": base, "yarn_global_attn_only": yarn}


def _plain_experts(mlp: MoE) -> MoE:
    """The mixture of this size as TransformerLens would build it."""
    return MoE(mlp.n_experts, mlp.top_k, mlp.d_mlp, mlp.act, renormalise=mlp.renormalise)


def _has_gate_bias(model: Transformer) -> bool:
    mlp = model.config.mlp
    if not isinstance(mlp, MLP) or not mlp.gated or not mlp.bias:
        return False
    biases = [model.get_parameter(f"blocks.{layer}.mlp.into.bias") for layer in range(model.config.n_layers)]
    return any(bool(bias.any()) for bias in biases)


def _norms(model: Transformer) -> dict[str, Tensor]:
    """Gamma and beta of every norm, under their names."""
    found: dict[str, Tensor] = {}
    config = model.config
    for name in hooked_layout.norms(config):
        ours = "ln_embed" if name == "embed.ln" else name
        if config.norm_place == "output" and name != "ln_final":
            ours += "_post"
        if config.shared_norm and name.endswith("ln2"):
            ours = name.replace("ln2", "ln1")
        module = model.get_submodule(ours)
        assert isinstance(module, Normalize)
        found |= {f"{name}.{part}": w for part, w in _norm_weights(module, model.dtype).items()}
    return found


def _norm_weights(module: Normalize, dtype: torch.dtype) -> dict[str, Tensor]:
    """Gamma and beta in TransformerLens' layout, which has all that a kind of norm may have."""
    found = {} if module.gamma is None else {"w": module.gamma.to(dtype)}
    if isinstance(module.kind, LayerNorm):
        ones = torch.ones(module.width, dtype=dtype)
        found = {"w": ones, "b": torch.zeros_like(ones), **found}
    return found if module.bias is None else {**found, "b": module.bias}


def _block(model: Transformer, weights: Weights, layer: int) -> dict[str, Tensor]:
    """Weights of one block, its norms aside."""
    config, block, views = model.config, model.block(layer), weights.layer(layer)
    grouped = "_" if config.kv_heads != config.n_heads else ""
    found = {
        "attn.W_Q": views.W_Q, f"attn.{grouped}W_K": views.W_K, f"attn.{grouped}W_V": views.W_V,
        "attn.W_O": views.W_O, "attn.b_Q": views.b_Q, f"attn.{grouped}b_K": views.b_K,
        f"attn.{grouped}b_V": views.b_V, "attn.b_O": views.b_O,
    }  # fmt: skip
    if block.attn.sinks is not None:
        found["attn.sinks"] = block.attn.sinks
    for name, norm in (("q_norm", block.attn.q_norm), ("k_norm", block.attn.k_norm)):
        if norm is not None:
            found[f"attn.{name}.w"] = _norm_weights(norm.norm, model.dtype)["w"]
    inside = _experts(block.mlp) if isinstance(block.mlp, Experts) else _feed_forward(views)
    written = {**found, **{f"mlp.{name}": w for name, w in inside.items()}}
    return {name: w for name, w in written.items() if w is not None}


def _feed_forward(views: LayerWeights) -> dict[str, Tensor]:
    names = ("W_gate", "W_in", "W_out", "b_in", "b_out")
    return {name: w for name in names if (w := getattr(views, name)) is not None}


def _experts(mlp: Experts) -> dict[str, Tensor]:
    found = {"W_gate.weight": mlp.router.weight}
    gates, linears = rearrange(mlp.into, "x (two m) d -> two x m d", two=2)
    for name, stack in (("W_gate", gates), ("W_in", linears), ("W_out", mlp.out)):
        found |= {f"experts.{x}.{name}.weight": w for x, w in enumerate(stack)}
    return found


def _fields(config: ModelConfig) -> dict[str, object]:
    """The fields of a HookedTransformerConfig."""
    scale = config.attn_scale
    names = {LayerNorm: "LN", RMSNorm: "RMS"}
    architecture = {"pre": "OlmoeForCausalLM", "output": "Olmo2ForCausalLM"}
    return {
        "n_layers": config.n_layers, "d_model": config.d_model, "n_ctx": config.n_ctx, "d_head": config.head_width,
        "n_heads": config.n_heads, "d_vocab": config.d_vocab, "d_vocab_out": config.n_outputs,
        "n_key_value_heads": config.kv_heads if config.kv_heads != config.n_heads else None,
        "normalization_type": names.get(type(config.norm)), "eps": getattr(config.norm, "eps", 1e-5),
        "use_normalization_before_and_after": config.norm_place == "sandwich",
        "original_architecture": architecture.get(config.norm_place) if config.qk_norm == "width" else None,
        "use_qk_norm": config.qk_norm == "head", "post_embedding_ln": config.embed_norm,
        "parallel_attn_mlp": config.parallel, "attention_dir": "causal" if config.causal else "bidirectional",
        "use_attn_scale": True, "attn_scale": config.head_width**0.5 if scale is None else 1 / scale,
        "scale_attn_by_inverse_layer_idx": config.scale_by_layer,
        "attn_scores_soft_cap": -1.0 if config.attn_softcap is None else config.attn_softcap,
        "output_logits_soft_cap": -1.0 if config.logit_softcap is None else config.logit_softcap,
        "use_attention_sinks": config.sinks, "device": "cpu", "init_weights": False,
        **_mlp_fields(config), **_position_fields(config), **_window_fields(config),
    }  # fmt: skip


def _mlp_fields(config: ModelConfig) -> dict[str, object]:
    mlp = config.mlp
    if mlp is None:
        return {"attn_only": True}
    assert isinstance(mlp, MLP | MoE)  # others are refused before
    fields: dict[str, object] = {"attn_only": False, "d_mlp": mlp.d_mlp, "act_fn": ACTIVATIONS[mlp.act]}
    if isinstance(mlp, MoE):
        shares = {
            "num_experts": mlp.n_experts,
            "experts_per_token": mlp.top_k,
            "norm_topk_prob": mlp.renormalise,
        }
        return fields | {"gated_mlp": True} | shares
    return fields | {"gated_mlp": mlp.gated}


def _position_fields(config: ModelConfig) -> dict[str, object]:
    position = config.position
    if not isinstance(position, Rotary):
        return {"positional_embedding_type": "alibi" if isinstance(position, Alibi) else "standard"}
    rule = position.scaling
    fields: dict[str, object] = {
        "positional_embedding_type": "rotary", "rotary_base": position.base, "rotary_dim": config.rotary_dim,
        "rotary_adjacent_pairs": position.interleaved,
    }  # fmt: skip
    if isinstance(rule, LinearScaling):
        fields["rotary_scaling_factor"] = rule.factor
    elif isinstance(rule, Llama3Scaling):
        fields |= {
            "use_NTK_by_parts_rope": True, "NTK_by_parts_factor": rule.factor,
            "NTK_by_parts_low_freq_factor": rule.low_freq_factor,
            "NTK_by_parts_high_freq_factor": rule.high_freq_factor, "NTK_original_ctx_len": rule.original_n_ctx,
        }  # fmt: skip
    elif isinstance(rule, YarnScaling):
        fields |= {
            "use_yarn_rope": True, "yarn_factor": rule.factor, "yarn_attention_factor": rule.attention_factor,
            "yarn_beta_fast": rule.beta_fast, "yarn_beta_slow": rule.beta_slow,
            "yarn_original_max_position_embeddings": rule.original_n_ctx, "yarn_truncate": rule.truncate,
        }  # fmt: skip
    return fields


def _window_fields(config: ModelConfig) -> dict[str, object]:
    if config.window is None:
        return {}
    kinds = ["local" if config.is_local(layer) else "global" for layer in range(config.n_layers)]
    return {"use_local_attn": True, "window_size": config.window, "attn_types": kinds} | (
        local_fields(config) or {}
    )
