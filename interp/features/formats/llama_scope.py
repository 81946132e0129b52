"""Llama Scope of OpenMOSS: `hyperparams.json` with `checkpoints/final.safetensors`, and its later form for R1 (Llama
distilled from DeepSeek-R1), `config.json` with `sae_weights.safetensors`.

Both are JumpReLU dictionaries of activations that are scaled to an average norm of sqrt(d); that is folded in.
"""

from __future__ import annotations

import torch
from torch import Tensor

from interp.core.wording import value_text
from interp.features.activations import JumpReLU
from interp.features.formats.configs import (
    check_keys,
    count,
    flag,
    part,
    refuse_facts,
    refuse_unknown,
    widened,
    words,
)
from interp.features.formats.files import Facts, Files, Layout, Stored
from interp.features.formats.llamascopium import NORM, WIDEST, kind_norm, threshold_of
from interp.features.formats.taps import of_hook
from interp.model.config import Json

SETTINGS, FINAL = "hyperparams.json", "checkpoints/final.safetensors"
CONFIG, WEIGHTS = "config.json", "sae_weights.safetensors"
TENSORS = ("encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias")
LOG_THRESHOLD = "log_jumprelu_threshold"
NORM_BELOW = 2.0**64
UNDERSTOOD = words("""
    sae_type d_model d_sae expansion_factor hook_point_in hook_point_out act_fn norm_activation
    dataset_average_activation_norm jump_relu_threshold sparsity_include_decoder_norm use_decoder_bias use_glu_encoder
    apply_decoder_bias_to_pre_encoder
""")
OF_TRAINING = words("""
    device dtype seed top_k k_warmup_steps use_batch_norm_mse init_encoder_with_decoder_transpose
    init_encoder_with_decoder_transpose_factor init_decoder_norm init_encoder_norm init_search bias_init_method
    decoder_exactly_fixed_norm decoder_bias_init_method l1_coefficient l1_coefficient_warmup_steps lp use_ghost_grads
    remove_gradient_parallel_to_decoder_directions tp_size ddp_size strict_loading sae_pretrained_name_or_path
    jumprelu_threshold_window use_triton_kernel sparsity_threshold_for_triton_spmm_kernel
    tanh_stretch_coefficient model_name exp_name exp_result_path run_name
""")
"""Keys that say how it was trained, and change no number of what came of it."""


def _fits(files: Files) -> bool:
    return files.has(SETTINGS, FINAL)


def _read(files: Files, facts: Facts) -> Stored:
    """The dictionary of the first release, with one threshold for all features."""
    refuse_facts(facts, "layer", "k", "norm_scaling_factor")
    config = _config(files, SETTINGS)
    norms = part(config, "dataset_average_activation_norm")
    c_in, c_out = (_scale(config, norms.get(place)) for place in ("in", "out"))
    threshold = config.get("jump_relu_threshold")
    if not isinstance(threshold, int | float) or isinstance(threshold, bool) or not 0 <= threshold < 2**32:
        raise ValueError(f"jump_relu_threshold must be a number of at least 0, got {value_text(threshold)}")
    stored = files.tensors(FINAL).every()
    check_keys(stored, TENSORS, "the tensors")
    thresholds = torch.full_like(widened(stored)["encoder.bias"], threshold * c_in)
    return _stored(config, stored, thresholds.log(), c_in, c_out)


LAYOUT = Layout("Llama Scope", _fits, _read)


def _fits_r1(files: Files) -> bool:
    return files.has(CONFIG, WEIGHTS) and TENSORS[0] in files.tensors(WEIGHTS)


def _read_r1(files: Files, facts: Facts) -> Stored:
    """The dictionary of the later form, with a threshold for each feature."""
    refuse_facts(facts, "layer", "k")
    config, tensors = _config(files, CONFIG), files.tensors(WEIGHTS)
    stored = tensors.every()
    norms = {name.removeprefix(NORM): stored.pop(name) for name in tensors.shapes if name.startswith(NORM)}
    check_keys(stored, (*TENSORS, LOG_THRESHOLD), "the tensors")
    if norms:
        refuse_facts(facts, "norm_scaling_factor")
        c_in, c_out = (
            _scale(config, float(norms[hook]) if hook in norms and norms[hook].numel() == 1 else None)
            for hook in _hooks(config)
        )
    elif facts.norm_scaling_factor is None or config.get("norm_activation", "dataset-wise") == "inference":
        raise ValueError(
            "norm_scaling_factor is required: these files do not hold the average norm of activations"
        )
    else:
        c_in = c_out = facts.norm_scaling_factor
    return _stored(config, stored, stored[LOG_THRESHOLD], c_in, c_out)


def _config(files: Files, name: str) -> Json:
    """The config; ValueError for what is not understood or not of a JumpReLU dictionary."""
    config = files.json(name)
    refuse_unknown(config, (*UNDERSTOOD, *OF_TRAINING))
    for key, wanted in {"act_fn": "jumprelu", "norm_activation": "dataset-wise", "sae_type": "sae"}.items():
        if config.get(key, wanted) != wanted:
            raise ValueError(f"{key} must be {wanted}, got {value_text(config[key])}")
    for key in ("use_glu_encoder", "apply_decoder_bias_to_pre_encoder"):
        if flag(config, key, False):
            raise ValueError(f"{key} must be false: dictionaries with it are not supported")
    if not flag(config, "use_decoder_bias", True):
        raise ValueError("use_decoder_bias must be true")
    return config


def _hooks(config: Json) -> list[str]:
    """The hooks that it reads and writes, the same where the config names one."""
    read = config.get("hook_point_in")
    if not isinstance(read, str):
        raise ValueError(f"hook_point_in must be the name of a hook, got {value_text(read)}")
    written = config.get("hook_point_out")
    return [read, read if written is None else str(written)]


def _scale(config: Json, norm: object) -> float:
    """What activations of this average norm are multiplied by."""
    width = count(config, "d_model")
    if (
        not isinstance(norm, int | float)
        or isinstance(norm, bool)
        or not 0 < norm < NORM_BELOW
        or width is None
        or width > WIDEST
    ):
        raise ValueError(
            "d_model and dataset_average_activation_norm of what is read and written are required, positive "
            f"numbers, got {value_text(width)} and {value_text(norm)}"
        )
    return width**0.5 / float(norm)


def _stored(
    config: Json, stored: dict[str, Tensor], log_threshold: Tensor, c_in: float, c_out: float
) -> Stored:
    """The dictionary, with the scales of what it reads and writes in its weights."""
    wide = widened(stored)
    norm = kind_norm({"sparsity_include_decoder_norm": False} | config, wide["decoder.weight"].mT)
    reads, writes = (of_hook(hook) for hook in _hooks(config))
    said = [count(config, "d_sae") or len(wide["encoder.bias"]), count(config, "d_model")]
    if said != [*wide["encoder.weight"].shape]:
        raise ValueError(
            f"the config says d_sae={said[0]}, d_model={said[1]}, encoder.weight has shape "
            f"{[*wide['encoder.weight'].shape]}"
        )
    return Stored(
        JumpReLU(),
        {
            "W_enc": wide["encoder.weight"].mT * c_in,
            "b_enc": wide["encoder.bias"],
            "W_dec": wide["decoder.weight"].mT / c_out,
            "b_dec": wide["decoder.bias"] / c_out,
            "threshold": threshold_of(log_threshold, norm),
        },
        reads=None if reads is None else reads.site,
        writes=None if writes is None else writes.site,
        before_gain=reads is not None and reads.before_gain,
        apply_b_dec_to_input=False,
        metadata=config,
    )


OF_R1 = Layout("Llama Scope R1", _fits_r1, _read_r1)
