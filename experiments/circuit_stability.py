"""Does integrating gradients find a better, more stable circuit? EAP against EAP-IG on indirect objects in demo-4l.

Both score all edges by swapped twins ("... John gave a drink to" / "... Mary gave a drink to"); their circuits are
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
from interp.causal.graph import EdgeGraph
from interp.circuits.circuit_evaluation import evaluate_circuit, faithfulness_curve
from interp.circuits.discovery import find_circuit, score_edges
from interp.circuits.edge_attribution import Method
from interp.circuits.edge_circuit import Circuit, CircuitProtocol
from interp.circuits.edge_rankings import edge_stability
from interp.circuits.interchange import Interchange
from interp.passes.metrics import Metric, logit_difference
from interp.plot.circuit import circuit as draw_circuit
from interp.plot.circuit import faithfulness_curve as draw_curve
from interp.runs.record import Record
from interp.zoo import tasks

METHODS: dict[str, Method] = {"EAP": "eap", "EAP-IG": "eap-ig-inputs"}
INTEGRALS = [f"{area}{end}" for area in ("cpr", "cmd") for end in ("", "_low", "_high")]


@dataclass(frozen=True)
class CircuitStability:
    """How many sentences, and how large a circuit."""

    model: str = "demo-4l"
    """Demo name, local folder, safetensors file or hub name."""
    sentences: int = 48
    """Pairs that score the edges, and as many others that judge the circuits."""
    edges: int = 40
    """Edges of the circuits that are drawn and whose stability is measured."""
    draws: int = 2
    """Random circuits of each kind."""
    seed: int = 0
    """Seed of the sentences and of the controls."""


@dataclass(frozen=True)
class Twins:
    """Sentences, their twins with the other giver, and the metric."""

    clean: list[str]
    corrupt: list[str]
    metric: Metric


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
    model = interp.HookedTransformer.from_pretrained(job.model)
    record.model(model)
    scoring, judging = (twins(seed, job.sentences) for seed in (job.seed, job.seed + 1))
    task = Interchange.of(model, judging.clean, judging.corrupt, metric=judging.metric)
    every = {name: searched(name, model, scoring, task, job, record) for name in METHODS}
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
    pairs: Twins,
    task: Interchange,
    job: CircuitStability,
    record: Record,
) -> Found:
    """The scores of one method, its circuit, and what they are worth on other sentences."""
    scored = partial(score_edges, model, pairs.clean, pairs.corrupt, each=True, metric=pairs.metric)
    scores = record.step(f"{name}-scores", partial(scored, method=METHODS[name]))
    circuit = circuit_of(
        model, record.step(f"{name}-circuit", lambda: edges(model, pairs, METHODS[name], job))
    )
    judged = record.step(
        f"{name}-judged", lambda: evaluate_circuit(task, circuit, subsets=8, draws=job.draws, seed=job.seed)
    )
    curve = partial(faithfulness_curve, task, scores)
    return Found(
        circuit,
        record.step(f"{name}-curve", lambda: curve(draws=job.draws, seed=job.seed)),
        record.step(f"{name}-helpful", lambda: curve(rank="helpful", draws=0)),
        judged,
        record.step(f"{name}-stability", lambda: edge_stability(scores, job.edges, seed=job.seed)),
    )


def edges(
    model: interp.HookedTransformer, pairs: Twins, method: Method, job: CircuitStability
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
    picture = draw_circuit(circuit).get_figure(root=True)
    assert picture is not None
    return picture


def twins(seed: int, count: int) -> Twins:
    """Random trained sentences and their swapped twins."""
    sentences = tasks.indirect_objects(np.random.default_rng(seed), count)
    metric = logit_difference([s.answer for s in sentences], [s.wrong for s in sentences])
    return Twins([s.prompt for s in sentences], [s.swapped().prompt for s in sentences], metric)


def summary(name: str, found: Found) -> pd.DataFrame:
    """One row for the method and one for each of its controls."""
    rows: list[dict[str, object]] = []
    for kind in found.curve.kind.values.tolist():
        cells = {key: float(found.curve[key].sel(kind=kind)) for key in INTEGRALS}
        cells |= {key: float(found.judged[key].sel(kind=kind)) for key in ("faithfulness", "overlap")}
        rows.append({"circuit": f"{name}, {kind}", **cells})
    rows[0] |= {
        "cpr_helpful": float(found.helpful.cpr[0]), "edges": len(found.circuit.edges),
        "completeness": float(found.judged.completeness.max()), "jaccard": float(found.stable.jaccard),
        "chance": float(found.stable.chance),
    }  # fmt: skip
    return pd.DataFrame(rows)


def figure(every: dict[str, Found]) -> Figure:
    """One panel per method."""
    picture, axes = plt.subplots(
        1, len(every), sharey=True, layout="constrained", figsize=(5.2 * len(every), 3.8)
    )
    for ax, (name, found) in zip(np.ravel(axes), every.items(), strict=True):
        draw_curve(found.curve, label=name, ax=ax)
    return picture
