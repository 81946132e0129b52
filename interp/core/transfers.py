"""Copies between host and GPU with as few synchronisations as possible.

A GPU works through a queue that the host fills. A copy to the host, or a blocking copy from it, waits until the queue
is empty, and then the GPU is idle. So copies to the GPU are non-blocking, and tensors for the host are copied together,
as are the flags of checks (`checks_together`).
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor

K = TypeVar("K", bound=Hashable)
Whole = int | Sequence["Whole"]
"""A whole number, or lists of them."""
Failure = Callable[[], Exception | None]
"""Function that returns the error of a failed check, or None if a closer check finds nothing wrong."""
LOOK = 8
"""Number of steps of a search after which the host reads from the GPU whether the search is over."""


def to_device(values: Tensor | Whole, device: torch.device) -> Tensor:
    """A tensor on a device, by a non-blocking copy; the host's tensor may be changed right after the call.

    Args:
        values: a tensor, or whole numbers, which become int64.

    Example:
        >>> to_device([[1, 2], [3, 4]], torch.device("cpu")).shape
        torch.Size([2, 2])
    """
    values = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    return values.to(device, non_blocking=values.device.type == "cpu")  # to the host one must wait


def to_host(tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
    """The tensors on the host, without gradients; all tensors of one device come in one copy.

    Example:
        >>> to_host({"a": torch.ones(2), "b": torch.ones(1, dtype=torch.bool)})["b"]
        tensor([True])
    """
    on_host = {name: value.detach() if value.requires_grad else value for name, value in tensors.items()}
    away: dict[torch.device, list[K]] = {}
    for name, value in on_host.items():
        if value.device.type != "cpu":
            away.setdefault(value.device, []).append(name)
    for names in away.values():
        names.sort(
            key=lambda name: -on_host[name].element_size()
        )  # aligns each tensor to a multiple of its element size
        flat = [_flat_bytes(on_host[name]) for name in names]
        parts = torch.cat(flat).cpu().split([len(piece) for piece in flat])
        for name, part in zip(names, parts, strict=True):
            value = on_host[name]
            on_host[name] = part.view(value.dtype).reshape(value.shape)
    return on_host


def _flat_bytes(value: Tensor) -> Tensor:
    flat = value.reshape(-1)
    dense = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return dense.view(torch.uint8)


def ended(done: Bool[Tensor, ""], step: int) -> bool:
    """Whether a search is over; on a GPU `done` is read every `LOOK` steps only, and further steps have no effect.

    Example:
        >>> ended(torch.tensor(True), 0)
        True
    """
    return (done.is_cpu or step % LOOK == LOOK - 1) and bool(done)


class Checks:
    """Checks on a GPU whose results the host has not read yet, in their order."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Bool[Tensor, ""], Failure]] = []

    def add(self, fine: Bool[Tensor, ""], failure: Failure) -> None:
        """Adds a check: `fine` is its result, `failure` returns its error."""
        self._waiting.append((fine, failure))

    @property
    def flags(self) -> dict[int, Bool[Tensor, ""]]:
        """The result of each check, for callers that copy the flags to the host with other tensors."""
        return {i: fine for i, (fine, _) in enumerate(self._waiting)}

    def settle(self, flags: Mapping[int, Bool[Tensor, ""]]) -> None:
        """Raises the error of the first check that failed; flags: `flags`, on the host."""
        waiting, self._waiting = self._waiting, []
        for i, (_, failure) in enumerate(waiting):
            if not bool(flags[i]) and (error := failure()) is not None:
                raise error


_TOGETHER: ContextVar[Checks | None] = ContextVar("interp_checks_together", default=None)


def check(fine: Bool[Tensor, ""], failure: Failure) -> None:
    """Raises the error of `failure` unless `fine`: at once, or, on a GPU inside `checks_together`, at its end.

    Example:
        >>> check(torch.tensor(True), lambda: ValueError("never"))
    """
    together = _TOGETHER.get()
    if together is not None and not fine.is_cpu:
        together.add(fine, failure)
    elif not bool(fine) and (error := failure()) is not None:
        raise error


@contextmanager
def checks_together() -> Iterator[Checks]:
    """Postpones checks on a GPU inside `with`, so that the caller can settle all of them with one copy to the host.

    If something inside raises, the first check that had failed before is raised instead, as it would be on the host.
    """
    checks = Checks()
    token = _TOGETHER.set(checks)
    try:
        yield checks
    except Exception as cause:
        try:
            checks.settle(to_host(checks.flags))
        except Exception as first:
            raise first from cause
        raise
    finally:
        _TOGETHER.reset(token)
