"""Kinds of arguments that belong to no wing: where things are computed, and what randomness starts from."""

from typing import Annotated

import torch

from interp.core.boundary import Required


def _no_device(given: object) -> str | None:
    """None for a device or its name."""
    if isinstance(given, torch.device):
        return None
    if not isinstance(given, str):
        return ""
    try:
        torch.device(given)
    except RuntimeError:
        return ""
    return None


def _no_seed(given: object) -> str | None:
    """None for a whole number that is not negative."""
    return None if isinstance(given, int) and not isinstance(given, bool) and given >= 0 else ""


Device = Annotated[torch.device | str, Required("a device such as 'cpu' or 'cuda:1'", _no_device)]
Seed = Annotated[int, Required("a whole number from 0 on", _no_seed)]
