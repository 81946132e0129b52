"""Gemma Scope 2 (Gemma 3): `<site>/layer_5_width_16k_l0_small/params.safetensors`, and its dictionaries of many layers.

Of one layer they are JumpReLU SAEs and transcoders, with an affine skip or without. Cross-layer transcoders and weakly
causal crosscoders are folders of `params_layer_0.safetensors`, ... with a decoder from each layer into each.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping

from torch import Tensor

from interp.features.activations import JumpReLU
from interp.features.cross_layer import CrossLayerTranscoder, LayerWeights
from interp.features.formats.configs import check_keys, count, flag, refuse_facts, refuse_unknown
from interp.features.formats.files import Facts, Files, Layout, Stored, Tensors
from interp.features.formats.gemma_scope import layer_of
from interp.features.formats.taps import Place, of_module
from interp.model.config import Json

CONFIG, PARAMS = "config.json", "params.safetensors"
WEIGHTS = {"w_enc": "W_enc", "b_enc": "b_enc", "w_dec": "W_dec", "b_dec": "b_dec", "threshold": "threshold"}
SKIP = "affine_skip_connection"
KEYS = (
    "architecture", "model_name", "hf_hook_point_in", "hf_hook_point_out", "affine_connection", "width", "l0", "type",
)  # fmt: skip
MODULES = {
    "resid_post": ("output", "output"),
    "attn_out": ("self_attn.o_proj.input", "self_attn.o_proj.input"),
    "mlp_out": ("post_feedforward_layernorm.output", "post_feedforward_layernorm.output"),
    "transcoder": ("pre_feedforward_layernorm.output", "post_feedforward_layernorm.output"),
    "clt": ("pre_feedforward_layernorm.output", "post_feedforward_layernorm.output"),
    "crosscoder": ("output", "output"),
}
"""What the dictionaries of a folder read and write in a block, by the folder's name without "_all"."""
_LAYER_FILE = re.compile(r"params_layer_(\d+)\.safetensors")


def _weights(files: Files) -> str | None:
    """The name of the file of weights, None where there is none."""
    if files.path.is_dir():
        return PARAMS if files.has(PARAMS) else None
    return files.names[0] if files.names[0].endswith(".safetensors") else None


def _fits(files: Files) -> bool:
    name = _weights(files)
    return name is not None and len(files.tensors(name).shapes.get("w_dec", ())) == 2


def _read(files: Files, facts: Facts) -> Stored:
    """The dictionary of one file, and where it belongs by its config, or by its path where there is none."""
    refuse_facts(facts, "k", "norm_scaling_factor")
    name = _weights(files)
    assert name is not None
    stored = files.tensors(name).every()
    config = _config(files)
    skips = SKIP in stored
    if flag(config, "affine_connection", skips) != skips:
        raise ValueError(
            f"affine_connection is {not skips}, and the tensors hold {'a' if skips else 'no'} {SKIP}"
        )
    check_keys(stored, (*WEIGHTS, *((SKIP,) if skips else ())), f"the tensors of {name}")
    if (width := count(config, "width")) not in (None, stored["b_enc"].shape[0]):
        raise ValueError(f"width is {width}, and b_enc has {stored['b_enc'].shape[0]} entries")
    weights = {ours: stored[theirs] for theirs, ours in WEIGHTS.items()}
    weights |= {"W_skip": stored[SKIP]} if skips else {}
    reads, writes = _places(files, config, facts)
    return Stored(
        JumpReLU(),
        weights,
        reads=None if reads is None else reads.site,
        writes=None if writes is None else writes.site,
        apply_b_dec_to_input=False,
        metadata=config,
    )


def _config(files: Files) -> Json:
    """The config, {} where there is none; ValueError for what is not understood."""
    config = files.json(CONFIG) if files.path.is_dir() else {}
    refuse_unknown(config, KEYS)
    if config.get("architecture", "jump_relu") != "jump_relu":
        raise ValueError(f"architecture must be jump_relu, got {config['architecture']!r}")
    return config


def _places(files: Files, config: Json, facts: Facts) -> tuple[Place | None, Place | None]:
    """What a dictionary reads and writes."""
    read = config.get("hf_hook_point_in")
    if isinstance(read, str):
        refuse_facts(facts, "layer")
        written = config.get("hf_hook_point_out") or read
        return of_module(read), of_module(str(written))
    modules, layer = _modules(files), layer_of(files.path.absolute() / "", facts)
    if modules is None or layer is None:
        return None, None
    return tuple(of_module(f"model.layers.{layer}.{module}") for module in modules)  # type: ignore[return-value]


def _modules(files: Files) -> tuple[str, str] | None:
    """What the dictionaries of this folder read and write in a block, by the names of the folders above."""
    names = [part.removesuffix("_all") for part in files.path.absolute().parts]
    return next((MODULES[name] for name in reversed(names) if name in MODULES), None)


LAYOUT = Layout("Gemma Scope 2", _fits, _read)


def _layer_files(files: Files) -> dict[int, str]:
    """The files of the layers by their number."""
    found = {name: _LAYER_FILE.fullmatch(name) for name in files.names if files.path.is_dir()}
    return {int(match[1]): name for name, match in found.items() if match is not None}


def _fits_layers(files: Files) -> bool:
    return bool(_layer_files(files))


def _read_layers(files: Files, facts: Facts) -> CrossLayerTranscoder:
    """The dictionary of one file a layer; nothing but shapes and biases is read."""
    refuse_facts(facts, "layer", "k", "norm_scaling_factor")
    config = _config(files)
    named = _layer_files(files)
    tensors = {number: files.tensors(named[number]) for number in sorted(named)}
    first = next(iter(tensors.values()))
    for each in tensors.values():
        check_keys(
            each.shapes, (*WEIGHTS, *((SKIP,) if SKIP in first else ())), f"the tensors of {each.path.name}"
        )
    layers = _layers(files, tuple(tensors))
    targets = first.shapes["w_dec"][1] if len(first.shapes["w_dec"]) == 3 else 0
    if targets != len(layers):
        raise ValueError(
            f"{first.path.name} writes to {targets} layers, and there are files of {len(layers)}"
        )
    by_layer = dict(zip(layers, tensors.values(), strict=True))
    return CrossLayerTranscoder(
        JumpReLU(),
        {layer: _layer_weights(by_layer[layer], place, targets) for place, layer in enumerate(layers)},
        {layer: by_layer[layer].get("b_dec") for layer in layers},
        *_sites(files, layers),
        metadata=config,
    )


def _layers(files: Files, numbers: tuple[int, ...]) -> tuple[int, ...]:
    """The layers of the model that the files belong to: their numbers, or those that the folder's name lists."""
    match = re.search(r"(?:^|/)layer((?:_\d+)+)_width", files.path.absolute().as_posix())
    if match is None:
        return numbers
    listed = tuple(int(layer) for layer in match[1].split("_")[1:])
    if numbers not in (listed, tuple(range(len(listed)))):
        raise ValueError(
            f"files of the layers {listed} are required, as the folder's name says, got {numbers}"
        )
    return listed


def _sites(files: Files, layers: tuple[int, ...]) -> tuple[Mapping[int, str], Mapping[int, str]]:
    """The sites that each layer reads and writes; empty where the path does not say it."""
    modules = _modules(files)
    if modules is None:
        return {}, {}
    places = [{layer: of_module(f"model.layers.{layer}.{module}") for layer in layers} for module in modules]
    reads, writes = ({layer: place.site for layer, place in each.items() if place} for each in places)
    return reads, writes


def _layer_weights(tensors: Tensors, place: int, targets: int) -> LayerWeights:
    """How the weights of the layer at a place are read; its decoder has all targets, or those from its place on."""
    d_in, d_sae = tensors.shapes["w_enc"]
    shape = tensors.shapes["w_dec"]
    if len(shape) != 3 or shape[0] != d_sae or shape[1] not in (targets, targets - place):
        raise ValueError(
            f"w_dec of {tensors.path.name} must have shape [{d_sae}, {targets}, d], got {[*shape]}"
        )
    skipped = shape[1] - (targets - place)
    return LayerWeights(
        (d_in, d_sae, shape[2]),
        functools.partial(_encoder, tensors),
        lambda features: tensors.get("w_dec", (features, slice(skipped, None))),
        (lambda: tensors.get(SKIP)) if SKIP in tensors else None,
    )


def _encoder(tensors: Tensors) -> dict[str, Tensor]:
    return {
        "W_enc": tensors.get("w_enc"), "b_enc": tensors.get("b_enc"), "threshold": tensors.get("threshold"),
    }  # fmt: skip


OF_LAYERS = Layout("Gemma Scope 2, of several layers", _fits_layers, _read_layers)
