"""Torch's global settings, of which no number may depend: default dtype and device, autocast, inference mode.

A public function runs as if nobody had touched them (`core/boundary.py` sees to it), so that an analysis gives the same
bits inside `torch.autocast` or after `torch.set_default_dtype(torch.float64)`, and may differentiate inside
`torch.inference_mode()`. What is a plain pass of a model (`observe`, `run_with_cache`, `generate`) does as it is told.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar

import torch

CPU = torch.device("cpu")
_INSIDE = ContextVar("interp_inside_a_public_function", default=False)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Inside `with`, torch's settings are those that it begins with; only the outermost call looks at them."""
    if _INSIDE.get():
        yield
        return
    token = _INSIDE.set(True)
    try:
        with nullcontext() if untouched() else reset():
            yield
    finally:
        _INSIDE.reset(token)


def untouched() -> bool:
    """Whether all of these settings are those that torch begins with."""
    return (
        torch.get_default_dtype() is torch.float32
        and not torch.is_inference_mode_enabled()
        and not _casting()
        and torch.get_default_device() == CPU
    )


@contextmanager
def reset() -> Iterator[None]:
    """Inside `with`, torch's settings are those that it begins with; gradients stay on or off, as they are."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled() or torch.is_inference_mode_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(mode=False))
        stack.enter_context(torch.set_grad_enabled(grad))
        for kind in _casting():
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(CPU)
        torch.set_default_dtype(torch.float32)
        stack.callback(torch.set_default_dtype, dtype)
        yield


def _casting() -> list[str]:
    """The kinds of devices on which products are cast to half precision."""
    return [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
