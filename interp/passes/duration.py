"""How long a computation takes, by its multiplications: what takes over a minute says so before it begins."""

import torch

from interp.core.notes import note
from interp.model.config import ModelConfig

A_MINUTE, A_MINUTE_ON_GPU = 2e12, 3e14
"""Multiplications (with their additions) of a minute on one core of a CPU, and on a GPU, of passes as analyses make
them. Machines differ by several times: what is said of it is a size, not a time."""

ELEMENTWISE = 40
"""Multiplications in matrices that take as long as the distance of two vectors, for each of their numbers (measured on
a CPU)."""
RANKED = 3
"""Times the multiplications that make logits that it takes to make them and to rank them (measured on a CPU)."""


def minutes(products: int | float, device: torch.device) -> float:
    """Estimated minutes that `products` multiplications take on this device."""
    minute = A_MINUTE * torch.get_num_threads() if device.type == "cpu" else A_MINUTE_ON_GPU
    return products / minute


def announce(what: str, products: int | float, device: torch.device, fewer: str) -> None:
    """Show a `Note` with the expected minutes of a computation, and how to reduce it, if it takes a minute or more."""
    if (time := minutes(products, device)) >= 1:
        note(f"{what}: about {float(f'{time:.1g}'):g} min on such a device; {fewer}")


def announce_logits(what: str, states: int, config: ModelConfig, device: torch.device) -> None:
    """`announce` for states of the stream that are read as tokens: logits of the whole vocabulary, ranked."""
    each = RANKED * config.d_model * config.n_outputs
    announce(
        f"{what}: {states} states read as tokens",
        states * each,
        device,
        "fewer layers or positions take less",
    )
