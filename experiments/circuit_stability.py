"""Does integrating gradients find a better, more stable circuit? EAP against EAP-IG on indirect objects in demo-4l.

Both score all edges by swapped twins ("... John gave a drink to" / "... Mary gave a drink to"); their circuits are
judged on other sentences, with random circuits and such of the same degrees beside them: faithfulness over size, CPR
and CMD (MIB, Mueller et al. 2025), and how far the edges change when the sentences do.

Run: `interp run experiments/circuit_stability.py --sentences 48 --out out/circuit_stability`
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import tyro
import xarray as xr

import interp
from interp.analyses.circuit_evaluation import evaluate_circuit, faithfulness_curve
from interp.analyses.discovery import find_circuit, score_edges
from interp.analyses.edge_attribution import Method
from interp.analyses.edge_circuit import Circuit
from interp.analyses.edge_rankings import edge_stability
from interp.analyses.interchange import Interchange
from interp.core.results import write_atomically
from interp.engine.metrics import Metric, logit_difference
from interp.plot.circuit import circuit as draw_circuit
from interp.plot.circuit import faithfulness_curve as draw_curve
from interp.zoo import tasks

METHODS: dict[str, Method] = {"EAP": "eap", "EAP-IG": "eap-ig-inputs"}
INTEGRALS = [f"{area}{end}" for area in ("cpr", "cmd") for end in ("", "_low", "_high")]


@dataclass(frozen=True)
class CircuitStability:
    """How many sentences, how large a circuit, and where to."""

    sentences: int = 48
    """Pairs that score the edges, and as many others that judge the circuits."""
    edges: int = 40
    """Edges of the circuits that are drawn and whose stability is measured."""
    draws: int = 2
    """Random circuits of each kind."""
    seed: int = 0
    """Seed of the sentences and of the controls."""
    out: Path = Path("out/circuit_stability")
    """Folder for summary.csv, curves.csv, one circuit in JSON and PNG per method, and curves.png."""


@dataclass(frozen=True)
class Twins:
    """Sentences, their twins with the other giver, and the metric."""

    clean: list[str]
    corrupt: list[str]
    metric: Metric


def main(job: CircuitStability) -> Path:
    """Score, search, judge; write tables, circuits and figures; print the summary."""
    model = interp.HookedTransformer.from_pretrained("demo-4l")
    found, judged = (twins(seed, job.sentences) for seed in (job.seed, job.seed + 1))
    task = Interchange.of(model, judged.clean, judged.corrupt, metric=judged.metric)
    job.out.mkdir(parents=True, exist_ok=True)
    curves: dict[str, xr.Dataset] = {}
    rows: dict[str, dict[str, float]] = {}
    for name, method in METHODS.items():
        scores = score_edges(model, found.clean, found.corrupt, metric=found.metric, method=method, each=True)
        circuit = find_circuit(
            model, found.clean, found.corrupt, metric=found.metric, method=method, edges=job.edges, search="greedy",
            task="indirect objects", seed=job.seed,
        )  # fmt: skip
        keep(circuit, job.out, name)
        curves[name] = faithfulness_curve(task, scores, draws=job.draws, seed=job.seed)
        helpful = faithfulness_curve(task, scores, rank="helpful", draws=0)
        rows |= summary(name, curves[name], helpful, scores, circuit, task, job)
    table = pd.DataFrame(rows).T
    frames = pd.concat({name: interp.frame(curve) for name, curve in curves.items()}, names=["method"])
    for name, frame in (("summary", table), ("curves", frames)):
        write_atomically(job.out / f"{name}.csv", partial(frame.to_csv))
    figure(curves, job.out / "curves.png")
    print(table.round(3).to_csv())
    return job.out


def twins(seed: int, count: int) -> Twins:
    """Random trained sentences and their swapped twins."""
    sentences = tasks.indirect_objects(np.random.default_rng(seed), count)
    metric = logit_difference([s.answer for s in sentences], [s.wrong for s in sentences])
    return Twins([s.prompt for s in sentences], [s.swapped().prompt for s in sentences], metric)


def summary(
    name: str,
    curve: xr.Dataset,
    helpful: xr.Dataset,
    scores: xr.Dataset,
    circuit: Circuit,
    task: Interchange,
    job: CircuitStability,
) -> dict[str, dict[str, float]]:
    """One row for the method and one for each of its controls."""
    judged = evaluate_circuit(task, circuit, subsets=8, draws=job.draws, seed=job.seed)
    rows: dict[str, dict[str, float]] = {}
    for kind in curve.kind.values.tolist():
        one = curve[INTEGRALS].sel(kind=kind)
        ends = {str(key): float(value) for key, value in one.data_vars.items()}
        rows[f"{name}, {kind}"] = ends | {
            key: float(judged[key].sel(kind=kind)) for key in ("faithfulness", "overlap")
        }
    stable = edge_stability(scores, job.edges, seed=job.seed)
    rows[f"{name}, found"] |= {
        "cpr_helpful": float(helpful.cpr[0]), "edges": len(circuit.edges),
        "completeness": float(judged.completeness.max()), "jaccard": float(stable.jaccard),
        "chance": float(stable.chance),
    }  # fmt: skip
    return rows


def keep(circuit: Circuit, out: Path, name: str) -> None:
    """The circuit as JSON and as a picture."""
    circuit.save(out / f"{name}.json")
    picture = draw_circuit(circuit).figure
    picture.savefig(out / f"{name}.png", dpi=150, bbox_inches="tight")  # type: ignore[union-attr]
    plt.close("all")


def figure(curves: dict[str, xr.Dataset], path: Path) -> None:
    """One panel per method."""
    picture, axes = plt.subplots(
        1, len(curves), sharey=True, layout="constrained", figsize=(5.2 * len(curves), 3.8)
    )
    for ax, (name, curve) in zip(np.ravel(axes), curves.items(), strict=True):
        draw_curve(curve, label=name, ax=ax)
    picture.savefig(path, dpi=150)
    plt.close(picture)


if __name__ == "__main__":
    print(main(tyro.cli(CircuitStability)))
