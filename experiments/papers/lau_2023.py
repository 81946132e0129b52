"""Lau et al. 2023 (arXiv:2308.12108) and Hoogland et al. 2024 (arXiv:2402.02364): the local learning coefficient."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from experiments.papers.claim import Claim, Measured, above, near
from experiments.papers.effort import Effort
from interp.dynamics import Langevin, learning_coefficient, learning_coefficient_of
from interp.dynamics.learning_coefficient import PointLoss
from interp.lab.training import FixedRows, Training, train
from interp.model import MLP, Learned, ModelConfig
from interp.tasks import Examples, Place, RepeatingChain

DIMENSIONS, ROWS = 10, 10_000


def lau_2023(effort: Effort) -> Iterator[Claim]:
    """Two minima whose coefficient is known, one whose estimate is known to be biased, and a model over training."""
    cases: dict[str, tuple[PointLoss, float, float]] = {
        "a bowl, |w|^2 / 2": (lambda point: point["w"].square().sum() / 2, DIMENSIONS / 2, 0.5),
        "a flat bowl, sum of w^4": (lambda point: (point["w"] ** 4).sum(), DIMENSIONS / 4, 0.25),
    }
    sampler = Langevin(
        chains=effort.of(16), steps=effort.of(3000), burn_in=effort.of(300), step=1e-4, localisation=1.0
    )
    at = {"w": torch.zeros(DIMENSIONS, dtype=torch.float64)}
    for name, (loss, known, within) in cases.items():
        found = learning_coefficient_of(loss, at, ROWS, sampler)
        yield Claim(
            f"{name}, in {DIMENSIONS} dimensions: coefficient",
            f"closed form: {known:g}",
            Measured.mean(found.of_chain.values, "chains"),
            near(known, within),
            "learning coefficient",
            note="tolerance: a tenth; the interval is over chains, which share their bias",
        )
    rises = [_rise(seed, effort) for seed in range(effort.of(4))]
    yield Claim(
        "a one-layer model, 20 and 300 updates: its coefficient at the end minus at the start",
        "rises over the stages of training",
        Measured.mean(rises, "seeds"),
        above(0.0),
        "learning coefficient",
        note="short chains; after 20 updates there is no minimum yet",
    )


def _rise(seed: int, effort: Effort) -> float:
    """The coefficient after long training minus that after short training, the same rows and chains."""
    task = RepeatingChain(d_vocab=12, width=8, low=6, high=6, concentration=0.3)
    rows = Examples(task.batch(Place(seed, 0), 100).batch)
    config = ModelConfig(1, 16, 2, 8, 12, mlp=MLP(32), position=Learned())
    short = Langevin(chains=2, steps=effort.of(80), burn_in=effort.of(40), step=1e-4, localisation=1.0)
    found = []
    for steps in (20, effort.of(300, least=40)):
        plan = Training(
            steps=steps,
            rows=100,
            learning_rate=3e-3,
            warm_up=10,
            final_share=0.01,
            seed=seed,
            log_every=steps,
        )
        model = train(config, FixedRows(rows, rows), plan).model
        found.append(float(learning_coefficient(model, rows, short).value))  # type: ignore[arg-type]
    return found[1] - found[0]
