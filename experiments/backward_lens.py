"""What would a false fact write into a model? The backward lens on 100 fact prompts, after Katz et al. 2024.

Each prompt asks for a fact in a phrasing no training text has; the target is the first token of another subject's
answer, as in CounterFact.

Run: `interp run experiments/backward_lens.py -p model=demo-4l`
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import interp
from interp import plot
from interp.core.stats import Moments
from interp.lenses import backward_lens, gradient_cosines, gradient_rank
from interp.lenses.factors import LensMatrix
from interp.opening import OfModel
from interp.runs.record import Record
from interp.tasks import HELD_OUT_PHRASINGS, FactPrompt, fact_prompts

MATRICES: tuple[LensMatrix, ...] = ("W_in", "W_out")
SHOWN = {"last token": "C0", "subject": "C1", "other tokens": "C7"}


@dataclass(frozen=True)
class FalseFacts(OfModel):
    """Whose gradients to read, on how many prompts."""

    prompts: int = 100
    """How many fact prompts, drawn at random."""
    seed: int = 0
    """Seed of the draw of prompts and targets."""


@dataclass(frozen=True, eq=False)
class Found:
    """What the gradients of all prompts say: words and lengths, ranks, directions."""

    lens: xr.Dataset
    ranks: xr.Dataset
    cosines: xr.Dataset


def main(job: FalseFacts, record: Record) -> None:
    """Keep the table and the figure; say the table."""
    model = job.opened()
    record.model(model)
    asked, targets = drawn(model, job)
    prompts = [prompt.prompt for prompt in asked]
    found = Found(
        *(
            record.step(name, partial(question, model, prompts, targets, matrices=MATRICES))
            for name, question in (
                ("lens", partial(backward_lens, top=1)), ("ranks", gradient_rank), ("cosines", gradient_cosines),
            )
        )
    )  # fmt: skip
    table = by_layer(found, subjects(model, found.lens, asked))
    record.figure("backward_lens", figure(found, table, model.text.pieces(targets[:1])[0]))
    record.table("backward_lens", table)
    record.say(table.round(3).to_string(index=False))


def drawn(model: interp.HookedTransformer, job: FalseFacts) -> tuple[list[FactPrompt], list[int]]:
    """Random prompts and, for each, the first token of another answer of its relation that begins differently."""
    generator, every = np.random.default_rng(job.seed), fact_prompts(HELD_OUT_PHRASINGS)
    asked = [every[i] for i in generator.permutation(len(every))[: job.prompts]]
    targets = []
    for prompt in asked:
        mine = first_token(model, prompt.answer)
        same = [other.answer for other in every if other.fact.relation == prompt.fact.relation]
        others = sorted({first_token(model, answer) for answer in same} - {mine})
        targets.append(int(generator.choice(others)))
    return asked, targets


def first_token(model: interp.HookedTransformer, answer: str) -> int:
    """The first token of an answer, what the paper takes as the target."""
    return model.text.tokenizer.encode(answer)[0]


def subjects(model: interp.HookedTransformer, lens: xr.Dataset, asked: Sequence[FactPrompt]) -> xr.DataArray:
    """Which columns hold a piece of the subject, of every prompt `[prompt, pos]`."""
    bos = "" if model.text.bos_id is None else model.text.pieces([model.text.bos_id])[0]
    rows = [[piece if piece != bos else "" for piece in row] for row in lens.token.values.tolist()]
    found = [on_subject(pieces, prompt) for pieces, prompt in zip(rows, asked, strict=True)]
    return xr.DataArray(found, dims=("prompt", "pos"))


def on_subject(pieces: Sequence[str], prompt: FactPrompt) -> list[bool]:
    """Which tokens of a prompt hold a piece of the subject."""
    if "".join(pieces) != prompt.prompt:
        raise ValueError(f"the pieces of {prompt.prompt!r} must spell it, got {pieces}")
    start = prompt.prompt.index(prompt.fact.subject)
    stop, ends = start + len(prompt.fact.subject), np.cumsum([len(piece) for piece in pieces]).tolist()
    return [
        bool(piece) and end > start and end - len(piece) < stop
        for piece, end in zip(pieces, ends, strict=True)
    ]


def by_layer(found: Found, subject: xr.DataArray) -> pd.DataFrame:
    """One row per quantity, matrix and layer: mean over prompts with its 95 % interval, and the null."""
    real = found.lens.token != ""
    length = real.sum("pos")
    is_last = (real.cumsum("pos") == length) & real
    groups = dict(zip(SHOWN, (is_last, subject & ~is_last, real & ~(subject | is_last)), strict=True))
    null = float(found.lens.attrs["null"].partition(": ")[2])
    lines = []
    for matrix in MATRICES:
        lens, ranks = (each.sel(matrix=matrix) for each in (found.lens, found.ranks))
        share = lens.delta / lens.delta.sum("pos")
        for name, here in groups.items():
            there = lens.target_rank.where(here & (lens.target_rank >= 0)).mean("pos")
            lines += _lines(f"target rank, {name}", matrix, there, null=null)
            even = float((here.sum("pos") / length).mean())
            lines += _lines(f"norm share, {name}", matrix, share.where(here).sum("pos"), null=even)
        lines += _lines("gradient rank / tokens", matrix, ranks.value / ranks.tokens)
        lines += _lines("rank equals tokens", matrix, (ranks.value == ranks.tokens).astype(float))
        cosines = found.cosines.value.sel(matrix=matrix)
        for other in cosines.other_layer.values.tolist():
            lines += _lines(f"cosine with layer {other}", matrix, cosines.sel(other_layer=other), null=0.0)
    return pd.DataFrame(lines)


def _lines(
    quantity: str, matrix: str, values: xr.DataArray, null: float | None = None
) -> list[dict[str, object]]:
    moments = Moments.of(torch.tensor(values.transpose("prompt", "layer").to_numpy()).double())
    low, high = moments.interval()
    cells = zip(moments.mean.tolist(), low.tolist(), high.tolist(), strict=True)
    return [
        {
            "quantity": quantity,
            "matrix": matrix,
            "layer": i,
            "value": value,
            "low": a,
            "high": b,
            "null": null,
        }
        for i, (value, a, b) in enumerate(cells)
    ]


def figure(found: Found, table: pd.DataFrame, target: str) -> Figure:
    """The panels of one prompt on top, means over all prompts below."""
    picture = plt.figure(figsize=(15, 12.5), layout="constrained")
    grid = picture.add_gridspec(3, 4, height_ratios=[1.0, 1.0, 1.2])
    for row, matrix in enumerate(MATRICES[::-1]):
        ax = picture.add_subplot(grid[row, :])
        plot.backward_lens(found.lens, matrix=matrix, threshold=0.005, ax=ax)
        ax.set_title(f"{ax.get_title()} (target {target!r})")
    plot.same_scale(picture.axes)
    below = [picture.add_subplot(grid[2, i]) for i in range(4)]
    middle = table["null"].max()  # of ranks: half of the largest
    _curve(below[0], table, "target rank, last token", "W_out", "C0", null=False)
    top = int(2 * middle)
    below[0].axhline(top, color="C7", linestyle="--", linewidth=0.8, label=f"least probable ({top})")
    below[0].set(
        title="target in delta of the last token (W_out)", ylabel=f"rank (0 = most probable; null {middle})"
    )
    for name, colour in SHOWN.items():
        _curve(below[1], table, f"norm share, {name}", "W_out", colour)
    below[1].set(
        title="where delta of W_out is long", ylabel="share of the prompt's sum of norms", ylim=(0, 1)
    )
    for matrix, style in zip(MATRICES, ("C2-", "C3--"), strict=True):
        _curve(below[2], table, "gradient rank / tokens", matrix, style, label=matrix)
    below[2].set(title="rank of each gradient", ylabel="rank / number of tokens", ylim=(0, 1.05))
    for ax in below[:3]:
        ax.set(xlabel="layer", xticks=sorted(table["layer"].unique()))
        ax.legend(fontsize=8)
    _cosines(below[3], found.cosines)
    picture.suptitle(
        f"{found.lens.sizes['prompt']} fact prompts with a false target; 95 % intervals over prompts"
    )
    return picture


def _curve(
    ax: Axes,
    table: pd.DataFrame,
    quantity: str,
    matrix: str,
    style: str,
    *,
    label: str | None = None,
    null: bool = True,
) -> None:
    rows = table[(table["quantity"] == quantity) & (table["matrix"] == matrix)]
    name = quantity.partition(", ")[2] or quantity
    colour = style[:2]
    ax.plot(rows["layer"], rows["value"], style, marker="o", label=label or name)
    ax.fill_between(rows["layer"], rows["low"], rows["high"], color=colour, alpha=0.25)
    if null and rows["null"].notna().all():
        ax.axhline(
            rows["null"].iloc[0], color=colour, linestyle=":", linewidth=0.8, label=f"{name}: even share"
        )


def _cosines(ax: Axes, cosines: xr.Dataset) -> None:
    found = cosines.value.sel(matrix="W_out").mean("prompt").transpose("layer", "other_layer").to_numpy()
    image = ax.imshow(found, cmap="RdBu", vmin=-1, vmax=1)
    ax.figure.colorbar(image, ax=ax, label="mean cosine")
    for (row, column), value in np.ndenumerate(found):
        ax.text(
            column, row, f"{value:.2f}", ha="center", va="center", color="white" if value > 0.6 else "black"
        )
    ticks = range(len(found))
    ax.set(
        title="delta of the last token (W_out)",
        xlabel="layer",
        ylabel="layer",
        xticks=ticks,
        yticks=ticks,
    )
