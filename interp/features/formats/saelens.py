"""Dictionaries on disk in SAELens' format: a folder with `cfg.json` and `sae_weights.safetensors`.

Written folders are read by SAELens 6, and folders of SAELens 6 and of its older versions are read here. What a config
says is either understood, or known to change no number, or refused by name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.files import made_folder, write_atomically
from interp.core.wording import value_text
from interp.features.activations import (
    AbsTopK,
    DictionaryKind,
    Gated,
    JumpReLU,
    MatchingPursuit,
    ReLU,
    TopK,
)
from interp.features.dictionary import Dictionary, Normalisation
from interp.features.folding import unwhitened, with_scaled_input, with_unit_decoder
from interp.features.formats.configs import (
    agreed,
    count,
    dtype_of,
    flag,
    part,
    refuse_facts,
    refuse_unknown,
    widened,
    words,
)
from interp.features.formats.files import Facts, Files, Layout, Stored
from interp.features.formats.taps import Place, hook_of, of_hook, of_module
from interp.model.config import Json

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
SCALER, WHITENING = "activation_scaler.json", "activation_whitening.safetensors"
"""What a checkpoint of training holds beside: the scaling of the activations that is folded in when training ends."""
VERSION = "6.0.0"
"""The version of SAELens whose format is written."""
RENAMED = {
    "hook_point": "hook_name", "hook_point_head_index": "hook_head_index", "hook_point_layer": "hook_layer",
    "activation_fn_str": "activation_fn",
}  # fmt: skip
"""Keys of older versions, and their names now."""
AUTOENCODERS = {
    "standard": ReLU, "topk": TopK, "abstopk": AbsTopK, "jumprelu": JumpReLU, "gated": Gated,
    "matching_pursuit": MatchingPursuit,
}  # fmt: skip
TRANSCODERS = {
    "transcoder": (ReLU, False), "skip_transcoder": (ReLU, True),
    "jumprelu_transcoder": (JumpReLU, False), "jumprelu_skip_transcoder": (JumpReLU, True),
}  # fmt: skip
"""Architectures by the kind of dictionary, and whether there is a skip."""
REFUSED = {
    "temporal": "its features of a token depend on the tokens before it, and a dictionary's on one vector",
    "batchtopk": "a checkpoint of training, whose threshold is not settled: save_inference_model writes jumprelu",
    "matryoshka_batchtopk": "a checkpoint of training, whose threshold is not settled: save_inference_model writes "
    "jumprelu",
}
PURSUIT = words("residual_threshold max_iterations stop_on_duplicate_support")
"""Settings of matching pursuit."""
EXPECTED_AVERAGE, WHITENED = "expected_average_only_in", "covariance_whitening"
"""Scalings of activations by constants, which are folded into the weights."""
RUN_TIME = get_args(Normalisation)
"""Scalings of each activation by itself."""
HOOKS = ("hook_name", "hook_name_out")

UNDERSTOOD = words("""
    architecture d_in d_sae d_out dtype k apply_b_dec_to_input normalize_activations reshape_activations activation_fn
    activation_fn_kwargs rescale_acts_by_decoder_norm finetuning_scaling_factor metadata residual_threshold
    max_iterations stop_on_duplicate_support
""")
DESCRIPTIVE = words("""
    model_name hook_name hook_name_out hf_hook_name hf_hook_name_out hook_layer hook_layer_out hook_head_index
    hook_head_index_out model_class_name model_from_pretrained_kwargs prepend_bos exclude_special_tokens neuronpedia_id
    context_size seqpos_slice dataset_path dataset_trust_remote_code sae_lens_version sae_lens_training_version
""")
"""Keys that say where a dictionary belongs and on what it was trained: kept in `Dictionary.metadata`."""
OF_TRAINING = words("""
    device seed lr l1_coefficient lp_norm expansion_factor from_pretrained_path is_dataset_tokenized
    use_cached_activations cached_activations_path n_batches_in_buffer total_training_tokens training_tokens
    store_batch_size store_batch_size_prompts train_batch_size train_batch_size_tokens b_dec_init_method
    lr_scheduler_name lr_warm_up_steps l1_warm_up_steps lr_decay_steps lr_end n_restart_cycles adam_beta1 adam_beta2
    use_ghost_grads feature_sampling_window feature_sampling_method dead_feature_window dead_feature_threshold
    dead_feature_estimation_method resample_batches feature_reinit_scale mse_loss_normalization
    scale_sparsity_penalty_by_decoder_norm normalize_sae_decoder noise_scale decoder_orthogonal_init
    decoder_heuristic_init decoder_heuristic_init_norm init_encoder_as_decoder_transpose decoder_init_norm log_to_wandb
    wandb_project wandb_entity wandb_log_frequency wandb_id run_name n_checkpoints checkpoint_path verbose
    prefer_streaming streaming autocast autocast_lm compile_llm compile_sae tokens_per_buffer name
    eval_every_n_wandb_logs n_eval_batches eval_batch_size_prompts act_store_device use_sparse_activations
    aux_loss_coefficient l0_coefficient l0_warm_up_steps pre_act_loss_coefficient jumprelu_init_threshold
    jumprelu_bandwidth jumprelu_sparsity_loss_mode jumprelu_tanh_scale jumprelu_ste_to_input target_l0
""")
"""Keys that say how the autoencoder was trained, in configs of older versions; they are ignored at loading."""


@public()
def save(dictionary: Dictionary, folder: Path | str) -> None:
    """Write a dictionary as a folder that SAELens and `load` read.

    Args:
        dictionary: an SAE of any kind but GroupMax, or a transcoder of kind ReLU or JumpReLU.
        folder: where it is written; made if there is none.

    Raises:
        ValueError: a dictionary that SAELens has no architecture for, or one at a site that it has no hook for.

    Example:
        >>> import tempfile
        >>> eye, zero = torch.eye(3), torch.zeros(3)
        >>> sae = Dictionary(interp.features.ReLU(), {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero})
        >>> with tempfile.TemporaryDirectory() as folder: save(sae, folder); same = interp.features.load(folder)
    """
    from safetensors.torch import save_file

    text = json.dumps(_config(dictionary), indent=2) + "\n"
    folder = made_folder(folder)
    weights = {name: weight.detach().cpu() for name, weight in dictionary.state_dict().items()}
    if isinstance(dictionary.kind, MatchingPursuit):
        del weights["W_enc"]  # SAELens reads it off W_dec
    if "W_skip" in weights:
        weights["W_skip"] = weights["W_skip"].mT
    weights = {name: weight.contiguous() for name, weight in weights.items()}
    write_atomically(folder / WEIGHTS, lambda path: save_file(weights, path))
    write_atomically(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))


def _config(dictionary: Dictionary) -> Json:
    """The config of a dictionary as SAELens 6 writes it."""
    kind, architecture = dictionary.kind, _architecture(dictionary)
    hooks = _hooks(dictionary, [*HOOKS] if architecture in TRANSCODERS else ["hook_name"])
    others = {key: value for key, value in dictionary.metadata.items() if key not in (*HOOKS, "layout")}
    config: Json = {
        "architecture": architecture,
        "d_in": dictionary.d_in,
        "d_sae": dictionary.d_sae,
        "dtype": str(dictionary.W_enc.dtype).removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": dictionary.apply_b_dec_to_input,
        "normalize_activations": dictionary.normalize_activations,
        "reshape_activations": "hook_z" if hooks.get("hook_name", "").endswith("hook_z") else "none",
        "metadata": {"sae_lens_version": VERSION, **others, **hooks},
    }
    if architecture in TRANSCODERS:
        config["d_out"] = dictionary.d_out
    if isinstance(kind, TopK | AbsTopK):
        config |= {"k": kind.k, "rescale_acts_by_decoder_norm": False}
    if isinstance(kind, MatchingPursuit):
        config |= dataclasses.asdict(kind)
    return config


def _architecture(dictionary: Dictionary) -> str:
    """SAELens' name of a dictionary's architecture; ValueError where it has none."""
    kind, skip = dictionary.kind, "W_skip" in dict(dictionary.named_parameters())
    if dictionary.transcodes or skip or dictionary.d_in != dictionary.d_out:
        found = [name for name, each in TRANSCODERS.items() if each == (type(kind), skip)]
    else:
        found = [name for name, each in AUTOENCODERS.items() if each is type(kind)]
    signed = not getattr(kind, "relu", True)
    if isinstance(kind, JumpReLU):
        signed = signed and not bool((dictionary.thresholds >= 0).all())
    if not found or signed:
        raise ValueError(
            f"an SAE of kind {', '.join(each.__name__ for each in AUTOENCODERS.values())}, or a transcoder of kind "
            f"ReLU or JumpReLU is required, got {dictionary}"
        )
    return found[0]


def _hooks(dictionary: Dictionary, keys: list[str]) -> dict[str, str]:
    """The hooks where a dictionary belongs: as its file named them where that is still so, else by their site."""
    sites = {
        "hook_name": (dictionary.reads, dictionary.before_gain),
        "hook_name_out": (dictionary.writes, False),
    }
    found = {}
    for key in keys:
        site, before_gain = sites[key]
        said = dictionary.metadata.get(key)
        if isinstance(said, str) and (site is None or of_hook(said) == Place(site, before_gain)):
            found[key] = said
        elif site is not None:
            found[key] = _hook_of(Place(site, before_gain))
    return found


def _hook_of(place: Place) -> str:
    if (hook := hook_of(place)) is None:
        raise ValueError(f"TransformerLens has no hook for what {place.site} holds, the norm's gain included")
    return hook


def _fits(files: Files) -> bool:
    return files.has(CONFIG, WEIGHTS)


def _read(files: Files, facts: Facts) -> Stored:
    """The dictionary of a stored config and its weights, with the config's constants folded into the weights."""
    refuse_facts(facts, "layer", "k")
    config = {RENAMED.get(key, key): value for key, value in files.json(CONFIG).items()}
    architecture = _architecture_of(config)  # those that are refused have keys of their own
    metadata = _metadata(config)
    refuse_unknown(config, (*UNDERSTOOD, *DESCRIPTIVE, *OF_TRAINING))
    dtype = dtype_of(config)
    centred = _centred(config, architecture)
    kind, normalisation = _kind(config, architecture), _normalisation(config)
    weights = _converted(files.tensors(WEIGHTS).every(), config, kind)
    _check_widths(config, weights, architecture)
    kind, weights = _folded(files, facts, config, kind, widened(weights))
    reads, writes = _places(metadata, architecture)
    return Stored(
        kind,
        weights,
        reads=None if reads is None else reads.site,
        writes=None if writes is None else writes.site,
        before_gain=reads is not None and reads.before_gain,
        apply_b_dec_to_input=centred,
        normalize_activations=normalisation if normalisation in RUN_TIME else "none",  # type: ignore[arg-type]
        metadata=metadata,
        dtype=dtype,
    )


LAYOUT = Layout("SAELens", _fits, _read)


def _metadata(config: Json) -> Json:
    """The config's descriptive keys, top-level or under `metadata`; raises ValueError for one head's autoencoder."""
    metadata = {key: config[key] for key in DESCRIPTIVE if key in config} | part(config, "metadata")
    for key in ("hook_head_index", "hook_head_index_out"):
        if metadata.get(key) is not None:
            raise ValueError(f"{key}={metadata[key]}: an autoencoder of a single head is not supported")
    settings = metadata.get("model_from_pretrained_kwargs")
    if isinstance(settings, Mapping) and any(settings.values()):
        warnings.warn(f"this autoencoder was trained on a model loaded with {dict(settings)}", stacklevel=4)
    if config.get("finetuning_scaling_factor"):
        raise ValueError("finetuning_scaling_factor is not supported: it rescales every feature")
    return metadata


def _architecture_of(config: Json) -> str:
    """The architecture that the config names, or in older versions its `activation_fn`."""
    activation, architecture = config.get("activation_fn") or "relu", config.get("architecture") or "standard"
    if activation == "topk" and architecture == "standard":
        architecture = "topk"
    elif activation != "relu" and (activation, architecture) != ("topk", "topk"):
        raise ValueError(f"activation_fn must be relu, or topk of architecture topk, got {activation!r}")
    if isinstance(architecture, str) and architecture in REFUSED:
        raise ValueError(f"architecture {architecture} is not supported: {REFUSED[architecture]}")
    known = (*AUTOENCODERS, *TRANSCODERS)
    if not isinstance(architecture, str) or architecture not in known:
        raise ValueError(f"architecture must be one of {', '.join(known)}, got {architecture!r}")
    return architecture


def _kind(config: Json, architecture: str) -> DictionaryKind:
    """The kind of dictionary of an architecture, with its settings."""
    kind = TRANSCODERS[architecture][0] if architecture in TRANSCODERS else AUTOENCODERS[architecture]
    arguments = part(config, "activation_fn_kwargs")
    refuse_unknown(arguments, ["k"], " of activation_fn_kwargs")
    if kind in (TopK, AbsTopK):
        k = agreed("k", count(arguments, "k"), count(config, "k"))
        if k is None:
            raise ValueError(f"a {architecture} autoencoder requires an integer k, got None")
        return kind(k)
    if kind is MatchingPursuit:
        settings = {key: config[key] for key in PURSUIT if key in config}
        return MatchingPursuit(**settings)  # type: ignore[arg-type]
    return kind()


def _normalisation(config: Json) -> str:
    """The input normalisation that the config names."""
    kind = config.get("normalize_activations", "none")
    if kind is None or isinstance(kind, bool):  # older versions store a boolean
        kind = EXPECTED_AVERAGE if kind else "none"
    known = (*RUN_TIME, EXPECTED_AVERAGE, WHITENED)
    if kind not in known:
        raise ValueError(f"normalize_activations must be one of {', '.join(known)}, got {kind!r}")
    return str(kind)


def _centred(config: Json, architecture: str) -> bool:
    """Whether b_dec is subtracted before encoding: usually, and never in transcoders."""
    transcodes = architecture in TRANSCODERS
    centred = flag(config, "apply_b_dec_to_input", not transcodes)
    if transcodes and centred:
        raise ValueError("apply_b_dec_to_input must be false in a transcoder, got true")
    return centred


def _converted(weights: dict[str, Tensor], config: Json, kind: DictionaryKind) -> dict[str, Tensor]:
    """The weights under our names and in our orientation, those of older versions among them."""
    found = dict(weights)
    if "scaling_factor" in found and bool((found["scaling_factor"] == 1).all()):
        del found["scaling_factor"]
    if "log_threshold" in found and isinstance(kind, JumpReLU):
        found["threshold"] = found.pop("log_threshold").exp()
    if "W_skip" in found:
        found["W_skip"] = found["W_skip"].mT
    if isinstance(kind, MatchingPursuit) and {"W_dec", "b_dec"} <= set(found):
        found["W_enc"] = found["W_dec"].mT
        if not _centred(config, "matching_pursuit"):  # what is not subtracted is not added
            found["b_dec"] = found["b_dec"].new_zeros(found["b_dec"].shape)
    return found


def _check_widths(config: Json, weights: Mapping[str, Tensor], architecture: str) -> None:
    """Raise ValueError unless the weights are as wide as the config says, and there is a skip where it says so."""
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    said = (config.get("d_in"), config.get("d_sae"))
    if said != (shape := shapes.get("W_enc", ())):
        raise ValueError(
            f"the config says d_in={said[0]}, d_sae={said[1]}, W_enc has shape {shape_text(shape)}"
        )
    skip = architecture in TRANSCODERS and TRANSCODERS[architecture][1]
    if skip != ("W_skip" in weights):
        raise ValueError(
            f"architecture {architecture} has {'a' if skip else 'no'} weight W_skip, unlike these files"
        )
    if architecture in TRANSCODERS and config.get("d_out") != (out := shapes.get("b_dec", ()))[:1][0]:
        raise ValueError(f"the config says d_out={config.get('d_out')}, b_dec has shape {shape_text(out)}")


def _folded(
    files: Files, facts: Facts, config: Json, kind: DictionaryKind, weights: dict[str, Tensor]
) -> tuple[DictionaryKind, dict[str, Tensor]]:
    """The kind and the weights with the constants of the config folded in, so that none is applied at run time."""
    normalisation = _normalisation(config)
    factor = _scaling_factor(files, facts, normalisation)
    rescaled = flag(config, "rescale_acts_by_decoder_norm", False)
    if rescaled and not isinstance(kind, TopK | AbsTopK):
        raise ValueError("rescale_acts_by_decoder_norm belongs to architecture topk and abstopk")
    if isinstance(kind, MatchingPursuit):
        if normalisation == WHITENED:
            raise ValueError(f"normalize_activations={WHITENED} is not possible with matching_pursuit")
        if (
            factor is not None
        ):  # the threshold and b_dec in units of x; directions and their order are the same
            kind = dataclasses.replace(kind, residual_threshold=kind.residual_threshold / factor)
            weights = weights | {"b_dec": weights["b_dec"] / factor}
        return kind, weights
    if factor is not None:
        weights = with_scaled_input(weights, factor)
    if rescaled:
        weights = with_unit_decoder(weights)
    if normalisation == WHITENED:
        weights = _unwhitened(files, config, weights)
    return kind, weights


def _scaling_factor(files: Files, facts: Facts, normalisation: str) -> float | None:
    """The factor of the activations, as the user or a checkpoint's scaler says it; None where there is none."""
    said = files.json(SCALER).get("scaling_factor") if normalisation == EXPECTED_AVERAGE else None
    if not isinstance(said, int | float | None):
        raise ValueError(f"scaling_factor of {SCALER} must be a number, got {value_text(said)}")
    factor = agreed("norm_scaling_factor", said, facts.norm_scaling_factor)
    if (normalisation == EXPECTED_AVERAGE) != (factor is not None):
        raise ValueError(
            f"norm_scaling_factor belongs to normalize_activations={EXPECTED_AVERAGE!r} and only there; "
            f"got {factor} with {normalisation!r}"
        )
    if factor is not None and not 0 < factor < math.inf:
        raise ValueError(f"norm_scaling_factor must be a positive number, got {value_text(factor)}")
    return factor


def _unwhitened(files: Files, config: Json, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an autoencoder of whitened activations, for activations as they are."""
    if not files.has(WHITENING):
        raise ValueError(f"normalize_activations={WHITENED!r} requires the file {WHITENING} beside, got none")
    tensors = files.tensors(WHITENING)
    mean, matrix, inverse = (tensors.get(name) for name in ("mean", "matrix", "inverse_matrix"))
    d = config.get("d_in")
    for name, tensor, shape in (
        ("mean", mean, (d,)),
        ("matrix", matrix, (d, d)),
        ("inverse_matrix", inverse, (d, d)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} of {WHITENING} must have shape {list(shape)}, got {shape_text(tensor.shape)}"
            )
    return unwhitened(weights, mean, matrix, inverse, centred=_centred(config, "standard"))


def _places(metadata: Json, architecture: str) -> tuple[Place | None, Place | None]:
    """Where a dictionary reads, and where a transcoder writes; None where we have no such site."""
    reads = _place(metadata, "")
    if architecture not in TRANSCODERS:
        return reads, None
    writes = _place(metadata, "_out")
    if reads is not None and not isinstance(
        metadata.get("hook_name_out", metadata.get("hf_hook_name_out")), str
    ):
        raise ValueError(f"hook_name_out must say where the transcoder of {reads.site!r} writes, got nothing")
    return (None, None) if reads is None or writes is None else (reads, writes)


def _place(metadata: Json, end: str) -> Place | None:
    hook, module = metadata.get(f"hook_name{end}"), metadata.get(f"hf_hook_name{end}")
    if isinstance(hook, str):
        return of_hook(hook)
    return of_module(module) if isinstance(module, str) else None
