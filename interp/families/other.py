"""Decoders without a file here: opened by transformers and wrapped (`interp.wrapped`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

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

    _check_quantised(values)
    opened = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=dtype or "auto", trust_remote_code=False
    )
    return wrap(opened, device=device)


def wrapped_model(
    network: nn.Module, values: Mapping[str, object], *, dtype: torch.dtype | None, device: torch.device
) -> Wrapped:
    """A live model, wrapped on its own tensors where they are not cast or moved."""
    _check_quantised(values)
    return wrap(network, dtype=dtype, device=device)


def _check_quantised(values: Mapping[str, object]) -> None:
    if quantization := values.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
        raise ValueError(
            f"{values.get('model_type')}: config asks for quantization_config ({method}), and quantised weights are "
            "not supported; load the original checkpoint, or one that was dequantised and saved again"
        )
