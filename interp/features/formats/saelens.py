"""Sparse autoencoders on disk, in SAELens' format: a folder with `cfg.json` and `sae_weights.safetensors`.

Written folders are read by SAELens 6, and folders of SAELens 6 and of its older versions are read here. What a config
says is either understood, or known to change no number, or refused by name.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.files import made_folder, write_atomically
from interp.core.wording import nearest, value_text
from interp.features.activations import DictionaryKind, JumpReLU, ReLU, TopK
from interp.features.dictionary import Dictionary
from interp.features.formats.files import Facts, Files, Layout, Stored
from interp.features.formats.taps import of_hook
from interp.model.config import Json

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
VERSION = "6.0.0"
"""The version of SAELens whose format is written."""
DTYPES = {
    "float32": torch.float32, "float64": torch.float64, "float16": torch.float16, "bfloat16": torch.bfloat16,
}  # fmt: skip
RENAMED = {
    "hook_point": "hook_name", "hook_point_head_index": "hook_head_index", "hook_point_layer": "hook_layer",
    "activation_fn_str": "activation_fn",
}  # fmt: skip
"""Keys of older versions, and their names now."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


UNDERSTOOD = _words("""
    architecture d_in d_sae dtype k apply_b_dec_to_input normalize_activations reshape_activations activation_fn
    activation_fn_kwargs rescale_acts_by_decoder_norm finetuning_scaling_factor metadata
""")
DESCRIPTIVE = _words("""
    model_name hook_name hook_layer hook_head_index model_class_name model_from_pretrained_kwargs prepend_bos
    exclude_special_tokens neuronpedia_id context_size seqpos_slice dataset_path dataset_trust_remote_code
    sae_lens_version sae_lens_training_version
""")
"""Keys that say where an autoencoder belongs and on what it was trained: kept in `Dictionary.metadata`."""
OF_TRAINING = _words("""
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
    eval_every_n_wandb_logs n_eval_batches eval_batch_size_prompts act_store_device
""")
"""Keys that say how the autoencoder was trained, in configs of older versions; they are ignored at loading."""


@public()
def save(dictionary: Dictionary, folder: Path | str) -> None:
    """Write a dictionary as a folder that SAELens and `load` read.

    Args:
        dictionary: an SAE of kind ReLU, TopK or JumpReLU.
        folder: where it is written; made if there is none.

    Raises:
        ValueError: a dictionary that SAELens has no architecture for.

    Example:
        >>> import tempfile
        >>> eye, zero = torch.eye(3), torch.zeros(3)
        >>> sae = Dictionary(ReLU(), {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero})
        >>> with tempfile.TemporaryDirectory() as folder: save(sae, folder); same = load(folder)
    """
    from safetensors.torch import save_file

    folder = made_folder(folder)
    weights = {name: weight.detach().cpu().contiguous() for name, weight in dictionary.state_dict().items()}
    text = json.dumps(_config(dictionary), indent=2) + "\n"
    write_atomically(folder / WEIGHTS, lambda path: save_file(weights, path))
    write_atomically(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))


def _config(dictionary: Dictionary) -> Json:
    """The config of a dictionary as SAELens 6 writes it."""
    names = {ReLU: "standard", TopK: "topk", JumpReLU: "jumprelu"}
    if type(dictionary.kind) not in names or dictionary.transcodes or dictionary.before_gain:
        raise ValueError(
            f"an SAE of kind {', '.join(kind.__name__ for kind in names)} is required, got {dictionary}"
        )
    metadata = {key: value for key, value in dictionary.metadata.items() if key != "layout"}
    hook = str(metadata.get("hook_name", ""))
    config: Json = {
        "architecture": names[type(dictionary.kind)],
        "d_in": dictionary.d_in,
        "d_sae": dictionary.d_sae,
        "dtype": str(dictionary.W_enc.dtype).removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": dictionary.apply_b_dec_to_input,
        "normalize_activations": dictionary.normalize_activations,
        "reshape_activations": "hook_z" if hook.endswith("hook_z") else "none",
        "metadata": {"sae_lens_version": VERSION, **metadata},
    }
    if isinstance(dictionary.kind, TopK):
        config |= {"k": dictionary.kind.k, "rescale_acts_by_decoder_norm": False}
    return config


def _fits(files: Files) -> bool:
    return files.has(CONFIG, WEIGHTS)


def _read(files: Files, facts: Facts) -> Stored:
    """The dictionary of a stored config and its weights, with the config's constants folded into the weights."""
    config = {RENAMED.get(key, key): value for key, value in files.json(CONFIG).items()}
    metadata = _metadata(config)
    _refuse_unknown(config)
    dtype_name = str(config.get("dtype", "float32")).removeprefix("torch.")
    if dtype_name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype_name!r}")
    tensors = files.tensors(WEIGHTS)
    weights = tensors.every()
    _convert_older(weights, config)
    kind, normalisation = _kind(config), _normalisation(config)
    said = [config.get(key) for key in ("d_in", "d_sae")]
    if said != list(shape := tensors.shapes.get("W_enc", ())):
        raise ValueError(
            f"the config says d_in={said[0]}, d_sae={said[1]}, W_enc has shape {shape_text(shape)}"
        )
    _fold_constants(weights, kind, config, normalisation, facts.norm_scaling_factor)
    hook = metadata.get("hook_name")
    place = of_hook(hook) if isinstance(hook, str) else None
    return Stored(
        kind,
        weights,
        reads=None if place is None else place.site,
        before_gain=place is not None and place.before_gain,
        apply_b_dec_to_input=_flag(config, "apply_b_dec_to_input", True),
        normalize_activations="none" if normalisation == "expected_average_only_in" else normalisation,  # type: ignore[arg-type]
        metadata=metadata,
        dtype=DTYPES[dtype_name],
    )


LAYOUT = Layout("SAELens", _fits, _read)


def _metadata(config: Json) -> Json:
    """The config's descriptive keys, top-level or under `metadata`; raises ValueError for one head's autoencoder."""
    inner = config.get("metadata") or {}
    if not isinstance(inner, dict):
        raise ValueError(f"metadata must be a JSON object, got {type(inner).__name__}")
    metadata = {key: config[key] for key in DESCRIPTIVE if key in config} | inner
    if metadata.get("hook_head_index") is not None:
        raise ValueError(
            f"hook_head_index={metadata['hook_head_index']}: an autoencoder of a single head is not supported"
        )
    settings = metadata.get("model_from_pretrained_kwargs")
    if isinstance(settings, Mapping) and any(settings.values()):
        warnings.warn(f"this autoencoder was trained on a model loaded with {dict(settings)}", stacklevel=4)
    return metadata


def _refuse_unknown(config: Json) -> None:
    """Raise ValueError for a config key that may change numbers and is not understood."""
    known = {*UNDERSTOOD, *DESCRIPTIVE, *OF_TRAINING}
    if unknown := sorted(set(config) - known):
        raise ValueError(f"unknown key {unknown[0]!r} may change numbers; {nearest(unknown[0], known)}")
    if config.get("finetuning_scaling_factor"):
        raise ValueError("finetuning_scaling_factor is not supported: it rescales every feature")


def _kind(config: Json) -> DictionaryKind:
    """The autoencoder kind that the config names by `architecture`, or in older versions by `activation_fn`."""
    activation = config.get("activation_fn", "relu")
    arguments = config.get("activation_fn_kwargs") or {}
    assert isinstance(arguments, Mapping)
    architecture = config.get("architecture", "standard")
    if activation == "topk" and architecture == "standard":
        architecture = "topk"
    elif activation not in ("relu", "topk"):
        raise ValueError(f"activation_fn must be relu or topk, got {activation!r}")
    match architecture:
        case "standard":
            return ReLU()
        case "jumprelu":
            return JumpReLU()
        case "topk":
            k = config.get("k", arguments.get("k"))
            if not isinstance(k, int):
                raise ValueError(f"a topk autoencoder requires an integer k, got {k!r}")
            return TopK(k)
    raise ValueError(f"architecture must be standard, topk or jumprelu, got {architecture!r}")


def _normalisation(config: Json) -> str:
    """The input normalisation that the config names."""
    kind = config.get("normalize_activations", "none")
    if kind is None or isinstance(kind, bool):  # older versions store a boolean
        kind = "expected_average_only_in" if kind else "none"
    known = ("none", "expected_average_only_in", "layer_norm", "constant_norm_rescale")
    if kind not in known:
        raise ValueError(f"normalize_activations must be one of {', '.join(known)}, got {kind!r}")
    return str(kind)


def _flag(config: Json, key: str, usual: bool) -> bool:
    """True or false as the config says, `usual` where it says nothing; ValueError for anything else, such as 1.5."""
    value = config.get(key)
    if not isinstance(value, bool | None):
        raise ValueError(f"{key} must be true or false, got {value_text(value)}")
    return usual if value is None else value


def _convert_older(weights: dict[str, Tensor], config: Json) -> None:
    """Rename and convert, in place, weights that older versions store under other names."""
    if "scaling_factor" in weights and bool((weights["scaling_factor"] == 1).all()):
        del weights["scaling_factor"]
    if "log_threshold" in weights and config.get("architecture") == "jumprelu":
        weights["threshold"] = weights.pop("log_threshold").exp()


def _fold_constants(
    weights: dict[str, Tensor], kind: DictionaryKind, config: Json, normalisation: str, factor: float | None
) -> None:
    """Fold the constants of the config into the weights, in place, so that none is applied at run time."""
    if (normalisation == "expected_average_only_in") != (factor is not None):
        raise ValueError(
            "norm_scaling_factor belongs to normalize_activations='expected_average_only_in' and only there; "
            f"got {factor} with {normalisation!r}"
        )
    if _flag(config, "rescale_acts_by_decoder_norm", False):
        if not isinstance(kind, TopK):
            raise ValueError("rescale_acts_by_decoder_norm belongs to architecture topk")
        norm = weights["W_dec"].norm(dim=1)
        weights["W_enc"] = weights["W_enc"] * norm
        weights["b_enc"] = weights["b_enc"] * norm
        weights["W_dec"] = weights["W_dec"] / norm[:, None]
    if factor is not None:
        weights["W_enc"] = weights["W_enc"] * factor
        weights["W_dec"] = weights["W_dec"] / factor
        weights["b_dec"] = weights["b_dec"] / factor
