"""Which parts of a model learn new facts? A demo model is taught some, all its weights free, and asked where they are.

Every subject gets the object of another of its relation. The model is trained on the facts in the wordings that it
knows until it says the new objects; then each part's weights go from the taught model into the one before, and back
(`interp.editing.diff`): in a trained wording, in one that no text contains, and, as a control of what else changed, the
divergence on facts that nobody touched. If MLPs hold facts and attention moves them (Meng et al. 2022,
arXiv:2202.05262), the shares of MLPs are the larger ones; a share says what suffices, not where a fact is. The wordings
of one fact are no independent prompts: intervals over several of them are too narrow.

Run: `interp run experiments/what_changed.py -p facts=40`
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import xarray as xr
from matplotlib.figure import Figure
from torch import Tensor

import interp
from interp import Batch, plot, tasks
from interp.editing import changed_tokens, diff, diff_interactions
from interp.metrics import kl_divergence, logit_difference
from interp.model import mean_next_token_loss
from interp.opening import OfModel
from interp.runs.record import Record

RELATION = "capital"


@dataclass(frozen=True)
class WhatChanged(OfModel):
    """What is taught to which model, and for how long."""

    model: str = "demo-4l"
    """A model that was trained on the package's facts."""
    facts: int = 40
    """Facts that are changed; as many others are asked for control."""
    steps: int = 40
    """Updates, each on all facts in all trained wordings."""
    rate: float = 3e-4
    """Learning rate."""
    seed: int = 0
    """Which facts, and which objects they get."""


@dataclass(frozen=True)
class Taught:
    """A prompt with the object that it is taught and the one that was true."""

    prompt: str
    new: str
    old: str


def main(job: WhatChanged, record: Record) -> None:
    """Teach, exchange parts, keep the tables and the figure; say the shares."""
    model = job.opened()
    record.model(model)
    taught, unseen, control = material(job)
    state = record.step("taught", lambda: dict(tuned(model, taught, job).state_dict()))
    other = copy.deepcopy(model)
    other.transformer.load_state_dict(state)
    said = [
        {"wording": name, "model": which, "says the new object": says(each, asked)}
        for name, asked in {"trained": taught, "unseen": unseen}.items()
        for which, each in {"before": model, "after": other}.items()
    ]
    record.table("said", pd.DataFrame(said))
    found = {
        "trained wording": record.step("trained", partial(shares, model, other, taught)),
        "unseen wording": record.step("unseen", partial(shares, model, other, unseen)),
        "facts left alone": record.step(
            "control", lambda: diff(model, control, other, metric=kl_divergence())
        ),
    }
    table = pd.concat([interp.frame(result).assign(asked=name) for name, result in found.items()])
    record.table("shares", table)
    most = largest(found["trained wording"])
    pairs = record.step("interactions", partial(together, model, other, taught, most))
    record.table("interactions", interp.frame(pairs))
    places = record.step("tokens", lambda: changed_tokens(model, control, other, top=5))
    record.table("tokens", interp.frame(places))
    record.figure("shares", figure(found))
    record.say(pd.DataFrame(said).round(3).to_string(index=False))
    weights = table[(table.what == "weights") & (table.score == "share")]
    record.say(weights.pivot(index="part", columns="asked", values="value").round(2).to_string())


def material(job: WhatChanged) -> tuple[list[Taught], list[Taught], list[str]]:
    """The new facts in all trained wordings and in an unseen one, and prompts about facts that stay."""
    draw = np.random.default_rng(job.seed)
    known = [fact for fact in tasks.load_facts() if fact.relation == RELATION]
    chosen = [known[i] for i in draw.permutation(len(known))[: 2 * job.facts]]
    changed, left = chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]
    objects = {fact.subject: changed[i - 1].object for i, fact in enumerate(changed)}

    def asked(phrasings: dict[str, tuple[str, ...]] | None) -> list[Taught]:
        prompts = tasks.fact_prompts(phrasings or tasks.TRAINED_PHRASINGS, changed)
        return [Taught(p.prompt, f" {objects[p.fact.subject]}", p.answer) for p in prompts]

    control = [p.prompt for p in tasks.fact_prompts(tasks.TRAINED_PHRASINGS, left)]
    return asked(None), asked(dict(tasks.HELD_OUT_PHRASINGS)), control


@torch.enable_grad()
def tuned(
    model: interp.HookedTransformer, taught: Sequence[Taught], job: WhatChanged
) -> interp.model.Transformer:
    """The model after all updates, every weight free."""
    network = copy.deepcopy(model.transformer).requires_grad_(True)
    network.tie()
    batch = model.to_batch([f"{each.prompt}{each.new}." for each in taught])
    optimiser = torch.optim.AdamW(network.parameters(), lr=job.rate, weight_decay=0.0)
    for _ in range(job.steps):
        logits = network(batch.tokens, keep=batch.keep)
        optimiser.zero_grad()
        mean_next_token_loss(logits, batch.tokens, batch.keep).backward()
        optimiser.step()
    return network.requires_grad_(False)


def told(model: interp.HookedTransformer, taught: Sequence[Taught]) -> Batch:
    """The prompts with the first token of the new object and of the old one, where these differ."""
    encode = model.text.tokenizer.encode
    firsts = torch.tensor([[encode(each.new)[0], encode(each.old)[0]] for each in taught])
    differ = (firsts[:, 0] != firsts[:, 1]).nonzero()[:, 0]
    batch = model.to_batch([taught[i].prompt for i in differ.tolist()])
    return batch.with_answers(firsts[differ, 0], firsts[differ, 1])


def says(model: interp.HookedTransformer, taught: Sequence[Taught]) -> float:
    """The share of prompts whose most probable next token begins the new object."""
    batch = told(model, taught)
    assert batch.answer is not None
    logits: Tensor = model.transformer(batch.tokens, keep=batch.keep, logits_at=batch.last()[:, None])
    return float((logits[:, 0].argmax(-1) == batch.answer).double().mean())


def shares(
    model: interp.HookedTransformer, other: interp.HookedTransformer, taught: Sequence[Taught]
) -> xr.Dataset:
    """What each part does to the logit of the new object minus that of the old."""
    return diff(model, told(model, taught), other, metric=logit_difference())


def largest(found: xr.Dataset, count: int = 3) -> list[str]:
    """The parts whose weights have the largest shares."""
    cells = found.value.sel(what="weights", score="share").to_series()
    return [str(part) for part in cells.abs().nlargest(count).index]


def together(
    model: interp.HookedTransformer,
    other: interp.HookedTransformer,
    taught: Sequence[Taught],
    parts: Sequence[str],
) -> xr.Dataset:
    """What pairs of these parts do beyond the sum of both."""
    return diff_interactions(model, told(model, taught), other, list(parts), metric=logit_difference())


def figure(found: dict[str, xr.Dataset]) -> Figure:
    """The shares of every part, one panel per kind of prompt."""
    picture, axes = plt.subplots(len(found), 1, figsize=(10, 3.9 * len(found)), layout="constrained")
    for ax, (name, result) in zip(axes, found.items(), strict=True):
        plot.diff(result, ax=ax)
        ax.set_title(f"{name}, {ax.get_title()}")
    return picture
