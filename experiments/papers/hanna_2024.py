"""Hanna et al. 2024 (arXiv:2403.17806), Have Faith in Faithfulness: EAP with integrated gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import xarray as xr

from experiments.papers.claim import Claim, Measured, above
from experiments.papers.effort import Effort
from interp.causal import batches
from interp.circuits import MIB_FRACTIONS, circuit_curve, recovery, score_edges
from interp.data.batch import Batch
from interp.hooked import HookedTransformer
from interp.passes.metrics import Metric, logit_difference
from interp.tasks import Facts, IndirectObjects
from interp.zoo.planted import PLANTED

SHARE = 0.02
"""The share of edges at which a small circuit is judged."""


def hanna_2024(effort: Effort) -> Iterator[Claim]:
    """Edges of planted circuits, and circuits of two tasks of demo-4l judged on other prompts."""
    apart = []
    for build in PLANTED.values():
        for seed in range(effort.of(3, least=1)):
            planted = build(seed, 8)
            metric = logit_difference(planted.answer, planted.wrong)
            tables = [
                _scores(HookedTransformer(planted.model), planted.clean, planted.corrupt, metric, method)
                for method in ("eap-ig-inputs", "eap")
            ]
            ours, plain = recovery(tables, planted.edges).value.sel(score="auroc").values.tolist()
            apart.append(ours - plain)
    yield Claim(
        "planted circuits: AUROC of edges, EAP-IG (inputs) minus EAP",
        "EAP-IG better",
        Measured.mean(apart, "models"),
        above(0.0),
        "AUROC",
        note="five hand-built models",
    )
    model = HookedTransformer.from_pretrained("demo-4l")
    for name, task in (("indirect objects", IndirectObjects), ("facts", Facts)):
        yield from _judged(name, model, task, effort)


def _judged(
    name: str, model: HookedTransformer, task: type[IndirectObjects] | type[Facts], effort: Effort
) -> Iterator[Claim]:
    """Faithfulness of small circuits on other pairs; distance from 1, pair by pair of methods."""
    rows = effort.of(32, least=6)
    drawn = (task(rows=rows, seed=seed).pairs(model.text.tokenizer) for seed in (0, 1))
    (find, find_corrupt), (judge, judge_corrupt) = (batches(model, pairs) for pairs in drawn)
    metric = logit_difference()
    curves = {
        method: circuit_curve(
            model,
            judge,
            judge_corrupt,
            _scores(model, find, find_corrupt, metric, method),
            metric=metric,
            fractions=MIB_FRACTIONS,
            draws=0,
        )
        for method in ("eap-ig-inputs", "eap")
    }
    cmd = [curve.isel(circuit=0, fraction=-1).sel(score="cmd") for curve in curves.values()]
    yield Claim(
        f"{name}: CMD of EAP minus that of EAP-IG (area between faithfulness and 1, on other pairs)",
        "EAP-IG more faithful",
        Measured(
            float(cmd[1].value - cmd[0].value),
            float(cmd[1].low - cmd[0].high),
            float(cmd[1].high - cmd[0].low),
            rows,
            "pairs",
        ),
        above(0.0),
        note="the interval is between the farthest ends of both",
    )


def _scores(
    model: HookedTransformer,
    clean: Batch | torch.Tensor,
    corrupt: Batch | torch.Tensor,
    metric: Metric,
    method: str,
) -> xr.Dataset:
    return score_edges(model, clean, corrupt, metric=metric, method=method, direction="noise")  # type: ignore[arg-type]
