"""Are features in fewer neurons where there are more? Sparse probes, proven best, over models of several sizes.

Gurnee et al. 2023 ask it of seven Pythia models: with size some features get neurons of their own, others split, many
stay as they are. Here the models of the package that have MLPs and read prose, or any others by name: what a question
asks (its capital, language, currency or continent) from one, two and four neurons of every layer at the last token,
beside the signs of superposition in the weights.

Run: `interp run experiments/probing_scale.py -p model=demo-4l -p smaller=demo-mlp-2l`
"""

from dataclasses import dataclass, replace
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import interp
from interp.features import probe_neurons
from interp.opening import OfModel
from interp.runs.record import Record
from interp.tasks import fact_prompts, load_facts
from interp.weights import superposition

RELATIONS = ("capital", "language", "currency", "continent")


@dataclass(frozen=True)
class ProbingScale(OfModel):
    """Whose neurons, and how many questions; `model` is the largest."""

    smaller: tuple[str, ...] = ()
    """Others with plain MLPs, small ones first; none = demo-mlp-2l."""
    prompts: int = 600
    """Questions, drawn from all there are."""
    most: int = 4
    """Neurons of the largest probe; the others read a half, a quarter, ... of them."""
    shuffles: int = 3
    """Repetitions with shuffled labels."""
    seed: int = 0
    """Of the draw, the splits and the shuffles."""


def main(job: ProbingScale, record: Record) -> None:
    """Probe every model, relation and layer; a table, a figure, and the best layers in words."""
    probes, signs = [], []
    for name in (*(job.smaller or ("demo-mlp-2l",)), job.model):
        model = replace(job, model=name).opened()
        record.model(model)
        neurons = int(getattr(model.cfg.mlp, "d_mlp", 0)) * model.cfg.n_layers
        for relation in RELATIONS:
            table = record.step(f"{name}-{relation}", partial(probed, model, relation, job))
            probes.append(table.assign(model=name, relation=relation, neurons=neurons))
        each = interp.frame(record.step(f"{name}-weights", partial(superposition, model)))
        signs.append(each.assign(model=name, depth=each.layer / max(1, model.cfg.n_layers - 1)))
    found, weights = pd.concat(probes, ignore_index=True), pd.concat(signs, ignore_index=True)
    record.table("probes", found)
    record.table("superposition", weights)
    record.figure("scale", figure(found, weights))
    record.say(best(found).round(2).to_string())


def probed(model: interp.HookedTransformer, relation: str, job: ProbingScale) -> pd.DataFrame:
    """F1 of the best few neurons of every layer for whether a question is about this."""
    every = fact_prompts(table=[fact for fact in load_facts() if fact.relation in RELATIONS])
    order = np.random.default_rng(job.seed).permutation(len(every))[: job.prompts]
    asked, sizes = [every[i] for i in order], [job.most >> i for i in reversed(range(job.most.bit_length()))]
    found = probe_neurons(
        model, [each.prompt for each in asked], [each.fact.relation == relation for each in asked],
        pos=-1, sizes=sizes, select="optimal", shuffles=job.shuffles, seed=job.seed,
    )  # fmt: skip
    return interp.frame(found.sel(score="f1"))[["layer", "n_neurons", "value", "low", "high", "null"]]


def best(found: pd.DataFrame) -> pd.DataFrame:
    """The highest F1 of any layer, a row per model and relation, a column per size."""
    return found.groupby(["model", "relation", "n_neurons"], sort=False).value.max().unstack()


def figure(found: pd.DataFrame, weights: pd.DataFrame) -> Figure:
    """F1 of the best layer by size, a panel per relation; norm times bias by depth."""
    picture, axes = plt.subplots(1, 5, figsize=(15, 3.2), layout="constrained")
    for ax, relation in zip(axes, RELATIONS, strict=False):
        for name, one in found[found.relation == relation].groupby("model", sort=False):
            top = one.loc[one.groupby("n_neurons").value.idxmax()]
            ends = [(top.value - top.low).clip(lower=0), (top.high - top.value).clip(lower=0)]
            ax.errorbar(
                top.n_neurons,
                top.value,
                ends,
                marker="o",
                capsize=2,
                label=f"{name}, {one.neurons.iloc[0]} neurons",
            )
            ax.plot(top.n_neurons, top.null, linestyle="--", linewidth=0.8, color=ax.lines[-1].get_color())
        ax.set(title=relation, xlabel="neurons read", ylim=(0, 1.02), xscale="log")
        ax.set_xticks(sorted(found.n_neurons.unique()), sorted(found.n_neurons.unique()))
        ax.minorticks_off()
    axes[0].set_ylabel("F1 of the best layer")
    axes[0].legend(fontsize="x-small", loc="lower right")
    for name, one in weights[weights.score == "norm_times_bias"].groupby("model", sort=False):
        axes[-1].plot(one.depth, one.value, marker="o", label=name)
    axes[-1].set(
        title="sign of superposition",
        xlabel="depth (0: first layer, 1: last)",
        ylabel="mean norm × bias of neurons",
    )
    axes[-1].legend(fontsize="x-small")
    return picture
