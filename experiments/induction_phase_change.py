"""When do induction heads form, in which models, and is it they that learn from context?

Olsson et al. 2022 watched small models over training: with two layers the in-context-learning score falls all at once,
together with the rise of prefix matching; with one layer it never does, unless keys can carry the token before. Here
the same on a language that a laptop can train on: a fixed random bigram chain whose rows repeat. What the chain allows
is learned by heart, the rest only from the context. Models with one and two layers, with smeared keys, with and
without MLPs, over log-spaced updates; at the end every head is ablated with all patterns preserved.

Run: `interp run experiments/induction_phase_change.py -p seeds=3` (about 20 CPU minutes; `--shard 1/2` takes half)
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import interp
from interp import Batch
from interp.causal import ablate
from interp.dynamics import in_context
from interp.families.convert import AnyModel
from interp.lab.training import Training, train
from interp.metrics import next_token_loss
from interp.model import MLP, ModelConfig, Rotary, Softmax, Transformer
from interp.runs.record import Record
from interp.tasks import Place, RepeatingChain

TRAINING = Training(steps=3000, rows=32, learning_rate=3e-3, checkpoints=40, log_every=100_000)


@dataclass(frozen=True)
class PhaseChange:
    """How large and how long."""

    seeds: int = 3
    """Runs of every model."""
    d_model: int = 64
    """Width of the stream; four heads."""
    d_vocab: int = 64
    """Token ids."""
    width: int = 64
    """Tokens of a row."""
    training: Training = TRAINING
    """How each is trained; `seed` is that of the first run."""


def models(job: PhaseChange) -> dict[str, ModelConfig]:
    """What is compared."""
    one = ModelConfig(1, job.d_model, 4, job.width, job.d_vocab, position=Rotary())
    plain = {
        "1 layer": one,
        "1 layer, smeared keys": replace(one, mixer=Softmax(smeared_keys=True)),
        "2 layers": replace(one, n_layers=2),
    }
    with_mlp = {f"{name}, MLP": replace(c, mlp=MLP(4 * job.d_model)) for name, c in plain.items()}
    return plain | with_mlp


def main(job: PhaseChange, record: Record) -> None:
    """Train every model, watch it, ablate its heads; keep tables and figures."""
    data, logs, heads = RepeatingChain(job.d_vocab, job.width), [], []
    for seed in range(job.seeds):
        for name, config in models(job).items():
            model_seed = job.training.seed + seed
            label = f"seed{model_seed}-{name.replace(' ', '-').replace(',', '')}"
            done = partial(watched, config, data, replace(job.training, seed=model_seed))
            found = record.step(label, done)
            logs.append(found[found["head"] < 0].assign(model=name, seed=model_seed))
            heads.append(found[found["head"] >= 0].assign(model=name, seed=model_seed))
    log, scored = pd.concat(logs, ignore_index=True), pd.concat(heads, ignore_index=True)
    record.table("log", log.drop(columns=["layer", "head", "part", "ablation"]))
    record.table("heads", scored[["model", "seed", "part", "induction", "previous_token", "ablation"]])
    record.figure("phase_change", curves(log))
    record.figure("ablation", ablations(scored))
    record.say(summary(log).to_string())


def watched(config: ModelConfig, data: RepeatingChain, training: Training) -> pd.DataFrame:
    """The log of one training, and below it a row for every head of the finished model."""
    rows = data.batch(Place(training.seed + 1, None), 128).batch
    trained = train(config, data, training, evaluate=partial(measured, rows=rows))
    model = trained.model
    assert isinstance(model, Transformer)
    scores = head_table(model)
    ablated = ablate(
        interp.HookedTransformer(deepcopy(model)), rows, "head",
        change=interp.edits.Zero(), freeze_patterns=True, metric=next_token_loss(),
    )  # fmt: skip
    scores = scores.join(interp.frame(ablated).set_index("part").value.rename("ablation"), on="part")
    return pd.concat(
        [trained.log.assign(layer=-1, head=-1, part="", ablation=np.nan), scores], ignore_index=True
    )


def measured(model: AnyModel, step: int, rows: Batch) -> dict[str, float]:
    """In-context learning and the best heads, at one point of training."""
    assert isinstance(model, Transformer)
    found = in_context(interp.HookedTransformer(deepcopy(model)), rows, early=8, late=60)
    score = found.sel(score="in_context", index=60)
    best = head_table(model)[["induction", "previous_token"]].max()
    return {
        "in_context": float(score.value), "low": float(score.low), "high": float(score.high),
        **{str(name): float(value) for name, value in best.items()},
    }  # fmt: skip


def head_table(model: Transformer) -> pd.DataFrame:
    """Prefix matching and attention to the token before, on random tokens that repeat, a row per head."""
    found = interp.heads(model, repeats=interp.tasks.RepeatedTokens(period=15, repeats=4), sentences=None)
    scores = interp.frame(found.value.sel(score=["induction", "previous_token"]))
    table = scores.pivot(index=["layer", "head", "part"], columns="score", values="value")
    return table.reset_index().rename_axis(columns=None)


def summary(log: pd.DataFrame) -> pd.DataFrame:
    """Where each model ends: mean over seeds, and the smallest and largest."""
    last = log[log.step == log.step.max()].groupby("model", sort=False)
    columns = ["held_out_loss", "accuracy", "in_context", "induction"]
    return last[columns].agg(["mean", "min", "max"]).round(3)


def curves(log: pd.DataFrame) -> Figure:
    """Loss, in-context-learning score and best prefix matching against updates; a line per seed."""
    panels = {
        "held_out_loss": "held-out loss (nats/token)",
        "in_context": "in-context-learning score (nats)",
        "induction": "best prefix-matching score",
    }
    names = list(dict.fromkeys(log.model))
    sides = [[n for n in names if "MLP" not in n], [n for n in names if "MLP" in n]]
    picture, axes = plt.subplots(3, 2, sharex=True, sharey="row", figsize=(9, 8), layout="constrained")
    for column, side in enumerate(sides):
        axes[0, column].set_title("attention only" if column == 0 else "with MLPs")
        for row, (what, label) in enumerate(panels.items()):
            for colour, name in enumerate(side):
                draw(axes[row, column], log[log.model == name], what, f"C{colour}", name)
            axes[row, column].grid(alpha=0.3)
            axes[row, 0].set_ylabel(label)
        axes[2, column].set(xscale="symlog", xlabel="updates")
        axes[0, column].legend()
    return picture


def draw(ax: Axes, log: pd.DataFrame, what: str, colour: str, name: str) -> None:
    """One line per seed; the legend names the first."""
    for i, (_, one) in enumerate(log.groupby("seed")):
        ax.plot(one.step, one[what], color=colour, label=name if i == 0 else None, alpha=0.8, lw=1.2)


def ablations(heads: pd.DataFrame) -> Figure:
    """What each head is worth, patterns preserved, against how well it matches prefixes."""
    picture, ax = plt.subplots(figsize=(6, 4.5), layout="constrained")
    for i, (name, some) in enumerate(heads.groupby("model", sort=False)):
        ax.scatter(
            some.induction, some.ablation, label=name, color=f"C{i % 3}", marker="os"[i // 3], alpha=0.8
        )
    ax.set(xlabel="prefix-matching score of the head", ylabel="effect of a zero on the loss (nats/token)")
    ax.axhline(0, color="grey", lw=0.8)
    ax.legend(fontsize=8)
    ax.grid(alpha=0.3)
    return picture
