"""How does a model know who receives the gift? Activation and path patching of the indirect-object task, in words.

Wang et al. 2022 (arXiv:2211.00593) on GPT-2 small: induction and duplicate-token heads notice the second mention of the
giver, S-inhibition heads move that to the end, into the queries of late name movers, and those copy the other name
straight to the logits. The same questions to a model of four layers: where is the answer decided, which heads reach the
logits (with MLPs between, and without), and through which inputs are the late heads told?

What demo-4l does is shorter: one local head of layer 0 looks from the end at the giver's second mention, which decides
the answer before layer 1; the MLPs of all layers turn it into the other name. Like GPT-2 small it has late name movers
that are told through their queries which name to avoid, but they do a small part of the work, and nothing in between
(duplicate-token, S-inhibition in layers of their own, negative heads) shows. Clean values are put into the corrupted
run ("denoise"); an effect is the logit difference with them minus that of the corrupted run.

Run: `interp run experiments/ioi.py -p model=demo-4l`
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
from interp import plot, tasks
from interp.causal import patch, path_patch
from interp.core.stats import t95
from interp.opening import OfModel
from interp.plot.canvas import annotate, heat_map, name_cells
from interp.runs.record import Record
from interp.tasks.indirect_objects import NameCorruption
from interp.views.scale import ColourScale

ROLES = ("IO", "S1", "S1+1", "S2", "end")
INPUTS = {"q": "queries", "k": "keys", "v": "values"}
GPT2_SMALL = """\
GPT-2 small (Wang et al. 2022): logit difference 3.56, receiver preferred in 99.3 % of the prompts. Three name movers
(9.6, 9.9, 10.0) raise the answer at the logits themselves, two negative heads (10.7, 11.10) lower it; four heads in the
middle (7.3, 7.9, 8.6, 8.10) tell the name movers' queries which name to avoid; MLPs were not needed in the account."""


@dataclass(frozen=True)
class IndirectObjectCircuit(OfModel):
    """Whom to ask, how often, what to corrupt."""

    prompts: int = 48
    """Pairs, in both orders of the names (ABBA, BABA); the two names were never together in training."""
    corruption: NameCorruption = "swap_giver"
    """swap_giver: the other of the two names gives, so that the answers change places; abc: three other names."""
    receivers: int = 2
    """How many heads after layer 0, the strongest at the logits, are asked through which inputs they are told."""
    top: int = 4
    """Senders named per question."""
    seed: int = 0
    """Seed of the pairs."""


@dataclass(frozen=True, eq=False)
class Task:
    """The pairs, and the same as batches that carry their answers."""

    pairs: tasks.TaskPairs
    clean: interp.Batch
    corrupt: interp.Batch

    @classmethod
    def of(cls, model: interp.HookedTransformer, job: IndirectObjectCircuit) -> "Task":
        """The pairs in this model's tokens."""
        asked = tasks.IndirectObjects(job.prompts, job.seed, held_out=True)
        found = asked.pairs(model.text.tokenizer, corruption=job.corruption)
        return cls(found, *interp.causal.batches(model, found))


def main(job: IndirectObjectCircuit, record: Record) -> None:
    """Ask, draw, tabulate and tell."""
    model = job.opened()
    record.model(model)
    task = Task.of(model, job)
    labels = record.step("labels", lambda: interp.heads(model)).label
    streams = record.step("streams", lambda: by_role(model, task).to_dataset(name="share")).share
    heads = record.step("heads", lambda: patch(model, task.clean, task.corrupt, "z"))
    to = partial(path_patch, model, task.clean, task.corrupt)
    routes = {
        "logits": record.step("to-logits", to),
        "logits, MLPs held": record.step("to-logits-MLPs-held", partial(to, freeze_mlps=True)),
    }
    late = strongest_late(routes["logits"], job.receivers)
    for part, name in INPUTS.items():
        ends = [receiver(model, head, part) for head in late]
        routes[name] = record.step(f"to-{name}", partial(to, ends))
    table = pd.concat([senders(found, labels).assign(to=name) for name, found in routes.items()])
    record.table("effects", table)
    record.figure("ioi", figure(job, streams, heads, routes))
    for line in [*baseline(model, task, routes["logits"]), *account(streams, routes, table, late, job.top)]:
        record.say(line)
    record.say(GPT2_SMALL)


def receiver(model: interp.HookedTransformer, head: interp.Part, part: str) -> str:
    """The name of a head's query, or of the key/value head that it reads."""
    config = model.cfg
    if part == "q" or config.kv_heads == config.n_heads:
        return f"{head}.{part}"
    assert head.index is not None
    return f"L{head.layer}G{head.index // (config.n_heads // config.kv_heads)}.{part}"


def by_role(model: interp.HookedTransformer, task: Task) -> xr.DataArray:
    """Share of the logit difference that the clean stream at one word brings back `[layer, role]`.

    Frames of different lengths have their words in different columns, so each frame is patched alone.
    """
    effects, total = [], 0.0
    for group in dict.fromkeys(task.pairs.groups):
        rows = torch.tensor([i for i, name in enumerate(task.pairs.groups) if name == group])
        found = patch(model, task.clean.rows(rows), task.corrupt.rows(rows), "resid_pre")
        columns = [int(task.pairs.columns(role)[rows[0]]) for role in ROLES]
        effects.append(found["each"].isel(pos=columns).sum("prompt").drop_vars("pos"))
        total += float((found.clean - found.corrupt).sum())
    summed = sum(effects[1:], effects[0])
    return (summed / total).rename(pos="role").assign_coords(role=list(ROLES))


def strongest_late(found: xr.Dataset, n: int) -> list[interp.Part]:
    """The heads after layer 0 with the largest effect on the logits."""
    late = interp.frame(found).query("kind == 'head' and layer > 0")
    return [interp.Part.of(part) for part in late.sort_values("value", key=np.abs, ascending=False).part[:n]]


def senders(found: xr.Dataset, labels: xr.DataArray) -> pd.DataFrame:
    """One row per sender that has a way, the strongest first."""
    table = interp.frame(found)[["part", "kind", "layer", "value", "low", "high", "n"]]
    names = labels.stack(cell=["layer", "head"])
    of_heads = dict(zip(names.part.values.tolist(), names.values.tolist(), strict=True))
    others = table.kind.map({"mlp": "MLP", "resid": "stream"})
    table = table[(table.kind != "resid") | (table.layer == 0)].drop(columns=["kind", "layer"])
    table.insert(1, "label", table.part.map(of_heads).fillna(others))
    return table.sort_values("value", key=np.abs, ascending=False)


def baseline(model: interp.HookedTransformer, task: Task, found: xr.Dataset) -> list[str]:
    """How well the model does the task, in both orders of the names."""
    logits = interp.observe(model, task.clean, logits_at=task.clean.last()[:, None]).output[:, 0]
    chance = logits.softmax(-1)[torch.arange(len(logits)), task.pairs.answer].mean()
    values = found.clean.to_numpy()
    order = np.array([group.partition(":")[0] for group in task.pairs.groups])
    half = float(t95(len(values))) * values.std(ddof=1) / len(values) ** 0.5
    orders = ", ".join(f"{name} {values[order == name].mean():+.2f}" for name in np.unique(order))
    return [
        f"{model.name}, {len(values)} pairs with names that never met in training",
        f"  logit(receiver) - logit(giver) {values.mean():+.2f} +- {half:.2f} ({orders}); receiver preferred in "
        f"{(values > 0).mean():.1%}, p(receiver) {chance:.1%}; corrupted {float(found.corrupt.mean()):+.2f}",
    ]


def account(
    streams: xr.DataArray,
    routes: dict[str, xr.Dataset],
    table: pd.DataFrame,
    late: Sequence[interp.Part],
    top: int,
) -> list[str]:
    """What was found, question by question."""
    lines = ["  the clean stream at one word, put into the corrupted run, brings back (1 = all):"]
    for layer in streams.layer.values:
        shares = ", ".join(f"{role} {float(streams.sel(layer=layer, role=role)):+.2f}" for role in ROLES)
        lines.append(f"    entering layer {layer}: {shares}")
    names = " and ".join(map(str, late))
    for to in routes:
        of = f" of heads {names}" if to in INPUTS.values() else ""
        lines.append(f"  to the {to}{of}, strongest senders (effect on the logit difference, 95 % interval):")
        for row in table[table.to == to].head(top).itertuples():
            lines.append(
                f"    {row.part:<8} {row.label:<16} {row.value:+.2f} [{row.low:+.2f}, {row.high:+.2f}]"
            )
    sizes = table[table.part.str.contains("H")].groupby("to").value.agg(lambda column: column.abs().sum())
    through, alone = sizes["logits"], sizes["logits, MLPs held"]
    felt = {name: float(table[table.to == name].value.abs().sum()) for name in INPUTS.values()}
    best = max(felt, key=lambda name: felt[name])
    lines.append(
        f"  of what heads do to the logits (sizes summed), {alone / through:.0%} is left when MLPs are held; "
        f"heads {names} are told mostly through their {best}"
    )
    return lines


def figure(
    job: IndirectObjectCircuit, streams: xr.DataArray, heads: xr.Dataset, routes: dict[str, xr.Dataset]
) -> Figure:
    """The stream by word, then every map of heads."""
    maps = {"all that follows from a head": heads} | {f"part to {to}": found for to, found in routes.items()}
    picture, grid = plt.subplots(2, 4, figsize=(21, 8), layout="constrained")
    draw_roles(grid.flat[0], streams)
    for ax, (title, found) in zip(grid.flat[1:], maps.items(), strict=False):
        plot.patching(found, "value", ax=ax)
        ax.set_title(title)
    plot.same_scale(grid)
    for ax in grid.flat[1 + len(maps) :]:
        ax.axis("off")
    picture.suptitle(f"{job.model}: indirect objects, corrupted by {job.corruption}")
    return picture


def draw_roles(ax: Axes, streams: xr.DataArray) -> None:
    """The stream's share of the answer by block and word."""
    values = streams.to_numpy()
    scale = ColourScale.signed(values, "share of the logit difference brought back")
    image = heat_map(ax, values, scale, title="clean stream into the corrupted run")
    annotate(ax, image, [[f"{v:.2f}" for v in row] for row in values])
    name_cells(ax, rows=[str(layer) for layer in streams.layer.values], columns=ROLES)
    ax.set_xlabel("word")
    ax.set_ylabel("entering layer")
