"""Decoders without a file here: opened by transformers and wrapped (`interp.wrapped`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from interp.families.quantised import KEYS, method_of, ordinary
from interp.families.stored import StoredTensors, weight_files

if TYPE_CHECKING:
    from interp.wrapped import Wrapped


def can_wrap(values: Mapping[str, object]) -> bool:
    """Whether transformers itself, without code from a checkpoint, has a causal model of a config's `model_type`, or
    one of images and text, of which the text part is meant.
    """
    return any(str(values.get("model_type")) in names for names in _kinds().values())


def _kinds() -> dict[str, Mapping[str, object]]:
    """The model types that each way to open a checkpoint knows, in the order in which they are tried."""
    from transformers.models.auto import modeling_auto as auto

    return {
        "AutoModelForCausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForImageTextToText": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }


def _opener(values: Mapping[str, object]) -> str:
    """The one that knows a config's `model_type`."""
    return next(name for name, known in _kinds().items() if str(values.get("model_type")) in known)


def wrapped_folder(
    folder: Path, values: Mapping[str, object], *, dtype: torch.dtype | None, device: torch.device
) -> Wrapped:
    """The wrapped model of a local folder. Errors: ValueError for what cannot be opened or is not understood."""
    import transformers

    from interp.wrapped import wrap

    opener = getattr(transformers, _opener(values))
    if method_of(values) is None:
        opened = opener.from_pretrained(str(folder), dtype=dtype or "auto", trust_remote_code=False)
        return wrap(opened, device=device)
    config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    kind: type[nn.Module] = opener._model_mapping[type(config)]
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
    from interp.wrapped import wrap

    return wrap(network, dtype=dtype, device=device)
