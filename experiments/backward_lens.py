"""What would a false fact write into a model? The backward lens on 100 fact prompts, after Katz et al. 2024.

Each prompt asks for a fact in a phrasing no training text has; the target is the first token of another subject's
answer, as in CounterFact.

Run: `interp run experiments/backward_lens.py -p model=demo-4l`
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import xarray as xr
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import interp
from interp import plot
from interp.core.stats import Moments
from interp.lenses.backward_lens import BackwardLens, backward_lens
from interp.lenses.factors import Matrix
from interp.runs.record import Record
from interp.zoo.tasks import FactPrompt, held_out_fact_prompts, load_facts

MATRICES: tuple[Matrix, ...] = ("W_in", "W_out")
SHOWN = {"last token": "C0", "subject": "C1", "other tokens": "C7"}


@dataclass(frozen=True)
class FalseFacts:
    """Whose gradients to read, on how many prompts."""

    model: str = "demo-4l"
    """Demo name, local folder, safetensors file or hub name."""
    prompts: int = 100
    """How many fact prompts, drawn at random."""
    seed: int = 0
    """Seed of the draw of prompts and targets."""


@dataclass(frozen=True, eq=False)
class Example:
    """One prompt in the lens: its tokens, its false target, and what each matrix would be told."""

    tokens: Sequence[str]
    target: str
    projected: Mapping[Matrix, xr.Dataset]


def main(job: FalseFacts, record: Record) -> None:
    """Keep the table and the figure; say the table."""
    model = interp.HookedTransformer.from_pretrained(job.model)
    record.model(model)
    asked, targets = drawn(model, job)
    prompts = [prompt.prompt for prompt in asked]
    lens = cache(lambda: backward_lens(model, prompts, targets, matrices=MATRICES))
    table = record.step("by_layer", lambda: by_layer(lens(), subjects(model, lens(), asked)))
    cosines = record.step("cosines", lambda: lens().cosines("W_out"))
    projected = {matrix: record.step(f"first_{matrix}", partial(first, lens, matrix)) for matrix in MATRICES}
    example = Example(model.to_str_tokens(prompts[0]), model.text.pieces(targets[:1])[0], projected)
    record.figure("backward_lens", figure(model, example, table, cosines))
    record.table("backward_lens", table)
    record.say(table.round(3).to_string(index=False))


def first(lens: Callable[[], BackwardLens], matrix: Matrix) -> xr.Dataset:
    """The first prompt in words, as coarse as a picture can show."""
    return lens().project(matrix, threshold=0.005).isel(prompt=[0])


def drawn(model: interp.HookedTransformer, job: FalseFacts) -> tuple[list[FactPrompt], list[int]]:
    """Random prompts and, for each, the first token of another answer of its relation that begins differently."""
    dice, every = np.random.default_rng(job.seed), held_out_fact_prompts(load_facts())
    asked = [every[i] for i in dice.permutation(len(every))[: job.prompts]]
    targets = []
    for prompt in asked:
        mine = first_token(model, prompt.answer)
        same = [other.answer for other in every if other.fact.relation == prompt.fact.relation]
        others = sorted({first_token(model, answer) for answer in same} - {mine})
        targets.append(int(dice.choice(others)))
    return asked, targets


def first_token(model: interp.HookedTransformer, answer: str) -> int:
    """The first token of an answer, what the paper takes as the target."""
    return model.text.tokenizer.encode(answer)[0]


def subjects(
    model: interp.HookedTransformer, lens: BackwardLens, asked: Sequence[FactPrompt]
) -> Bool[torch.Tensor, "b p"]:
    """Which columns hold a piece of the subject, of every prompt."""
    return torch.stack([on_subject(model, lens, row, prompt) for row, prompt in enumerate(asked)])


def on_subject(
    model: interp.HookedTransformer, lens: BackwardLens, row: int, prompt: FactPrompt
) -> Bool[torch.Tensor, "p"]:
    """Which columns of a row hold a piece of the subject."""
    ids = lens.batch.tokens[row, : int(lens.batch.lengths[row])].tolist()
    pieces = ["" if token == model.text.bos_id else model.text.pieces([token])[0] for token in ids]
    if "".join(pieces) != prompt.prompt:
        raise ValueError(f"the pieces of {prompt.prompt!r} must spell it, got {pieces}")
    ends = np.cumsum([len(piece) for piece in pieces])
    start = prompt.prompt.index(prompt.fact.subject)
    found = torch.zeros(lens.batch.tokens.shape[1], dtype=torch.bool)
    for column, (piece, end) in enumerate(zip(pieces, ends, strict=True)):
        found[column] = bool(end > start and end - len(piece) < start + len(prompt.fact.subject))
    return found


def by_layer(lens: BackwardLens, subject: Bool[torch.Tensor, "b p"]) -> pd.DataFrame:
    """One row per quantity, matrix and layer: mean over prompts with its 95 % interval, and the null."""
    last, most = lens.batch.last(), lens.factors.model.config.d_vocab - 1
    real = torch.arange(subject.shape[1]) < lens.batch.lengths[:, None]
    is_last = torch.zeros_like(subject)
    is_last[torch.arange(len(subject)), last] = True
    groups = dict(zip(SHOWN, (is_last, subject & ~is_last, real & ~(subject | is_last)), strict=True))
    lines = []
    for matrix in MATRICES:
        ranks = torch.tensor(lens.ranks(matrix).target_rank.values).double()
        ranks[ranks < 0] = torch.nan
        delta = torch.tensor(lens.norms(matrix).delta.values).nan_to_num(0.0).double()
        share = delta / delta.sum(-1, keepdim=True)
        for name, here in groups.items():
            there = torch.where(here[:, None], ranks, torch.nan).nanmean(-1)
            lines += _lines(f"target rank, {name}", matrix, there, null=most / 2)
            even = float((here.sum(1) / lens.batch.lengths).mean())
            lines += _lines(f"norm share, {name}", matrix, (share * here[:, None]).sum(-1), null=even)
        found = lens.gradient_rank(matrix)
        full = torch.tensor((found.gradient_rank / found.tokens).transpose("prompt", "layer").values)
        lines += _lines("gradient rank / tokens", matrix, full)
        every = torch.tensor(found.gradient_rank.values == found.tokens.values[:, None])
        lines += _lines("rank equals tokens", matrix, every.double())
        cosines = torch.tensor(lens.cosines(matrix).cosine.transpose("prompt", "other_layer", "layer").values)
        for other, values in enumerate(cosines.double().unbind(1)):
            lines += _lines(f"cosine with layer {other}", matrix, values, null=0.0)
    return pd.DataFrame(lines)


def _lines(
    quantity: str, matrix: str, values: Float[torch.Tensor, "b l"], null: float | None = None
) -> list[dict[str, object]]:
    moments = Moments.of(values)
    low, high = moments.interval()
    cells = zip(moments.mean.tolist(), low.tolist(), high.tolist(), strict=True)
    return [
        {"quantity": quantity, "matrix": matrix, "layer": i, "mean": mean, "low": a, "high": b, "null": null}
        for i, (mean, a, b) in enumerate(cells)
    ]


def figure(
    model: interp.HookedTransformer, example: Example, table: pd.DataFrame, cosines: xr.Dataset
) -> Figure:
    """The panels of one prompt on top, means over all prompts below."""
    picture = plt.figure(figsize=(15, 12.5), layout="constrained")
    grid = picture.add_gridspec(3, 4, height_ratios=[1.0, 1.0, 1.2])
    for row, matrix in enumerate(MATRICES[::-1]):
        ax = picture.add_subplot(grid[row, :])
        plot.backward_lens(example.projected[matrix], model.text.pieces, tokens=example.tokens, ax=ax)
        ax.set_title(f"{ax.get_title()} (target {example.target!r})")
    below = [picture.add_subplot(grid[2, i]) for i in range(4)]
    top = model.cfg.d_vocab - 1
    _curve(below[0], table, "target rank, last token", "W_out", "C0", null=False)
    below[0].axhline(top, color="C7", linestyle="--", linewidth=0.8, label=f"least probable ({top})")
    below[0].set(
        title="target in delta of the last token (W_out)", ylabel=f"rank (0 = most probable; null {top / 2})"
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
    _cosines(below[3], cosines)
    picture.suptitle(
        f"{cosines.sizes['prompt']} fact prompts with a false target; 95 % intervals over prompts"
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
    ax.plot(rows["layer"], rows["mean"], style, marker="o", label=label or name)
    ax.fill_between(rows["layer"], rows["low"], rows["high"], color=colour, alpha=0.25)
    if null and rows["null"].notna().all():
        ax.axhline(
            rows["null"].iloc[0], color=colour, linestyle=":", linewidth=0.8, label=f"{name}: even share"
        )


def _cosines(ax: Axes, cosines: xr.Dataset) -> None:
    found = cosines.cosine.mean("prompt").transpose("layer", "other_layer").to_numpy()
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
