"""Decoders without a file here: opened by transformers and wrapped (`interp.wrapped`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from interp.families.quantised import KEYS, method_of, ordinary
from interp.families.stored import StoredTensors, weight_files
from interp.wrapped import Wrapped, wrap


def can_wrap(values: Mapping[str, object]) -> bool:
    """Whether transformers itself, without code from a checkpoint, has a causal model of a config's `model_type`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return str(values.get("model_type")) in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def vocabulary(values: Mapping[str, object]) -> int | None:
    """How many tokens a config's text part has; None if it does not say."""
    text = values.get("text_config")
    found = (text if isinstance(text, Mapping) else values).get("vocab_size")
    return found if isinstance(found, int) else None


def wrapped_folder(
    folder: Path, values: Mapping[str, object], *, dtype: torch.dtype | None, device: torch.device
) -> Wrapped:
    """The wrapped model of a local folder. Errors: ValueError for what cannot be opened or is not understood."""
    import transformers

    if method_of(values) is None:
        opened = transformers.AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=dtype or "auto", trust_remote_code=False
        )
        return wrap(opened, device=device)
    config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    kind: type[nn.Module] = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # type: ignore[assignment]
    network, said = on_our_numbers(kind, folder, values, dtype)
    found = wrap(network, device=device)
    found.dequantised = said
    return found


def on_our_numbers(
    kind: type[nn.Module], folder: Path, values: Mapping[str, object], dtype: torch.dtype | None
) -> tuple[nn.Module, str | None]:
    """transformers' model of a quantised folder on the numbers that we read there; and how they are stored."""
    config = kind.config_class.from_pretrained(str(folder))  # type: ignore[attr-defined]
    for key in KEYS:
        if hasattr(config, key):
            delattr(config, key)
    with StoredTensors(weight_files(folder)) as stored:
        tensors = ordinary(stored, values, str(values.get("model_type")), dtype)
        state = {name: tensors[name].clone() for name in tensors}
    kept = dtype or next(value.dtype for value in state.values() if value.is_floating_point())
    return kind.from_pretrained(None, config=config, state_dict=state, dtype=kept), tensors.dequantised  # type: ignore[attr-defined]


def wrapped_model(
    network: nn.Module, values: Mapping[str, object], *, dtype: torch.dtype | None, device: torch.device
) -> Wrapped:
    """A live model, wrapped on its own tensors where they are not cast or moved."""
    if method := method_of(values):
        raise ValueError(
            f"{values.get('model_type')}: a live model with quantised weights ({method}) is not wrapped, since its "
            "matrices are no linear maps; give the folder of its checkpoint, whose weights are dequantised at load"
        )
    return wrap(network, dtype=dtype, device=device)
