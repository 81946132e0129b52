"""What half precision does to a model, and where an analysis computes in it.

`Watch` sees every operator: the model's own pass may run in half precision, what is computed from it may not. `rounded`
is a model whose pass rounds as if the dtype had fewer digits, which says how far rounding alone moves a result.
"""

import copy
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import CodeType, FrameType

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import interp
from interp import HookedTransformer
from interp.features import Dictionary
from interp.model import Transformer
from interp.model.block import Block
from interp.weights import HeadCircuits
from tests.configs import SPREAD, build

PACKAGE = f"{Path(interp.__file__).parent}/"
HALF = (torch.bfloat16, torch.float16)
DEVICE = torch.empty(0, device=os.environ.get("INTERP_TEST_DEVICE", "cpu")).device
"""Where the models are that are asked (`make test-device`); what they are compared with is on the host."""
DTYPES = HALF if DEVICE.type == "cpu" else (*HALF, torch.float32)
"""In which they are asked; single precision is the other tests' on the host."""
EXACT = {
    "_index_put_impl_", "_reshape_alias", "_to_copy", "_unsafe_view", "abs", "alias", "amax", "amin", "aminmax",
    "as_strided", "cat", "clamp", "clamp_max", "clamp_min", "clone", "constant_pad_nd", "copy", "copy_",
    "detach", "detach_", "diagonal", "embedding", "empty", "empty_like", "expand", "fill", "fill_", "flip",
    "full", "full_like", "gather", "index", "index_put", "index_put_", "index_select", "lift_fresh",
    "masked_fill", "masked_fill_", "masked_select", "max", "maximum", "min", "minimum", "nan_to_num", "neg",
    "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "permute", "relu", "repeat", "roll",
    "scalar_tensor", "scatter", "select", "slice", "sort", "split", "split_with_sizes", "squeeze", "stack", "t",
    "topk", "transpose", "tril", "triu", "unbind", "unsqueeze", "view", "where", "zero_", "zeros", "zeros_like",
}  # fmt: skip
"""Operators whose result is among what they are given, so that no digit is lost; a sum or a product is none.

`_to_copy` rounds where it narrows: what is written into a pass must be of its dtype.
"""
NORMS = {"linalg_vector_norm", "_foreach_norm"}
"""Which are among them where they look for the largest number."""
PASS: tuple[CodeType, ...] = tuple(
    function.__code__
    for function in (Transformer.forward, Block.forward, Block.without_attention)
)  # fmt: skip
"""What runs in the model's dtype: a pass, and a block by itself; and what an edit puts there, wherever it is asked."""


class Watch(TorchDispatchMode):
    """Which lines of the package compute in half precision outside of the model's own pass, and by which operator."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        """The operator itself, written down where its result is in half precision and its numbers are new."""
        found = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        each = found if isinstance(found, (tuple, list)) else (found,)
        exact = name in EXACT or (name in NORMS and args[1:2] == (torch.inf,))
        if not exact and any(isinstance(x, Tensor) and x.dtype in HALF for x in each):
            where = self._where(sys._getframe(1))
            if where is not None:
                self.seen.add(f"{name} in {where}")
        return found

    @staticmethod
    def _where(frame: FrameType | None) -> str | None:
        """The innermost line of the package; None where it is the model's, in a pass or in its derivative."""
        place, of_model, passing = None, False, False
        while frame is not None:
            code = frame.f_code
            if "/torch/autograd/" in code.co_filename and code.co_name == "grad":
                return None
            passing |= code in PASS
            if place is None and code.co_filename.startswith(PACKAGE):
                place = f"{code.co_filename.removeprefix(PACKAGE)}:{frame.f_lineno} ({code.co_name})"
                of_model = place.startswith(("model/", "lab/"))
                passing |= place.startswith("model/edits.py")
            frame = frame.f_back
        return None if of_model and passing else place


# --- the same weights in every dtype ------------------------------------------------------------------------------


@functools.cache
def same_in_every_dtype(name: str, seed: int | None = None) -> Transformer:
    """A model of the `CONFIGS` whose weights bfloat16 and float16 both hold, in float64; with a seed, another one."""
    network = copy.deepcopy(build(name))
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in network.parameters():
            if generator is not None:
                weight += SPREAD * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight.copy_(weight.bfloat16().half())
    return network


@functools.cache
def narrow(name: str, dtype: torch.dtype, seed: int | None = None) -> Transformer:
    """The same numbers in this dtype."""
    return copy.deepcopy(same_in_every_dtype(name, seed)).to(DEVICE, dtype)


def narrowed(given: object, dtype: torch.dtype) -> object:
    """A copy in this dtype, on the device, of a model or the circuits of one; an autoencoder there; or what it is."""
    if isinstance(given, Transformer):
        return copy.deepcopy(given).to(DEVICE, dtype)
    if isinstance(given, HookedTransformer):
        network = narrowed(given.transformer, dtype)
        assert isinstance(network, Transformer)
        return HookedTransformer(network, given.text.tokenizer)
    if isinstance(given, HeadCircuits):
        return replace(given, model=narrowed(given.model, dtype))  # type: ignore[arg-type]
    return copy.deepcopy(given).to(DEVICE) if isinstance(given, Dictionary) else given


def rounded(name: str, unit: float, draw: int, seed: int | None = None) -> Transformer:
    """The model in float64, every module of its blocks and embeddings off by up to `unit` of each number it gives.

    Draws 2 n and 2 n + 1 are off in opposite directions, so that one of them brings two near values together. What
    stands after the blocks is exact: analyses read the logits off the stream themselves.
    """
    network, generator = (
        copy.deepcopy(same_in_every_dtype(name, seed)),
        torch.Generator().manual_seed(draw // 2),
    )
    most = unit if draw % 2 else -unit

    def off(module: nn.Module, given: object, found: Tensor) -> Tensor:
        share = torch.rand(found.shape, generator=generator, dtype=found.dtype)
        return found * (1 + most * (2 * share - 1))

    for module in _in_blocks(network):
        module.register_forward_hook(off)
    return network


def _in_blocks(network: Transformer) -> Iterator[nn.Module]:
    for name, module in network.named_modules():
        if name.startswith(("embed", "pos_embed", "blocks.")) and not isinstance(module, nn.ModuleList):
            yield module
