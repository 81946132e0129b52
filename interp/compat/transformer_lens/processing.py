"""Weights rewritten without changing what the model says: norms folded, writes centred, value biases moved.

Every step is a function of a state dict in TransformerLens' layout and of its config (anything with the attributes of
a HookedTransformerConfig). It returns a new dict and writes to no tensor it was given; numbers are those of
TransformerLens 3.9, except that float64 stays float64, that experts are centred along d_model, and that W_U is not
centred after a final RMSNorm. The steps alone do
what they are told; `process_weights` and `processed` leave out what would change the model's probabilities, and say so.
"""

import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from interp.compat.transformer_lens.folding import (
    State,
    center_attention_weights,
    centred,
    extract_attention_tensors_for_folding,
    fold_layer_norm,
    fold_layer_norm_biases,
    fold_layer_norm_weights,
)
from interp.core.factored import FactoredMatrix
from interp.core.stats import wide

POST_NORM_ARCHITECTURES = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")
"""Architectures whose norms stand on what a sublayer adds, not on what it reads."""
NORMED = ("LN", "LNPre", "RMS", "RMSPre")
FOLDABLE = re.compile(r"(?:blocks\.\d+\.(?:ln1|ln2|mlp\.ln)|ln_final)\.[wb]")
"""Gammas and betas that folding makes idle."""
MATRICES = ("W_Q", "W_K", "W_V", "W_O", "_W_K", "_W_V", "W_in", "W_gate", "W_out")
NOTHING_TO_DO = ("no LayerNorm", "no norm weights")
_log = logging.getLogger(__name__)


def fill_missing_keys(model: nn.Module, state_dict: State) -> dict[str, Tensor]:
    """The state dict, completed by the model's own values where it has no entry (biases, norms, masks).

    Errors: ValueError naming the weight matrices that are missing, which no default can stand for.
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

    Errors: KeyError without `embed.W_E`, or without `pos_embed.W_pos` where positions are embedded.
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

    A soft cap on the logits breaks that. Errors: KeyError without `unembed.W_U`.
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
    """The same W_QK and W_OV in other factors: W_Q = U sqrt(S), W_K = V sqrt(S), W_V = U S, W_O = V^T.

    The biases of queries and keys are a last row of their matrices meanwhile; b_V goes into b_O. Signs, and rotations
    among equal singular values, are arbitrary.
    Errors: AssertionError under rotary positions, ValueError for grouped attention.
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
    state = {n: wide(w) if w.is_floating_point() else w for n, w in state_dict.items()}
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
    """`[d_model]`: what constant values add to the stream, query heads reading theirs in groups."""
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
