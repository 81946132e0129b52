"""Does a model carry a task that a list shows in a few heads, and does their sum make it do the task elsewhere?

Lists of antonyms, capitals, past tenses and plurals give the average indirect effect of every head. What the heads of
the largest effect add, averaged over lists of a task, is added to prompts about pairs that had no part in it: without
examples, in lists with shuffled outputs, and in a template. Beside it stand the prompts as they are, the same heads
averaged over shuffled lists, the vectors of the other tasks, and as many other heads at the same length.

Run: `interp run experiments/function_vectors.py -p model=FOLDER`, about ten minutes of one CPU on SmolLM2-135M.
"""

from dataclasses import dataclass
from functools import partial

import matplotlib.pyplot as plt
import torch
import xarray as xr
from matplotlib.figure import Figure

import interp
from interp import plot
from interp.causal import average_indirect_effect, function_vectors
from interp.opening import OfModel
from interp.runs.record import Record
from interp.tasks import PairLists, load_word_pairs


@dataclass(frozen=True)
class Tasks(OfModel):
    """Which tasks, how many lists, and where the vectors are added."""

    tasks: tuple[str, ...] = ("antonym", "country_capital", "present_past", "singular_plural")
    """Tasks of `load_word_pairs`."""
    pairs: int = 50
    """The most pairs of a task."""
    shots: int = 5
    """Examples of a list."""
    rows: int = 12
    """Lists of each task."""
    top: int = 10
    """Heads of a vector."""
    depths: tuple[float, ...] = (1 / 6, 1 / 3, 1 / 2)
    """After which blocks vectors are added, as shares of the depth."""
    templates: tuple[str, ...] = ('They wrote "{input}" on the board, and below it they wrote',)
    """Prompts of natural text."""
    draws: int = 19
    """Draws of other heads."""
    seed: int = 0
    """Of the split of the pairs, the lists and the other heads."""


def main(job: Tasks, record: Record) -> None:
    """Find the heads, add their vectors, and keep the numbers as tables and figures."""
    torch.set_num_threads(1)
    model = job.opened()
    record.model(model)
    effects = record.step("effects", partial(effects_of, model, job))
    found = record.step("vectors", partial(vectors_of, model, job, effects))
    record.table("effects", interp.frame(effects))
    vectors = interp.frame(found)
    record.table("vectors", vectors)
    record.figure("vectors", figure(effects, found))
    record.say(interp.frame(effects).nlargest(job.top, "value").round(3).to_string())
    for score in ("accuracy", "probability"):
        table = vectors[vectors.score == score].pivot_table(
            "value", ["task", "setting", "layer"], "vector", sort=False
        )
        cells = found.sel(score=score, vector="none").null.to_series()
        table = table.assign(random=cells, p=found.p.sel(score=score).to_series())
        record.say(f"{score}\n{table.round(3).to_string()}")


def lists_of(job: Tasks) -> PairLists:
    """How lists are written and drawn."""
    return PairLists(shots=job.shots, rows=job.rows, seed=job.seed)


def pairs_of(job: Tasks) -> dict[str, tuple[tuple[str, str], ...]]:
    """The pairs of every task."""
    return {task: load_word_pairs()[task][: job.pairs] for task in job.tasks}


def effects_of(model: interp.HookedTransformer, job: Tasks) -> xr.Dataset:
    """The average indirect effects of all heads."""
    return average_indirect_effect(model, pairs_of(job), lists=lists_of(job))


def vectors_of(model: interp.HookedTransformer, job: Tasks, effects: xr.Dataset) -> xr.Dataset:
    """The vectors of the heads of the largest effects, and what they do."""
    ranked = interp.frame(effects).sort_values("value", ascending=False, kind="stable").part.tolist()
    return function_vectors(
        model,
        pairs_of(job),
        heads=ranked[: job.top],
        layers=sorted({int(share * model.cfg.n_layers) for share in job.depths}),
        templates=job.templates,
        random=job.draws,
        lists=lists_of(job),
        seed=job.seed,
    )


def figure(effects: xr.Dataset, found: xr.Dataset) -> Figure:
    """The effects of heads, and the accuracy in every setting at the middle of the layers."""
    settings = found.setting.values.tolist()
    layer = int(found.layer.values[found.sizes["layer"] // 2])
    picture, axes = plt.subplots(
        1, 1 + len(settings), figsize=(6 + 5 * len(settings), 7), layout="constrained"
    )
    plot.average_indirect_effect(effects, ax=axes[0])
    for ax, setting in zip(axes[1:], settings, strict=True):
        plot.function_vectors(found, setting=setting, layer=layer, ax=ax)
    return picture
