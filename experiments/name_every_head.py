"""What does every head of a model do? The whole table of heads, and a figure with a word for each.

Run: `interp run experiments/name_every_head.py -p model=demo-4l`
"""

from dataclasses import dataclass

import matplotlib.pyplot as plt
import pandas as pd
import xarray as xr
from matplotlib.figure import Figure

import interp
from interp import plot
from interp.attention import attention_kernel
from interp.attention.labels import RULES
from interp.opening import OfModel
from interp.runs.record import Record

MAPS = ("induction", "previous_token", "copying_weights", "name_mover")


@dataclass(frozen=True)
class NameEveryHead(OfModel):
    """Whose heads to name."""

    seed: int = 0
    """Seed of the repeated tokens and of the sentences."""


def main(job: NameEveryHead, record: Record) -> None:
    """Keep both results and the figure; say the heads that have a label, and why scores are absent."""
    model = job.opened()
    record.model(model)
    data = interp.tasks.RepeatedTokens(seed=job.seed)
    table = record.step("heads", lambda: interp.heads(model, repeats=data))
    record.step("kernel", lambda: attention_kernel(model, data))
    record.figure("heads", figure(job.model, table))
    record.table("named", named(table))
    for line in sentences(table):
        record.say(line)


def named(table: xr.Dataset) -> pd.DataFrame:
    """Each labelled head with the score behind its label, its 95 % interval and its null."""
    rests_on = {rule.label: rule.evidence[0].scores[0] for rule in RULES}
    rows = interp.frame(table)
    rows = rows[rows.score == rows.label.map(rests_on)]
    return rows[["part", "label", "score", "value", "low", "high", "null"]].reset_index(drop=True)


def sentences(table: xr.Dataset) -> list[str]:
    """A line for each labelled head, and the reason for each score that the table does not have."""
    lines = [
        f"{row.part} {row.label}: {row.score} {row.value:.2f} [{row.low:.2f}, {row.high:.2f}], "
        f"null {row.null:.2f}"
        for row in named(table).itertuples()
    ]
    absent = (f"{key}: {reason}" for key, reason in table.attrs.items() if str(key).startswith("no_"))
    return [*lines, *(line.replace("_", " ", 1) for line in absent)]


def figure(name: str, table: xr.Dataset) -> Figure:
    """The labels on top, maps of four scores below."""
    n_layers, n_heads = table.sizes["layer"], table.sizes["head"]
    maps = [score for score in MAPS if score in table.score.values]
    rows = (len(maps) + 1) // 2
    size = (2.4 + 1.5 * n_heads, 1.4 + 0.6 * n_layers + rows * (1.2 + 0.42 * n_layers))
    picture = plt.figure(figsize=size, layout="constrained")
    grid = picture.add_gridspec(1 + rows, 2, height_ratios=[1.4, *[1.0] * rows])
    plot.head_labels(table, ax=picture.add_subplot(grid[0, :]))
    for i, score in enumerate(maps):
        plot.heads(table, score, ax=picture.add_subplot(grid[1 + i // 2, i % 2]))
    picture.suptitle(name)
    return picture
