"""Which method finds the edges that matter? Five of them against each other, on what demo-4l can do.

Against circuits that are known by construction `python -m experiments.board` judges them.

The edges are scored on one half of the pairs and judged on the other. CPR and CMD are MIB's (Mueller et al. 2025), CPR
ranks by "helpful" and CMD by "magnitude". `spearman` and `overlap` compare an estimate with the exact effects on the
same pairs; in the row "exact" they compare the exact effects on two random halves of all pairs with each other, for
scale. Edges are corrupted in the clean run (direction "noise").

Run: `interp run experiments/circuit_benchmark.py -p pairs=32`
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import interp
from interp import tasks
from interp.causal import agreement
from interp.circuits import MIB_FRACTIONS, circuit_curve, score_edges
from interp.circuits.circuit_evaluation import KINDS
from interp.circuits.edge_rankings import resampled
from interp.data.batch import Prompts
from interp.metrics import Metric, logit_difference
from interp.opening import OfModel
from interp.runs.record import Record

Row = dict[str, str | float]
"""Cells of a table by column."""
METHODS = ("exact", "eap", "clean-corrupted", "eap-ig-inputs", "eap-ig-activations")
TASKS: dict[str, Callable[..., tasks.Task]] = {
    "indirect objects": partial(tasks.IndirectObjects, held_out=True),
    "facts": tasks.Facts,
    "repeated sequences": tasks.TASKS["repeated_sequences"],
    "copy": tasks.ListCopy,
}
"""Names of people that the model never saw together, and facts in phrasings that it was trained on."""


@dataclass(frozen=True)
class CircuitBenchmark(OfModel):
    """How many models, pairs and resamples."""

    model: str = "demo-4l"
    """Whose circuits of the tasks to find: demo name, local folder, safetensors file or hub name."""
    tasks: tuple[str, ...] = ()
    """Which of the four; none: all."""
    pairs: int = 32
    """Pairs of a task that score the edges, and as many others that judge the circuits."""
    top: int = 40
    """How many of the largest scores `overlap` compares."""
    share: float = 0.02
    """The share of all edges at which `faithfulness` is told; one of MIB's."""
    draws: int = 3
    """Random circuits of each kind beside those of a task."""
    resamples: int = 200
    """Bootstrap resamples of the pairs for `spearman` and `overlap`."""
    seed: int = 0
    """Seed of pairs, controls and resamples."""


@dataclass(frozen=True)
class Half:
    """Pairs of prompts and their metric."""

    clean: Prompts
    corrupt: Prompts
    metric: Metric


def main(job: CircuitBenchmark, record: Record) -> None:
    """Score, compare, judge; keep the table and the figure; say the table."""
    model = job.opened()
    record.model(model)
    tables = [
        record.step(f"task-{name.replace(' ', '-')}", partial(task_table, name, model, job))
        for name in job.tasks or TASKS
    ]
    judged = pd.concat(tables, ignore_index=True)
    record.table("tasks", judged)
    record.say(readable(judged).to_string(index=False))
    record.figure("benchmark", figure(judged, job))


def task_table(name: str, model: interp.HookedTransformer, job: CircuitBenchmark) -> pd.DataFrame:
    """One row per method and score; random circuits of each kind have the sizes that the exact scores lead to."""
    scoring, judging = halves(name, model, job)
    judge = partial(
        circuit_curve, model, judging.clean, judging.corrupt, metric=judging.metric, fractions=MIB_FRACTIONS,
        seed=job.seed,
    )  # fmt: skip
    scores = {method: scored(model, scoring, method) for method in METHODS}
    exact, other = scores["exact"], scored(model, judging, "exact")
    rows = []
    for method, table in scores.items():
        draws = job.draws if method == "exact" else 0
        curve, helpful = judge(table, draws=draws), judge(table, rank="helpful", draws=draws)
        for kind in curve.circuit.values.tolist():
            found = areas(curve.sel(circuit=kind), helpful.sel(circuit=kind), job.share)
            if kind == KINDS[0]:
                found += split_half(exact, other, job) if method == "exact" else compared(table, exact, job)
            who = {"task": name, "method": method if kind == KINDS[0] else kind}
            rows += [who | each for each in found]
    return pd.DataFrame(rows)


def halves(name: str, model: interp.HookedTransformer, job: CircuitBenchmark) -> tuple[Half, Half]:
    """Different pairs for the scores and for their judgement; facts may share a subject."""
    drawn = TASKS[name](rows=4 * job.pairs, seed=job.seed).pairs(model.text.tokenizer)
    rows = [*{pair: i for i, pair in enumerate(zip(drawn.clean, drawn.corrupt, strict=True))}.values()]
    if len(rows) < 2 * job.pairs:
        raise ValueError(f"{2 * job.pairs} different pairs of {name} are required, got {len(rows)}")
    first, second = (
        Half(
            [drawn.clean[i] for i in some], [drawn.corrupt[i] for i in some],
            logit_difference(drawn.answer[some], drawn.wrong[some]),
        )
        for some in (rows[: job.pairs], rows[job.pairs : 2 * job.pairs])
    )  # fmt: skip
    return first, second


def scored(model: interp.HookedTransformer, half: Half, method: str) -> xr.Dataset:
    """The scores of all edges, pair by pair."""
    return score_edges(
        model, half.clean, half.corrupt, metric=half.metric, method=method, direction="noise", each=True,  # type: ignore[arg-type]
    )  # fmt: skip


def areas(curve: xr.Dataset, helpful: xr.Dataset, share: float) -> list[Row]:
    """CPR, CMD and the faithfulness of a small circuit, each with its interval."""
    whole = (("cpr", helpful.isel(fraction=-1)), ("cmd", curve.isel(fraction=-1)))
    cells = [(score, table.sel(score=score)) for score, table in whole]
    cells.append(("faithfulness", curve.sel(score="faithfulness", fraction=share)))
    return [
        {"score": score, **{end: float(cell[end]) for end in ("value", "low", "high")}}
        for score, cell in cells
    ]


def compared(estimate: xr.Dataset, exact: xr.Dataset, job: CircuitBenchmark) -> list[Row]:
    """Rank correlation and top overlap of scores of the same pairs, 95 % by bootstrap over them."""
    weights = resampled(job.pairs, job.resamples, np.random.default_rng(job.seed))
    correlation, overlap = agreements(means(estimate, weights), means(exact, weights), job.top)
    return [interval("spearman", correlation), interval("overlap", overlap)]


def split_half(one: xr.Dataset, other: xr.Dataset, job: CircuitBenchmark) -> list[Row]:
    """The same for exact effects of random halves of all pairs: the mean over halvings, and their middle 95 %."""
    every, generator = xr.concat([one[["each"]], other[["each"]]], "prompt"), np.random.default_rng(job.seed)
    orders = np.stack([generator.permutation(2 * job.pairs) for _ in range(job.resamples)])
    first = torch.from_numpy(orders < job.pairs).double() / job.pairs
    found = agreements(means(every, first), means(every, 1 / job.pairs - first), job.top)
    correlation, overlap = torch.cat((found.mean(1, keepdim=True), found), 1)
    return [interval("spearman", correlation), interval("overlap", overlap)]


def means(table: xr.Dataset, weights: Float[Tensor, "w n"]) -> Float[Tensor, "w sender receiver"]:
    """The mean scores under every weighting of the pairs."""
    return torch.einsum("wb,bsr->wsr", weights, torch.from_numpy(table["each"].values).double())


def agreements(
    ours: Float[Tensor, "w sender receiver"], theirs: Float[Tensor, "w sender receiver"], top: int
) -> Float[Tensor, "2 w"]:
    """Rank correlation and overlap under every weighting."""
    found = [agreement(a, b, top=top) for a, b in zip(ours, theirs, strict=True)]
    return torch.tensor([(each.rank_correlation, each.overlap) for each in found]).T


def interval(score: str, values: Float[Tensor, "w"]) -> Row:
    """The first value, and the middle 95 % of the others, those of resamples."""
    low, high = np.quantile(values[1:].numpy(), [0.025, 0.975]).tolist()
    return {"score": score, "value": float(values[0]), "low": low, "high": high}


def readable(table: pd.DataFrame) -> pd.DataFrame:
    """One row per method, every score with its interval as text; a dash where there is none."""
    cells = zip(table.value, table.low, table.high, strict=True)
    told = [f"{value:.3f} [{low:.3f}, {high:.3f}]" for value, low, high in cells]
    others = [name for name in table if name not in ("score", "value", "low", "high")]
    wide = table.assign(told=told).pivot(index=others, columns="score", values="told")
    return wide.fillna("-").reset_index().rename_axis(columns=None)


def figure(judged: pd.DataFrame, job: CircuitBenchmark) -> Figure:
    """Five panels: what a task says of every method. CMD is on a logarithmic axis."""
    picture, axes = plt.subplots(2, 3, figsize=(14, 7.2), layout="constrained")
    one = judged[judged.method.isin(METHODS)]
    panels = [
        (judged, "cpr", "CPR (whole model: 1)"),
        (judged, "cmd", "CMD (best: 0)"),
        (judged, "faithfulness", f"faithfulness of the best {100 * job.share:g} %"),
        (one, "spearman", "rank correlation with exact\n(exact: of two halves)"),
        (one, "overlap", f"overlap of the largest {job.top} with exact\n(exact: of two halves)"),
    ]
    for ax, (table, score, label) in zip(np.ravel(axes)[:5], panels, strict=True):
        panel(ax, table[table.score == score])
        ax.set_ylabel(label)
    axes[0, 1].set_yscale("log")
    axes[1, 2].axis("off")
    axes[1, 2].legend(*axes[0, 0].get_legend_handles_labels(), loc="center", frameon=False)
    return picture


def panel(ax: Axes, table: pd.DataFrame) -> None:
    """One group of dots per task, one dot with its interval per method."""
    groups = list(dict.fromkeys(table.task))
    methods = [*METHODS, *KINDS[1:]]
    for i, method in enumerate(methods):
        rows = table[table.method == method].set_index("task").reindex(groups)
        x = np.arange(len(groups)) + (i - (len(methods) - 1) / 2) * 0.11
        ax.vlines(x, rows.low, rows.high, color=f"C{i}")
        ax.plot(x, rows.value, "o", markersize=4, color=f"C{i}", label=method)
    ax.set_xticks(range(len(groups)), [name.replace("_", " ").replace(" ", "\n") for name in groups])
    ax.grid(axis="y", linewidth=0.4)
