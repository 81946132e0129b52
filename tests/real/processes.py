"""Runs of a model opened from files in more than one process, and the memory that all of them have together.

`python -m tests.real.processes HOW FOLDER OUT` opens the model of FOLDER (or a demo's name), asks it in the way HOW,
and fails unless the answer is bit for bit that of one process. OUT is a folder for shards.
"""

import copy
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import interp
from interp import HookedTransformer
from interp.data.sources import open_source
from interp.data.stream import Stream
from interp.lenses import LogitLens
from interp.passes.observe import text_of
from interp.runs import Results
from tests.runs.killing import ROOT
from tests.runs.running import agree

HOWS = ("devices", "ray", "shards", "pickle", "deepcopy")
TEXTS = [
    ("When Mary and John went to the store, John gave a drink to her. " * 5)[: 20 + 37 * i % 100]
    for i in range(4)
]


def asked(model: HookedTransformer, **how: object) -> Results:
    """What a lens says of some texts, in two windows."""
    stream = Stream(open_source(TEXTS), text_of(model), tokens_per_batch=64, rows_per_window=2)
    return interp.run([LogitLens(top=3)], model, stream, **how)  # type: ignore[arg-type]


def answered(how: str, model: HookedTransformer, out: Path) -> Results:
    """The same in one of the ways."""
    if how == "devices":
        return asked(model, devices=["cpu", "cpu"])
    if how == "ray":
        return asked(model, engine="ray")
    if how == "shards":
        for share in ("1/2", "0/2"):
            asked(model, out=out, shard=share)
        return asked(model, out=out, resume=True)
    return asked(pickle.loads(pickle.dumps(model)) if how == "pickle" else copy.deepcopy(model))


def together(process: int) -> int:
    """Bytes of memory of no file that a process and its children have, what they share counted once."""
    return sum(_own(each) for each in _family(process))


def watched(how: str, model: str, out: Path, patience: float) -> tuple[int, int, str]:
    """The exit code of such a run, the most memory that its processes had together, and what it said."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
    }
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.real.processes", how, model, str(out)],
        env=environment,
        cwd=ROOT,
        stdout=(said := (out / "said.txt").open("w+")),
        stderr=subprocess.STDOUT,
    )
    most, end = 0, time.monotonic() + patience
    while child.poll() is None and time.monotonic() < end:
        most = max(most, together(child.pid))
        time.sleep(0.05)
    child.kill()
    said.seek(0)
    return child.wait(), most, said.read()


def _family(process: int) -> Iterator[int]:
    yield process
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = path.read_text().split()
        except OSError:  # it has ended
            continue
        for child in children:
            yield from _family(int(child))


def _own(process: int) -> int:
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended
        return 0
    kilobytes = {line.split()[0]: line.split()[1] for line in lines[1:]}
    return 1024 * sum(int(kilobytes[f"Pss_{kind}:"]) for kind in ("Anon", "Shmem"))


if __name__ == "__main__":
    torch.set_num_threads(1)
    way, name, folder = sys.argv[1:]
    opened = HookedTransformer.from_pretrained(name)
    agree(answered(way, opened, Path(folder) / "run"), asked(opened))
