"""What memory a process takes to load a model; processes of their own import it from here."""

from pathlib import Path

import torch

from interp import families


def taken(tiny: Path, big: Path, dtype: torch.dtype) -> float:
    """The most memory that loading takes, by the size of the model; less 24 MiB for chunks and the allocator.

    Loads a tiny model first, so that imports do not count. What else the system does to the process's pages, such as
    mapping those of libraries again that it had taken back, comes on top: of several processes the least is loading's.
    """
    families.from_folder(tiny)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    model = families.from_folder(big, dtype=dtype)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return (status("VmHWM") - before - 24 * 2**20) / size


def status(field: str) -> int:
    """Bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024
