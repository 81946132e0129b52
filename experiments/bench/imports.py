"""Claim: `import interp` takes at most 1.3x the CPU time of `import torch`, in fresh interpreters."""

import os
import subprocess
import sys

import torch
import tyro
from measure import report, timing

CLAIM = 1.3
MODULES = ("torch", "interp", "transformer_lens")


def main(repeats: int = 9) -> None:
    """Measure `torch`, `interp` and, for comparison, TransformerLens.

    Args:
        repeats: fresh interpreters per module.
    """
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {module: [] for module in MODULES}
    for turn in range(repeats + 1):
        for module in MODULES if turn % 2 else reversed(MODULES):
            spent = child_cpu_seconds(f"import {module}")
            if turn:
                seconds[module].append(spent)
    for module in MODULES:
        claim = {"claim": CLAIM} if module == "interp" else {}
        report("imports", module, f"import {module}", timing(seconds, module, "torch"), claim)


def child_cpu_seconds(code: str) -> float:
    """User and system seconds of a fresh interpreter that runs `code`."""
    child = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"})
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"{code!r} failed with status {status}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    tyro.cli(main)
