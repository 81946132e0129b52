"""OpenMOSS' llamascopium 2 (before: lm-saes): `config.json` and `sae_weights.safetensors`, of SAEs, transcoders,
crosscoders and cross-layer transcoders.

Activations are scaled to an average norm of sqrt(d) before they are encoded; that is folded into the weights. A feature
is active where its pre-activation times the norm of its direction exceeds the threshold (unless the config says no).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.wording import value_text
from interp.features.activations import DictionaryKind, JumpReLU, NormTopK, ReLU, TopK
from interp.features.cross_layer import Crosscoder, CrossLayerTranscoder, LayerWeights
from interp.features.dictionary import Normalisation
from interp.features.formats.configs import check_keys, count, flag, refuse_facts, refuse_unknown, widened
from interp.features.formats.files import Facts, Files, Index, Layout, Stored, Tensors
from interp.features.formats.taps import of_hook
from interp.model.config import Json

CONFIG = "config.json"
PLACES = tuple(
    f"{name}.{kind}"
    for name in ("sae_weights", "checkpoints/pruned", "checkpoints/final")
    for kind in ("safetensors", "pt")
)
"""Where weights lie, in the order in which they are sought."""
KEYS = (
    "sae_type", "d_model", "expansion_factor", "use_decoder_bias", "act_fn", "norm_activation",
    "sparsity_include_decoder_norm", "top_k", "use_triton_kernel", "sparsity_threshold_for_triton_spmm_kernel",
    "jumprelu_threshold_window", "device", "dtype",
)  # fmt: skip
OWN_KEYS = {
    "sae": ("hook_point_in", "hook_point_out", "use_glu_encoder"),
    "crosscoder": ("hook_points",),
    "clt": (
        "hook_points_in", "hook_points_out", "init_cross_layer_decoder_all_zero", "decode_with_csr",
        "sparsity_threshold_for_csr",
    ),
}  # fmt: skip
WIDEST = 2**31
THRESHOLD, NORM = "activation_function.log_jumprelu_threshold", "dataset_average_activation_norm."


def _weights(files: Files) -> Tensors | None:
    """The tensors of the file of weights, None where there is none."""
    for name in PLACES:
        if files.has(name):
            return Tensors(files.place(name), "sae" if name.endswith(".pt") else None)
    return None


def _fits(files: Files) -> bool:
    if not files.has(CONFIG) or "sae_type" not in files.json(CONFIG):
        return False
    weights = _weights(files)
    return weights is not None and "encoder.weight" not in weights


def _read(files: Files, facts: Facts) -> Stored | Crosscoder | CrossLayerTranscoder:
    """The dictionary of the type that the config names."""
    refuse_facts(facts, "layer", "k", "norm_scaling_factor")
    config, tensors = files.json(CONFIG), _weights(files)
    assert tensors is not None
    sae_type = config.get("sae_type")
    if not isinstance(sae_type, str) or sae_type not in OWN_KEYS:
        raise ValueError(f"sae_type must be one of {', '.join(OWN_KEYS)}, got {value_text(sae_type)}")
    refuse_unknown(config, (*KEYS, *OWN_KEYS[sae_type]))
    match sae_type:
        case "sae":
            return _sae(config, tensors)
        case "crosscoder":
            return _crosscoder(config, tensors)
        case _:
            return _transcoder(config, tensors)


LAYOUT = Layout("llamascopium", _fits, _read)


def _sae(config: Json, tensors: Tensors) -> Stored:
    """An SAE, or a transcoder where the two hooks differ."""
    if flag(config, "use_glu_encoder", False):
        raise ValueError("use_glu_encoder is not supported: features are z times a sigmoid of x")
    biased = flag(config, "use_decoder_bias", True)
    required = ("W_E", "b_E", "W_D", *(("b_D",) if biased else ()))
    stored = _checked(config, tensors, required)
    hooks = [_hook(config, key) for key in ("hook_point_in", "hook_point_out")]
    scale_in, scale_out = scales(config, tensors, hooks)
    weights = widened({"W_enc": stored["W_E"], "b_enc": stored["b_E"], "W_dec": stored["W_D"]})
    weights["b_dec"] = (
        widened({"b": stored["b_D"]})["b"] if biased else weights["W_dec"].new_zeros(_width(config))
    )
    _check_shapes(config, weights)
    kind = kind_of(config)
    if isinstance(kind, JumpReLU):
        weights["threshold"] = threshold_of(stored[THRESHOLD], kind_norm(config, weights["W_dec"]))
    weights |= {
        "W_enc": weights["W_enc"] * scale_in,
        "W_dec": weights["W_dec"] / scale_out,
        "b_dec": weights["b_dec"] / scale_out,
    }
    reads, writes = (of_hook(hook) for hook in hooks)
    return Stored(
        kind,
        weights if scale_in != 1 or scale_out != 1 else _as_stored(weights, stored["W_E"]),
        reads=None if reads is None else reads.site,
        writes=None if writes is None else writes.site,
        before_gain=reads is not None and reads.before_gain,
        apply_b_dec_to_input=False,
        normalize_activations=_normalisation(config, hooks),
        metadata=config,
    )


def _as_stored(weights: Mapping[str, Tensor], like: Tensor) -> dict[str, Tensor]:
    """The weights in the dtype of the file, where nothing but thresholds was worked out."""
    return {name: weight.to(like.dtype) for name, weight in weights.items()}


def _width(config: Json) -> int:
    width = count(config, "d_model")
    if width is None or width > WIDEST:
        raise ValueError(f"d_model is required, at most {WIDEST}, got {value_text(width)}")
    return width


def _features(config: Json) -> int:
    """The number of features, which is rounded down."""
    factor = config.get("expansion_factor")
    if not isinstance(factor, int | float) or isinstance(factor, bool) or not 0 < factor < 2**32:
        raise ValueError(f"expansion_factor must be a positive number, got {value_text(factor)}")
    return int(_width(config) * factor)


def _hook(config: Json, key: str) -> str:
    hook = config.get(key)
    if not isinstance(hook, str):
        raise ValueError(f"{key} must be the name of a hook, got {value_text(hook)}")
    return hook


def _hooks(config: Json, key: str) -> list[str]:
    hooks = config.get(key)
    if not isinstance(hooks, list) or not hooks or not all(isinstance(hook, str) for hook in hooks):
        raise ValueError(f"{key} must be a list of hooks, got {value_text(hooks)}")
    return hooks


def _checked(config: Json, tensors: Tensors, required: Sequence[str]) -> dict[str, Tensor]:
    """The tensors, which are those required, with thresholds where the rule has them."""
    thresholds = (THRESHOLD,) if isinstance(kind_of(config), JumpReLU) else ()
    names = [name for name in tensors.shapes if not name.startswith(NORM)]
    check_keys(names, (*required, *thresholds), f"the tensors of {tensors.path.name}")
    return {name: tensors.get(name) for name in names}


def _check_shapes(config: Json, weights: Mapping[str, Tensor]) -> None:
    """ValueError unless widths are those of the config."""
    wanted = (_width(config), _features(config))
    if tuple(weights["W_enc"].shape[-2:]) != wanted or tuple(weights["W_dec"].shape[-2:]) != wanted[::-1]:
        raise ValueError(
            f"the config says d_model={wanted[0]} and {wanted[1]} features, W_E has shape "
            f"{[*weights['W_enc'].shape]} and W_D {[*weights['W_dec'].shape]}"
        )


def kind_of(config: Json) -> DictionaryKind:
    """The activation function; ValueError for those that look at a whole batch, or at all layers together."""
    rule = config.get("act_fn", "relu")
    match rule.lower() if isinstance(rule, str) else rule:
        case "relu":
            return ReLU()
        case "jumprelu":
            return JumpReLU()
        case "topk":
            k = count(config, "top_k") or 50
            return NormTopK(k) if flag(config, "sparsity_include_decoder_norm", True) else TopK(k)
        case "batchtopk" | "batchlayertopk" | "layertopk":
            raise ValueError(
                f"act_fn {rule!r} is not supported: which features are active depends on other vectors or layers, "
                "and no threshold is stored; llamascopium converts such dictionaries to jumprelu"
            )
    raise ValueError(f"act_fn must be relu, jumprelu or topk, got {value_text(rule)}")


def kind_norm(config: Json, W_dec: Float[Tensor, "*l s o"]) -> Float[Tensor, "*l s"] | None:
    """The norms of the directions that pre-activations are multiplied by before the rule looks at them; None: by 1."""
    return W_dec.norm(dim=-1) if flag(config, "sparsity_include_decoder_norm", True) else None


def threshold_of(log_threshold: Tensor, norm: Tensor | None) -> Tensor:
    """Thresholds of pre-activations, from the logarithms of those of pre-activations times a norm (None: 1)."""
    threshold = widened({"": log_threshold})[""].exp()
    if norm is None:
        return threshold
    return (threshold / norm).clamp_max(torch.finfo(norm.dtype).max)  # a direction of 0 is never active


def scales(config: Json, tensors: Tensors, hooks: Sequence[str]) -> list[float]:
    """What activations at each hook are multiplied by before they are encoded."""
    match config.get("norm_activation", "dataset-wise"):
        case "dataset-wise":
            return [_scale(config, tensors, hook) for hook in hooks]
        case "inference" | "token-wise":
            return [1.0] * len(hooks)
    raise ValueError(
        "norm_activation must be dataset-wise, inference or token-wise, got "
        f"{value_text(config.get('norm_activation'))}"
    )


def _scale(config: Json, tensors: Tensors, hook: str) -> float:
    norm = tensors.get(NORM + hook)
    if norm.numel() != 1 or not 0 < float(norm) < torch.inf:
        raise ValueError(f"{NORM}{hook} must be a positive number, got {value_text(norm)}")
    return _width(config) ** 0.5 / float(norm)


def _normalisation(config: Json, hooks: Sequence[str]) -> Normalisation:
    """How each vector is scaled by itself."""
    if config.get("norm_activation") != "token-wise":
        return "none"
    if len(set(hooks)) > 1:
        raise ValueError(
            "norm_activation 'token-wise' of a transcoder is not supported: the norm of what it writes is not known"
        )
    return "constant_norm_rescale"


def _crosscoder(config: Json, tensors: Tensors) -> Crosscoder:
    """A crosscoder of several hooks."""
    hooks = _hooks(config, "hook_points")
    _refuse_token_wise(config)
    if not flag(config, "sparsity_include_decoder_norm", True) or not flag(config, "use_decoder_bias", True):
        raise ValueError("sparsity_include_decoder_norm and use_decoder_bias must be true of a crosscoder")
    stored = _checked(config, tensors, ("W_E", "b_E", "W_D", "b_D"))
    weights = {
        "W_enc": stored["W_E"],
        "b_enc": stored["b_E"].sum(0),
        "W_dec": stored["W_D"],
        "b_dec": stored["b_D"],
    }
    _check_shapes(config, weights)
    kind = kind_of(config)
    if isinstance(kind, JumpReLU):
        weights["threshold"] = threshold_of(stored[THRESHOLD], kind_norm(config, stored["W_D"]))
    scale = stored["W_E"].new_tensor(scales(config, tensors, hooks))
    if bool((scale != 1).any()):
        weights |= {"scale": scale, "unscale": scale}
    places = (of_hook(hook) for hook in hooks)
    return Crosscoder(
        kind, weights, reads=tuple(place.site if place else None for place in places), metadata=config
    )


def _refuse_token_wise(config: Json) -> None:
    if config.get("norm_activation") == "token-wise":
        raise ValueError("norm_activation 'token-wise' of several layers is not supported")


def _transcoder(config: Json, tensors: Tensors) -> CrossLayerTranscoder:
    """A cross-layer transcoder; its decoders are stored by the layer that they write to."""
    reads, writes = (_hooks(config, key) for key in ("hook_points_in", "hook_points_out"))
    _refuse_token_wise(config)
    n = len(reads)
    if len(writes) != n:
        raise ValueError(f"hook_points_out must name {n} hooks, got {len(writes)}")
    kind = kind_of(config)
    names = ["W_E", "b_E", *(f"W_D.{i}" for i in range(n)), *(f"b_D.{i}" for i in range(n))]
    thresholds = (THRESHOLD,) if isinstance(kind, JumpReLU) else ()
    check_keys((x for x in tensors.shapes if not x.startswith(NORM)), (*names, *thresholds), "the tensors")
    for name, wanted in {
        "W_E": (n, _width(config), _features(config)),
        **{f"W_D.{i}": (i + 1, _features(config), _width(config)) for i in range(n)},
    }.items():
        if tensors.shapes[name] != wanted:
            raise ValueError(f"{name} must have shape {[*wanted]}, got {[*tensors.shapes[name]]}")
    opened = _Opened(config, tensors, kind, scales(config, tensors, reads), scales(config, tensors, writes))
    return CrossLayerTranscoder(
        kind,
        {layer: opened.layer(layer) for layer in range(n)},
        {layer: opened.scaled(f"b_D.{layer}", 1 / opened.scales_out[layer]) for layer in range(n)},
        _sites(reads),
        _sites(writes),
        metadata=config,
    )


def _sites(hooks: Sequence[str]) -> dict[int, str]:
    """The site of each layer; empty where one is none of ours."""
    places = [of_hook(hook) for hook in hooks]
    if any(place is not None and place.before_gain for place in places):
        raise ValueError(
            f"a cross-layer transcoder that reads a norm before its gain is not supported: {hooks[0]}"
        )
    return {layer: place.site for layer, place in enumerate(places) if place} if all(places) else {}


@dataclass(frozen=True)
class _Opened:
    """The file of a cross-layer transcoder, and what is worked out of it."""

    config: Json
    tensors: Tensors
    kind: DictionaryKind
    scales_in: Sequence[float]
    scales_out: Sequence[float]

    def layer(self, layer: int) -> LayerWeights:
        """How the weights of a layer are read."""
        shape = (_width(self.config), _features(self.config), _width(self.config))
        return LayerWeights(
            shape, functools.partial(self.encoder, layer), functools.partial(self.directions, layer)
        )

    def scaled(self, name: str, factor: float, index: Index = ()) -> Tensor:
        """A tensor, or a part of it, times a factor."""
        stored = self.tensors.get(name, index)
        return stored if factor == 1 else widened({"": stored})[""] * factor

    def encoder(self, layer: int) -> dict[str, Tensor]:
        """The encoder of a layer, with what its rule takes."""
        weights = {
            "W_enc": self.scaled("W_E", self.scales_in[layer], (layer,)), "b_enc": self.tensors.get("b_E", (layer,)),
        }  # fmt: skip
        included = flag(self.config, "sparsity_include_decoder_norm", True)
        norm = self.norm(layer) if included and not isinstance(self.kind, ReLU) else None
        if isinstance(self.kind, JumpReLU):
            weights["threshold"] = threshold_of(self.tensors.get(THRESHOLD, (layer,)), norm)
        elif norm is not None:
            weights["norm"] = norm
        return weights

    def norm(self, layer: int) -> Float[Tensor, "s"]:
        """The norm of each feature's directions into all its layers together, as they are stored."""
        parts = [self.tensors.get(f"W_D.{later}", (layer,)) for later in range(layer, len(self.scales_out))]
        return torch.stack([widened({"": part})[""].square().sum(-1) for part in parts]).sum(0).sqrt()

    def directions(self, layer: int, features: list[int]) -> Float[Tensor, "a l o"]:
        """The directions of features of a layer into it and each later one."""
        later = range(layer, len(self.scales_out))
        return torch.stack(
            [self.scaled(f"W_D.{to}", 1 / self.scales_out[to], (layer, features)) for to in later], 1
        )
