"""How long a computation takes, by its multiplications: what takes over a minute says so before it begins."""

import torch

from interp.core.notes import note

A_MINUTE, A_MINUTE_ON_GPU = 2e12, 3e14
"""Multiplications (with their additions) of a minute on one core of a CPU, and on a GPU, of passes as analyses make
them. Machines differ by several times: what is said of it is a size, not a time."""


def minutes(products: int | float, device: torch.device) -> float:
    """Estimated minutes that `products` multiplications take on this device."""
    minute = A_MINUTE * torch.get_num_threads() if device.type == "cpu" else A_MINUTE_ON_GPU
    return products / minute


def announce(what: str, products: int | float, device: torch.device, fewer: str) -> None:
    """Show a `Note` with the expected minutes of a computation, and how to reduce it, if it takes a minute or more."""
    if (time := minutes(products, device)) >= 1:
        note(f"{what}: about {float(f'{time:.1g}'):g} min on such a device; {fewer}")
