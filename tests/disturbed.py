"""The suite as on a machine whose matrix products round otherwise: `make test-strict`.

A BLAS may take another kernel for another shape, and another order of summing rounds otherwise: `(x @ w)[:9]` and
`x[:9] @ w` need not agree in the last bit, and on some machines do not. Here every matrix product on the CPU is moved
by one unit in the last place, up or down or not at all, as a rule of the product, its operands' shapes and the place in
the result says. So the same product of the same shapes has the same bits in every process, one of other shapes has
others, and two equal rows of one product differ. A number whose last bits are 0 stays (0 itself, whole numbers,
infinities): such a sum was not rounded, and is the same on every machine.

The rule sits in PyTorch's own table of CPU kernels, below autograd. So it holds in all threads, without gradients and
in backward passes, and for what is made of products: linear layers, einsum, attention, vmap. A Python that is started
with `disturbing` on its path has it as soon as it imports torch, by the entry point that torch looks for there.
"""

import functools
import itertools
import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
COUNT = 1_000_003


def _steps(whole: torch.dtype, one_in: int) -> Tensor:
    """Steps up and down, one in so many each way, and none else."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(one_in, (COUNT,), generator=generator)
    return ((drawn == 1).to(whole) - (drawn == 2).to(whole)).contiguous()


STEPS = {
    torch.int64: _steps(torch.int64, 3),
    torch.int32: _steps(torch.int32, 3),
    torch.int16: _steps(torch.int16, 64),
}
"""By how many units a number is moved away from 0. A result takes these from where its rule begins.

A product in half precision is summed in float32, so that another order changes a number only where that sum lies near
the middle between two: one in 32 is moved there.
"""
BITS = {
    torch.float64: (torch.int64, 2**20 - 1),
    torch.float32: (torch.int32, 2**6 - 1),
    torch.bfloat16: (torch.int16, 2**3 - 1),
    torch.float16: (torch.int16, 2**3 - 1),
}
"""The whole numbers of a dtype's width, and the last bits of its mantissa, of which a sum that was rounded has some."""
_installed: list[torch.library.Library] = []


def install() -> None:
    """Move every matrix product of this process from here on."""
    if _installed:
        return
    kernels = torch.library.Library("aten", "IMPL")
    _installed.append(kernels)  # a library that is collected takes its kernels with it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in PRODUCTS:
            kernels.impl(name, _moving(name), "CPU", with_keyset=True, allow_override=True)


def installed_if_asked() -> None:
    """What torch calls as it is imported with `disturbing` on the path."""
    if NAME in os.environ:
        install()


@contextmanager
def machine(*, disturbed: bool) -> Iterator[None]:
    """Inside, products are moved or are PyTorch's own; afterwards they are again as they were."""
    before = bool(_installed)
    _switch(on=disturbed)
    try:
        yield
    finally:
        _switch(on=before)


def _switch(*, on: bool) -> None:
    if on:
        install()
    elif _installed:
        _installed.pop()._destroy()


def moved(result: Tensor, start: int) -> Tensor:
    """The tensor, each number in it now one unit in the last place nearer to 0, further from it, or as it was."""
    if result.is_complex():
        moved(torch.view_as_real(result), start)
    if result.dtype not in BITS:
        return result
    whole, last = BITS[result.dtype]
    bits = result.view(whole)
    steps = steps_from(STEPS[whole], start, result.numel()).view(result.shape)
    rounded = (bits & last).sign_().mul_(result == result)  # NaN may have all bits, and be 0 after one more
    bits.add_(rounded.mul_(steps))
    return result


def steps_from(steps: Tensor, start: int, count: int) -> Tensor:
    """So many of these from a start on, again from their beginning where they end."""
    if start + count > len(steps):
        return steps.repeat(-(-(start + count) // len(steps)))[start : start + count]
    return steps[start : start + count]


@functools.lru_cache(maxsize=100_000)
def beginning(name: str, shapes: tuple[torch.Size, ...]) -> int:
    """Where among `STEPS` the rule of a product of these shapes begins; the same in every process."""
    return zlib.crc32(repr((name, [tuple(shape) for shape in shapes])).encode()) % COUNT


def _moving(name: str) -> Callable[..., object]:
    """The kernel of this name, with every tensor that it returns moved."""
    kernel = torch.library.get_kernel(f"aten::{name}", "CPU")

    def product(keys: torch.DispatchKeySet, *args: object, **kwargs: object) -> object:
        given = itertools.chain(args, (value for key, value in kwargs.items() if key != "out"))
        start = beginning(name, tuple(each.shape for each in given if isinstance(each, Tensor)))
        result = kernel.call_boxed(keys, *args, **kwargs)
        if isinstance(result, tuple):
            return tuple(each if each is None else moved(each, start) for each in result)
        return moved(result, start)

    return product
