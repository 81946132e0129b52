"""Gammas and betas of norms, moved into the weights that read them; TransformerLens' layout.

The config is anything with the attributes of a HookedTransformerConfig.
"""

import re
from collections.abc import Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

State = Mapping[str, Tensor]


class _Norm(NamedTuple):
    """Gamma and beta of one norm, and the name under which it is stored (None: its parameters are idle already)."""

    name: str | None
    gamma: Tensor
    beta: Tensor | None


def fold_layer_norm(
    state_dict: State, cfg: Any, fold_biases: bool = True, center_weights: bool = True
) -> dict[str, Tensor]:
    """Every norm's gamma (and beta) in the weights that read it; the norms are left with gamma 1 and beta 0.

    W' = diag(gamma) W, b' = b + beta W, and with `center_weights` each column of W' minus its mean over d_model, which
    LayerNorm's own centring makes idle. For RMSNorm both options are to be False; W_U after a final RMSNorm
    (`final_rms`) is not centred in any case.
    """
    state = dict(state_dict)
    for layer in range(cfg.n_layers):
        at = f"blocks.{layer}."
        norm = _norm(state, f"{at}ln1", cfg)
        _fold_attention(state, f"{at}attn.", norm, fold_biases, center_weights, cfg)
        if not getattr(cfg, "attn_only", False):
            own = _norm(state, f"{at}ln2", cfg)
            if own is None and norm is not None and getattr(cfg, "parallel_attn_mlp", False):
                own = norm._replace(name=None)
            _fold_mlp(state, f"{at}mlp.", own, fold_biases, center_weights, cfg)
    _fold_unembed(state, fold_biases, center_weights, cfg)
    return state


def centred(weight: Tensor, dim: int) -> Tensor:
    """The weight minus its mean along one axis."""
    return weight - weight.mean(dim, keepdim=True)


Three = tuple[Tensor, Tensor, Tensor]
"""Of queries, keys and values."""


def fold_layer_norm_biases(
    wq_tensor: Tensor,
    wk_tensor: Tensor,
    wv_tensor: Tensor,
    bq_tensor: Tensor | None,
    bk_tensor: Tensor | None,
    bv_tensor: Tensor | None,
    ln_bias: Tensor,
) -> Three:
    """b + beta W for queries, keys and values, `[h e]`; weights `[h d e]`, no bias counts as 0."""
    pairs = ((wq_tensor, bq_tensor), (wk_tensor, bk_tensor), (wv_tensor, bv_tensor))
    q, k, v = ((w * ln_bias[:, None]).sum(-2) + (0 if b is None else b) for w, b in pairs)
    return q, k, v


def fold_layer_norm_weights(
    wq_tensor: Tensor, wk_tensor: Tensor, wv_tensor: Tensor, ln_weight: Tensor
) -> Three:
    """diag(gamma) W for queries, keys and values `[h d e]`."""
    return wq_tensor * ln_weight[:, None], wk_tensor * ln_weight[:, None], wv_tensor * ln_weight[:, None]


def center_attention_weights(wq_tensor: Tensor, wk_tensor: Tensor, wv_tensor: Tensor) -> Three:
    """Weights `[h d e]` of queries, keys and values minus their means over d_model."""
    return centred(wq_tensor, -2), centred(wk_tensor, -2), centred(wv_tensor, -2)


def extract_attention_tensors_for_folding(
    state_dict: State, cfg: Any, layer: int, adapter: object = None
) -> dict[str, Any]:
    """What folding one layer's first norm reads: "wq", ..., "bv", "ln1_w", "ln1_b" (None where missing), and "keys".

    "keys" holds the name of each, "W_Q", ...; grouped keys and values are found under "_W_K". Errors: ValueError for
    an adapter.
    """
    if adapter is not None:
        raise ValueError(
            "state dicts in TransformerLens' layout only: the adapters of a TransformerBridge are not here"
        )
    at = f"blocks.{layer}."
    keys = {"ln1_b": f"{at}ln1.b", "ln1_w": f"{at}ln1.w"}
    found = {name: state_dict.get(key) for name, key in keys.items()}
    for kind, x in product("Wb", "QKV"):
        name = f"{kind}_{x}"
        keys[name] = f"{at}attn.{name}" if f"{at}attn.{name}" in state_dict else f"{at}attn._{name}"
        found[f"{kind}{x}".lower()] = state_dict.get(keys[name])
    return {**found, "keys": keys}


def _norm(state: State, name: str, cfg: Any) -> _Norm | None:
    if f"{name}.w" not in state:
        return None
    offset = 1.0 if getattr(cfg, "rmsnorm_uses_offset", False) else 0.0
    return _Norm(name, state[f"{name}.w"] + offset, state.get(f"{name}.b"))


def _idle(state: dict[str, Tensor], norm: _Norm, cfg: Any, *, beta: bool) -> None:
    """The norm's parameters become 1 and 0."""
    if norm.name is None:
        return
    gamma = torch.zeros_like if getattr(cfg, "rmsnorm_uses_offset", False) else torch.ones_like
    state[f"{norm.name}.w"] = gamma(norm.gamma)
    if beta and norm.beta is not None:
        state[f"{norm.name}.b"] = torch.zeros_like(norm.beta)


def _fold_attention(
    state: dict[str, Tensor], at: str, norm: _Norm | None, fold_biases: bool, center: bool, cfg: Any
) -> None:
    if f"{at}W_Q" not in state:
        return
    for x in "QKV":
        under = "_" if f"{at}W_{x}" not in state else ""
        weight, bias = f"{at}{under}W_{x}", f"{at}{under}b_{x}"
        if norm is not None:
            if fold_biases and norm.beta is not None:
                state[bias] = state.get(bias, 0) + (state[weight] * norm.beta[:, None]).sum(-2)
            state[weight] = state[weight] * norm.gamma[:, None]
        if center:
            state[weight] = centred(state[weight], -2)
    if norm is not None:
        _idle(state, norm, cfg, beta=fold_biases)


def _fold_mlp(
    state: dict[str, Tensor], at: str, norm: _Norm | None, fold_biases: bool, center: bool, cfg: Any
) -> None:
    if (getattr(cfg, "num_experts", None) or 0) > 0:
        if norm is not None:
            _fold_experts(state, at, norm, cfg)
        return
    if norm is not None:
        parts = ("in", "gate") if getattr(cfg, "gated_mlp", False) else ("in",)
        for part in parts:
            weight, bias = f"{at}W_{part}", f"{at}b_{part}"
            if weight not in state:
                continue
            if fold_biases and norm.beta is not None:
                state[bias] = state.get(bias, 0) + (state[weight] * norm.beta[:, None]).sum(-2)
            state[weight] = state[weight] * norm.gamma[:, None]
        _idle(state, norm, cfg, beta=fold_biases)
    if center and f"{at}W_in" in state:
        state[f"{at}W_in"] = centred(state[f"{at}W_in"], 0)
    if (getattr(cfg, "act_fn", None) or "").startswith("solu") and f"{at}ln.w" in state:
        _fold_activation(state, at, fold_biases, center)


def _fold_experts(state: dict[str, Tensor], at: str, norm: _Norm, cfg: Any) -> None:
    """Router and experts are Linear layers, `[out, d_model]`; nothing happens where the experts are not here."""
    experts = re.compile(re.escape(at) + r"experts\.\d+\.W_(in|gate)\.weight")
    names = [name for name in state if experts.fullmatch(name)]
    if not names:
        return
    for name in (*names, *[n for n in (f"{at}W_gate.weight",) if n in state]):
        state[name] = state[name] * norm.gamma
    _idle(state, norm, cfg, beta=False)


def _fold_activation(state: dict[str, Tensor], at: str, fold_biases: bool, center: bool) -> None:
    """The norm inside a SoLU activation, which W_out reads."""
    gamma, beta, weight = state[f"{at}ln.w"], state[f"{at}ln.b"], state[f"{at}W_out"]
    if fold_biases:
        state[f"{at}b_out"] = state[f"{at}b_out"] + (weight * beta[:, None]).sum(-2)
        state[f"{at}ln.b"] = torch.zeros_like(beta)
    state[f"{at}W_out"] = weight * gamma[:, None]
    if center:
        state[f"{at}W_out"] = centred(state[f"{at}W_out"], 0)
    state[f"{at}ln.w"] = torch.ones_like(gamma)


def _fold_unembed(state: dict[str, Tensor], fold_biases: bool, center: bool, cfg: Any) -> None:
    if (norm := _norm(state, "ln_final", cfg)) is None:
        return
    W_U, beta = state["unembed.W_U"], norm.beta
    with_beta = fold_biases and "unembed.b_U" in state and not getattr(cfg, "final_rms", False)
    if with_beta and beta is not None:
        state["unembed.b_U"] = state["unembed.b_U"] + (W_U * beta[:, None]).sum(-2)
    state["unembed.W_U"] = W_U * norm.gamma[:, None]
    if center and not getattr(cfg, "final_rms", False):
        state["unembed.W_U"] = centred(state["unembed.W_U"], 0)
    _idle(state, norm, cfg, beta=with_beta)
