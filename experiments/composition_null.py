"""How far from chance do heads compose? The scores of a demo model against their null, per kind, as one figure.

Run: `interp run experiments/composition_null.py -p model=demo-4l`
"""

from dataclasses import dataclass
from functools import partial
from typing import get_args

import matplotlib.pyplot as plt
import numpy as np
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from interp.core.results import labelled
from interp.opening import OfModel
from interp.runs.record import Record
from interp.weights import HeadCircuits
from interp.weights.composition import Kind, Null, against_null


@dataclass(frozen=True)
class CompositionNull(OfModel):
    """Whose scores to draw, against which null."""

    model: str = "demo-attn-2l"
    """Demo name, local folder, safetensors file or hub name; of two layers at least."""
    null: Null = "spectrum"
    """What chance keeps of a head: its singular values, or its shape alone."""
    bins: int = 40
    """Ends of the bars of the histogram."""


def main(job: CompositionNull, record: Record) -> None:
    """Q-, K- and V-composition of all pairs of heads with their null, and the figure."""
    model = job.opened()
    record.model(model)
    circuits = HeadCircuits(model, folded=True)
    kinds: tuple[Kind, ...] = get_args(Kind)
    found = {kind: record.step(kind, partial(scores, circuits, kind, job.null)) for kind in kinds}
    record.figure("composition_null", figure(found, job))


def scores(circuits: HeadCircuits, kind: Kind, null: Null) -> xr.Dataset:
    """Of each pair of heads that can compose, `value` and `z`; the null's density `at` some, `chance`."""
    raw, law = against_null(circuits, kind, null=null)
    mean, sd = (x.expand_as(raw) for x in (law.mean(), law.sd()))
    exists = raw.isfinite() & sd.isfinite()
    top = float(torch.maximum(raw[exists], (mean + 4 * sd)[exists]).max()) * 1.02
    grid = torch.linspace(top / 1000, top, 1000, dtype=raw.dtype)
    chance = torch.stack([law.density(x).expand_as(raw)[exists].mean() for x in grid])
    values = {
        "value": (("pair",), raw[exists]), "z": (("pair",), ((raw - mean) / sd)[exists]),
        "at": (("point",), grid), "chance": (("point",), chance),
    }  # fmt: skip
    return labelled("composition_null", values, attrs={"null": null})


def figure(found: dict[Kind, xr.Dataset], job: CompositionNull) -> Figure:
    """A histogram of the scores and the density of the null per kind."""
    picture, axes = plt.subplots(len(found), 1, sharex=True, figsize=(7, 6.5), layout="constrained")
    for ax, (kind, table) in zip(axes, found.items(), strict=True):
        draw(ax, table, kind, job.bins)
    axes[0].set_title(f"{job.model}: composition against chance ({job.null} null)")
    axes[0].legend(frameon=False, loc="center right")
    axes[-1].set_xlabel("composition score, ||W1 W2|| / (||W1|| ||W2||)")
    return picture


def draw(ax: Axes, found: xr.Dataset, kind: Kind, bins: int) -> None:
    """One kind: its pairs, its null, and how many pairs lie beyond three standard deviations of it."""
    z = found.z.to_numpy()
    ax.hist(
        found.value.to_numpy(),
        bins=list(np.linspace(0, float(found["at"][-1]), bins)),
        density=True,
        color="C0",
        alpha=0.6,
        label="pairs of heads",
    )
    ax.plot(found["at"], found.chance, color="black", label="chance")
    ax.set_ylabel(f"{kind}\ndensity")
    above, below = (float(beyond.mean()) for beyond in (z > 3, z < -3))
    words = f"{len(z)} pairs\nz > 3: {above:.0%}\nz < -3: {below:.0%}"
    ax.text(0.98, 0.95, words, transform=ax.transAxes, ha="right", va="top")
    ax.grid(alpha=0.3)
