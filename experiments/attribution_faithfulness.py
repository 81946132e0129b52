"""Which token attribution can be believed? Remove the tokens each names, on indirect-object sentences.

Comprehensiveness (removing a method's top tokens, more is better) and sufficiency (keeping only them, less is better)
of every method against random orders, as bars with 95 % intervals over prompts.

Run: `interp run experiments/attribution_faithfulness.py --model demo-4l --out out/attribution_faithfulness.png`
"""

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import tyro
import xarray as xr
from matplotlib.axes import Axes

import interp
from interp.analyses.faithfulness import RANDOM, Erasure, Measure, compare_methods
from interp.zoo.tasks import indirect_objects


@dataclass(frozen=True)
class AttributionFaithfulness:
    """Whose attributions to compare, on how many prompts, and where the figure and the table go."""

    model: str = "demo-4l"
    prompts: int = 32
    measure: Measure = "logits"
    """What a removal is to change: the logit difference of the two names, or the answer's probability."""
    seed: int = 0
    out: Path = Path("out/attribution_faithfulness.png")


def main(job: AttributionFaithfulness) -> Path:
    """Compare all methods, draw them by comprehensiveness, and write the numbers beside the figure."""
    model = interp.HookedTransformer.from_pretrained(job.model)
    asked = indirect_objects(np.random.default_rng(job.seed), job.prompts, held_out=True)
    result = compare_methods(
        model,
        [one.prompt for one in asked],
        [one.answer for one in asked],
        [one.wrong for one in asked],
        erasure=Erasure(measure=job.measure),
        batch_size=128,
    )
    result = result.sortby("comprehensiveness")
    figure, axes = plt.subplots(1, 2, sharey=True, figsize=(9, 4.2), layout="constrained")
    unit = {"logits": "logit difference", "probability": "probability of the answer"}[job.measure]
    for ax, name, good in zip(axes, ("comprehensiveness", "sufficiency"), ("more", "less"), strict=True):
        draw(ax, result, name)
        ax.set_xlabel(f"fall of the {unit} ({good} is better)")
    figure.suptitle(f"{job.model}: faithfulness of token attribution, {job.prompts} indirect-object prompts")
    job.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(job.out, dpi=150)
    numbers = result.drop_vars(["comprehensiveness_each", "sufficiency_each"])
    numbers.to_dataframe().to_csv(job.out.with_suffix(".csv"))
    return job.out


def draw(ax: Axes, result: xr.Dataset, name: str) -> None:
    """One bar per method with its interval; random orders as a line through all of them."""
    mean = result[name].to_numpy()
    ends = np.abs(np.stack((result[f"{name}_low"], result[f"{name}_high"])) - mean)
    methods = [str(method) for method in result.attribution.values]
    colours = ["C7" if method == RANDOM else "C0" for method in methods]
    ax.barh(methods, mean, xerr=ends, color=colours, capsize=3, height=0.7)
    ax.axvline(mean[methods.index(RANDOM)], color="black", linewidth=0.8, linestyle="--")
    ax.set_title(name)
    ax.grid(axis="x", alpha=0.3)


if __name__ == "__main__":
    print(main(tyro.cli(AttributionFaithfulness)))
