"""Which ways of mixing positions form induction heads, and what do they cost?

Every mixer stands in the same two-layer model, gets an MLP as wide as makes the parameters equal, and reads the same
rows: half of them repeat a random bigram chain (induction), half ask for values by their keys (associative recall,
Arora et al. 2023). Measured on held-out rows: in-context-learning score, share of copies and of recalled values that
are right, the best prefix-matching score on the effective pattern, K-composition, seconds. Intervals are over seeds.
Where weights are no shares (lightning, differential, pooling: a norm follows, or they may be negative) the attention
scores count them as a_ij / sum_j |a_ij|, the part of all that a query weighs.

Run: `interp run experiments/mixers_and_induction.py -p seeds=3` (more than two CPU hours). Side by side: a run for each
seed with `-p seeds=1 -p training.seed=1`, then one with `-p seeds=0 -p joined=runs/NAME -p joined=runs/OTHER`.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from scipy import stats

import interp
from interp import Batch
from interp.dynamics import in_context
from interp.lab import (
    BigBird,
    Differential,
    Dilated,
    DualChunk,
    FixedBlocks,
    Lightning,
    Linear,
    Longformer,
    LongTermMemory,
    Polar,
    Pool,
    Reformer,
    SpatialGating,
    Strided,
    Synthesizer,
)
from interp.lab.training import Training, scores, train
from interp.model import MLP, GatedDelta, Mamba2, ModelConfig, NoPosition, Rotary, Softmax, Transformer
from interp.model.records import Mixer
from interp.runs.record import TABLES, Record
from interp.tasks import AssociativeRecall, Examples, Place, RepeatingChain

TRAINING = Training(steps=1000, rows=32, learning_rate=3e-3, log_every=500)
WIDTH = 65
COSTS = ("parameters", "train_seconds", "forward_ms")
"""Columns that say what a mixer costs."""
SOFTMAX = Softmax()
VARIANTS: dict[str, Mixer | tuple[Mixer, ...]] = {
    "softmax": SOFTMAX,
    "multi-query": SOFTMAX,
    "cosine": Softmax(score="cosine"),
    "additive": Softmax(score="additive"),
    "smeared keys": Softmax(smeared_keys=True),
    "refined": Softmax(refinement="additive"),
    "local": SOFTMAX,
    "dilated": Softmax(sparsity=Dilated(16, 2)),
    "strided": Softmax(sparsity=Strided(8)),
    "fixed blocks": Softmax(sparsity=FixedBlocks(16, 2)),
    "Longformer": Softmax(sparsity=Longformer(16, 1, 2)),
    "BigBird": Softmax(sparsity=BigBird(8, 3, 1, 1)),
    "LSH": Reformer(8, 2),
    "dual chunk": DualChunk(48, 32),
    "differential": Differential(),
    "synthesizer": Synthesizer("dense"),
    "linear": Linear(),
    "lightning": Lightning(),
    "lightning, softmax": (Lightning(), SOFTMAX),
    "polar": Polar(),
    "memory as a gate": LongTermMemory("gate"),
    "memory as context": LongTermMemory("context"),
    "gated delta": GatedDelta(4, 4, 16, 16, chunk=16),
    "state space": Mamba2(4, 4, 16, 16, chunk=16),
    "spatial gating": SpatialGating(),
    "pooling": Pool(),
}
"""By name; what a mixer alone does not say stands in `config_of`."""


@dataclass(frozen=True)
class MixersAndInduction:
    """How large, how long, which."""

    only: tuple[str, ...] = ()
    """Names of VARIANTS; none = all of them."""
    seeds: int = 3
    """Trainings of every variant, each from another seed."""
    joined: tuple[Path, ...] = ()
    """Folders of runs of this experiment, whose trainings join the table and the figure."""
    d_vocab: int = 64
    """Token ids."""
    training: Training = TRAINING
    """How each is trained; `seed` is that of the first run."""


@dataclass(frozen=True)
class RepeatsAndRecall:
    """Half of the rows repeat a random bigram chain, half ask for values by their keys."""

    d_vocab: int = 64
    """Token ids."""

    width = WIDTH

    @property
    def chain(self) -> RepeatingChain:
        """The rows that repeat."""
        return RepeatingChain(self.d_vocab, WIDTH)

    @property
    def recall(self) -> AssociativeRecall:
        """The rows of keys and values."""
        return AssociativeRecall(self.d_vocab, pairs=20, queries=12)

    def batch(self, place: Place, rows: int) -> Examples:
        """Rows of this place, those that repeat first."""
        one, two = self.chain.batch(place, rows - rows // 2), self.recall.batch(place, rows // 2)
        assert one.determined is not None and two.determined is not None
        tokens = torch.cat((one.batch.tokens, two.batch.tokens))
        return Examples(Batch(tokens, bos=True), torch.cat((one.determined, two.determined)))


def config_of(name: str, d_vocab: int) -> ModelConfig:
    """The model of a variant, its MLP as wide as makes all models equally large."""
    mixer = VARIANTS[name]
    first = mixer[0] if isinstance(mixer, tuple) else mixer
    base = ModelConfig(2, 64, 4, WIDTH, d_vocab, mlp=MLP(128))
    if isinstance(mixer, Lightning):  # it does not rotate; its decay tells the order
        base = replace(base, position=NoPosition())
    elif first.traits.queries:
        base = replace(base, position=Rotary())
    config = replace(
        base,
        mixer=mixer,
        n_kv_heads=1 if name == "multi-query" else None,
        window=16 if name == "local" else None,
    )
    spare = parameters(replace(base, position=Rotary(), mixer=SOFTMAX)) - parameters(config)
    per_neuron = base.n_layers * (2 * base.d_model + 1)
    return replace(config, mlp=MLP(128 + round(spare / per_neuron)))


def parameters(config: ModelConfig) -> int:
    """How many numbers are trained."""
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


def main(job: MixersAndInduction, record: Record) -> None:
    """Train every variant from every seed; keep a table and a figure."""
    data = RepeatsAndRecall(job.d_vocab)
    rows = [pd.read_parquet(folder / TABLES / "runs.parquet") for folder in job.joined]
    for seed in range(job.training.seed, job.training.seed + job.seeds):
        for name in job.only or VARIANTS:
            config, training = config_of(name, job.d_vocab), replace(job.training, seed=seed)
            label = f"seed{seed}-{name.replace(' ', '-').replace(',', '')}"
            rows.append(record.step(label, partial(measured, name, config, data, training)))
    table = pd.concat(rows, ignore_index=True)
    found = with_intervals(table)
    record.table("runs", table)
    record.table("mixers", found)
    record.figure("mixers", figure(table))
    record.say(found.round(3).to_string(index=False))


def measured(name: str, config: ModelConfig, data: RepeatsAndRecall, training: Training) -> pd.DataFrame:
    """Train one model and measure it: one row."""
    begun = time.process_time()
    trained = train(config, data, training)
    seconds = time.process_time() - begun
    model = trained.model
    assert isinstance(model, Transformer)
    held_out = Place(training.seed, None)
    chain, recall = data.chain.batch(held_out, 256), data.recall.batch(held_out, 256)
    context = in_context(interp.HookedTransformer(model), chain.batch, early=8, late=60)
    row = {
        "mixer": name,
        "seed": training.seed,
        "parameters": parameters(config),
        "in_context": float(context.value.sel(score="in_context", index=60)),
        "copies_right": scores(model, chain)["accuracy"],
        "recalled_right": scores(model, recall)["accuracy"],
        **best_heads(model),
        "k_composition": k_composition(model),
        "train_seconds": seconds,
        "forward_ms": timed(partial(model, chain.batch.tokens)),
    }
    return pd.DataFrame([row])


def best_heads(model: Transformer) -> dict[str, float]:
    """The best prefix-matching and previous-token scores of any head, on effective patterns; NaN without those."""
    if not all(mixer.traits.patterned for mixer in model.config.mixers):
        return {"induction": np.nan, "previous_token": np.nan}
    found = interp.heads(
        model, repeats=interp.tasks.RepeatedTokens(period=16, repeats=4), sentences=None
    ).value
    return {score: float(found.sel(score=score).max()) for score in ("induction", "previous_token")}


def k_composition(model: Transformer) -> float:
    """The largest K-composition over heads of the two layers, above its null; NaN where a circuit is missing."""
    first, second = (mixer.traits for mixer in model.config.mixers)
    if not (first.additive and first.bilinear and second.additive and second.bilinear):
        return float("nan")
    return float(interp.composition(model, "K").excess.max())


@torch.no_grad()
def timed(call: Callable[[], object], repeats: int = 5) -> float:
    """The median CPU milliseconds of a call."""
    times = []
    for _ in range(repeats):
        begun = time.process_time()
        call()
        times.append(1000 * (time.process_time() - begun))
    return float(np.median(times))


def with_intervals(table: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds with 95 % t-intervals, a row per mixer and score; beside them what the mixer costs."""
    grouped = table.drop(columns=["seed", *COSTS]).groupby("mixer", sort=False)
    mean, count = grouped.mean(), grouped.count()
    with np.errstate(invalid="ignore"):
        half = grouped.sem() * stats.t.ppf(0.975, (count - 1).where(count > 1))
    ends = {"value": mean, "low": mean - half, "high": mean + half, "n": count}
    found = pd.concat({name: each.stack() for name, each in ends.items()}, axis=1)
    costs = table.groupby("mixer", sort=False)[list(COSTS)].mean()
    return found.rename_axis(["mixer", "score"]).reset_index().join(costs, on="mixer")


def figure(table: pd.DataFrame) -> Figure:
    """Every run as a dot, every mean as a line, mixers in order of their in-context learning."""
    panels = {
        "in_context": "in-context-learning\nscore (nats)",
        "copies_right": "copies right",
        "recalled_right": "values recalled",
        "induction": "best prefix-\nmatching score",
        "previous_token": "best previous-\ntoken score",
    }
    order = table.groupby("mixer").in_context.mean().sort_values(ascending=False).index
    picture, axes = plt.subplots(
        1, len(panels), sharey=True, figsize=(12, 0.27 * len(order) + 1.2), layout="constrained"
    )
    for ax, (column, label) in zip(axes, panels.items(), strict=True):
        for y, name in enumerate(order):
            values = table[table.mixer == name][column]
            ax.plot(values, [y] * len(values), "o", color="C0", alpha=0.6, ms=4)
            ax.plot([values.mean()] * 2, [y - 0.35, y + 0.35], color="C1", lw=2)
        ax.set_title(label, fontsize=9)
        ax.grid(alpha=0.3)
    axes[0].set_yticks(range(len(order)), order)
    axes[0].set_ylim(-0.7, len(order) - 0.3)
    return picture
