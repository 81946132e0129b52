"""Torch's global settings, on which no result may depend: default dtype and device, autocast, inference mode.

A public function runs under torch's default settings (by the decorator in `core/boundary.py`). So an analysis gives the
same bits inside `torch.autocast` or after `torch.set_default_dtype(torch.float64)`, and may differentiate inside
`torch.inference_mode()`. A plain pass of a model (`observe`, `run_with_cache`, `generate`) keeps the user's settings;
under autocast `generate` and `stream` say so by a `Note`, since their tokens may be others.

How the device rounds the factors of float32 products (`torch.set_float32_matmul_precision`) is the user's choice, as
the model's dtype is: it is kept, and `products` says it in every result.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar

import torch

CPU = torch.device("cpu")
_DEPTH = ContextVar("interp_depth_of_public_functions", default=0)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside `with`, torch has its default settings; of nested calls only the outermost one sets them."""
    outer = _DEPTH.get()
    token = _DEPTH.set(outer + 1)
    try:
        with nullcontext() if outer or untouched() else reset():
            yield
    finally:
        _DEPTH.reset(token)


def depth() -> int:
    """How many public functions of this package are running, one inside of another: 0 in a user's own code.

    What is made inside of one was computed by it, and is not checked as what a user gives.
    """
    return _DEPTH.get()


def untouched() -> bool:
    """Whether all of these settings are torch's defaults."""
    return (
        torch.get_default_dtype() is torch.float32
        and not torch.is_inference_mode_enabled()
        and not _autocast_devices()
        and torch.get_default_device() == CPU
    )


@contextmanager
def reset() -> Iterator[None]:
    """Inside `with`, torch has its default settings; gradients stay enabled or disabled, as they were."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled() or torch.is_inference_mode_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind in _autocast_devices():
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(CPU)
        torch.set_default_dtype(torch.float32)
        stack.callback(torch.set_default_dtype, dtype)
        yield


def _autocast_devices() -> list[str]:
    """The device types ("cpu", "cuda") on which autocast is enabled."""
    return [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]


def products(device: torch.device) -> str | None:
    """To what this device may round the factors of float32 matrix products: "tf32" or "bf16"; None: to nothing.

    torch's own `get_float32_matmul_precision` raises where a user has set a backend by itself.
    """
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    rounded = str(backend.matmul.fp32_precision)
    return rounded if rounded in ("tf32", "bf16") else None
