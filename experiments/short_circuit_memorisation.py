"""Where do memorised strings need attention? A demo model's facts with attention short-circuited, by depth.

Every range of layers in turn lets each token attend to itself alone (Menta et al. 2025, arXiv:2501.05078). Watched are
the facts that the model learned by heart, in a trained wording (those that greedy decoding writes exactly), and what is
no memory of a string: the same facts in a wording that no training text contains, names from the sentence itself,
repeated random tokens, and prose written for this file. Late blocks that carry memory alone would cost the first and
spare the others.

Run: `interp run experiments/short_circuit_memorisation.py -p model=demo-4l`
"""

from dataclasses import dataclass
from functools import partial
from itertools import combinations_with_replacement

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import interp
from interp import Batch, plot, tasks
from interp.causal import continuations, recall
from interp.opening import OfModel
from interp.runs.record import Record

MEMORISED = "memorised facts"
PROSE = (
    "The old man sat by the window and watched the rain fall on the street.",
    "She had never been so far from home, and the thought made her afraid.",
    "“I do not know what you mean,” said the girl, and she turned away.",
    "In the morning the soldiers crossed the river and went into the village.",
    "He opened the door, looked into the dark room and called her name.",
    "They talked for a long time about the war and about their friends.",
    "Her brother was a good man, but he could not keep his money.",
    "The horse stopped on the hill, and no one knew which way to go.",
    "It was late in the evening when the doctor came to see the child.",
    "“You must come with us,” he said, “for the night will be cold.”",
    "The young officer smiled, took her hand and led her to the table.",
    "All the houses in the town were empty, and the fires had gone out.",
    "She read the letter twice and then put it into the fire.",
    "My father never spoke of it again, and I did not ask him.",
    "The great hall was full of people who had come to hear him.",
    "When the music stopped, everyone turned to look at the stranger.",
    "He was tired and hungry, but he was happy to be alive.",
    "There was nothing to be done, and so they waited for the morning.",
    "The cat lay under the chair and did not move when they came in.",
    "At last the ship came into the harbour with its flags flying.",
)
"""Prose that no training text contains, in the manner of the novels that the demo models have read."""


@dataclass(frozen=True)
class ShortCircuit(OfModel):
    """Whose memory to test, and on how much."""

    model: str = "demo-4l"
    """A model that was trained on the package's facts."""
    facts: int | None = None
    """How many of the package's facts, the first ones; None: all."""
    sentences: int = 200
    """Sentences with an indirect object."""
    repeats: int = 50
    """Rows of 25 random tokens, twice."""
    seed: int = 0
    """Of wordings, sentences and random tokens."""


def main(job: ShortCircuit, record: Record) -> None:
    """Short-circuit every range of layers, keep the table and the figure; say single layers and all of them."""
    model = job.opened()
    record.model(model)
    results = {
        name: record.step("-".join(name.replace(",", "").split()), partial(recited, model, name, *some))
        for name, some in material(model, job).items()
    }
    table = pd.concat([interp.frame(result).assign(material=name) for name, result in results.items()])
    record.table("recall", table)
    record.figure("recall", figure(results, job.model))
    shown = ["exact_match", "token_accuracy", "loss", "loss_change", "entropy"]
    wide = table.pivot(index=["material", "n", "part"], columns="score", values="value")[shown].reset_index()
    everything = "+".join(f"L{layer}.attn" for layer in range(model.cfg.n_layers))
    single = wide[(wide.part == everything) | ~wide.part.str.contains("+", regex=False)]
    record.say(single.round(3).to_string(index=False))


def recited(model: interp.HookedTransformer, name: str, batch: Batch, span: Tensor) -> xr.Dataset:
    """How well one kind of material is recalled with every range of layers short-circuited."""
    if name == MEMORISED:
        batch, span = known(model, batch, span)
    ranges = combinations_with_replacement(range(model.cfg.n_layers), 2)
    return recall(model, batch, span, [range(a, b + 1) for a, b in ranges])


def material(model: interp.HookedTransformer, job: ShortCircuit) -> dict[str, tuple[Batch, Tensor]]:
    """Prompts with their continuations, by what recalling them takes; facts once each, for rows must be independent.

    Which of the first kind are memorised is not known yet.
    """
    generator, facts = np.random.default_rng(job.seed), tasks.load_facts()[: job.facts]
    worded = [
        tasks.FactPrompt(fact, str(generator.choice(tasks.TRAINED_PHRASINGS[fact.relation])))
        for fact in facts
    ]
    sentences = tasks.IndirectObjects(job.sentences, held_out=True).sentences(generator)
    prose = model.to_batch(PROSE)
    return {
        MEMORISED: continuations(model, [(p.prompt, f"{p.answer}.") for p in worded]),
        "facts, unseen wording": continuations(
            model, [(p.prompt, f"{p.answer}.") for p in tasks.fact_prompts(tasks.HELD_OUT_PHRASINGS, facts)]
        ),
        "names, unseen pairs": continuations(model, [(s.prompt, s.answer) for s in sentences]),
        "repeated random tokens": repeated(model, generator, job.repeats),
        "unseen prose": (prose, prose.real & (torch.arange(prose.tokens.shape[1]) > 0)),
    }


def repeated(model: interp.HookedTransformer, generator: np.random.Generator, n: int) -> tuple[Batch, Tensor]:
    """BOS and 25 random tokens, twice; the second copy but for its first token, which nothing announces."""
    period, bos = 25, model.text.bos_id
    tokens = tasks.RepeatedTokens(period, 2, n).tokens(model.cfg.d_vocab, bos=bos, generator=generator)
    column = torch.arange(tokens.shape[1])
    return Batch(tokens), (column > period + 1).expand(tokens.shape)


def known(model: interp.HookedTransformer, batch: Batch, span: Tensor) -> tuple[Batch, Tensor]:
    """Those that the whole model completes exactly."""
    match = recall(model, batch, span, [0])["each"].sel(part="none", score="exact_match").to_numpy()
    kept = torch.from_numpy(match == 1).nonzero()[:, 0]
    return batch.rows(kept), span[kept]


def figure(results: dict[str, xr.Dataset], model: str) -> Figure:
    """Token accuracy and added loss by layer for all material, and two maps over ranges of layers."""
    picture, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for name, result in results.items():
        plot.recall_curve(result, ax=axes[0, 0])
        added_loss(axes[0, 1], result, f"{name} (n = {result.sizes['prompt']})")
    axes[0, 1].legend(fontsize="small")
    axes[0, 0].set_ylim(-0.03, 1.03)
    for ax, name in zip(axes[1], (MEMORISED, "repeated random tokens"), strict=True):
        plot.recall_map(results[name], ax=ax)
        ax.set_title(f"{name}, {ax.get_title()}")
    picture.suptitle(f"{model} with attention short-circuited; whiskers: 95 % over prompts")
    return picture


def added_loss(ax: Axes, result: xr.Dataset, label: str) -> None:
    """By how much each single layer's short-circuit raises the loss, with the interval of the difference."""
    single = [part for part in result.part.values.tolist() if part != "none" and "+" not in part]
    some = result.sel(part=single, score="loss_change")
    ends = np.abs(np.stack((some.low, some.high)) - some.value.to_numpy())
    ax.errorbar(single, some.value, yerr=ends, marker="o", capsize=3, label=label)
    ax.set_xlabel("short-circuited part")
    ax.set_ylabel("added loss (nats per token)")
    ax.grid(alpha=0.3)
