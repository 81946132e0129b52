"""Claims, in fresh interpreters, by the CPU time of `import torch`: at most 1.3x for the model class, 0.6x for help,
2.6x for the report page of a prompt.

Bytecode is written in the untimed round and read in the others, as it is from the second time on for any user, also
where the environment that this runs in forbids to write it.
"""

import os
import subprocess
import sys
import tempfile

import torch
import tyro
from measure import report, timing

LENS = "import interp\nmodel = interp.HookedTransformer.from_pretrained('demo-4l')\ninterp.logit_lens(model, 'a b')"
CODE = {
    "torch": ("import torch", None),
    "the package": ("import interp", 0.6),
    "the model class": ("from interp import HookedTransformer", 1.3),
    "help": ("from interp.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass", 0.6),
    "models": ("from interp.cli import main; main(['models'])", 0.6),
    "list": ("from interp.cli import main; main(['list'])", None),
    "lens": (LENS, None),
    "report": ("from interp.cli import main; main(['report', '--model', 'demo-4l', '--out', 'page'])", 2.6),
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
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(repeats + 1):
            for name in CODE if turn % 2 else reversed(CODE):
                spent = child_cpu_seconds(CODE[name][0], folder)
                if turn:
                    seconds[name].append(spent)
    for name, (code, most) in CODE.items():
        claim = {} if most is None else {"claim": most}
        said = code.partition("\n")[0] if name == "help" else code.replace("\n", "; ")
        report("imports", name, said, timing(seconds, name, "torch"), claim)


def child_cpu_seconds(code: str, folder: str) -> float:
    """User and system seconds of a fresh interpreter that runs `code` in a folder, where its bytecode is kept."""
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=folder, stdout=subprocess.DEVNULL,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": f"{folder}/bytecode"},
    )  # fmt: skip
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise RuntimeError(f"{code!r} failed with status {status}")
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    tyro.cli(main)
