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

from interp.core.boundary import public
from interp.core.files import json_object, made_folder, regular, write_atomically
from interp.core.kinds import Device, require_device
from interp.core.stats import narrowed
from interp.core.wording import nearest, value_text
from interp.features.sae import SAE, JumpReLU, ReLU, SaeKind, TopK
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
"""Keys that say where an autoencoder belongs and on what it was trained: kept in `SAE.metadata`."""
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
def save_sae(sae: SAE, folder: Path | str) -> None:
    """Write an autoencoder as a folder that SAELens and `load_sae` read.

    Args:
        sae: the autoencoder.
        folder: where it is written; made if there is none.

    Example:
        >>> import tempfile
        >>> eye, zero = torch.eye(3), torch.zeros(3)
        >>> sae = SAE(ReLU(), {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero})
        >>> with tempfile.TemporaryDirectory() as folder: save_sae(sae, folder); same = load_sae(folder)
    """
    from safetensors.torch import save_file

    folder = made_folder(folder)
    weights = {name: weight.detach().cpu().contiguous() for name, weight in sae.state_dict().items()}
    text = json.dumps(_sae_config(sae), indent=2) + "\n"
    write_atomically(folder / WEIGHTS, lambda path: save_file(weights, path))
    write_atomically(folder / CONFIG, lambda path: path.write_text(text, encoding="utf-8"))


@public()
def load_sae(
    folder: Path | str,
    *,
    dtype: torch.dtype | None = None,
    device: Device = "cpu",
    norm_scaling_factor: float | None = None,
) -> SAE:
    """Load an autoencoder from a SAELens folder, of architecture standard, topk or jumprelu.

    Decoder norms (`rescale_acts_by_decoder_norm`) and the norm scaling factor are folded into the weights: no number
    changes. Warns if the model it was trained on had its own weights processed at loading: our models never have.

    Args:
        folder: with `cfg.json` and `sae_weights.safetensors`.
        dtype: of the weights; None: as its config says.
        device: where the weights are put.
        norm_scaling_factor: sqrt(d_in) / mean norm of the model's activations; None: no scaling. A folder with
            `normalize_activations = "expected_average_only_in"` does not hold it and requires it, any other refuses it.

    Returns:
        The `SAE`.

    Raises:
        ValueError: a folder that is none or is damaged, a key that is neither understood nor known to change no number,
            an architecture that is not one of these, one head's autoencoder, and everything that `SAE` refuses.

    Example:
        >>> import tempfile
        >>> eye, zero = torch.eye(3), torch.zeros(3)
        >>> sae = SAE(TopK(2), {"W_enc": eye, "b_enc": zero, "W_dec": eye, "b_dec": zero})
        >>> with tempfile.TemporaryDirectory() as folder: save_sae(sae, folder); same = load_sae(folder)
        >>> same.kind
        TopK(k=2)
    """
    folder = Path(folder)
    require_device(device)
    config, weights = _folder_content(folder)
    try:
        return _sae_of(config, weights, dtype, norm_scaling_factor).to(device)
    except ValueError as cause:
        raise ValueError(f"{folder}: {cause}") from cause


def _sae_config(sae: SAE) -> Json:
    """The config of an autoencoder as SAELens 6 writes it."""
    names = {ReLU: "standard", TopK: "topk", JumpReLU: "jumprelu"}
    hook = str(sae.metadata.get("hook_name", ""))
    config: Json = {
        "architecture": names[type(sae.kind)],
        "d_in": sae.d_in,
        "d_sae": sae.d_sae,
        "dtype": str(sae.W_enc.dtype).removeprefix("torch."),
        "device": "cpu",
        "apply_b_dec_to_input": sae.apply_b_dec_to_input,
        "normalize_activations": sae.normalize_activations,
        "reshape_activations": "hook_z" if hook.endswith("hook_z") else "none",
        "metadata": {"sae_lens_version": VERSION, **sae.metadata},
    }
    if isinstance(sae.kind, TopK):
        config |= {"k": sae.kind.k, "rescale_acts_by_decoder_norm": False}
    return config


def _folder_content(folder: Path) -> tuple[Json, dict[str, Tensor]]:
    """The config and the weights in a SAELens folder, as they are stored."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json_object(folder / CONFIG)
        weights = load_file(regular(folder / WEIGHTS))
    except (OSError, SafetensorError, ValueError) as cause:
        raise ValueError(
            f"{folder} is not a readable SAELens folder ({CONFIG}, {WEIGHTS}): {cause}"
        ) from cause
    return config, weights


def _sae_of(
    raw: Json, weights: dict[str, Tensor], dtype: torch.dtype | None, norm_scaling_factor: float | None
) -> SAE:
    """The autoencoder of a stored config and its weights, with the config's constants folded into the weights."""
    config = {RENAMED.get(key, key): value for key, value in raw.items()}
    metadata = _metadata(config)
    _refuse_unknown(config)
    kind = _kind(config)
    dtype_name = str(config.get("dtype", "float32")).removeprefix("torch.")
    if dtype_name not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype_name!r}")
    tensors = {name: narrowed(weight, dtype or DTYPES[dtype_name], name) for name, weight in weights.items()}
    _convert_older(tensors, config)
    normalisation = _normalisation(config)
    sae = SAE(
        kind,
        tensors,
        apply_b_dec_to_input=_flag(config, "apply_b_dec_to_input", True),
        normalize_activations="none" if normalisation == "expected_average_only_in" else normalisation,  # type: ignore[arg-type]
        metadata=metadata,
    )
    if [sae.d_in, sae.d_sae] != [config.get(key) for key in ("d_in", "d_sae")]:
        raise ValueError(
            f"the config says d_in={config.get('d_in')}, d_sae={config.get('d_sae')}, "
            f"W_enc has shape [{sae.d_in}, {sae.d_sae}]"
        )
    _fold_constants(sae, config, normalisation, norm_scaling_factor)
    return sae


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


def _kind(config: Json) -> SaeKind:
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


@torch.no_grad()
def _fold_constants(sae: SAE, config: Json, normalisation: str, factor: float | None) -> None:
    """Fold the constants of the config into the weights, in place, so that none is applied at run time."""
    if (normalisation == "expected_average_only_in") != (factor is not None):
        raise ValueError(
            "norm_scaling_factor belongs to normalize_activations='expected_average_only_in' and only there; "
            f"got {factor} with {normalisation!r}"
        )
    if _flag(config, "rescale_acts_by_decoder_norm", False):
        if not isinstance(sae.kind, TopK):
            raise ValueError("rescale_acts_by_decoder_norm belongs to architecture topk")
        norm = sae.W_dec.norm(dim=1)
        sae.W_enc.mul_(norm)
        sae.b_enc.mul_(norm)
        sae.W_dec.div_(norm[:, None])
    if factor is not None:
        sae.W_enc.mul_(factor)
        sae.W_dec.div_(factor)
        sae.b_dec.div_(factor)
