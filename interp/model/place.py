"""Layers over several devices: which block lives where."""

from collections.abc import Sequence

import torch


def layer_devices(n_layers: int, devices: Sequence[torch.device]) -> tuple[torch.device, ...]:
    """The device of every block, in consecutive runs of equal length; ValueError without any device."""
    if not devices:
        raise ValueError("at least one device is required, got none")
    return tuple(devices[layer * len(devices) // n_layers] for layer in range(n_layers))
