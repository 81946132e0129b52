"""The suite as on a machine whose matrix products round otherwise: `make test-disturbed`.

A BLAS may take another kernel for another shape, and another order of summing rounds otherwise: `(x @ w)[:9]` and
`x[:9] @ w` need not agree in the last bit, and on some machines do not. Here every matrix product on the CPU is moved by
one unit in the last place, up or down or not at all, as a rule of the product, its operands' shapes and the place in the
result says. So the same product of the same shapes has the same bits in every process, one of other shapes has others,
and two equal rows of one product differ. What is 0, infinite or not a number stays.

The rule sits in PyTorch's own table of CPU kernels, below autograd. So it holds in all threads, without gradients and in
backward passes, and for what is made of products: linear layers, einsum, attention, vmap. A Python that is started with
`disturbing` on its path has it as soon as it imports torch, by the entry point that torch looks for there.
"""

import functools
import itertools
import os
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

NAME = "INTERP_TEST_DISTURBED"
"""The environment variable that switches the mode on, here and in the processes that tests start."""
PLACE = Path(__file__).with_name("disturbing")
"""What stands first in the PYTHONPATH of such a process."""
PRODUCTS = (
    *("mm", "mm.out", "bmm", "bmm.out", "addmm", "addmm.out", "addmm_", "baddbmm", "baddbmm.out", "baddbmm_"),
    *("addmv", "addmv.out", "addmv_", "dot", "vdot", "_addmm_activation", "_addmm_activation.out"),
    *("convolution", "convolution_backward"),
    *("_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"),
)  # fmt: skip
"""The CPU kernels that multiply matrices; every other product on the CPU calls these."""
TOWARDS = torch.tensor([0.5, 1.0, 2.0])[
    torch.randint(3, (1_000_003,), generator=torch.Generator().manual_seed(0))
]
"""Factors of what a number is moved towards: smaller, itself, larger. A result takes them from where its rule begins."""
_kept: list[torch.library.Library] = []


def install() -> None:
    """Move every matrix product of this process from here on."""
    if _kept:
        return
    kernels = torch.library.Library("aten", "IMPL")
    _kept.append(kernels)  # a library that is collected takes its kernels with it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in PRODUCTS:
            kernels.impl(name, _moving(name), "CPU", with_keyset=True, allow_override=True)


def installed_if_asked() -> None:
    """What torch calls as it is imported with `disturbing` on the path."""
    if NAME in os.environ:
        install()


def moved(result: Tensor, start: int) -> Tensor:
    """Each number one unit in the last place nearer to 0, further from it, or as it was."""
    if result.is_complex():
        return torch.view_as_complex(moved(torch.view_as_real(result), start))
    if not result.is_floating_point():
        return result
    return torch.nextafter(result, result * towards(start, result.numel()).to(result.dtype).view(result.shape))


def towards(start: int, count: int) -> Tensor:
    """So many of `TOWARDS` from a start on, again from its beginning where it ends."""
    if start + count > len(TOWARDS):
        return TOWARDS.repeat(-(-(start + count) // len(TOWARDS)))[start : start + count]
    return TOWARDS[start : start + count]


@functools.lru_cache(maxsize=100_000)
def beginning(name: str, shapes: tuple[torch.Size, ...]) -> int:
    """Where among `TOWARDS` the rule of a product of these shapes begins; the same in every process."""
    return zlib.crc32(repr((name, [tuple(shape) for shape in shapes])).encode()) % len(TOWARDS)


def _moving(name: str) -> Callable[..., object]:
    """The kernel of this name, with every tensor that it returns moved."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
    in_place = name.endswith(("_", ".out"))

    def product(keys: torch.DispatchKeySet, *args: object, **kwargs: object) -> object:
        given = itertools.chain(args, (value for key, value in kwargs.items() if key != "out"))
        start = beginning(name, tuple(each.shape for each in given if isinstance(each, Tensor)))
        result = kernel.call_boxed(keys, *args, **kwargs)
        if in_place:
            return result.copy_(moved(result, start))
        if isinstance(result, tuple):
            return tuple(each if each is None else moved(each, start) for each in result)
        return moved(result, start)

    return product
