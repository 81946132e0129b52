"""The devices of a model: one, or several that share its layers, given by the user or chosen by free memory."""

from collections.abc import Sequence
from typing import Literal

import torch

from interp.core.kinds import Device
from interp.families.fill import check_dtype

Devices = Sequence[Device] | Literal["auto"]
"""Several devices to spread the layers over, or "auto": the accelerators of this machine, by their free memory."""
SLOTS = 64
"""Number of equal shares of the layers that are distributed over devices by free memory."""


def places_of(dtype: torch.dtype | None, device: Device, devices: Devices | None) -> tuple[torch.device, ...]:
    """The devices to use, each checked for the dtype: layer i of n stands on place `i * len(places) // n`.

    Raises:
        ValueError: no device, a device that does not exist here, or one without this dtype.
    """
    if devices == "auto":
        places = by_free_memory(free_memory()) or (torch.device("cpu"),)
    elif isinstance(devices, str):
        raise ValueError(
            f"devices requires several devices or 'auto', got {devices!r}; device={devices!r} is one"
        )
    else:
        places = tuple(torch.device(d) for d in ([device] if devices is None else devices))
    if not places:
        raise ValueError("at least one device is required, got devices=[]")
    for place in dict.fromkeys(places):
        check_dtype(dtype or torch.float32, place)
    return places


def free_memory() -> dict[torch.device, int]:
    """The accelerators of this machine -> their free memory in bytes."""
    if not torch.cuda.is_available():
        return {}
    return {torch.device("cuda", i): torch.cuda.mem_get_info(i)[0] for i in range(torch.cuda.device_count())}


def by_free_memory(free: dict[torch.device, int]) -> tuple[torch.device, ...]:
    """The devices, each repeated in proportion to its free memory, `SLOTS` entries in all.

    Shares are rounded down, and the device with most memory gets the remainder; a single device is listed once.

    Example:
        >>> [str(place) for place in by_free_memory({torch.device("cuda", 0): 30, torch.device("cuda", 1): 10})][46:50]
        ['cuda:0', 'cuda:0', 'cuda:1', 'cuda:1']
    """
    total = sum(free.values())
    shares = {device: SLOTS * n_bytes // total for device, n_bytes in free.items()} if total else {}
    if not shares:
        return ()
    largest = max(shares, key=lambda device: free[device])
    shares[largest] += SLOTS - sum(shares.values())
    places = tuple(device for device, share in shares.items() for _ in range(share))
    return (places[0],) if len(set(places)) == 1 else places
