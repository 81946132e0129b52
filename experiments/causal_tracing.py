"""Where does a demo model keep its facts? Causal tracing by layer and token, with paths severed: figure, tables, words.

Meng et al. 2022 (arXiv:2202.05262, section 2) on GPT-2 XL: restoring one state helps most at the last subject token in
middle layers, through MLPs (severing them removes the effect, severing attention does not), and at the last token in
late layers, through attention. Is it so in a model of four layers? Windows of ten layers make no sense here: MLPs and
attention are restored one layer at a time by default.

Run: `interp run experiments/causal_tracing.py -p facts=60`
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.figure import Figure

import interp
from interp import tasks
from interp.causal.causal_trace import causal_trace
from interp.opening import OfModel
from interp.plot import causal_trace as draw_map, causal_trace_curves, same_scale
from interp.runs.record import Record


@dataclass(frozen=True)
class CausalTracing(OfModel):
    """How many facts, and how they are disturbed."""

    model: str = "demo-4l"
    """A model that was trained on the package's facts."""
    facts: int = 60
    """Facts asked about, each in a random trained phrasing; those the model does not know are dropped and counted."""
    window: int = 1
    """MLP (attention) outputs restored together."""
    noise: float = 3.0
    """Standard deviation of the noise on the subject's embeddings, in theirs."""
    samples: int = 10
    """Draws of the noise per fact."""
    seed: int = 0
    """Seed of facts, phrasings and noise."""


def main(job: CausalTracing, record: Record) -> None:
    """Trace, draw, and say what is seen."""
    model = job.opened()
    record.model(model)
    found = {
        name: record.step("-".join(name.replace(",", "").split()), trace)
        for name, trace in traces(model, job).items()
    }
    record.figure("causal_tracing", figure(found))
    record.figure("one_fact", one_fact(found["state"]))
    tables = [interp.frame(trace).assign(trace=name) for name, trace in found.items()]
    record.table("effects", pd.concat(tables, ignore_index=True))
    for line in in_words(found, job):
        record.say(line)


def traces(model: interp.HookedTransformer, job: CausalTracing) -> dict[str, Callable[[], xr.Dataset]]:
    """The same facts, traced by states with and without severed paths, by MLPs and by attention."""
    known = tasks.fact_prompts()
    drawn = np.random.default_rng(job.seed).permutation(len(known))[: job.facts]
    asked = [known[i] for i in drawn]
    trace = partial(
        causal_trace,
        model,
        [fact.prompt for fact in asked],
        [fact.fact.subject for fact in asked],
        [model.text.tokenizer.encode(fact.answer)[0] for fact in asked],
        noise=job.noise,
        samples=job.samples,
        seed=job.seed,
        window=job.window,
    )
    return {
        "state": trace,
        "state, MLPs severed": partial(trace, severed="mlp"),
        "state, attention severed": partial(trace, severed="attn"),
        "MLPs": partial(trace, kind="mlp"),
        "attention": partial(trace, kind="attn"),
    }


def figure(found: Mapping[str, xr.Dataset]) -> Figure:
    """One map per trace, and the curves of the states."""
    picture, axes = plt.subplots(2, 3, figsize=(17, 8.5), layout="constrained")
    for ax, trace in zip(axes.flat, found.values(), strict=False):
        draw_map(trace, ax=ax)
    same_scale(axes)
    causal_trace_curves(found["state"], ax=axes.flat[-1])
    return picture


def one_fact(trace: xr.Dataset) -> Figure:
    """The first fact, token by token."""
    picture, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    draw_map(trace, prompt=0, ax=ax)
    return picture


def in_words(found: Mapping[str, xr.Dataset], job: CausalTracing) -> list[str]:
    """What is seen, beside what Meng et al. saw in GPT-2 XL."""
    state, last = found["state"], found["state"].sizes["layer"] - 1
    lines = [
        f"{state.sizes['prompt']} facts, {state.attrs['dropped']} dropped; total effect {interval(state.total)}",
        f"MLPs and attention restored {job.window} layer(s) at a time, ten in the paper.",
        "indirect effects, peak over layers with 95 % over facts:",
    ]
    for name, trace in found.items():
        for role in ("last subject", "first after", "last token"):
            # The last block's output at the last token is everything, by definition.
            cells = trace.sel(role=role, layer=slice(0, last - 1 if name.startswith("state") else last))
            best = cells.isel(layer=int(cells.value.argmax("layer")))
            lines.append(f"  {name:26s} {role:14s} layer {int(best.layer)}: {told(best)}")
    return [*lines, *verdicts(found)]


def verdicts(found: Mapping[str, xr.Dataset]) -> list[str]:
    """The paper's three findings, each with what this model says."""
    state = found["state"]
    early, end = (state.sel(role=role, layer=0) for role in ("last subject", "last token"))
    where = "the last subject token" if early.value > end.value else "the last token"
    mine = "last subject" if early.value > end.value else "last token"
    cut = {name: found[f"state, {name} severed"].sel(role=mine, layer=0) for name in ("MLPs", "attention")}
    whole = state.sel(role=mine, layer=0)
    middle = int(found["MLPs"].sel(role=mine).value.argmax("layer"))
    return [
        f"early site: after block 0 {told(early)} at the last subject token, {told(end)} "
        f"at the last token: here it is {where} (GPT-2 XL: the last subject token, about 0.09).",
        f"what carries it on from there: {told(whole)} as it is, {told(cut['MLPs'])} with "
        f"later MLPs severed, {told(cut['attention'])} with attention severed (GPT-2 XL: MLPs).",
        f"the MLPs that help most at {where} are of layer {middle} (GPT-2 XL: about 0.07, near layer 15 of 48).",
    ]


def told(cell: xr.Dataset) -> str:
    """The indirect effect of one cell and its 95 % interval."""
    return f"{float(cell.value):.2f} [{float(cell.low):.2f}, {float(cell.high):.2f}]"


def interval(estimate: xr.DataArray) -> str:
    """A number along the dim `estimate`, and its 95 % interval."""
    value, low, high = estimate.sel(estimate=["value", "low", "high"]).to_numpy()
    return f"{value:.2f} [{low:.2f}, {high:.2f}]"
