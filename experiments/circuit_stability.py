"""Does integrating gradients find a better, more stable circuit? EAP against EAP-IG on indirect objects in demo-4l.

Both score all edges by swapped pairs ("... John gave a drink to" / "... Mary gave a drink to"); their circuits are
judged on other sentences, with random circuits and such of the same degrees beside them: faithfulness over size, CPR
and CMD (MIB, Mueller et al. 2025), and how far the edges change when the sentences do.

Run: `interp run experiments/circuit_stability.py -p sentences=48`
"""

from dataclasses import asdict, dataclass
from functools import partial

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import xarray as xr
from matplotlib.figure import Figure

import interp
from interp import plot, tasks
from interp.causal import EdgeGraph
from interp.circuits import (
    MIB_FRACTIONS,
    Circuit,
    CircuitProtocol,
    circuit_curve,
    edge_stability,
    evaluate_circuit,
    find_circuit,
    score_edges,
)
from interp.circuits.edge_attribution import EdgeMethod
from interp.metrics import Metric, logit_difference
from interp.opening import OfModel
from interp.runs.record import Record

ENDS = ("value", "low", "high")
METHODS: dict[str, EdgeMethod] = {"EAP": "eap", "EAP-IG": "eap-ig-inputs"}


@dataclass(frozen=True)
class CircuitStability(OfModel):
    """How many sentences, and how large a circuit."""

    sentences: int = 48
    """Pairs that score the edges, and as many others that judge the circuits."""
    edges: int = 40
    """Edges of the circuits that are drawn and whose stability is measured."""
    draws: int = 2
    """Random circuits of each kind."""
    seed: int = 0
    """Seed of the sentences and of the controls."""


@dataclass(frozen=True)
class Sentences:
    """Clean sentences, the same with the other giver, and the metric."""

    clean: list[str]
    corrupt: list[str]
    metric: Metric

    @classmethod
    def drawn(cls, seed: int, count: int) -> "Sentences":
        """Random trained sentences, and the same with the two names swapped at the giver."""
        some = tasks.IndirectObjects(count).sentences(np.random.default_rng(seed))
        metric = logit_difference([s.answer for s in some], [s.wrong for s in some])
        return cls([s.prompt for s in some], [s.swapped().prompt for s in some], metric)


@dataclass(frozen=True, eq=False)
class Found:
    """What one method found, and how it was judged."""

    circuit: Circuit
    curve: xr.Dataset
    """Faithfulness over size, edges ranked by magnitude."""
    helpful: xr.Dataset
    """The same, ranked by sign and magnitude."""
    judged: xr.Dataset
    stable: xr.Dataset


def main(job: CircuitStability, record: Record) -> None:
    """Score, search, judge; keep tables, circuits and figures; say the summary."""
    model = job.opened()
    record.model(model)
    halves = tuple(Sentences.drawn(seed, job.sentences) for seed in (job.seed, job.seed + 1))
    every = {name: searched(name, model, halves, job, record) for name in METHODS}
    for name, found in every.items():
        record.figure(name, drawn(found.circuit))
    record.figure("curves", figure(every))
    curves = {name: interp.frame(found.curve) for name, found in every.items()}
    record.table("curves", pd.concat(curves, names=["method"]).reset_index(level=0))
    table = pd.concat([summary(name, found) for name, found in every.items()])
    record.table("summary", table)
    record.say(table.round(3).to_csv(index=False))


def searched(
    name: str,
    model: interp.HookedTransformer,
    halves: tuple[Sentences, ...],
    job: CircuitStability,
    record: Record,
) -> Found:
    """The scores of one method, its circuit, and what they are worth on other sentences."""
    pairs, other = halves
    judging = model, other.clean, other.corrupt
    scored = partial(score_edges, model, pairs.clean, pairs.corrupt, each=True, metric=pairs.metric)
    scores = record.step(f"{name}-scores", partial(scored, method=METHODS[name]))
    circuit = circuit_of(
        model, record.step(f"{name}-circuit", lambda: edges(model, pairs, METHODS[name], job))
    )
    judge = partial(
        evaluate_circuit, metric=other.metric, subsets=8, draws=job.draws, nodes=None, seed=job.seed
    )
    judged = record.step(f"{name}-judged", partial(judge, *judging, circuit))
    curve = partial(circuit_curve, *judging, scores, metric=other.metric, fractions=MIB_FRACTIONS)
    return Found(
        circuit,
        record.step(f"{name}-curve", lambda: curve(draws=job.draws, seed=job.seed)),
        record.step(f"{name}-helpful", lambda: curve(rank="helpful", draws=0)),
        judged,
        record.step(f"{name}-stability", lambda: edge_stability(scores, job.edges, seed=job.seed)),
    )


def edges(
    model: interp.HookedTransformer, pairs: Sentences, method: EdgeMethod, job: CircuitStability
) -> pd.DataFrame:
    """The circuit that one method finds, an edge a row; the rest of it in `attrs`."""
    found = find_circuit(
        model, pairs.clean, pairs.corrupt, metric=pairs.metric, method=method, edges=job.edges, search="greedy",
        task="indirect objects", seed=job.seed,
    )  # fmt: skip
    assert found.protocol is not None
    table = pd.DataFrame({"edge": found.edges, "score": found.scores.values()})
    table.attrs = {"model": found.model, "task": found.task, "protocol": asdict(found.protocol)}
    return table


def circuit_of(model: interp.HookedTransformer, table: pd.DataFrame) -> Circuit:
    """The circuit again."""
    scores = dict(zip(table.edge, table.score, strict=True))
    held = table.attrs
    return Circuit(
        EdgeGraph.of(model.cfg), scores, held["model"], held["task"], CircuitProtocol(**held["protocol"])
    )


def drawn(circuit: Circuit) -> Figure:
    """The circuit as a picture."""
    picture = plot.circuit(circuit).get_figure(root=True)
    assert picture is not None
    return picture


def summary(name: str, found: Found) -> pd.DataFrame:
    """One row for each score of the method's circuit and of its controls."""
    last, small = found.curve.isel(fraction=-1), found.judged.sel(score="faithfulness")
    rows = []
    for kind in found.curve.circuit.values.tolist():
        cells = {score: last.sel(circuit=kind, score=score) for score in ("cpr", "cmd")}
        cells |= {"faithfulness": small.sel(circuit=kind)}
        rows += [row(name, kind, score, *(cell[end] for end in ENDS)) for score, cell in cells.items()]
        rows.append(row(name, kind, "overlap", small.overlap.sel(circuit=kind)))
    best = found.helpful.isel(fraction=-1).sel(circuit="found", score="cpr")
    gap = found.judged.value.sel(score="incompleteness").max()
    rows.append(row(name, "found", "cpr, helpful edges first", *(best[end] for end in ENDS)))
    rows.append(row(name, "found", "largest incompleteness", gap))
    rows.append(row(name, "found", "jaccard", found.stable.value))
    rows.append(row(name, "random", "jaccard", found.stable.null))
    return pd.DataFrame(rows)


def row(method: str, circuit: str, score: str, *ends: xr.DataArray) -> dict[str, str | float]:
    """A number and, where it has one, its 95 % interval."""
    told = dict(zip(ENDS, map(float, ends), strict=False))
    return {"method": method, "circuit": circuit, "score": score, **told}


def figure(every: dict[str, Found]) -> Figure:
    """One panel per method."""
    picture, axes = plt.subplots(
        1, len(every), sharey=True, layout="constrained", figsize=(5.2 * len(every), 3.8)
    )
    for ax, (name, found) in zip(np.ravel(axes), every.items(), strict=True):
        plot.circuit_curve(found.curve, label=name, ax=ax)
    return picture
