"""A Hugging Face model of `oracle` beside ours, which was loaded from it."""

import functools

import torch
from torch import Tensor

from interp import HookedTransformer
from interp.model import Transformer
from tests.families.oracle import CASES, NAMES, hf_model, some_tokens

BASES = tuple({CASES[name].config_class.model_type: name for name in reversed(NAMES)}.values())[::-1]
"""The first case of each family of decoders."""


@functools.cache
def ours(name: str, dtype: torch.dtype = torch.float32) -> HookedTransformer:
    """Our model of one of the `CASES`; shared between tests, so never write to it."""
    return HookedTransformer.from_pretrained(hf_model(name, dtype))


def network(name: str, dtype: torch.dtype = torch.float32) -> Transformer:
    """Its Transformer."""
    return ours(name, dtype).transformer


def largest(a: Tensor, b: Tensor) -> float:
    """The largest difference."""
    return float((a - b).abs().max())


def padded(side: str) -> tuple[Tensor, Tensor]:
    """Three rows of 20, 13 and 6 tokens, padded with 0 on one side, and their keep-mask."""
    tokens, keep = some_tokens(), torch.zeros(3, 20, dtype=torch.bool)
    for row, length in enumerate((20, 13, 6)):
        keep[row, :length] = True
    keep = keep if side == "right" else keep.flip(1)
    return tokens.masked_fill(~keep, 0), keep
