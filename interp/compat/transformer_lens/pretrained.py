"""`HookedTransformer.from_pretrained`: a native model's weights, processed, in a model under TransformerLens' names."""

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from interp import zoo
from interp.compat.hooked_config import values_of
from interp.compat.hooked_file import read_hooked
from interp.compat.transformer_lens.config import HookedTransformerConfig
from interp.compat.transformer_lens.loading_from_pretrained import (
    get_pretrained_model_config,
    get_pretrained_state_dict,
    make_model_alias_map,
    revision_of,
)
from interp.compat.transformer_lens.processing import processed
from interp.families.hub import at_revision
from interp.families.native import BOS
from interp.zoo.demos import WEIGHTS

Model = TypeVar("Model", bound=nn.Module)
Tokenizer = Any
"""A transformers tokenizer."""
DTYPE_FROM_STRING = {
    "float64": torch.float64, "fp64": torch.float64, "float32": torch.float32, "fp32": torch.float32,
    "float16": torch.float16, "fp16": torch.float16, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
}  # fmt: skip
BUFFERS = ("mask", "IGNORE", "rotary_sin", "rotary_cos", "alibi")
"""Masks and tables that a state dict of weights does not have."""
_log = logging.getLogger(__name__)


def from_pretrained(
    cls: type[Model],
    model_name: str,
    fold_ln: bool = True,
    center_writing_weights: bool = True,
    center_unembed: bool = True,
    refactor_factored_attn_matrices: bool = False,
    checkpoint_index: int | None = None,
    checkpoint_value: int | None = None,
    checkpoint_label: int | None = None,
    hf_model: nn.Module | None = None,
    device: str | torch.device | None = None,
    n_devices: int = 1,
    tokenizer: Tokenizer | None = None,
    move_to_device: bool = True,
    fold_value_biases: bool = True,
    default_prepend_bos: bool | None = None,
    default_padding_side: Literal["left", "right"] | None = None,
    dtype: str | torch.dtype = "float32",
    first_n_layers: int | None = None,
    n_ctx: int | None = None,
    **from_pretrained_kwargs: Any,
) -> Model:
    """A pretrained model of class `cls`, its weights processed unless switched off (`processing`).

    A step of the processing that would change probabilities is left out with a warning.

    Args:
        model_name: a hub name or its short name, a local folder or file of weights, a demo (`interp.DEMOS`), or with
            `hf_model` any name.
        from_pretrained_kwargs: `revision` and `torch_dtype`; more of Hugging Face's options are refused by name.

    Raises:
        ValueError: what is unknown or not supported; the message names it.
        RuntimeError: BERT and T5.
    """
    _refuse(model_name, from_pretrained_kwargs, n_devices)
    if checkpoint_value is not None and checkpoint_label is not None:
        raise ValueError("checkpoint_value and checkpoint_label are the same: give one of them")
    kind = _dtype(from_pretrained_kwargs.get("torch_dtype", dtype), fold_ln)
    cfg = get_pretrained_model_config(
        model_name, hf_cfg=_live_config(hf_model), checkpoint_index=checkpoint_index,
        checkpoint_value=checkpoint_label if checkpoint_value is None else checkpoint_value, device=device,
        default_prepend_bos=default_prepend_bos, dtype=kind, first_n_layers=first_n_layers, n_ctx=n_ctx,
        **from_pretrained_kwargs,
    )  # fmt: skip
    state = get_pretrained_state_dict(model_name, cfg, hf_model, dtype=kind, **from_pretrained_kwargs)
    state, changes = processed(
        state, cfg, fold_ln=fold_ln, center_writing_weights=center_writing_weights, center_unembed=center_unembed,
        fold_value_biases=fold_value_biases, refactor_factored_attn_matrices=refactor_factored_attn_matrices,
    )  # fmt: skip
    for field, value in changes.items():
        setattr(cfg, field, value)
    name = make_model_alias_map().get(model_name.lower(), model_name)
    if tokenizer is None:
        revision = from_pretrained_kwargs.get("revision") or revision_of(name, cfg.checkpoint_value)
        tokenizer = named_tokenizer(name, revision, live=hf_model is not None)
    cfg.tokenizer_name = None if tokenizer is None else name
    padding = {} if default_padding_side is None else {"default_padding_side": default_padding_side}
    model = cls(cfg, tokenizer, move_to_device=move_to_device, **padding)
    _fill(model, state)
    sys.stdout.write(f"Loaded pretrained model {model_name} into HookedTransformer\n")
    return model


def from_pretrained_no_processing(
    cls: type[Model],
    model_name: str,
    fold_ln: bool = False,
    center_writing_weights: bool = False,
    center_unembed: bool = False,
    refactor_factored_attn_matrices: bool = False,
    fold_value_biases: bool = False,
    dtype: str | torch.dtype = torch.float32,
    default_prepend_bos: bool | None = None,
    default_padding_side: Literal["left", "right"] | None = None,
    **from_pretrained_kwargs: Any,
) -> Model:
    """The pretrained model with every step of the processing off by default, by a subclass' own `from_pretrained`."""
    load = getattr(cls, "from_pretrained", None) or from_pretrained.__get__(cls)
    return load(
        model_name, fold_ln=fold_ln, center_writing_weights=center_writing_weights, center_unembed=center_unembed,
        refactor_factored_attn_matrices=refactor_factored_attn_matrices, fold_value_biases=fold_value_biases,
        dtype=dtype, default_prepend_bos=default_prepend_bos, default_padding_side=default_padding_side,
        **from_pretrained_kwargs,
    )  # fmt: skip


def load_hooked(
    cls: type[Model],
    path: Path | str,
    config: object = None,
    *,
    tokenizer: Tokenizer | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> Model:
    """The model of class `cls` in a file of TransformerLens; see `interp.compat.load_hooked` for both.

    Here also what the native model cannot do (SoLU, shortformer). Weights are neither folded nor centred; a bias that
    no layer has is zero. dtype None keeps the state dict's. What the config says of device, seed and tokenizer is not
    followed. Nothing in the file is run.

    Raises:
        FileNotFoundError: no such file.
        ValueError: what is missing, left over, of another shape or not finite, a field that does not exist, or a file
            with anything that would have to run.
    """
    state, chosen = read_hooked(path, config)
    try:
        return _filled_model(cls, state, values_of(chosen), tokenizer, dtype, torch.device(device))
    except (ValueError, TypeError, AssertionError) as cause:
        raise ValueError(f"{path}: {cause}") from cause


def _filled_model(
    cls: type[Model],
    state: Mapping[str, torch.Tensor],
    values: Mapping[str, object],
    tokenizer: Tokenizer | None,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Model:
    """The model of a state dict and the fields of its config."""
    if broken := [n for n, w in state.items() if _is_weight(n) and not bool(w.isfinite().all())]:
        raise ValueError(f"{broken[0]}: the checkpoint holds NaN or infinities")
    found = state["embed.W_E"].dtype if "embed.W_E" in state else torch.float32
    cfg = HookedTransformerConfig.from_dict({
        **values, "dtype": found if dtype is None else dtype, "device": str(device), "seed": None, "n_devices": 1,
        "tokenizer_name": None, "init_weights": False,
    })  # fmt: skip
    with torch.random.fork_rng(devices=()):  # experts are made with random weights
        model = cls(cfg, tokenizer)
    kinds = {name.rpartition(".")[2] for name in state}
    zeros = {
        name: torch.zeros_like(weight)
        for name, weight in model.named_parameters()
        if (kind := name.rpartition(".")[2]) not in kinds and kind.lstrip("_").startswith("b_")
    }
    own = {name: weight.shape for name, weight in model.named_parameters()}
    for name, weight in state.items():
        if name in own and weight.shape != own[name]:
            raise ValueError(f"{name} requires shape {list(own[name])}, got {list(weight.shape)}")
    _fill(model, {**zeros, **state})
    return model


def _is_weight(name: str) -> bool:
    return name.rpartition(".")[2] not in BUFFERS


def tokenizer_for(cfg: HookedTransformerConfig) -> Tokenizer | None:
    """The tokenizer that `cfg.tokenizer_name` means: a folder, a demo, a hub name or its short name."""
    return None if cfg.tokenizer_name is None else named_tokenizer(cfg.tokenizer_name)


def named_tokenizer(model_name: str, revision: str | None = None, *, live: bool = False) -> Tokenizer | None:
    """The transformers tokenizer that belongs to a model, None where its folder has none.

    live: the weights are at hand already, so a name that leads nowhere is no error.
    """
    import transformers

    try:
        name = make_model_alias_map().get(model_name.lower(), model_name)
        if name in zoo.DEMOS:
            return _own_tokenizer(WEIGHTS / name)
        if not Path(name).exists():
            return transformers.AutoTokenizer.from_pretrained(name, revision=revision or "main")
        path = at_revision(Path(name), revision) if Path(name).is_dir() else Path(name).parent
        if (path / "tokenizer.json").is_file() and not (path / "tokenizer_config.json").is_file():
            return _own_tokenizer(path)
        files = ("tokenizer.model", "tokenizer_config.json", "vocab.json")
        if not any((path / file).is_file() for file in files):
            return None
        return transformers.AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
    except (OSError, ValueError) as cause:
        if not live:
            raise
        _log.warning("no tokenizer for %s was found (%s): give tokenizer=", model_name, type(cause).__name__)
        return None


def _own_tokenizer(folder: Path) -> Tokenizer | None:
    """A bare `tokenizer.json` of this package, in which one token begins, ends and pads."""
    import transformers

    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), name_or_path=str(folder), add_bos_token=True
    )
    if BOS in found.get_vocab():
        found.bos_token = found.eos_token = found.pad_token = BOS
    return found


def _live_config(hf_model: nn.Module | None) -> dict[str, Any] | None:
    """The config of a live model, with the class that the model now has."""
    if hf_model is None:
        return None
    config = getattr(hf_model, "config", None)
    assert config is not None, "PreTrainedModel must have a config attribute"
    return {**config.to_dict(), "architectures": [type(hf_model).__name__]}


def _dtype(given: str | torch.dtype, fold_ln: bool) -> torch.dtype:
    """The dtype of a name; a warning where folding would round much."""
    kind = DTYPE_FROM_STRING.get(given) if isinstance(given, str) else given
    if kind is None:
        raise KeyError(f"dtype must be a torch.dtype or one of {', '.join(DTYPE_FROM_STRING)}, got {given!r}")
    if kind.itemsize < 4 and fold_ln:
        _log.warning("in %s, from_pretrained_no_processing keeps more of the weights' precision", kind)
    return kind


def _refuse(model_name: str, options: Mapping[str, Any], n_devices: int) -> None:
    if options.get("load_in_8bit") or options.get("load_in_4bit"):
        raise AssertionError("Quantization not supported: load the original checkpoint")
    for kind, ours in (("t5", "interp.HookedEncoderDecoder"), ("bert", "interp.HookedTransformer")):
        if model_name.lower().startswith(kind) and not Path(model_name).exists():
            raise RuntimeError(f"{model_name} is no decoder: use {ours}.from_pretrained({model_name!r})")
    if n_devices > 1:
        raise ValueError(
            f"n_devices must be 1, got {n_devices}; interp.HookedTransformer.from_pretrained(..., devices=[...]) "
            "spreads the layers"
        )


def _fill(model: nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Load the weights; every one of the model's is there and none is left over."""
    missing, unexpected = model.load_state_dict(dict(state), strict=False)
    missing = [name for name in missing if _is_weight(name)]
    if missing or unexpected:
        raise ValueError(
            f"the weights do not fit the model: missing {missing[:3]}, left over {unexpected[:3]}"
        )
