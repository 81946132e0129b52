"""Transfers between host and device: without a wait where none is needed, in one copy where one is.

An accelerator works through a queue that the host fills. A copy to the host, and a plain copy from it,
wait until all of that is done, and then the device stands still. So what is sent does not wait, and what is fetched is
fetched together; checks of numbers are flags that are fetched with them (`checks_together`).
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
"""Maker of the error of a failed check; None where a closer look finds nothing wrong."""
LOOK = 8
"""Number of steps of a search between two looks at a device's numbers."""


def to_device(values: Tensor | Whole, device: torch.device) -> Tensor:
    """A tensor on a device, queued after the device's work; the host's copy may change at once.

    Args:
        values: a tensor, or whole numbers, which become int64.

    Example:
        >>> to_device([[1, 2], [3, 4]], torch.device("cpu")).shape
        torch.Size([2, 2])
    """
    values = values if isinstance(values, Tensor) else torch.tensor(values, dtype=torch.int64)
    return values.to(device, non_blocking=values.device.type == "cpu")  # to the host one must wait


def to_host(tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
    """Tensors brought to the host, without gradients, those of one device in one copy; the host's own as they are.

    Example:
        >>> to_host({"a": torch.ones(2), "b": torch.ones(1, dtype=torch.bool)})["b"]
        tensor([True])
    """
    found = {name: value.detach() if value.requires_grad else value for name, value in tensors.items()}
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


def ended(done: Bool[Tensor, ""], step: int) -> bool:
    """Whether a search is over; a device is asked after every `LOOK` steps, and goes on until then without effect.

    Example:
        >>> ended(torch.tensor(True), 0)
        True
    """
    return (done.is_cpu or step % LOOK == LOOK - 1) and bool(done)


class Checks:
    """Checks of a device's numbers that were not looked at yet, in their order."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Bool[Tensor, ""], Failure]] = []

    def add(self, fine: Bool[Tensor, ""], failure: Failure) -> None:
        """Look at one more."""
        self._waiting.append((fine, failure))

    @property
    def flags(self) -> dict[int, Bool[Tensor, ""]]:
        """Whether each check is fine, for callers that fetch the flags with something else."""
        return {i: fine for i, (fine, _) in enumerate(self._waiting)}

    def settle(self, flags: Mapping[int, Bool[Tensor, ""]]) -> None:
        """Raise what the first that is not fine raises; flags: `flags`, on the host."""
        waiting, self._waiting = self._waiting, []
        for i, (_, failure) in enumerate(waiting):
            if not bool(flags[i]) and (error := failure()) is not None:
                raise error


_TOGETHER: ContextVar[Checks | None] = ContextVar("interp_checks_together", default=None)


def check(fine: Bool[Tensor, ""], failure: Failure) -> None:
    """Raise what `failure` gives unless `fine`: at once, or, of a device inside `checks_together`, after that.

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
    """Let the checks of a device's numbers wait, so that they are settled once, with other fetched values.

    Where something else raises inside, the first check that failed before is raised instead, as on the host.
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
