"""When does a demo model learn to copy? Its training log as one figure: the induction phase change.

Run: `interp run experiments/phase_change.py -p model=demo-attn-2l`
"""

from dataclasses import dataclass

import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.figure import Figure

from interp.runs.record import Record
from interp.zoo.demos import WEIGHTS


@dataclass(frozen=True)
class PhaseChange:
    """Which training log to draw."""

    model: str = "demo-attn-2l"
    """A demo model that was trained."""


def main(job: PhaseChange, record: Record) -> None:
    """Keep the log beside its figure."""
    log = pd.read_csv(WEIGHTS / job.model / "training_log.csv")
    record.table("training_log", log)
    record.figure("phase_change", figure(job.model, log))


def figure(name: str, log: pd.DataFrame) -> Figure:
    """Loss, in-context-learning score and best induction score against training tokens."""
    panels = {
        "validation_loss": "held-out loss\n(nats/token)",
        "in_context_learning_score": "in-context-learning\nscore (nats)",
        "best_induction_score": "best induction score\n(attention mass)",
    }
    picture, axes = plt.subplots(len(panels), 1, sharex=True, figsize=(7, 6.5), layout="constrained")
    for ax, (column, label) in zip(axes, panels.items(), strict=True):
        ax.plot(log["tokens"] / 1e6, log[column], marker=".", color="C0")
        ax.set_ylabel(label)
        ax.grid(alpha=0.3)
    axes[0].set_title(f"{name}: the induction phase change")
    axes[-1].set_xlabel("training tokens (millions)")
    return picture
