"""Kinds of arguments that many functions share: devices, dtypes, seeds, counts, numbers, how many are listed."""

import math
from collections.abc import Callable
from typing import Annotated, Literal

import torch
from jaxtyping import Shaped

from interp.core.hints import Required
from interp.core.torch_state import depth
from interp.core.wording import odd_value

MOST_NUMBER = 1e30
"""The largest size of a setting: products of a larger one overflow in float32."""
MOST_COUNT = 10_000_000
"""The largest number of steps, draws, samples or permutations: a loop of more would never end."""
WIDE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes of real numbers that every operation of torch takes."""
Precision = torch.dtype | Literal["float64", "float32", "bfloat16", "float16"]
"""A dtype of weights, or its name."""


def as_dtype(dtype: Precision | None) -> torch.dtype | None:
    """The dtype of this name, or the dtype itself; None stays None.

    Example:
        >>> as_dtype("bfloat16")
        torch.bfloat16
    """
    if isinstance(dtype, str):
        named_dtype: torch.dtype = getattr(torch, dtype)
        return named_dtype
    return dtype


def listed(top: int | None, usual: int, most: int, what: str = "") -> int:
    """Number of listed things: `top`, or for None the `usual` number, but at most `most`.

    Raises:
        ValueError: a `top` that is not in 1 to `most`; the message adds `what`, the words for the things.
    """
    if top is None:
        return min(usual, most)
    if not 1 <= top <= most:
        raise ValueError(f"top must be in [1, {most}]{what}, got {top!r}")
    return top


def require_device(
    device: torch.device | str, dtype: torch.dtype = torch.float32, *, numbers: bool = True
) -> None:
    """Raises a ValueError unless tensors of the dtype can be on the device here, and unless it holds their numbers.

    Args:
        numbers: whether the device must hold numbers; False: "meta" is one too.
    """
    if numbers and torch.device(device).type == "meta":
        raise ValueError("device must be one that holds numbers, got meta")
    try:
        torch.empty(0, dtype=dtype, device=device)
    except (RuntimeError, TypeError, AssertionError, ImportError) as cause:
        name = str(dtype).removeprefix("torch.")
        raise ValueError(
            f"device must be one of this machine, {name} on {device} is not possible here: {cause}"
        ) from cause


def _device_refusal(value: object) -> str | None:
    """None for a device or the name of one, else ""."""
    if not isinstance(value, str | torch.device):
        return ""
    try:
        device = torch.device(value)
    except (RuntimeError, ValueError):
        return ""
    return ": there is one cpu" if device.type == "cpu" and device.index else None


def _values_refusal(value: object) -> str | None:
    """None for a real number or a tensor of such, else ""; a tensor's numbers are looked at where a user gives it."""
    if isinstance(value, torch.Tensor):
        if odd_value(value) or value.is_complex() or value.dtype is torch.bool:
            return ""
        return None if depth() or value.is_meta or not value.numel() else _size_refusal(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return ""
    return None if -MOST_NUMBER <= value <= MOST_NUMBER or value == -math.inf else ""


def _size_refusal(value: torch.Tensor) -> str | None:
    """None where all numbers of a tensor are in range, or -inf; else a text that says what they are."""
    numbers = value.detach()
    if numbers.dtype not in WIDE:  # torch compares few whole numbers, and none of eight bits
        numbers = numbers.double()
    fine = (numbers.abs() <= MOST_NUMBER) | (numbers == -math.inf)
    if bool(fine.all()):
        return None
    return f", with {float(numbers[~fine].flatten()[0]):g} among its numbers"


def _seed_refusal(value: object) -> str | None:
    """None for a whole number that is not negative, else ""."""
    return None if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else ""


def _count_refusal(value: object) -> str | None:
    """None for a whole number up to `MOST_COUNT`, else ""; functions themselves refuse numbers that are too small."""
    return None if isinstance(value, int) and not isinstance(value, bool) and value <= MOST_COUNT else ""


def _number_refusal(fits: Callable[[float], bool]) -> Callable[[object], str | None]:
    """A function that returns None for numbers that fit, else ""."""

    def refusal(value: object) -> str | None:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return ""
        return None if fits(value) else ""

    return refusal


Device = Annotated[torch.device | str, Required("a device such as 'cpu' or 'cuda:1'", _device_refusal)]
DeviceName = Annotated[
    str,
    Required(
        "the name of a device such as 'cpu' or 'cuda:1'",
        lambda value: _device_refusal(value) if isinstance(value, str) else "",
    ),
]
Values = Annotated[
    Shaped[torch.Tensor, "..."] | float,
    Required(
        f"a number or a tensor of real numbers up to {MOST_NUMBER:g} (-inf for attention scores)",
        _values_refusal,
    ),
]
Seed = Annotated[int, Required("a whole number from 0 on", _seed_refusal)]
Count = Annotated[int, Required(f"a whole number up to {MOST_COUNT}", _count_refusal)]
PositiveCount = Annotated[
    int,
    Required(
        f"a whole number from 1 to {MOST_COUNT}",
        lambda value: _count_refusal(value) if isinstance(value, int) and value >= 1 else "",
    ),
]
FromZero = Annotated[
    int,
    Required(
        f"a whole number from 0 to {MOST_COUNT}",
        lambda value: _count_refusal(value) if isinstance(value, int) and value >= 0 else "",
    ),
]
Number = Annotated[float, Required("a number, and not NaN", _number_refusal(lambda x: not math.isnan(x)))]
Finite = Annotated[
    float, Required(f"a number up to {MOST_NUMBER:g}", _number_refusal(lambda x: abs(x) <= MOST_NUMBER))
]
Probability = Annotated[float, Required("a number from 0 to 1", _number_refusal(lambda x: 0 <= x <= 1))]
Cosine = Annotated[float, Required("a number from -1 to 1", _number_refusal(lambda x: -1 <= x <= 1))]
Positive = Annotated[
    float,
    Required(f"a number above 0, up to {MOST_NUMBER:g}", _number_refusal(lambda x: 0 < x <= MOST_NUMBER)),
]
NotNegative = Annotated[
    float, Required(f"a number from 0 to {MOST_NUMBER:g}", _number_refusal(lambda x: 0 <= x <= MOST_NUMBER))
]
