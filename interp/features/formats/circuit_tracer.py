"""Transcoders of circuit-tracer: `config.yaml` with `layer_0.safetensors`, ... (one a layer), or with
`W_enc_0.safetensors`, `W_dec_0.safetensors`, ... (features that write to all later layers).

Features below 0 are possible here: a threshold below 0 lets them pass, and top-k keeps the signs of what it chooses.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import yaml
from torch import Tensor

from interp.core.files import regular
from interp.core.wording import value_text
from interp.features.activations import DictionaryKind, JumpReLU, ReLU, TopK
from interp.features.cross_layer import CrossLayerTranscoder, LayerWeights
from interp.features.formats.configs import agreed, check_keys, count, refuse_facts, refuse_unknown
from interp.features.formats.files import Facts, Files, Layout, Stored, Tensors
from interp.features.formats.taps import Place, of_hook
from interp.model.config import Json

CONFIG = "config.yaml"
KEYS = (
    "model_name", "model_kind", "feature_input_hook", "feature_output_hook", "scan", "activation", "k", "repo_id",
    "revision", "subfolder", "transcoders",
)  # fmt: skip
THRESHOLD = "activation_function.threshold"
_ONE, _ENCODER, _DECODER = (
    re.compile(pattern.replace("N", r"(\d+)") + r"\.safetensors")
    for pattern in ("layer_N", "W_enc_N", "W_dec_N")
)


def _numbered(files: Files, pattern: re.Pattern[str]) -> dict[int, str]:
    """The files of a folder whose names have this form, by the layer that they name."""
    found = {name: pattern.fullmatch(name) for name in files.names if files.path.is_dir()}
    return {int(match[1]): name for name, match in found.items() if match is not None}


def _config(files: Files, kind: str) -> Json:
    """The config, {} where there is none; ValueError for what is not understood, or of another kind of model."""
    config = _yaml(files.place(CONFIG)) if files.has(CONFIG) else {}
    refuse_unknown(config, KEYS)
    if config.get("model_kind", kind) != kind:
        raise ValueError(f"model_kind must be {kind} of such files, got {value_text(config['model_kind'])}")
    if config.get("transcoders"):
        raise ValueError(
            f"{CONFIG} says under 'transcoders' that the weights are elsewhere: load those files"
        )
    return config


def _yaml(path: Path) -> Json:
    """The mapping in a YAML file; ValueError for anything else."""
    try:
        found = yaml.safe_load(regular(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as cause:
        raise ValueError(f"{path.name} is not readable YAML: {cause}") from cause
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError(f"{path.name} must hold a YAML mapping of names, got {value_text(found)}")
    return found


def _place(config: Json, key: str, layer: int) -> Place | None:
    """The place of a hook of a block; None where the config does not name one, or it is none of ours."""
    hook = config.get(key)
    if not isinstance(hook, str | None):
        raise ValueError(f"{key} must be the name of a hook, got {value_text(hook)}")
    return None if hook is None else of_hook(f"blocks.{layer}.{hook}")


def _fits(files: Files) -> bool:
    return files.has(CONFIG) and bool(_numbered(files, _ONE))


def _read(files: Files, facts: Facts) -> Stored:
    """The transcoder of one layer of the folder."""
    refuse_facts(facts, "norm_scaling_factor")
    config, layers = _config(files, "transcoder_set"), _numbered(files, _ONE)
    layer = next(iter(layers)) if len(layers) == 1 and facts.layer is None else facts.layer
    if layer not in layers:
        raise ValueError(
            f"layer must be one of {sorted(layers)}, of which there are files, got {facts.layer}"
        )
    stored = files.tensors(layers[layer]).every()
    optional = {THRESHOLD, "W_skip"} & set(stored)
    check_keys(stored, ("W_enc", "b_enc", "W_dec", "b_dec", *optional), f"the tensors of {layers[layer]}")
    kind = _kind(config, facts, THRESHOLD in stored)
    weights = {name: stored[name] for name in ("b_enc", "W_dec", "b_dec")} | {"W_enc": stored["W_enc"].mT}
    if THRESHOLD in stored:
        weights["threshold"] = stored[THRESHOLD].reshape(-1).expand(len(stored["b_enc"]))
    if "W_skip" in stored:
        weights["W_skip"] = stored["W_skip"].mT
    reads, writes = (_place(config, f"feature_{end}_hook", layer) for end in ("input", "output"))
    return Stored(
        kind,
        weights,
        reads=None if reads is None else reads.site,
        writes=None if writes is None else writes.site,
        before_gain=reads is not None and reads.before_gain,
        apply_b_dec_to_input=False,
        metadata=config,
    )


def _kind(config: Json, facts: Facts, has_threshold: bool) -> DictionaryKind:
    """The activation function: that of the thresholds in the files, or else what the config names."""
    named = config.get("activation")
    k = agreed("k", count(config, "k"), facts.k)
    if named not in (None, "relu", "topk", "jump_relu"):
        raise ValueError(f"activation must be relu, topk or jump_relu, got {value_text(named)}")
    if (
        has_threshold != (named == "jump_relu")
        and named is not None
        and (has_threshold or named == "jump_relu")
    ):
        raise ValueError(
            f"activation is {named!r}, and the files hold {'a' if has_threshold else 'no'} threshold"
        )
    if has_threshold:
        refuse_facts(facts, "k")
        return JumpReLU(relu=False)
    if named == "topk" or (named is None and k is not None):
        if k is None:
            raise ValueError("k is required of activation 'topk': load(path, k=...)")
        return TopK(k, relu=False)
    refuse_facts(facts, "k")
    return ReLU()


LAYOUT = Layout("circuit-tracer", _fits, _read)


def _fits_layers(files: Files) -> bool:
    return bool(_numbered(files, _ENCODER)) and bool(_numbered(files, _DECODER))


def _read_layers(files: Files, facts: Facts) -> CrossLayerTranscoder:
    """The transcoder of all layers; nothing but shapes and biases is read."""
    refuse_facts(facts, "layer", "k", "norm_scaling_factor")
    config = _config(files, "cross_layer_transcoder")
    encoders, decoders = _numbered(files, _ENCODER), _numbered(files, _DECODER)
    n = len(encoders)
    if missing := [f"W_{end}_{i}.safetensors" for end, held in (("enc", encoders), ("dec", decoders))
                   for i in range(max(len(encoders), len(decoders))) if i not in held]:  # fmt: skip
        raise ValueError(f"{missing[0]} is missing: a file of every layer is required")
    thresholds = "threshold_0" in files.tensors(encoders[0])
    places = {
        end: [_place(config, f"feature_{end}_hook", layer) for layer in range(n)]
        for end in ("input", "output")
    }
    if any(place is not None and place.before_gain for place in places["input"]):
        raise ValueError("a cross-layer transcoder that reads a norm before its gain is not supported")
    reads, writes = (
        {layer: place.site for layer, place in enumerate(found) if place} for found in places.values()
    )
    return CrossLayerTranscoder(
        JumpReLU(relu=False) if thresholds else ReLU(),
        {layer: _layer_weights(files, layer, n, thresholds) for layer in range(n)},
        {layer: files.tensors(encoders[layer]).get(f"b_dec_{layer}") for layer in range(n)},
        reads,
        writes,
        metadata=config,
    )


def _layer_weights(files: Files, layer: int, n: int, thresholds: bool) -> LayerWeights:
    """How the weights of a layer are read, once their shapes are looked at."""
    encoder, decoder = (files.tensors(f"W_{end}_{layer}.safetensors") for end in ("enc", "dec"))
    names = ("W_enc", "b_enc", "b_dec", *(("threshold",) if thresholds else ()))
    check_keys(encoder.shapes, (f"{name}_{layer}" for name in names), f"the tensors of {encoder.path.name}")
    check_keys(decoder.shapes, (f"W_dec_{layer}",), f"the tensors of {decoder.path.name}")
    shape, wide = encoder.shapes[f"W_enc_{layer}"], decoder.shapes[f"W_dec_{layer}"]
    if len(shape) != 2 or len(wide) != 3 or wide[:2] != (shape[0], n - layer):
        raise ValueError(
            f"W_dec_{layer} must have shape [s, {n - layer}, d] and W_enc_{layer} [s, d], got {[*wide]} and {[*shape]}"
        )

    def read() -> dict[str, Tensor]:
        found = {name: encoder.get(f"{name}_{layer}") for name in names if name != "b_dec"}
        flat = {name: x.reshape(-1) for name, x in found.items() if name == "threshold"}
        return found | flat | {"W_enc": found["W_enc"].mT}

    return LayerWeights(
        (shape[1], shape[0], wide[2]),
        read,
        functools.partial(_directions, decoder, f"W_dec_{layer}"),
    )


def _directions(decoder: Tensors, name: str, features: list[int]) -> Tensor:
    return decoder.get(name, (features,))


OF_LAYERS = Layout("circuit-tracer, across layers", _fits_layers, _read_layers)
