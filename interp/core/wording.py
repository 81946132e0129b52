"""Pieces of error messages: a value in a few words, and the known name that is nearest to a wrong one."""

import difflib
import inspect
import reprlib
from collections.abc import Iterable

import torch

from interp.core.axes import shape_text

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60

NO_TEMPLATE = (
    "messages require a tokenizer with a chat template, this one has none: give one, "
    "from_pretrained(source, chat_template=...), or the prompts as plain texts"
)
"""Error about a chat for a tokenizer without a chat template."""


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """A readable hint, `"nearest: a, b"`, of the known names closest to `name`; empty if none is close."""
    close = difflib.get_close_matches(name, list(known), n=count, cutoff=0.4)
    return f"nearest: {', '.join(close)}" if close else "no name is close"


def odd_value(value: object) -> str | None:
    """None for a value that can be computed with; else why not: a tensor without numbers in rows, a number too long."""
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**64 else "more than 64 bits"
    if isinstance(value, torch.dtype):
        computed = value.is_floating_point and value.itemsize > 1
        return None if computed else "no dtype of real numbers to compute with"
    if not isinstance(value, torch.Tensor):
        return None
    if value.is_meta:
        return "no numbers (device meta)"
    if value.layout is not torch.strided:
        return f"layout {value.layout}".replace("torch.", "")
    return "quantised numbers" if value.is_quantized else None


def value_text(value: object) -> str:
    """A value in a few words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    if inspect.ismodule(value):
        return f"the module {value.__name__}"
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and (shape or hasattr(value, "dim")):
        kind = f"{value.dtype} and " if hasattr(value, "dtype") else ""
        kind = f"{odd}, {kind}" if (odd := odd_value(value)) else kind
        return f"{type(value).__name__} of {kind}shape {shape_text(shape)}"
    short = _SHORT.repr(value).partition("\n")[0].removesuffix("(")  # of a network, whose parts follow
    kind = ", ".join(filter(None, (type(value).__name__, odd_value(value))))
    return f"{short} ({kind})" if type(value).__name__ not in short else short


def beginning(value: object, most: int) -> str:
    """The first characters of a value's `repr`; of one that is nested too deep for Python in a few levels."""
    try:
        return repr(value)[:most]
    except RecursionError:
        return _SHORT.repr(value)[:most]
