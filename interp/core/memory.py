"""The memory that a call will hold, where the arguments tell: much is said, more than is free is refused."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from interp.core.notes import note

MUCH = 2**32
"""Bytes from which on a call says what it will hold."""
_GROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)
"""Files of a control group's limit and use, in its versions 2 and 1."""


def check_memory(what: str, size: int | float, device: torch.device, fewer: str) -> None:
    """Refuse a call that will hold more memory than is free, and show a `Note` for one that will hold much.

    Args:
        what: the words for what is held, with the argument that decides its size.
        size: its bytes; a lower bound refuses nothing that would fit.
        device: where it is held.
        fewer: how the caller gets by with less.

    Raises:
        ValueError: more than is free; names `what`, both sizes, and `fewer`.
    """
    if size < MUCH / 4:
        return  # so that usual calls do not ask the system
    free = free_memory(device)
    if size > free:
        raise ValueError(
            f"{what}: {_gigabytes(size)} of memory are required, {_gigabytes(free)} are free; {fewer}"
        )
    if size >= MUCH:
        note(f"{what}: {_gigabytes(size)} of memory; {fewer}")


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still take on a device: what the system, its group and its limits leave."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return max(0, min(_left_on_host()))


def _left_on_host() -> Iterator[int]:
    page = os.sysconf("SC_PAGE_SIZE")
    yield os.sysconf("SC_PHYS_PAGES") * page
    with suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        yield 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
    for limit, used in _GROUPS:
        with suppress(OSError, ValueError):  # no such group, or one without a limit ("max")
            root = Path("/sys/fs/cgroup")
            yield int((root / limit).read_text()) - int((root / used).read_text())
    with suppress(ImportError, OSError):  # no limits outside POSIX
        import resource

        limit_of_process = resource.getrlimit(resource.RLIMIT_AS)[0]
        if limit_of_process != resource.RLIM_INFINITY:
            yield limit_of_process - page * int(Path("/proc/self/statm").read_text().split()[0])


def _gigabytes(size: int | float) -> str:
    return f"{float(f'{size / 1e9:.2g}'):g} GB"
