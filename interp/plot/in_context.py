"""Loss by token index, its map over training, and head scores over the checkpoints of a training run."""

from __future__ import annotations

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.ticker import StrMethodFormatter

from interp.core.boundary import public
from interp.core.wording import nearest
from interp.model.parts import Part
from interp.plot.canvas import COLOURS, axes, curve, legend
from interp.views.scale import ColourScale
from interp.views.writing import number

REST = "#999999"
"""Colour of what is drawn for comparison."""


@public()
def loss_by_index(result: xr.Dataset, *, label: str | None = None, ax: Axes | None = None) -> Axes:
    """The loss at every token index with its 95 % band; dotted, the two indices that the score compares.

    Args:
        result: what `interp.dynamics.in_context` returned.
        label: a name for the legend, where several models share an Axes.
        ax: the Axes to draw on; None: a new figure.

    Example:
        >>> rows = interp.tasks.RepeatedTokens(period=10, repeats=3).tokens(model.cfg.d_vocab, bos=0)
        >>> ax = plot.loss_by_index(interp.dynamics.in_context(model, rows))
    """
    ax = axes(ax, 6.4, 3.6)
    loss = result.sel(score="loss").sortby("index")
    index = loss["index"].to_numpy()
    name = _score_line(result) if label is None else f"{label}: {_score_line(result)}"
    curve(ax, index, loss, alpha=0.25, linewidth=1.4, label=name)
    for place in (result.attrs["early"], result.attrs["late"]):
        ax.axvline(place, color=REST, linewidth=0.8, linestyle=":")
    ax.set_xlim(0, int(index[-1]) + 1)
    ax.set_xlabel("token index (BOS is 0)")
    ax.set_ylabel("loss (nats)")
    ax.set_title("loss by token index")
    legend(ax)
    return ax


@public()
def loss_map(result: xr.Dataset, value: str = "loss", *, ax: Axes | None = None) -> Axes:
    """The `loss` by training step and token index (logarithmic), or its `slope` d loss / d log(index), signed.

    One row per checkpoint, the first on top, however far apart.

    Args:
        result: what `interp.dynamics.loss_map` returned.
        value: "loss" or "slope".
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: another value.

    Example:
        >>> rows = interp.tasks.RepeatedTokens(period=10, repeats=3).tokens(model.cfg.d_vocab, bos=0)
        >>> load = {"step10": model, "step20": model}.__getitem__
        >>> ax = plot.loss_map(interp.dynamics.loss_map(load, ["step10", "step20"], rows))
    """
    if value not in ("loss", "slope"):
        raise KeyError(f"no value {value!r} in a loss map; {nearest(value, ('loss', 'slope'))}")
    cells = result.value.sel(score="loss") if value == "loss" else result[value]
    values = cells.transpose("step", "index").to_numpy()
    index, steps = result["index"].to_numpy(), [str(step) for step in result.step.values]
    ax = axes(ax, 6.8, 1.6 + min(0.36 * len(steps), 5.0))
    scale = (
        _loss_scale(values) if value == "loss" else ColourScale.signed(values, "d loss / d log index (nats)")
    )
    edges = np.append(index - 0.5, index[-1] + 0.5)
    mesh = ax.pcolormesh(
        edges,
        np.arange(len(steps) + 1) - 0.5,
        values,
        cmap=COLOURS[scale.kind],
        vmin=scale.low,
        vmax=scale.high,
    )
    ax.figure.colorbar(mesh, ax=ax, pad=0.02).set_label(scale.label)
    ax.set_xscale("log", subs=(2, 5))
    for which in (ax.xaxis.set_major_formatter, ax.xaxis.set_minor_formatter):
        which(StrMethodFormatter("{x:g}"))
    ax.invert_yaxis()
    shown = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 12)).round().astype(int))
    ax.set_yticks(shown, [steps[i] for i in shown])
    ax.set_xlabel("token index (BOS is 0)")
    ax.set_ylabel("training step")
    ax.set_title("loss over training" if value == "loss" else "loss slope over training: red where it falls")
    return ax


@public()
def heads_over_training(
    result: xr.Dataset, score: str = "induction", *, top: int = 3, ax: Axes | None = None
) -> Axes:
    """One score of every head against the training step: the best heads named, with their bands, the rest in grey.

    The dashed line is the chance level of the best head, where the score has one.

    Args:
        result: `interp.dynamics.over_checkpoints` of `Heads`.
        score: the score that is drawn.
        top: number of heads that are named, the best at the last checkpoint.
        ax: the Axes to draw on; None: a new figure.

    Raises:
        KeyError: an unknown score.

    Example:
        >>> from interp.attention import Heads
        >>> load = {"step10": model, "step20": model}.__getitem__
        >>> table = interp.dynamics.over_checkpoints(load, ["step10", "step20"], Heads())
        >>> ax = plot.heads_over_training(table, "previous_token")
    """
    dims = {"step", "layer", "head", "score"}
    known = result.score.values.tolist() if dims == set(result.value.dims) else []
    if score not in known:
        raise KeyError(f"no score {score!r} over steps, layers and heads; {nearest(score, known)}")
    ax = axes(ax, 6.4, 3.8)
    kept = [name for name in ("value", "low", "high", "null") if name in result]
    table = result[kept].sel(score=score)
    lines = table.stack(place=("layer", "head")).transpose("place", "step")
    steps = result.step.to_numpy()
    order = np.argsort(-lines.value.to_numpy()[:, -1], kind="stable")
    for place in order[top:]:
        ax.plot(steps, lines.value[place], color=REST, linewidth=0.8, alpha=0.6)
    for place in order[:top]:
        name = str(Part("head", *map(int, lines.place.values[place])))
        curve(ax, steps, lines.isel(place=place), marker=".", label=name)
    if "null" in lines and bool(lines.null[order[0]].notnull().all()):
        chance = lines.null[order[0]]
        ax.plot(steps, chance, color="black", linewidth=0.8, linestyle="--", label="chance")
    legend(ax, title="head")
    ax.set_xlabel("training step")
    words = score.replace("_", " ")
    ax.set_ylabel(f"{words} ({result['unit'].sel(score=score).item()})")
    ax.set_title(f"{words} over training: {len(order)} heads, best {min(top, len(order))} named")
    return ax


def _loss_scale(values: Float[np.ndarray, "s n"]) -> ColourScale:
    """From the smallest loss to the largest."""
    return ColourScale("plain", float(np.nanmin(values)), float(np.nanmax(values)), "loss (nats)")


def _score_line(result: xr.Dataset) -> str:
    late = result.sel(score="in_context", index=result.attrs["late"])
    score, low, high = (float(late[name]) for name in ("value", "low", "high"))
    indices = f"loss({result.attrs['late']}) - loss({result.attrs['early']})"
    return f"{indices} = {number(score, sign=True)} [{number(low, sign=True)}, {number(high, sign=True)}]"
