"""Kinds of arguments that many functions share: devices, dtypes, seeds, counts, and how many things are listed."""

from typing import Annotated, Literal

import torch

from interp.core.hints import Required

MOST_COUNT = 10_000_000
"""The most steps, draws, samples or permutations that are taken: more would never end."""
Precision = torch.dtype | Literal["float64", "float32", "bfloat16", "float16"]
"""A dtype of weights, or its name."""


def as_dtype(given: Precision | None) -> torch.dtype | None:
    """The dtype that is meant; None stays None.

    Example:
        >>> as_dtype("bfloat16")
        torch.bfloat16
    """
    if isinstance(given, str):
        found: torch.dtype = getattr(torch, given)
        return found
    return given


def listed(top: int | None, usual: int, most: int, what: str = "") -> int:
    """Number of things that are listed of `most`: `top`; for None the usual number, or all where there are fewer.

    Raises:
        ValueError: a `top` that is none of 1 to `most`; `what` says of what.
    """
    if top is None:
        return min(usual, most)
    if not 1 <= top <= most:
        raise ValueError(f"top must be in [1, {most}]{what}, got {top!r}")
    return top


def _no_device(given: object) -> str | None:
    """None for a device or its name."""
    if isinstance(given, torch.device):
        return None
    if not isinstance(given, str):
        return ""
    try:
        torch.device(given)
    except (RuntimeError, ValueError):
        return ""
    return None


def _no_seed(given: object) -> str | None:
    """None for a whole number that is not negative."""
    return None if isinstance(given, int) and not isinstance(given, bool) and given >= 0 else ""


def _no_count(given: object) -> str | None:
    """None for a whole number that a loop can come to the end of; what is too small is for the function to say."""
    return None if isinstance(given, int) and not isinstance(given, bool) and given <= MOST_COUNT else ""


Device = Annotated[torch.device | str, Required("a device such as 'cpu' or 'cuda:1'", _no_device)]
Seed = Annotated[int, Required("a whole number from 0 on", _no_seed)]
Count = Annotated[int, Required(f"a whole number up to {MOST_COUNT}", _no_count)]
