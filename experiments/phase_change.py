"""When does a demo model learn to copy? Its training log as one figure: the induction phase change.

Run: `interp run experiments/phase_change.py --model demo-attn-2l --out out/phase_change.png`
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pandas as pd
import tyro

from interp.zoo.catalog import WEIGHTS


@dataclass(frozen=True)
class PhaseChange:
    """Which training log to draw, and where to."""

    model: str = "demo-attn-2l"
    out: Path = Path("out/phase_change.png")


def main(job: PhaseChange) -> Path:
    """Draw loss, in-context-learning score and best induction score against training tokens."""
    log = pd.read_csv(WEIGHTS / job.model / "training_log.csv")
    panels = {
        "validation_loss": "held-out loss\n(nats/token)",
        "in_context_learning_score": "in-context-learning\nscore (nats)",
        "best_induction_score": "best induction score\n(attention mass)",
    }
    figure, axes = plt.subplots(len(panels), 1, sharex=True, figsize=(7, 6.5), layout="constrained")
    for ax, (column, label) in zip(axes, panels.items(), strict=True):
        ax.plot(log["tokens"] / 1e6, log[column], marker=".", color="C0")
        ax.set_ylabel(label)
        ax.grid(alpha=0.3)
    axes[0].set_title(f"{job.model}: the induction phase change")
    axes[-1].set_xlabel("training tokens (millions)")
    job.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(job.out, dpi=150)
    return job.out


if __name__ == "__main__":
    print(main(tyro.cli(PhaseChange)))
