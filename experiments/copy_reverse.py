"""Where does a decoder look when it copies, and when it says a sequence backwards? Cross-attention as an alignment.

Run: `interp run experiments/copy_reverse.py`

Two encoder-decoders are trained with teacher forcing on random sequences, one to copy, one to reverse, then decode
greedily on their own. Read: for each head of the cross-attention, the source position that a target token attends to
most. A copy is the diagonal, a reversal the anti-diagonal.
"""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
import xarray as xr
from matplotlib.figure import Figure

import interp
from interp.core.results import labelled
from interp.lab.training import (
    Training,
    encoder_decoder,
    exactly_right,
    train,
)
from interp.model import EncoderDecoder
from interp.runs.record import Record
from interp.tasks import Examples, Place, SequencePairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TASKS = {"copy": False, "reverse": True}
"""Each task, and whether the target is the source backwards."""
TRAINING = Training(steps=1200, rows=64, learning_rate=3e-3, final_share=0.0)


@dataclass(frozen=True)
class CopyReverse:
    """Two models and their task."""

    d_vocab: int = 32
    """Token ids, the start and the end among them."""
    low: int = 4
    """The shortest sequence."""
    high: int = 12
    """The longest sequence."""
    d_model: int = 64
    """Width of both sides."""
    n_heads: int = 4
    """Heads of every attention."""
    n_layers: int = 2
    """Layers of either side."""
    test_rows: int = 512
    """Held-out sequences that are decoded."""
    training: Training = TRAINING
    """How both are trained."""


def main(job: CopyReverse, record: Record) -> None:
    """Train both, decode, read the alignment; a table and a figure."""
    logs: dict[str, pd.DataFrame] = {}
    found: dict[str, xr.Dataset] = {}
    for task, backwards in TASKS.items():
        data = SequencePairs(job.d_vocab, job.low, job.high, backwards)
        config = encoder_decoder(
            data.d_vocab, data.width, d_model=job.d_model, n_heads=job.n_heads, n_layers=job.n_layers
        )
        trained = train(config, data, job.training, out=record.stream_folder(task), resume=True)
        model, logs[task] = trained.model, trained.log
        assert isinstance(model, EncoderDecoder)
        record.model(interp.HookedTransformer(model.encoder), f"{task}_encoder")
        record.model(interp.HookedTransformer(model.decoder), f"{task}_decoder")
        test = data.batch(Place(job.training.seed + 1, None), job.test_rows)
        found[task] = record.step(f"{task}_alignment", partial(alignment, model, test, backwards))
    table = (
        pd.DataFrame({task: summary(each) for task, each in found.items()})
        .T.rename_axis("task")
        .reset_index()
    )
    record.table("copy_reverse", table)
    record.figure("copy_reverse", figure(logs, found))
    record.say(table.to_string(index=False))


def alignment(model: EncoderDecoder, examples: Examples, backwards: bool) -> xr.Dataset:
    """Dataset[layer, head]: `aligned`, the share of target symbols whose most attended source token is their own.

    Under teacher forcing: target column i has read i symbols and predicts symbol i, which stands at source position i,
    or at n - 1 - i backwards; the end tokens do not count. `chance`: the mean of 1 / (source tokens). `exact_match`:
    the share of sources that are decoded to their target, greedily, without being told. `pattern` [layer, head, target,
    source] is that of the first of the longest examples.
    """
    batch, source = examples.batch, examples.source
    assert source is not None
    layers = range(model.config.decoder.n_layers)
    sites = [f"blocks.{layer}.cross_attn.hook_pattern" for layer in layers]
    _, cache = interp.HookedEncoderDecoder(model).run_with_cache(source, batch, names_filter=sites)
    pattern = torch.stack([cache["decoder"][site] for site in sites], dim=1)
    lengths = source.lengths[:, None] - 1
    column = torch.arange(batch.tokens.shape[1])
    own = lengths - 1 - column if backwards else column
    counted = (column < lengths)[:, None, None]
    hits = (pattern.argmax(-1) == own.expand(len(batch), -1)[:, None, None]) & counted
    first = int(lengths.argmax())
    n = int(lengths[first]) + 1
    return labelled(
        "copy_reverse",
        {
            "aligned": (("layer", "head"), hits.sum((0, 3)) / counted.sum()),
            "chance": ((), (counted[:, 0, 0] / (lengths + 1)).sum() / counted.sum()),
            "exact_match": ((), exactly_right(model, examples).double().mean()),
            "pattern": (("layer", "head", "target", "source"), pattern[first, ..., :n, :n]),
        },
        coords={"layer": layers, "head": range(pattern.shape[2])},
        units={
            "aligned": "share of target symbols",
            "exact_match": "share of sources",
            "pattern": "attention mass",
        },
        attrs={"rows": len(batch)},
    )


def summary(found: xr.Dataset) -> dict[str, str | float]:
    """What the table says about a task."""
    layer, head = best(found)
    return {
        "exact_match": float(found.exact_match),
        "best": f"L{layer}X{head}",
        "aligned": float(found.aligned.max()),
        "chance": float(found.chance),
    }


def best(found: xr.Dataset) -> tuple[int, int]:
    """Layer and head that are aligned best."""
    place = found.aligned.argmax(("layer", "head"))
    return int(place["layer"]), int(place["head"])


def figure(logs: dict[str, pd.DataFrame], found: dict[str, xr.Dataset]) -> Figure:
    """A row per task: what was learned when, how aligned each head is, and the pattern of the best one."""
    picture, axes = plt.subplots(
        len(found), 3, figsize=(12, 3.4 * len(found)), layout="constrained", squeeze=False
    )
    for (task, each), log, (left, middle, right) in zip(found.items(), logs.values(), axes, strict=True):
        left.plot(log.step, log.accuracy, color="C0", marker=".")
        left.set(
            title=task, xlabel="updates", ylabel="target tokens right, teacher-forced", ylim=(-0.02, 1.02)
        )
        matrix(middle, each.aligned.to_numpy(), "head", "layer", "aligned symbols (share)")
        layer, head = best(each)
        pattern = each.pattern.sel(layer=layer, head=head).to_numpy()
        matrix(right, pattern, "source position", "target position", "attention")
        right.plot(
            pattern.argmax(1), range(len(pattern)), "o", color="C1", markersize=4, label="most attended"
        )
        right.set_title(f"cross-attention of head L{layer}X{head}, one pair")
        right.legend()
    return picture


def matrix(ax: "Axes", values: np.ndarray, x: str, y: str, unit: str) -> None:
    """Numbers in [0, 1] as an image with its colour bar."""
    image = ax.imshow(values, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    ax.figure.colorbar(image, ax=ax, label=unit)
    ax.set(xlabel=x, ylabel=y, xticks=range(values.shape[1]), yticks=range(values.shape[0]))
