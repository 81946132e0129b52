"""Wang et al. 2022 (arXiv:2211.00593): the circuit of indirect objects in GPT-2 small, looked for in demo-4l."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
import pandas as pd
import torch
import xarray as xr

from experiments.papers.claim import Claim, Measured, above, below
from experiments.papers.effort import Effort
from interp.causal import ablate, batches, path_patch
from interp.core.results import frame
from interp.data.batch import Batch
from interp.hooked import HookedTransformer
from interp.model.edits import Mean
from interp.model.tap import Read
from interp.passes import observe
from interp.passes.metrics import logit_difference
from interp.tasks import IndirectObjects, TaskPairs

MOVERS = 3
"""How many late heads are asked, the strongest at the logits."""


def wang_2022(effort: Effort) -> Iterator[Claim]:
    """What the model says, what reaches its logits, where name movers look and what tells them, what is spared."""
    model = HookedTransformer.from_pretrained("demo-4l")
    asked = IndirectObjects(effort.of(96, least=12), held_out=True).pairs(model.text.tokenizer)
    clean, corrupt = batches(model, asked)
    to = partial(path_patch, model, clean, corrupt)
    logits = to()
    n = len(clean)
    yield Claim(
        "share of sentences whose receiver is preferred to the giver",
        "99.3 %",
        Measured.share(int((logits.clean > 0).sum()), n, "sentences"),
        above(0.9),
        note="demo-4l, name pairs never seen together; region: nine in ten",
    )
    late = frame(logits).query("kind == 'head' and layer > 0")
    best = late.nlargest(MOVERS, "value")
    yield from _movers(model, asked, clean, logits, best.part.tolist())
    yield from _negative(late)
    yield from _told(to, best.part.tolist())
    yield from _spared(model, asked, clean, best.part.tolist())


def _movers(
    model: HookedTransformer, asked: TaskPairs, clean: Batch, logits: xr.Dataset, movers: list[str]
) -> Iterator[Claim]:
    """The strongest late head at the logits: its effect, and where it looks."""
    one = logits.sel(part=movers[0])
    yield Claim(
        f"name movers: {movers[0]} (of layers after the first the strongest) straight to the logits",
        "9.9, 10.0 and 9.6 raise the answer at the logits",
        Measured(float(one.value), float(one.low), float(one.high), int(one.n), "sentences"),
        above(0.0),
        "logits",
    )
    layer, head = int(movers[0][1]), int(movers[0].partition("H")[2])
    read = Read(f"blocks.{layer}.attn.hook_pattern")
    pattern = observe(model, clean, [read]).trace[read]
    rows = torch.arange(len(clean))
    seen = {role: pattern[rows, head, clean.last(), asked.columns(role)].double() for role in ("IO", "S2")}
    yield Claim(
        f"name movers: attention of {movers[0]} from the end to the receiver minus to the giver's second mention",
        "to the receiver: 0.59",
        Measured.mean(seen["IO"] - seen["S2"], "sentences"),
        above(0.0),
        "attention",
    )


def _negative(late: pd.DataFrame) -> Iterator[Claim]:
    """The late head that lowers the answer most."""
    worst = late.nsmallest(1, "value").iloc[0]
    yield Claim(
        f"negative name movers: {worst.part} (the lowest of {len(late)} late heads) straight to the logits",
        "10.7 and 11.10 lower the answer by more than most movers raise it",
        Measured(float(worst.value), float(worst.low), float(worst.high), int(worst.n), "sentences"),
        below(-0.5),
        "logits",
        note="region: half a logit, about a tenth of what the paper's two do beside the whole",
    )


def _told(to: partial[xr.Dataset], movers: list[str]) -> Iterator[Claim]:
    """Through which of their inputs the movers are told, summed over senders that are heads."""
    each = {}
    for name in ("q", "k", "v"):
        found = to([f"{mover}.{name}" for mover in movers])
        heads = found.isel(part=found.kind.values == "head")
        each[name] = torch.from_numpy(heads["each"].transpose("prompt", "part").values).double().sum(1)
    yield Claim(
        f"S-inhibition: heads to the queries of {', '.join(movers)}, minus to keys and values together",
        "name movers are told through their queries which name to avoid",
        Measured.mean(each["q"] - each["k"] - each["v"], "sentences"),
        above(0.0),
        "logits",
    )


def _spared(model: HookedTransformer, asked: TaskPairs, clean: Batch, movers: list[str]) -> Iterator[Claim]:
    """What is left without the movers, and without MLPs, at their means over other sentences."""
    metric = logit_difference(asked.answer, asked.wrong)
    whole = metric_of(model, asked, clean)
    without = partial(ablate, model, clean, change=Mean(), metric=metric, by=("part",))
    lost = without([movers])
    each = torch.from_numpy(np.asarray(lost["each"]).reshape(len(clean), -1)[:, 0]).double()
    yield Claim(
        f"backup: share of the logit difference that is lost with {', '.join(movers)} replaced by their means",
        "all name movers out: about 5 %",
        Measured.mean(-each / whole.mean(), "sentences"),
        below(0.1),
        note="region: a tenth",
    )
    late = [[f"L{layer}.mlp" for layer in range(1, model.cfg.n_layers)]]
    gone = without(late)
    each = torch.from_numpy(np.asarray(gone["each"]).reshape(len(clean), -1)[:, 0]).double()
    yield Claim(
        "MLPs after the first are no part of the circuit: share lost with them replaced by their means",
        "the circuit is of heads; MLPs are not ablated",
        Measured.mean(-each / whole.mean(), "sentences"),
        below(0.1),
        note="region: a tenth",
    )


def metric_of(model: HookedTransformer, asked: TaskPairs, clean: Batch) -> torch.Tensor:
    """The logit difference of every sentence."""
    rows = torch.arange(len(clean))
    logits = observe(model, clean, logits_at=clean.last()[:, None]).output[:, 0].double()
    return logits[rows, asked.answer] - logits[rows, asked.wrong]
