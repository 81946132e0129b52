"""Gurnee et al. 2023 (arXiv:2305.01610), Finding Neurons in a Haystack: sparse probes, planted and in demo-4l."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import xarray as xr

from experiments.papers.claim import Claim, Measured, above, near
from experiments.papers.effort import Effort
from interp.features import probe, probe_neurons
from interp.hooked import HookedTransformer
from interp.tasks import fact_prompts, load_facts

NEURONS, PLANTED, EXAMPLES = 256, 8, 600
RELATIONS = ("capital", "language", "currency", "continent")


def gurnee_2023(effort: Effort) -> Iterator[Claim]:
    """The authors' own synthetic test, single neurons for what a question asks, and layers that need more of them."""
    recalls = {shift: [recall(seed, shift) for seed in range(effort.of(8))] for shift in (1.0, 0.0)}
    for shift, says, region in (
        (1.0, "found above a threshold of the shift; closed form: 1", near(1.0, 0.05)),
        (0.0, f"closed form (chance): {PLANTED / NEURONS:.3f}", near(PLANTED / NEURONS, 0.06)),
    ):
        yield Claim(
            f"planted: share of {PLANTED} of {NEURONS} shifted neurons that mean differences find, shift {shift:g} sd",
            says,
            Measured.mean(recalls[shift], "seeds"),
            region,
        )
    model = HookedTransformer.from_pretrained("demo-4l")
    found = {relation: probed(model, relation, effort) for relation in RELATIONS}
    for relation, result in found.items():
        one = result.sel(n_neurons=1, score="f1").isel(rank=0)
        best = one.isel(layer=int(one.value.values.argmax()))
        yield Claim(
            f"what is asked ({relation}, at the last token): F1 of one neuron, best layer ({int(best.layer)})",
            "single neurons for contexts, F1 0.95 to 1.0 (French, Go, Python)",
            Measured(float(best.value), float(best.low), float(best.high), int(best.n), "test prompts"),
            above(0.9),
            "F1",
            note="the best of four layers, chosen on the same prompts; region: 0.9",
        )
    gains = [_gain(result, 0) - _gain(result, 2) for result in found.values()]
    yield Claim(
        "what 16 neurons add to the F1 of one: first layer minus third",
        "early layers superpose, middle layers have neurons of their own",
        Measured.mean(gains, "relations"),
        above(0.0),
        "F1",
    )


def recall(seed: int, shift: float) -> float:
    """The share of planted neurons among those chosen: Gaussian noise through x sigmoid(1.702 x), positives shifted."""
    generator = torch.Generator().manual_seed(seed)
    planted = torch.randperm(NEURONS, generator=generator)[:PLANTED]
    labels = torch.rand(EXAMPLES, generator=generator) < 0.5
    x = torch.randn(EXAMPLES, NEURONS, generator=generator)
    x[:, planted] += shift * labels[:, None]
    found = probe(x * (1.702 * x).sigmoid(), labels, sizes=(PLANTED,), shuffles=1, seed=seed)
    chosen = set(found.neuron.isel(n_neurons=0).values.ravel().astype(int).tolist()[:PLANTED])
    return len(chosen & set(planted.tolist())) / PLANTED


def probed(model: HookedTransformer, relation: str, effort: Effort) -> xr.Dataset:
    """Probes of one neuron and of sixteen in every layer for whether a question is about this."""
    asked = [fact for fact in load_facts() if fact.relation in RELATIONS]
    every = fact_prompts(table=asked)
    order = np.random.default_rng(0).permutation(len(every))[: effort.of(500, least=80)]
    prompts = [every[i] for i in order]
    labels = [prompt.fact.relation == relation for prompt in prompts]
    return probe_neurons(
        model, [prompt.prompt for prompt in prompts], labels, pos=-1, sizes=(1, 16), shuffles=1
    )


def _gain(found: xr.Dataset, layer: int) -> float:
    f1 = found.value.sel(score="f1", layer=layer).isel(rank=0) if "rank" in found.value.dims else None
    f1 = found.value.sel(score="f1", layer=layer) if f1 is None else f1
    return float(f1.sel(n_neurons=16) - f1.sel(n_neurons=1))
