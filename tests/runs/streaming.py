"""A causal question over a stream of pairs, in processes that are killed: importable by those."""

import sys
from pathlib import Path

import torch

import interp
from interp.causal import Patch
from interp.data import Pairs, Stream
from interp.runs import Results
from tests.runs.killing import dying_at_write, model
from tests.runs.running import agree

CLEAN = [[1 + (7 * i + 3 * j) % 20 for j in range(4 + i % 5)] for i in range(40)]
CORRUPT = [[*ids[:2], 1 + ids[2] % 20, *ids[3:]] for ids in CLEAN]
BAD = 17
"""The pair that does not align."""
ASKED = {
    "by_head": Patch("z", metric=interp.logit_difference(3, 4)),
    "noised": Patch(
        "resid_pre", metric=interp.metrics.answer_probability(5), by=["layer"], direction="noise", each=False
    ),
}


def stream(tokens: int = 40) -> Stream:
    """Several windows of several batches of pairs, one of them with a pair that does not align."""
    corrupt = [ids + [1] * (i == BAD) for i, ids in enumerate(CORRUPT)]
    return Stream(Pairs(CLEAN, corrupt).source(), model().text, tokens_per_batch=tokens, rows_per_window=9)


def whole() -> Results:
    """The answers of one process and one thread, in memory."""
    torch.set_num_threads(1)
    return interp.run(ASKED, model(), stream())


def go_on(folder: Path) -> None:
    """Go on with the run in the folder, or begin it."""
    torch.set_num_threads(1)  # a forked process has no other threads to share the work with
    interp.run(ASKED, model(), stream(), out=folder, resume=(folder / "work.json").exists())


def die(number: int, folder: Path) -> None:
    """Go on, and die halfway through the n-th entry of the journal."""
    dying_at_write(number)
    go_on(folder)


def on_ray() -> None:
    """A run on a Ray of two actors of this machine."""
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        expected = whole()
        agree(interp.run(ASKED, model(), stream(), engine="ray"), expected)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    on_ray()
    sys.exit(0)
