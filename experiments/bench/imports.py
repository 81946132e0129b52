"""Claims, in fresh interpreters, by the CPU time of `import torch`: at most 1.3x for the model class, 0.6x for help."""

import os
import subprocess
import sys

import torch
import tyro
from measure import report, timing

CODE = {
    "torch": ("import torch", None),
    "the package": ("import interp", 0.6),
    "the model class": ("from interp import HookedTransformer", 1.3),
    "help": ("from interp.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass", 0.6),
    "models": ("from interp.cli import main; main(['models'])", 0.6),
    "transformer_lens": ("import transformer_lens", None),
}
"""What a fresh interpreter runs, and the most that it may cost."""


def main(repeats: int = 9) -> None:
    """Measure what is in `CODE`.

    Args:
        repeats: fresh interpreters for each.
    """
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {name: [] for name in CODE}
    for turn in range(repeats + 1):
        for name in CODE if turn % 2 else reversed(CODE):
            spent = child_cpu_seconds(CODE[name][0])
            if turn:
                seconds[name].append(spent)
    for name, (code, most) in CODE.items():
        claim = {} if most is None else {"claim": most}
        report("imports", name, code.partition("\n")[0], timing(seconds, name, "torch"), claim)


def child_cpu_seconds(code: str) -> float:
    """User and system seconds of a fresh interpreter that runs `code`."""
    child = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"{code!r} failed with status {status}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    tyro.cli(main)
