"""The training run that `test_loop.py` kills; a process of its own imports it from here."""

import os
import signal
from functools import partial
from pathlib import Path

import torch

from interp.lab.training import Training, attention_only, train
from interp.tasks import RepeatedSequences

DIES_AT = 6


def go_on(folder: Path, dies: bool = False) -> None:
    """Begin the run in the folder or go on with it, as a user's script would; SIGKILL at an evaluation, if it dies."""
    torch.set_num_threads(1)  # a forked process has no other threads to share the work with
    data = RepeatedSequences(20, 12, 4, 5)
    plan = Training(steps=9, rows=4, log_every=2, evaluation_rows=8, keep_seconds=0.0)
    train(attention_only(1, 20, 12), data, plan, out=folder, resume=True, evaluate=partial(_evaluate, dies))


def _evaluate(dies: bool, model: torch.nn.Module, step: int) -> dict[str, float]:
    if dies and step == DIES_AT:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"step_again": float(step)}
