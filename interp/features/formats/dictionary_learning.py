"""Dictionaries of saprmarks/dictionary_learning and its fork: `ae.pt` beside `config.json`, one class for each rule.

The fork (science-of-finetuning) also writes `model.safetensors` beside a `config.json` of its own, and may keep the
mean and the scale of the activations in the file; these are folded into the weights. Features are those of the stored
weights: AutoEncoder.from_pretrained multiplies them by the decoder's norms, unless normalize_decoder=False.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.wording import value_text
from interp.features.activations import DictionaryKind, Gated, JumpReLU, ReLU, TopK
from interp.features.folding import shifted
from interp.features.formats.configs import (
    agreed,
    check_keys,
    count,
    part,
    refuse_facts,
    refuse_unknown,
    widened,
    words,
)
from interp.features.formats.files import Facts, Files, Layout, Stored
from interp.features.formats.taps import Place, of_module
from interp.model.config import Json

CONFIG, STATE, HUB = "config.json", "ae.pt", "model.safetensors"
TRAINER = words(
    "activation_dim dict_class dict_size k layer lm_name submodule_name group_sizes group_fractions"
)
OF_TRAINING = words("""
    trainer_class anneal_start auxk_alpha bandwidth decay_start device group_weights l1_penalty lr n_sparsity_updates
    norm_factor p_end p_start resample_steps seed sparsity_function sparsity_penalty sparsity_queue_length
    sparsity_warmup_steps steps target_l0 threshold_beta threshold_start_step top_k_aux wandb_name warmup_steps
    use_threshold max_decay_steps temperature total_steps compile ghost_threshold entropy lambda_reg wandb_entity
""")
"""Keys that say how a dictionary was trained; a factor of the activations is in the stored biases by then."""
OF_FORK = words("activation_mean activation_std target_rms encoder_init_norm")
SCALING = words("activation_mean activation_std activation_global_scale target_rms")
"""Buffers of the fork."""
BUFFER = words("""
    d_submodule io n_ctxs ctx_len refresh_batch_size out_batch_size device layer n_init_batches dataset_name dataset
    dtype add_special_tokens remove_bos model_name submodule_name
""")
UNDONE_EPS = 1e-8
"""What the fork adds to the scale when it undoes it."""
ENDS = {"in": "input", "out": "output"}
SITES = {
    "resid_pre": "hook_resid_pre", "resid_mid": "hook_resid_mid", "resid_post": "hook_resid_post",
    "mlp_out": "hook_mlp_out", "attn_out": "hook_attn_out",
}  # fmt: skip
_NAME = re.compile(
    r"(resid_pre|resid_mid|resid_post|mlp_out|attn_out|mlp|attn|attention)(?:_layer)?(?:_(\d+))?"
)
LINEAR = {"W_enc": "encoder.weight", "b_enc": "encoder.bias", "W_dec": "decoder.weight"}


class _Class(NamedTuple):
    """How a class of dictionaries is stored."""

    kind: type
    names: Mapping[str, str]
    """Our name of a weight, and theirs."""
    centred: bool = True
    """Whether b_dec is subtracted before encoding."""
    optional: frozenset[str] = frozenset()
    """What may be stored beside the weights."""


_OURS = {name: name for name in ("W_enc", "b_enc", "W_dec", "b_dec")}
CLASSES = {
    "AutoEncoder": _Class(ReLU, LINEAR | {"b_dec": "bias"}),
    "AutoEncoderNew": _Class(ReLU, LINEAR | {"b_dec": "decoder.bias"}, centred=False),
    "GatedAutoEncoder": _Class(
        Gated,
        {
            "W_enc": "encoder.weight", "W_dec": "decoder.weight", "b_dec": "decoder_bias", "r_mag": "r_mag",
            "b_gate": "gate_bias", "b_mag": "mag_bias",
        },
    ),
    "JumpReluAutoEncoder": _Class(JumpReLU, _OURS | {"threshold": "threshold"}, centred=False),
    "AutoEncoderTopK": _Class(TopK, LINEAR | {"b_dec": "b_dec"}, optional=frozenset({"k", "threshold"})),
    "BatchTopKSAE": _Class(JumpReLU, LINEAR | {"b_dec": "b_dec", "threshold": "threshold"}, optional=frozenset({"k"})),
    "MatryoshkaBatchTopKSAE": _Class(
        JumpReLU, _OURS | {"threshold": "threshold"}, optional=frozenset({"k", "group_sizes"})
    ),
}  # fmt: skip


def _fits(files: Files) -> bool:
    if files.has(CONFIG, STATE):
        return True
    return files.has(CONFIG, HUB) and files.json(CONFIG).get("dict_class") in CLASSES


def _read(files: Files, facts: Facts) -> Stored:
    """The dictionary of a folder, with the fork's scaling of the activations folded into the weights."""
    refuse_facts(facts, "norm_scaling_factor")
    config, hub = files.json(CONFIG), not files.has(STATE)
    trainer = _known(config, hub)
    name = trainer.get("dict_class")
    if not isinstance(name, str) or name not in CLASSES:
        raise ValueError(f"dict_class must be one of {', '.join(CLASSES)}, got {value_text(name)}")
    stored = CLASSES[name]
    state = _state(files, HUB if hub else STATE, stored)
    weights = {ours: state[theirs].mT if theirs in LINEAR.values() and state[theirs].ndim == 2 else state[theirs]
               for ours, theirs in stored.names.items()}  # fmt: skip
    kind = _kind(stored, state, trainer, facts)
    _check_widths(trainer, weights)
    weights = _with_thresholds(weights, name)
    centred = stored.centred
    if "activation_mean" in state and not bool(
        torch.cat([state[key].flatten() for key in SCALING[:2]]).isnan().any()
    ):
        weights, centred = _unscaled(weights, state), False
    place = _place(trainer, {} if hub else part(config, "buffer"), facts)
    groups = {"group_sizes": state["group_sizes"].tolist()} if "group_sizes" in state else {}
    return Stored(
        kind,
        weights,
        reads=None if place is None else place.site,
        apply_b_dec_to_input=centred,
        metadata={"model_name": trainer.get("lm_name"), **config, **groups},
        dtype=state[stored.names["W_dec"]].dtype,
    )


LAYOUT = Layout("dictionary_learning", _fits, _read)


def _known(config: Json, hub: bool) -> Json:
    """The part of a config that describes the dictionary; ValueError for a key that is not understood."""
    if hub:
        refuse_unknown(config, (*TRAINER, *OF_FORK))
        return config
    refuse_unknown(config, ("trainer", "buffer"))
    trainer = part(config, "trainer")
    refuse_unknown(trainer, (*TRAINER, *OF_TRAINING, *OF_FORK), " of the trainer")
    refuse_unknown(part(config, "buffer"), BUFFER, " of the buffer")
    return trainer


def _state(files: Files, file: str, stored: _Class) -> dict[str, Tensor]:
    """The tensors of a file; ValueError for those of an unfinished training, and for one too many or too few."""
    tensors = files.tensors(file)
    if "ae" in tensors.plain:
        raise ValueError(
            f"{file} is the state of a training that was interrupted, whose biases are not scaled yet: finish it, or "
            "take one of its checkpoints"
        )
    refuse_unknown(dict(tensors.plain), (), f" of {file}")
    state = {name.removeprefix("_orig_mod."): tensor for name, tensor in tensors.every().items()}
    optional = {*stored.optional, *(SCALING if "activation_mean" in state else ())}
    check_keys(state.keys() - stored.optional, (*stored.names.values(), *(optional - stored.optional)), file)
    return state


def _kind(stored: _Class, state: Mapping[str, Tensor], trainer: Json, facts: Facts) -> DictionaryKind:
    """The kind of a class; k is in the file, and in older versions in the config alone."""
    said = count(trainer, "k")
    if "k" in state:
        said = agreed("k", count({"k": state["k"].tolist()}, "k"), said)
    if stored.kind is not TopK:
        refuse_facts(facts, "k")
        kind: DictionaryKind = stored.kind()
        return kind
    if (k := agreed("k", said, facts.k)) is None:
        raise ValueError("k is required, and neither ae.pt nor config.json says it: load(..., k=32)")
    return TopK(k)


def _check_widths(trainer: Json, weights: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the encoder is as wide as the config says."""
    shape = tuple(weights["W_enc"].shape)
    said = (count(trainer, "activation_dim"), count(trainer, "dict_size"))
    if len(shape) != 2 or any(mine not in (None, theirs) for mine, theirs in zip(said, shape, strict=True)):
        raise ValueError(
            f"the config says activation_dim={said[0]}, dict_size={said[1]}, the encoder has shape {shape_text(shape)}"
        )


def _with_thresholds(weights: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The weights with a threshold for each feature, where one for all is stored."""
    threshold = weights.get("threshold")
    if threshold is None or threshold.ndim:
        return weights
    if float(threshold) < 0:
        warnings.warn(
            f"the threshold of this {name} was not settled when it was stored: every positive feature is active",
            stacklevel=4,
        )
    return weights | {"threshold": threshold.expand(weights["W_enc"].shape[1])}


def _unscaled(weights: dict[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that read x where the fork's read (x - mean) scale - b_dec, and whose output is not scaled."""
    mean, scale = widened(
        {name: state[name] for name in ("activation_mean", "activation_global_scale")}
    ).values()
    if scale.ndim or mean.shape != weights["b_dec"].shape:
        raise ValueError(
            f"activation_mean must have shape {shape_text(weights['b_dec'].shape)} and activation_global_scale none, "
            f"got {shape_text(mean.shape)} and {shape_text(scale.shape)}"
        )
    wide = widened(weights)
    moved = shifted(wide, -((mean * scale + wide["b_dec"]) @ wide["W_enc"]))
    undone = scale + UNDONE_EPS
    return moved | {
        "W_enc": wide["W_enc"] * scale,
        "W_dec": wide["W_dec"] / undone,
        "b_dec": wide["b_dec"] / undone + mean,
    }


def _place(trainer: Json, buffer: Json, facts: Facts) -> Place | None:
    """Where a dictionary belongs, by the layer and what the config calls the module; None where that is not known."""
    name, io = trainer.get("submodule_name"), buffer.get("io", "out")
    if not isinstance(io, str) or io not in ENDS:
        raise ValueError(
            f"io of the buffer must be in or out, got {value_text(io)}: a transcoder is not supported"
        )
    if isinstance(name, str) and (place := of_module(name, ENDS[io])) is not None:
        return place
    match = None if name is None else _NAME.fullmatch(str(name))
    if name is not None and match is None:
        return None
    said = None if match is None or match[2] is None else int(match[2])
    layer = agreed("layer", agreed("layer", count(trainer, "layer", least=0), said), facts.layer)
    if layer is None:
        return None
    if match is None:
        return of_module(f"layers.{layer}", ENDS[io])
    return None if io == "in" and match[1] in SITES else _named(layer, match[1], ENDS[io])


def _named(layer: int, name: str, end: str) -> Place | None:
    return (
        Place(f"blocks.{layer}.{SITES[name]}") if name in SITES else of_module(f"layers.{layer}.{name}", end)
    )
