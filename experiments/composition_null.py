"""How far from chance do heads compose? The scores of a demo model against their null, per kind, as one figure.

Run: `interp run experiments/composition_null.py --model demo-4l --out out/composition_null.png`
"""

from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro
from matplotlib.axes import Axes

import interp
from interp.analyses.composition import Kind, Null, against_null


@dataclass(frozen=True)
class CompositionNull:
    """Whose scores to draw, against which null, and where to."""

    model: str = "demo-attn-2l"
    null: Null = "spectrum"
    bins: int = 40
    out: Path = Path("out/composition_null.png")


def main(job: CompositionNull) -> Path:
    """Draw a histogram of the scores and the density of the null, averaged over pairs, for Q, K and V."""
    model = interp.HookedTransformer.from_pretrained(job.model)
    circuits = interp.Circuits(model.transformer, folded=True)
    kinds: tuple[Kind, ...] = get_args(Kind)
    figure, axes = plt.subplots(len(kinds), 1, sharex=True, figsize=(7, 6.5), layout="constrained")
    for ax, kind in zip(axes, kinds, strict=True):
        draw(ax, circuits, kind, job)
    axes[0].set_title(f"{job.model}: composition against chance ({job.null} null)")
    axes[0].legend(frameon=False, loc="center right")
    axes[-1].set_xlabel("composition score, ||W1 W2|| / (||W1|| ||W2||)")
    job.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(job.out, dpi=150)
    return job.out


def draw(ax: Axes, circuits: interp.Circuits, kind: Kind, job: CompositionNull) -> None:
    """One kind: its pairs, its null, and how many pairs lie beyond three standard deviations of it."""
    raw, law = against_null(circuits, kind, null=job.null)
    mean, sd = (x.expand_as(raw) for x in (law.mean(), law.sd()))
    exists = raw.isfinite() & sd.isfinite()
    found, z = raw[exists], ((raw - mean) / sd)[exists]
    top = float(torch.maximum(found, (mean + 4 * sd)[exists]).max()) * 1.02
    grid = torch.linspace(top / 1000, top, 1000, dtype=raw.dtype)
    chance = torch.stack([law.density(x).expand_as(raw)[exists].mean() for x in grid])
    ax.hist(
        found,
        bins=list(np.linspace(0, top, job.bins)),
        density=True,
        color="C0",
        alpha=0.6,
        label="pairs of heads",
    )
    ax.plot(grid, chance, color="black", label="chance")
    ax.set_ylabel(f"{kind}\ndensity")
    above, below = (float(beyond.double().mean()) for beyond in (z > 3, z < -3))
    words = f"{len(z)} pairs\nz > 3: {above:.0%}\nz < -3: {below:.0%}"
    ax.text(0.98, 0.95, words, transform=ax.transAxes, ha="right", va="top")
    ax.grid(alpha=0.3)


if __name__ == "__main__":
    print(main(tyro.cli(CompositionNull)))
