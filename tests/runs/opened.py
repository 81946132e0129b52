"""Tiny models that are opened from files, as large ones are: their parameters are views of the file."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from interp import Batch, HookedTransformer
from interp.model import Transformer
from tests.families.oracle import new_hf_model, some_tokens


def opened_from(
    folder: Path,
    name: str,
    dtype: torch.dtype = torch.float32,
    *,
    prepared: Callable[[nn.Module], None] = lambda network: None,
    mapped: bool = True,
) -> Transformer:
    """A tiny model of transformers, saved to the folder as safetensors and opened from there."""
    network = new_hf_model(name).to(dtype)
    prepared(network)
    network.save_pretrained(folder)
    found = HookedTransformer.from_pretrained(folder, dtype=dtype).transformer
    if not mapped:
        for parameter in found.parameters():
            parameter.data = parameter.data.clone()
    return found


def rows() -> list[Batch]:
    """Windows of a batch each, for such models."""
    return [Batch(some_tokens()) for _ in range(3)]
