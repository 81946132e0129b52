"""Which token attribution can be believed? Remove the tokens each names, on indirect-object sentences.

Comprehensiveness (removing a method's top tokens, more is better) and sufficiency (keeping only them, less is better)
of every method against random orders, as bars with 95 % intervals over prompts.

Run: `interp run experiments/attribution_faithfulness.py -p model=demo-4l`
"""

from dataclasses import dataclass

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import interp
from interp.opening import OfModel
from interp.runs.record import Record
from interp.tasks import IndirectObjects
from interp.tokens.erasure import RANDOM, ErasureMeasure, compare_methods


@dataclass(frozen=True)
class AttributionFaithfulness(OfModel):
    """Whose attributions to compare, and on how many prompts."""

    prompts: int = 32
    """How many sentences; the two names were never together in training."""
    measure: ErasureMeasure = "logits"
    """What a removal is to change: the logit difference of the two names, or the answer's probability."""
    seed: int = 0
    """Seed of the sentences."""


def main(job: AttributionFaithfulness, record: Record) -> None:
    """Compare all methods, and keep the numbers by comprehensiveness beside the figure."""
    model = job.opened()
    record.model(model)
    asked = IndirectObjects(job.prompts, job.seed, held_out=True).sentences()
    found = record.step(
        "faithfulness",
        lambda: compare_methods(
            model,
            model.to_batch([one.prompt for one in asked]).split(128),
            [one.answer for one in asked],
            [one.wrong for one in asked],
            measure=job.measure,
        ),
    )
    found = found.sortby(found.value.sel(score="comprehensiveness"))
    record.figure("faithfulness", figure(found, job))
    record.table("faithfulness", interp.frame(found))


def figure(result: xr.Dataset, job: AttributionFaithfulness) -> Figure:
    """Both measures as bars, one row per method."""
    picture, axes = plt.subplots(1, 2, sharey=True, figsize=(9, 4.2), layout="constrained")
    unit = {"logits": "logit difference", "probability": "probability of the answer"}[job.measure]
    for ax, name, good in zip(axes, ("comprehensiveness", "sufficiency"), ("more", "less"), strict=True):
        draw(ax, result.sel(score=name), name)
        ax.set_xlabel(f"fall of the {unit} ({good} is better)")
    picture.suptitle(f"{job.model}: faithfulness of token attribution, {job.prompts} indirect-object prompts")
    return picture


def draw(ax: Axes, result: xr.Dataset, name: str) -> None:
    """One bar per method with its interval; random orders as a line through all of them."""
    mean = result.value.to_numpy()
    ends = np.abs(np.stack((result.low, result.high)) - mean)
    methods = [str(method) for method in result.attribution.values]
    colours = ["C7" if method == RANDOM else "C0" for method in methods]
    ax.barh(methods, mean, xerr=ends, color=colours, capsize=3, height=0.7)
    ax.axvline(mean[methods.index(RANDOM)], color="black", linewidth=0.8, linestyle="--")
    ax.set_title(name)
    ax.grid(axis="x", alpha=0.3)
