"""What goes from the host to a device and back: without a wait where none is needed, in one copy where it is.

An accelerator works through a queue that the host fills. A copy to the host, and a plain copy from it,
wait until all of that is done, and then the device stands still. So what is sent does not wait, and what is fetched is
fetched together.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

K = TypeVar("K", bound=Hashable)
Whole = int | Sequence["Whole"]
"""A whole number, or lists of them."""


def sent(values: Tensor | Whole, device: torch.device) -> Tensor:
    """The same numbers on a device, queued after its work; the host's copy may change at once.

    values: a tensor, or whole numbers, which become int64.

    Example:
        >>> sent([[1, 2], [3, 4]], torch.device("cpu")).shape
        torch.Size([2, 2])
    """
    values = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    return values.to(device, non_blocking=values.device.type == "cpu")  # to the host one must wait


def fetched(tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
    """The same tensors on the host, without gradients, those of one device in one copy; the host's own as they are.

    Example:
        >>> fetched({"a": torch.ones(2), "b": torch.ones(1, dtype=torch.bool)})["b"]
        tensor([True])
    """
    found = {name: value.detach() for name, value in tensors.items()}
    away: dict[torch.device, list[K]] = {}
    for name, value in found.items():
        if value.device.type != "cpu":
            away.setdefault(value.device, []).append(name)
    for names in away.values():
        names.sort(
            key=lambda name: -found[name].element_size()
        )  # so that each begins at a multiple of its own size
        flat = [_bytes(found[name]) for name in names]
        parts = torch.cat(flat).cpu().split([len(each) for each in flat])
        for name, part in zip(names, parts, strict=True):
            value = found[name]
            found[name] = part.view(value.dtype).reshape(value.shape)
    return found


def _bytes(value: Tensor) -> Tensor:
    flat = value.reshape(-1)
    dense = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return dense.view(torch.uint8)
