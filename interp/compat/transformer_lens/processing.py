"""Weights rewritten without changing what the model says: norms folded, writes centred, value biases moved.

Every step is a function of a state dict in TransformerLens' layout and of its config (anything with the attributes of
a HookedTransformerConfig). It returns a new dict and writes to no tensor it was given; numbers are those of
TransformerLens 3.9, except that float64 stays float64, that experts are centred along d_model, and that W_U is not
centred after a final RMSNorm. The steps alone do
what they are told; `process_weights` and `processed` leave out what would change the model's probabilities, and say so.
"""

import logging
import re
from collections.abc import Callable, Mapping
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interp.compat.transformer_lens.components import LayerNormPre, RMSNormPre
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.core.factored import FactoredMatrix
from interp.core.stats import upcast

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
"""One tensor each of queries, keys and values."""


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
    """Inputs of folding one layer's first norm: "wq", ..., "bv", "ln1_w", "ln1_b" (None where missing), and "keys".

    "keys" has the name of each, "W_Q", ...; grouped keys and values are found under "_W_K".

    Raises:
        ValueError: an adapter.
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


POST_NORM_ARCHITECTURES = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""Architectures with norms on what a sublayer adds, not on what it reads."""
NORMED = ("LN", "LNPre", "RMS", "RMSPre")
FOLDABLE = re.compile(r"(?:blocks\.\d+\.(?:ln1|ln2|mlp\.ln)|ln_final)\.[wb]")
"""Gammas and betas that folding makes idle."""
MATRICES = ("W_Q", "W_K", "W_V", "W_O", "_W_K", "_W_V", "W_in", "W_gate", "W_out")
NOTHING_TO_DO = ("no LayerNorm", "no norm weights")
_log = logging.getLogger(__name__)


def fill_missing_keys(model: nn.Module, state_dict: State) -> dict[str, Tensor]:
    """The state dict, completed by the model's own values where it has no entry (biases, norms, masks).

    Raises:
        ValueError: weight matrices that are missing, which have no default; the message names them.
    """
    own = model.state_dict()
    missing = sorted(name for name in set(own) - set(state_dict) if "hf_model" not in name)
    if matrices := [name for name in missing if name.rpartition(".")[2] in MATRICES]:
        raise ValueError(
            f"the state dict is missing weight matrices that the model expects: {matrices}; grouped keys and values "
            "are called _W_K and _W_V"
        )
    for name in missing:
        if "W_" in name or re.search(r"(ln|norm).*\.[wb]$", name):
            _log.warning("%s is missing and keeps the model's own value", name)
    return {**state_dict, **{name: own[name] for name in missing}}


def center_writing_weights(state_dict: State, cfg: Any) -> dict[str, Tensor]:
    """Every weight that writes to the stream minus its mean over d_model: LayerNorm takes that mean away anyway.

    Raises:
        KeyError: no `embed.W_E`, or no `pos_embed.W_pos` where positions are embedded.
    """
    state = dict(state_dict)
    if getattr(cfg, "original_architecture", None) not in POST_NORM_ARCHITECTURES:
        embedded = getattr(cfg, "positional_embedding_type", "standard") not in ("rotary", "alibi", "none")
        for name in ("embed.W_E", *["pos_embed.W_pos"] * embedded):
            if name not in state:
                raise KeyError(f"{name} is required in the state dict, it has {', '.join(list(state)[:10])}")
            state[name] = centred(state[name], -1)
    written = re.compile(
        r"blocks\.\d+\.(attn\.(W_O|b_O)|mlp\.(W_out|b_out)|mlp\.experts\.\d+\.(W_out|b_out))"
    )
    linear = re.compile(r"blocks\.\d+\.mlp\.experts\.\d+\.W_out\.weight")
    for name, weight in state.items():
        if written.fullmatch(name.removesuffix(".bias")):
            state[name] = centred(weight, -1)
        elif linear.fullmatch(name):
            state[name] = centred(weight, 0)
    return state


def center_unembed(state_dict: State, cfg: Any = None) -> dict[str, Tensor]:
    """W_U and b_U minus their means over the vocabulary: logits shift together, probabilities stay.

    A soft cap on the logits breaks that.

    Raises:
        KeyError: no `unembed.W_U`.
    """
    if "unembed.W_U" not in state_dict:
        raise KeyError(
            f"unembed.W_U is required in the state dict, it has {', '.join(list(state_dict)[:10])}"
        )
    names = [name for name in ("unembed.W_U", "unembed.b_U") if name in state_dict]
    return {**state_dict, **{name: centred(state_dict[name], -1) for name in names}}


def fold_value_biases(state_dict: State, cfg: Any) -> dict[str, Tensor]:
    """b_V's constant share of the output in b_O: b_O' = b_O + sum_h b_V[h] W_O[h], b_V' = 0; patterns sum to 1.

    Under grouped attention a value head's bias counts once for each query head that reads it.
    """
    state = dict(state_dict)
    for layer in range(cfg.n_layers):
        at = f"blocks.{layer}.attn."
        name = f"{at}_b_V" if f"{at}_b_V" in state else f"{at}b_V"
        if name not in state:
            continue
        b_V, W_O = state[name], state[f"{at}W_O"]
        if b_V.ndim != 2 or W_O.ndim != 3:
            raise ValueError(
                f"{name} [head, d_head] and W_O [head, d_head, d_model] are required, got shapes {tuple(b_V.shape)} "
                f"and {tuple(W_O.shape)}"
            )
        state[f"{at}b_O"] = state.get(f"{at}b_O", 0) + _value_bias(b_V, W_O)
        state[name] = torch.zeros_like(b_V)
    return state


def refactor_factored_attn_matrices(state_dict: State, cfg: Any) -> dict[str, Tensor]:
    """A state dict with equal W_QK and W_OV in other factors: W_Q = U sqrt(S), W_K = V sqrt(S), W_V = U S, W_O = V^T.

    The biases of queries and keys are a last row of their matrices meanwhile; b_V goes into b_O. Signs, and rotations
    among equal singular values, are arbitrary.

    Raises:
        AssertionError: rotary positions.
        ValueError: grouped attention.
    """
    if getattr(cfg, "positional_embedding_type", "standard") == "rotary":
        raise AssertionError(
            "You can't refactor the QK circuit when using rotary embeddings: it depends on how far apart they are"
        )
    state = dict(state_dict)
    for layer in range(cfg.n_layers):
        at = f"blocks.{layer}.attn."
        if f"{at}W_Q" not in state:
            continue
        names = [f"{at}{name}" for name in ("W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")]
        if missing := [name for name in names if name not in state]:
            raise ValueError(
                f"refactoring requires {missing[0]} beside {at}W_Q; grouped keys and values (_W_K, _W_V) have no "
                "factors of their own for each head"
            )
        rows = [torch.cat((state[f"{at}W_{x}"], state[f"{at}b_{x}"][:, None]), 1) for x in "QK"]
        u, s, v = FactoredMatrix(rows[0], rows[1].mT).svd()
        for x, factor in (("Q", u), ("K", v)):
            even = (factor * s.sqrt()[:, None]).to(rows[0].dtype)
            state |= {f"{at}W_{x}": even[:, :-1], f"{at}b_{x}": even[:, -1]}
        W_V, W_O, b_V = (state[f"{at}{name}"] for name in ("W_V", "W_O", "b_V"))
        u, s, v = FactoredMatrix(W_V, W_O).svd()
        state[f"{at}b_O"] = state[f"{at}b_O"] + _value_bias(b_V, W_O)
        state[f"{at}b_V"] = torch.zeros_like(b_V)
        state |= {f"{at}W_V": (u * s[:, None]).to(W_V.dtype), f"{at}W_O": v.mT.to(W_O.dtype)}
    return state


def process_weights(
    state_dict: State,
    cfg: Any,
    fold_ln: bool = True,
    center_writing_weights: bool = True,
    center_unembed: bool = True,
    fold_value_biases: bool = True,
    refactor_factored_attn_matrices: bool = False,
) -> dict[str, Tensor]:
    """All steps in TransformerLens' order, in float32 at least; norms that were folded stay, with gamma 1 and beta 0.

    A step that would change probabilities is left out with a warning (`refusals`).
    """
    wanted = {
        "fold_ln": fold_ln, "center_writing_weights": center_writing_weights, "center_unembed": center_unembed,
        "fold_value_biases": fold_value_biases, "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
    }  # fmt: skip
    refused = refusals(state_dict, cfg)
    for step, reason in refused.items():
        if wanted[step]:
            level = logging.INFO if reason.startswith(NOTHING_TO_DO) else logging.WARNING
            _log.log(level, "%s is left out: %s", step, reason)
    todo = [step for step, on in wanted.items() if on and step not in refused]
    state = {n: upcast(w) if w.is_floating_point() else w for n, w in state_dict.items()}
    if "fold_ln" in todo:
        layer_norm = getattr(cfg, "normalization_type", "LN") in ("LN", "LNPre")
        if layer_norm and "ln_final.b" in state and "unembed.b_U" not in state:
            state["unembed.b_U"] = state["unembed.W_U"].new_zeros(state["unembed.W_U"].shape[-1])
        state = fold_layer_norm(state, cfg, fold_biases=layer_norm, center_weights=layer_norm)
    for step in todo:
        if step != "fold_ln":
            state = _STEPS[step](state, cfg)
    if "center_writing_weights" in todo and "fold_value_biases" in todo:
        for name in (n for n in list(state) if n.endswith(".attn.b_O")):
            state[name] = centred(state[name], -1)
    first = next(iter(state_dict.values())).dtype if state_dict else torch.float32
    return {n: w.to(state_dict[n].dtype if n in state_dict else first) for n, w in state.items()}


def processed(
    state: State,
    cfg: Any,
    *,
    fold_ln: bool = True,
    center_writing_weights: bool = True,
    center_unembed: bool = True,
    fold_value_biases: bool = True,
    refactor_factored_attn_matrices: bool = False,
) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The processed state without the norms' idle parameters, and the config fields that change with it.

    `{"normalization_type": "LNPre"}` (or "RMSPre") if norms were folded, else nothing. Doing it twice does no more.
    """
    found = process_weights(
        state, cfg, fold_ln, center_writing_weights, center_unembed, fold_value_biases,
        refactor_factored_attn_matrices,
    )  # fmt: skip
    if not fold_ln or "fold_ln" in refusals(state, cfg):
        return found, {}
    gates = re.compile(r"blocks\.\d+\.mlp\.b_gate")  # all zero, and no parameter of a HookedTransformer
    kept = {n: w for n, w in found.items() if not FOLDABLE.fullmatch(n) and not gates.fullmatch(n)}
    return kept, {"normalization_type": cfg.normalization_type.removesuffix("Pre") + "Pre"}


def refusals(state_dict: State, cfg: Any) -> dict[str, str]:
    """Step -> why it is left out: it would change the model's probabilities, or finds nothing to do."""
    kind = getattr(cfg, "normalization_type", "LN")
    architecture = getattr(cfg, "original_architecture", None)
    found: dict[str, str] = {}
    if reason := _unfoldable(state_dict, cfg, kind):
        found["fold_ln"] = reason
    if kind not in ("LN", "LNPre"):
        found["center_writing_weights"] = f"no LayerNorm (normalization_type={kind!r}) takes the mean away"
    elif getattr(cfg, "final_rms", False):
        found["center_writing_weights"] = "the final norm is an RMSNorm (final_rms), which sees the mean"
    for step in ("fold_ln", "center_writing_weights"):
        if architecture in POST_NORM_ARCHITECTURES:
            found[step] = f"{architecture} norms what a sublayer adds (post-norm), not what it reads"
        elif getattr(cfg, "positional_embedding_type", "standard") == "shortformer":
            found[step] = "shortformer adds positions to what queries and keys read, after the norm"
    if (getattr(cfg, "output_logits_soft_cap", None) or -1) > 0:
        found["center_unembed"] = (
            "a soft cap on the logits (output_logits_soft_cap) is no function of a shift"
        )
    if getattr(cfg, "use_attention_sinks", False):
        found["fold_value_biases"] = "with attention sinks a pattern's rows do not sum to 1"
        found["refactor_factored_attn_matrices"] = found["fold_value_biases"]
    elif getattr(cfg, "use_qk_norm", False) and cfg.positional_embedding_type != "rotary":
        found["refactor_factored_attn_matrices"] = (
            "queries and keys are normed (use_qk_norm) before they meet"
        )
    return found


def _unfoldable(state: State, cfg: Any, kind: str | None) -> str | None:
    """Why norms cannot be folded, but for the place of the norms."""
    if kind not in NORMED:
        return f"normalization_type={kind!r} has no weights to fold"
    if not any(name.endswith((".ln1.w", ".ln2.w", "ln_final.w")) for name in state):
        return "no norm weights in the state dict (folded already)"
    if kind.startswith("RMS"):
        return None
    if (getattr(cfg, "num_experts", None) or 0) > 0:
        return "the beta of a LayerNorm before experts has no bias to go to"
    betas = [w for name, w in state.items() if re.fullmatch(r"blocks\.\d+\.ln2\.b", name)]
    if getattr(cfg, "gated_mlp", False) and any(bool(beta.any()) for beta in betas):
        return "the beta of ln2 has no bias to go to: a gated MLP here has none on its gate"
    return None


def _value_bias(b_V: Tensor, W_O: Tensor) -> Tensor:
    """`[d_model]`: the term of constant values in the stream, query heads reading theirs in groups."""
    shared = b_V.repeat_interleave(W_O.shape[0] // b_V.shape[0], 0)
    return (shared[:, :, None] * W_O).sum((0, 1))


_STEPS: dict[str, Callable[[State, Any], dict[str, Tensor]]] = {
    "center_writing_weights": center_writing_weights,
    "center_unembed": center_unembed,
    "fold_value_biases": fold_value_biases,
    "refactor_factored_attn_matrices": refactor_factored_attn_matrices,
}


class ProcessWeights:
    """The steps under the names that TransformerLens gives them in `weight_processing`; its adapters are not here."""

    fold_layer_norm = staticmethod(fold_layer_norm)
    fold_layer_norm_biases = staticmethod(fold_layer_norm_biases)
    fold_layer_norm_weights = staticmethod(fold_layer_norm_weights)
    center_attention_weights = staticmethod(center_attention_weights)
    extract_attention_tensors_for_folding = staticmethod(extract_attention_tensors_for_folding)
    center_writing_weights = staticmethod(center_writing_weights)
    center_unembed = staticmethod(center_unembed)
    fold_value_biases = staticmethod(fold_value_biases)
    refactor_factored_attn_matrices = staticmethod(refactor_factored_attn_matrices)
    process_weights = staticmethod(process_weights)


class ProcessedWeights(nn.Module):
    """A mixin of `HookedTransformer`; each step by itself is a function above."""

    cfg: HookedTransformerConfig
    blocks: Any
    ln_final: Any
    setup: Any
    _share: Any

    def load_and_process_state_dict(
        self,
        state_dict: State,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """Load weights in TransformerLens' layout after these steps; a missing entry keeps the model's own value.

        A step that would change the model's probabilities is left out with a warning. Twice does no more than once.
        """
        state = self.fill_missing_keys(state_dict)
        state, changed = processed(
            state, self.cfg, fold_ln=fold_ln, center_writing_weights=center_writing_weights,
            center_unembed=center_unembed, fold_value_biases=fold_value_biases,
            refactor_factored_attn_matrices=refactor_factored_attn_matrices,
        )  # fmt: skip
        if changed.get("normalization_type", self.cfg.normalization_type) != self.cfg.normalization_type:
            self.cfg.to_dict()["normalization_type"] = str(changed["normalization_type"])
            self._fold_norms()
        self.load_state_dict(state, strict=False)

    def _fold_norms(self) -> None:
        """Put norms without weights in the place of those that were folded."""
        plain = LayerNormPre if self.cfg.normalization_type == "LNPre" else RMSNormPre
        self.ln_final = RMSNormPre(self.cfg) if self.cfg.final_rms else plain(self.cfg)
        for block in self.blocks:
            block.__dict__["normalization_type"] = self.cfg.normalization_type
            block.ln1 = plain(self.cfg)
            if not self.cfg.attn_only:
                block.ln2 = plain(self.cfg)
                if self.cfg.is_layer_norm_activation():
                    block.mlp.ln = plain(self.cfg)
        self.setup()
        self._share()

    def process_weights_(
        self,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """`load_and_process_state_dict` of the model's own weights; value biases are folded as well."""
        self.load_and_process_state_dict(
            self.state_dict(), fold_ln=fold_ln, center_writing_weights=center_writing_weights,
            center_unembed=center_unembed, refactor_factored_attn_matrices=refactor_factored_attn_matrices,
        )  # fmt: skip

    def fill_missing_keys(self, state_dict: State) -> dict[str, Tensor]:
        """The state dict with the model's own values for what it lacks."""
        return fill_missing_keys(self, state_dict)

    def fold_layer_norm(
        self, state_dict: State, fold_biases: bool = True, center_weights: bool = True
    ) -> dict[str, Tensor]:
        """A state dict with gamma and beta folded into what reads the norm."""
        return fold_layer_norm(state_dict, self.cfg, fold_biases, center_weights)

    def center_writing_weights(self, state_dict: State) -> dict[str, Tensor]:
        """A state dict in which what writes to the stream has mean zero."""
        return center_writing_weights(state_dict, self.cfg)

    def center_unembed(self, state_dict: State) -> dict[str, Tensor]:
        """A state dict with an unembedding of mean zero over the vocabulary."""
        return center_unembed(state_dict)

    def fold_value_biases(self, state_dict: State) -> dict[str, Tensor]:
        """A state dict with b_V moved into b_O."""
        return fold_value_biases(state_dict, self.cfg)

    def refactor_factored_attn_matrices(self, state_dict: State) -> dict[str, Tensor]:
        """A state dict with W_Q W_K^T and W_V W_O factored by their singular values."""
        return refactor_factored_attn_matrices(state_dict, self.cfg)
