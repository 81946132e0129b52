"""How early can a model's answer be read off its stream? Logit lens against tuned lens, by depth, on held-out prompts.

Run: `interp run experiments/tuned_lens.py -p model=demo-4l`

The translators are trained on generated sentences (facts in trained phrasings, indirect objects) and on texts that the
model itself samples, for no corpus is shipped. Held out: facts in phrasings no training text contains, and sentences
with pairs of names that occur in none.
"""

from dataclasses import dataclass, replace

import matplotlib.pyplot as plt
import numpy as np
import xarray as xr
from matplotlib.figure import Figure
from torch import Tensor

import interp
from interp import plot, tasks
from interp.lenses import TunedLens, by_depth, train_tuned_lens
from interp.opening import OfModel
from interp.passes import Sampling
from interp.runs.record import Record


@dataclass(frozen=True)
class TunedLensRun(OfModel):
    """Whose lens to tune, and how long."""

    steps: int = 400
    """Optimiser steps of 16 rows."""
    sampled: int = 256
    """Texts that the model writes itself, 48 tokens each."""
    sentences: int = 768
    """Generated training sentences of each kind."""
    held_out: int = 150
    """Held-out prompts of each kind."""
    seed: int = 0
    """Seed of the sentences, the samples and the order of the rows."""


def main(job: TunedLensRun, record: Record) -> None:
    """Train, and compare on held-out prompts; the figure, and the curves in words."""
    model = job.opened()
    record.model(model)
    trained = record.step("lens", lambda: translators(model, job))
    tuned = replace(TunedLens.untrained(model), weight=trained["weight"], bias=trained["bias"])
    curves = record.step("curves", lambda: compared(model, tuned, held_out(job)))
    record.figure("tuned_lens", figure(job.model, curves))
    shown = interp.frame(curves.sel(score=["kl", "target_prob"]))
    record.say(shown[["lens", "depth", "score", "value", "low", "high"]].round(3).to_string(index=False))


def translators(model: interp.HookedTransformer, job: TunedLensRun) -> dict[str, Tensor]:
    """The trained fields of a `TunedLens`: `replace(TunedLens.untrained(model), **record.result("lens"))` is it."""
    tuned = train_tuned_lens(model, texts(model, job), steps=job.steps, seed=job.seed)
    return {"weight": tuned.weight, "bias": tuned.bias}


def figure(name: str, curves: xr.Dataset) -> Figure:
    """Both lenses: how far from the last depth, and how sure of the answer."""
    picture, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for lens in curves.lens.values:
        for ax, score in zip(axes, ("kl", "target_prob"), strict=True):
            plot.lens_curve(curves.sel(lens=lens), score, label=str(lens), ax=ax)
    picture.suptitle(f"{name}, held-out prompts")
    return picture


def texts(model: interp.HookedTransformer, job: TunedLensRun) -> list[str]:
    """What the translators learn from."""
    generator = np.random.default_rng(job.seed)
    facts = tasks.fact_prompts()
    chosen = [facts[i].text for i in generator.permutation(len(facts))[: job.sentences]]
    names = [sentence.text for sentence in tasks.IndirectObjects(job.sentences).sentences(generator)]
    starts = [" ".join(text.split()[:1]) for text in (chosen + names)]
    prompts = [starts[i] for i in generator.permutation(len(starts))[: job.sampled]]
    written = model.generate(model.to_batch(prompts), 48, sampling=Sampling(seed=job.seed))
    return chosen + names + model.to_texts(written)


def held_out(job: TunedLensRun) -> tuple[list[str], list[str]]:
    """Prompts that no training text contains, and their answers."""
    generator = np.random.default_rng(job.seed + 1)
    facts = tasks.fact_prompts(tasks.HELD_OUT_PHRASINGS)
    chosen = [facts[i] for i in generator.permutation(len(facts))]
    names = tasks.IndirectObjects(job.held_out, held_out=True).sentences(generator)
    every = [*chosen[: job.held_out], *names]
    return [one.prompt for one in every], [one.answer for one in every]


def compared(
    model: interp.HookedTransformer, tuned: TunedLens, prompts: tuple[list[str], list[str]]
) -> xr.Dataset:
    """The curves over depth of both lenses, at the last token of the held-out prompts; the target is the first token of
    the answer.
    """
    batch = model.to_batch(prompts[0])
    answers = [model.text.ids(answer, prepend_bos=False)[0] for answer in prompts[1]]
    lenses = {"logit lens": None, "tuned lens": tuned}
    curves = [
        by_depth(interp.logit_lens(model, batch, answer=answers, pos=-1, translators=lens))
        for lens in lenses.values()
    ]
    return xr.concat(curves, xr.DataArray(list(lenses), dims="lens", name="lens"))
