"""How well do gradients predict what leaving training rows out does? Three estimates against training again.

A model of one layer learns a random bigram chain from a hundred rows. It is trained again without each of some random
groups of rows, everything else the same bits; held-out rows are measured. The effects are then predicted from the full
model alone, by gradient products, K-FAC and EK-FAC, and scored by the linear datamodeling score (Park et al. 2023).
Exact effects and predictions are means over seeds; how far the exact effects of two seeds agree says what one seed is
worth. `scale` is the factor by which predictions had to be multiplied (least squares through 0); 1 = as predicted.

Run: `interp run experiments/influence.py -p seeds=3` (80 seconds on one core; `-p processes=2` shares them)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import xarray as xr
from matplotlib.figure import Figure

from interp import plot
from interp.dynamics import influence, lds
from interp.dynamics.influence import InfluenceMethod
from interp.dynamics.lds import correlations, interval
from interp.lab.training import FixedRows, Training, leave_out, train
from interp.model import MLP, Learned, ModelConfig, Transformer
from interp.runs.record import Record
from interp.tasks import Examples, Place, RepeatingChain

TRAINING = Training(steps=200, rows=100, learning_rate=1e-3, warm_up=10, final_share=0.01)
METHODS: tuple[InfluenceMethod, ...] = ("dot", "kfac", "ekfac")


@dataclass(frozen=True)
class Influence:
    """How many rows, groups and models."""

    rows: int = 100
    """Rows of training."""
    queries: int = 30
    """Held-out rows that are measured."""
    groups: int = 30
    """Random groups that are left out, one after the other."""
    share: float = 0.2
    """Of the rows that a group has."""
    seeds: int = 3
    """First weights and orders of the rows over which effects are averaged."""
    d_vocab: int = 16
    """Token ids."""
    width: int = 10
    """Tokens of a row."""
    damping: float = 0.1
    """Of K-FAC and EK-FAC, as a share of each matrix' mean eigenvalue."""
    processes: int = 1
    """Worker processes; they change no number."""
    training: Training = TRAINING
    """How each is trained; `seed` is that of the first."""


def main(job: Influence, record: Record) -> None:
    """Train, leave out, predict, score; keep a table and a figure."""
    task = RepeatingChain(job.d_vocab, job.width, job.width - 2, job.width - 2, concentration=0.3)
    rows, queries = (
        Examples(task.batch(Place(0, step), n).batch) for step, n in ((0, job.rows), (1, job.queries))
    )
    config = ModelConfig(1, 16, 2, job.width, job.d_vocab, mlp=MLP(32), position=Learned())
    draw = np.random.default_rng(0)
    size = max(1, round(job.share * job.rows))
    groups = [sorted(draw.choice(job.rows, size, replace=False).tolist()) for _ in range(job.groups)]
    exact, predicted = [], dict[InfluenceMethod, list[xr.Dataset]]((method, []) for method in METHODS)
    for seed in range(job.training.seed, job.training.seed + job.seeds):
        plan = replace(job.training, seed=seed)
        again = partial(leave_out, config, rows, queries, groups, plan, processes=job.processes)
        exact.append(record.step(f"seed{seed}-exact", again))
        for method in METHODS:
            estimate = partial(estimated, config, rows, queries, plan, method, job.damping)
            predicted[method].append(record.step(f"seed{seed}-{method}", estimate))
    scores = {method: lds(mean(exact), mean(each)) for method, each in predicted.items()}
    table = pd.DataFrame([row(method, score) for method, score in scores.items()])
    table = pd.concat([table, pd.DataFrame(of_seeds(exact))], ignore_index=True)
    record.table("scores", table)
    record.figure("influence", figure(scores))
    record.say(table.round(3).to_string(index=False))


def estimated(
    config: ModelConfig,
    rows: Examples,
    queries: Examples,
    training: Training,
    method: InfluenceMethod,
    damping: float,
) -> xr.Dataset:
    """What the gradients of the model trained on all rows say."""
    model = train(config, FixedRows(rows, rows), training).model
    assert isinstance(model, Transformer)
    return influence(model, rows, queries, method=method, damping=damping)


def mean(found: Sequence[xr.Dataset]) -> xr.Dataset:
    """The same with effects averaged over seeds."""
    value, values = found[0].value, np.mean([each.value.to_numpy() for each in found], 0)
    return found[0].assign(value=(value.dims, values, value.attrs))


def row(method: str, score: xr.Dataset) -> dict[str, str | float]:
    """The score of an estimate, and its scale."""
    ours, exact = score.predicted.to_numpy(), score.exact.to_numpy()
    ends = {name: float(score[name]) for name in ("value", "low", "high")}
    return {"prediction": method, **ends, "scale": float((ours * exact).sum() / np.square(ours).sum())}


def of_seeds(exact: Sequence[xr.Dataset]) -> list[dict[str, str | float]]:
    """How the exact effects of the first seed correlate with those of the second."""
    if len(exact) < 2:
        return []
    one, other = (torch.tensor(each.value.to_numpy()).T for each in exact[:2])
    correlation, without = correlations(one, other)
    low, high = interval(correlation, without)
    scale = float((one * other).sum() / one.square().sum())
    ends = {"value": float(correlation.mean()), "low": float(low), "high": float(high)}
    return [{"prediction": "exact, another seed", **ends, "scale": scale}]


def figure(scores: Mapping[InfluenceMethod, xr.Dataset]) -> Figure:
    """Exact against predicted effects, a panel per method."""
    picture, axes = plt.subplots(1, len(scores), figsize=(4.2 * len(scores), 3.8), layout="constrained")
    for ax, score in zip(axes, scores.values(), strict=True):
        plot.influence(score, ax=ax)
    return picture
