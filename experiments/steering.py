"""Does a direction steer, or would any? What a question is about, turned into another, beside two nulls.

Prompts that ask for one relation of countries (their capital) against prompts that ask for another (their language)
give a direction in every layer, by each method, from half of the countries. Prompts of the other half are steered.
Beside each dose stand random directions of its length, and directions that the method finds in the same prompts where
which is which is shuffled: these know what prompts about countries look like, and are the harder null. A principal
component is nearly the same however the prompts are shuffled; beside it stand shuffled mean differences.

Run: `interp run experiments/steering.py`, two minutes on one CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

import matplotlib.pyplot as plt
import pandas as pd
import torch
import xarray as xr
from matplotlib.figure import Figure

import interp
from interp import plot
from interp.causal import Subspace, steering, steering_curve
from interp.causal.steering import RANDOM, SteeringMethod
from interp.opening import OfModel
from interp.runs.record import Record
from interp.tasks.facts import TRAINED_PHRASINGS, load_facts

METHODS = [method for method in get_args(SteeringMethod) if method != "dictionary"]
NULLS = ("random", "shuffled")


@dataclass(frozen=True)
class SteeringDose(OfModel):
    """Which relation is turned into which, by how much."""

    towards: str = "capital"
    """The relation that is steered towards."""
    away: str = "language"
    """The relation that the prompts ask for."""
    strengths: tuple[float, ...] = (0.5, 1.0, 2.0)
    """The doses."""
    countries: int = 60
    """How many countries are used, half of them for the direction."""
    draws: int = RANDOM
    """Directions of each null."""
    sentences: int = 8
    """Other texts, whose loss is the price."""
    seed: int = 0
    """Of the split of the prompts, the draws and the sentences."""


def main(job: SteeringDose, record: Record) -> None:
    """Find, steer, and keep the numbers as a table and a figure."""
    torch.set_num_threads(1)
    model = job.opened()
    record.model(model)
    curves = {
        (method, null): record.step(
            f"{method.replace(' ', '_')}_{null}", partial(curve, model, job, method, null)
        )
        for method in METHODS
        for null in NULLS
    }
    keys = ["value", "low", "high", "null", "p", "n", "norm"]
    parts = [
        interp.frame(found[keys]).assign(method=method, beside=null)
        for (method, null), found in curves.items()
    ]
    table = pd.concat(parts, ignore_index=True)
    record.table("steering", table)
    record.figure("steering", figure(curves, job))
    effects = table[(table.score == "effect") & (table.strength == job.strengths[len(job.strengths) // 2])]
    record.say(effects.pivot_table("p", ["method", "layer"], "beside", sort=False).round(3).to_string())


def curve(
    model: interp.HookedTransformer, job: SteeringDose, method: SteeringMethod, null: str
) -> xr.Dataset:
    """The dose curve of one method beside one null."""
    objects = {(fact.subject, fact.relation): fact.object for fact in load_facts()}
    countries = [c for c, kind in objects if kind == job.towards and (c, job.away) in objects][
        : job.countries
    ]
    positive, negative = (
        [way.format(subject=country) for country in countries[::2] for way in TRAINED_PHRASINGS[relation]]
        for relation in (job.towards, job.away)
    )
    found = steering(model, positive, negative, method=method, seed=job.seed)
    layers = found.layer.values.tolist()
    answers = [[_first(model, objects[c, kind]) for c in countries[1::2]] for kind in (job.towards, job.away)]
    kept = [i for i, (right, wrong) in enumerate(zip(*answers, strict=True)) if right != wrong]
    texts = interp.tasks.IndirectObjects(job.sentences, job.seed, held_out=True).sentences()
    beside = None
    if null == "shuffled":
        own: SteeringMethod = "mean difference" if method == "pca" else method
        others = steering(model, positive, negative, method=own, shuffles=job.draws, seed=job.seed).shuffled
        beside = [torch.from_numpy(others.sel(layer=layer).values) for layer in layers]
    return steering_curve(
        model,
        [TRAINED_PHRASINGS[job.away][0].format(subject=countries[1::2][i]) for i in kept],
        [Subspace.of_result(found, layer=layer) for layer in layers],
        strengths=job.strengths,
        metric=interp.logit_difference(*([each[i] for i in kept] for each in answers)),
        loss_on=[sentence.text for sentence in texts],
        random=job.draws,
        beside=beside,
        seed=job.seed,
    )


def _first(model: interp.HookedTransformer, word: str) -> int:
    """The first token of a word inside a text."""
    tokenizer = model.text.tokenizer
    assert tokenizer is not None
    return tokenizer.encode(f" {word}")[0]


def figure(curves: dict[tuple[SteeringMethod, str], xr.Dataset], job: SteeringDose) -> Figure:
    """Effects by method (to the right) beside each null (downwards), and the price beside random directions."""
    rows: Sequence[tuple[str, str]] = (("effect", "random"), ("effect", "shuffled"), ("loss", "random"))
    picture, axes = plt.subplots(
        3, len(METHODS), sharex=True, sharey="row", figsize=(4.2 * len(METHODS), 9.5), layout="constrained"
    )
    for row, (score, null) in zip(axes, rows, strict=True):
        for ax, method in zip(row, METHODS, strict=True):
            plot.steering_curve(curves[method, null], score, ax=ax)
            ax.set_title(f"{method}, beside {null}", fontsize=10)
    picture.suptitle(
        f"{job.model}: from {job.away} to {job.towards}; dotted: the middle 95 % of {job.draws} directions"
    )
    return picture
