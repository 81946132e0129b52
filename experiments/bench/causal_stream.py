"""Claim: one causal question over a stream of prompt pairs gives the same bits however it is run.

`interp.causal.Patch("z")` of 2 000 indirect-object pairs on demo-4l: in memory; killed with SIGKILL in the middle and
gone on with in another process; on two processes; and on Ray, where it is installed. One JSON line: a SHA-256 of every
variable and coordinate of each result, whether they agree, and seconds (wall clock and of CPU, children included).
One thread per process: matrix products round differently on another number of threads.
"""

import hashlib
import importlib.util
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import tyro

import interp
from interp import tasks
from interp.causal import Patch
from interp.data import Pairs, Stream
from interp.runs import Results

Engine = Literal["memory", "folder", "processes", "ray"]
PATIENCE = 900.0
"""Seconds after which a process counts as stuck."""
DIE_AFTER = 0.4
"""Of the windows: where the run in a folder is killed."""
WINDOW = 64


def main(
    pairs: int = 2000, model: str = "demo-4l", engine: Engine | None = None, out: Path | None = None
) -> None:
    """Ask in every way, each in a process of its own, and compare.

    Args:
        pairs: pairs of prompts.
        model: a demo model.
        engine: ask in this way only, and print the digest; what the script calls itself with.
        out: the folder of the run, for `folder`.
    """
    torch.set_num_threads(1)
    if engine is not None:
        print(json.dumps(asked(pairs, model, engine, out)))
        return
    ways: dict[str, dict[str, object]] = {"memory": told(pairs, model, "memory")}
    with tempfile.TemporaryDirectory() as folder:
        ways["resumed"] = resumed(pairs, model, Path(folder) / "run")
    ways["processes"] = told(pairs, model, "processes")
    has_ray = importlib.util.find_spec("ray") is not None
    ways["ray"] = told(pairs, model, "ray") if has_ray else {"skipped": "ray is not installed"}
    digests = {way["sha256"] for way in ways.values() if "sha256" in way}
    print(
        json.dumps(
            {
                "bench": "causal_stream", "model": model, "pairs": pairs, "same_bits": len(digests) == 1, **ways,
                "load": os.getloadavg(), "torch": torch.__version__,
            }
        )
    )  # fmt: skip
    if len(digests) != 1:
        raise SystemExit("the results differ")


def asked(pairs: int, name: str, engine: Engine, out: Path | None) -> dict[str, object]:
    """The digest of the answer, and what it took."""
    model = interp.HookedTransformer.from_pretrained(name)
    stream, begun = stream_of(model, pairs), time.monotonic()
    question = Patch("z", metric=interp.logit_difference())
    if engine == "folder":
        assert out is not None
        found = interp.run(question, model, stream, out=out, resume=(out / "work.json").exists())
    elif engine == "processes":
        found = interp.run(question, model, stream, devices=["cpu", "cpu"])
    elif engine == "ray":
        found = on_ray(question, model, stream)
    else:
        found = interp.run(question, model, stream)
    wall = time.monotonic() - begun
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    best = found["patch"].value.argmax(...)
    return {
        "sha256": digest(found), "rows": found.rows, "set_aside": len(found.rejected),
        "largest_effect": [str(found["patch"].part.isel(best).item()), round(float(found["patch"].value.max()), 4)],
        "wall_s": round(wall, 1), "cpu_s": round(sum(each.ru_utime + each.ru_stime for each in spent), 1),
        "resident_mib": round(max(each.ru_maxrss for each in spent) / 1024),
    }  # fmt: skip


def stream_of(model: interp.HookedTransformer, pairs: int) -> Stream:
    """Windows of pairs, with their answers."""
    made = tasks.IndirectObjects(pairs, seed=0).pairs(model.text.tokenizer)
    real = torch.ones_like(made.clean_tokens, dtype=torch.bool) if made.keep is None else made.keep
    clean, corrupt = (
        [row[kept].tolist() for row, kept in zip(tokens, real, strict=True)]
        for tokens in (made.clean_tokens, made.corrupt_tokens)
    )
    source = Pairs(clean, corrupt, made.answer.tolist(), made.wrong.tolist()).source()
    return Stream(source, model.text, tokens_per_batch=1024, rows_per_window=WINDOW)


def on_ray(question: Patch, model: interp.HookedTransformer, stream: Stream) -> Results:
    """On two actors of this machine."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        return interp.run(question, model, stream, engine="ray")
    finally:
        ray.shutdown()


def resumed(pairs: int, model: str, folder: Path) -> dict[str, object]:
    """Begin in a folder, kill the process with SIGKILL in the middle, go on in another one."""
    command, begun = ours(pairs, model, "folder", folder), time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    windows = -(-pairs // WINDOW)
    while done(folder) < DIE_AFTER * windows and child.poll() is None:
        time.sleep(0.01)
        if time.monotonic() - begun > PATIENCE:
            child.kill()
            raise SystemExit("the run gets nowhere")
    child.send_signal(signal.SIGKILL)
    code = child.wait()
    there = done(folder)
    return {
        **told(pairs, model, "folder", folder),
        "killed_with": -code,
        "windows_done": f"{there} of {windows}",
    }


def done(folder: Path) -> int:
    """How many windows the journal in a folder holds, by somebody who only looks."""
    from interp.core.stats import Rows
    from interp.runs.journal import Journal, numbers_in

    if not folder.is_dir() or "main" not in (numbers := numbers_in(folder)):
        return 0
    found = Journal.open(folder, "main", {"patch": Rows}, read_only=True, number=numbers["main"])
    return len(found.progress.tree)


def told(pairs: int, model: str, engine: Engine, out: Path | None = None) -> dict[str, object]:
    """What a process of its own says."""
    said = subprocess.run(
        ours(pairs, model, engine, out), check=True, timeout=PATIENCE, stdout=subprocess.PIPE, text=True
    ).stdout
    found: dict[str, object] = json.loads(said.splitlines()[-1])
    return found


def ours(pairs: int, model: str, engine: Engine, out: Path | None) -> list[str]:
    """The command of one way."""
    command = [sys.executable, __file__, "--pairs", str(pairs), "--model", model, "--engine", engine]
    return command if out is None else [*command, "--out", str(out)]


def digest(found: Results) -> str:
    """SHA-256 of every number and label."""
    mark = hashlib.sha256()
    for name, result in found.items():
        for key in sorted([*result.data_vars, *result.coords]):
            value = result[key]
            mark.update(repr((name, key, value.dims, value.shape, str(value.dtype))).encode())
            mark.update(
                repr(value.values.tolist()).encode() if value.dtype.kind in "OUT" else value.values.tobytes()
            )
    mark.update(found.rejected.to_csv().encode())
    mark.update(np.array([found.rows, found.tokens, found.cut]).tobytes())
    return mark.hexdigest()


if __name__ == "__main__":
    tyro.cli(main)
