"""Olsson et al. 2022, In-context Learning and Induction Heads: the phase change, on a chain of symbols that repeats."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import torch

from experiments.papers.claim import Claim, Measured, above, below
from experiments.papers.effort import Effort
from interp.attention import heads
from interp.causal import ablate
from interp.core.results import frame
from interp.data.batch import Batch
from interp.dynamics import in_context
from interp.families.convert import AnyModel
from interp.lab.training import Training, train
from interp.model import ModelConfig, Rotary, Softmax, Transformer
from interp.model.edits import Zero
from interp.passes.metrics import next_token_loss
from interp.tasks import Place, RepeatedTokens, RepeatingChain

CHAIN = RepeatingChain(d_vocab=64, width=64)
ONE = ModelConfig(1, 64, 4, CHAIN.width, CHAIN.d_vocab, position=Rotary())
MODELS = {
    "1": ONE,
    "1 smeared": replace(ONE, mixer=Softmax(smeared_keys=True)),
    "2": replace(ONE, n_layers=2),
}
"""One layer, one whose keys carry the token before, and two."""
EARLY, LATE = 8, 60
EVERY = 75
"""Updates between two measurements."""


@dataclass(frozen=True)
class Watched:
    """One model over its training, and what the best induction head is worth at the end."""

    learned: list[float]
    """In-context-learning score, late minus early nats; negative: context helps."""
    induction: list[float]
    """Prefix matching of the best head."""
    ablated: float
    """Nats that the loss rises by without that head, patterns held."""
    of_others: float
    """The mean of the same over the other heads."""


def olsson_2022(effort: Effort) -> Iterator[Claim]:
    """Which models change phase, whether both scores do so together, and what the heads are worth."""
    seeds = range(effort.of(5))
    steps = effort.of(900, least=2 * EVERY)
    every = {name: [watched(config, seed, steps) for seed in seeds] for name, config in MODELS.items()}
    two, one, smeared = every["2"], every["1"], every["1 smeared"]
    gap = [a.learned[-1] - b.learned[-1] for a, b in zip(two, one, strict=True)]
    yield Claim(
        "in-context-learning score of two layers minus that of one",
        "after the change -0.4 nats, one layer never gets there",
        Measured.mean(gap, "seeds"),
        below(0.0),
        "nats",
    )
    yield Claim(
        "prefix matching of the best head, two layers minus one",
        "induction heads with two layers, none with one",
        Measured.mean([a.induction[-1] - b.induction[-1] for a, b in zip(two, one, strict=True)], "seeds"),
        above(0.2),
        "attention",
        note="region: a fifth of all attention",
    )
    apart = [change(a.induction, rises=True) - change(a.learned, rises=False) for a in two]
    yield Claim(
        f"two layers: measurements (each {EVERY} updates) between the steepest rise of the one and fall of the other",
        "both change in the same window",
        Measured.mean([abs(x) for x in apart], "seeds"),
        below(2.0),
        "measurements",
        note="region: two measurements",
    )
    yield Claim(
        "smeared keys, one layer: prefix matching of the best head minus that of plain keys",
        "with smeared keys one layer has the change too",
        Measured.mean(
            [a.induction[-1] - b.induction[-1] for a, b in zip(smeared, one, strict=True)], "seeds"
        ),
        above(0.2),
        "attention",
        note="region: a fifth of all attention",
    )
    moments = [[change(each.learned, rises=False) for each in some] for some in (two, smeared)]
    earlier = [plain - smear for plain, smear in zip(*moments, strict=True)]
    yield Claim(
        "smeared keys, one layer: measurements by which its change comes before that of two plain layers",
        "smeared keys: earlier",
        Measured.mean(earlier, "seeds"),
        above(0.0),
        "measurements",
        note="the paper compares two layers with two",
    )
    yield Claim(
        "two layers: nats lost without the best induction head minus without another head, patterns held",
        "induction heads are most of in-context learning in small attention-only models",
        Measured.mean([a.ablated - a.of_others for a in two], "seeds"),
        above(0.0),
        "nats per token",
    )


def watched(config: ModelConfig, seed: int, steps: int) -> Watched:
    """Train one model, measure it on the way, ablate its heads at the end."""
    rows = CHAIN.batch(Place(seed + 1, None), 96).batch
    plan = Training(steps=steps, rows=32, learning_rate=3e-3, warm_up=50, log_every=EVERY, seed=seed)
    done = train(config, CHAIN, plan, evaluate=lambda model, step: _measured(model, rows))
    model = done.model
    assert isinstance(model, Transformer)
    lost = frame(
        ablate(deepcopy(model), rows, "head", change=Zero(), freeze_patterns=True, metric=next_token_loss())
    )
    best = _induction(model).reshape(-1).argmax()
    effects = torch.from_numpy(lost.value.to_numpy(dtype=np.float64, copy=True))
    rest = torch.cat((effects[:best], effects[best + 1 :]))
    return Watched(
        list(done.log.in_context), list(done.log.induction), float(effects[best]), float(rest.mean())
    )


def change(series: list[float], *, rises: bool) -> int:
    """Between which two neighbours a series moves most in one direction: the index of the first."""
    steps = np.diff(series)
    return int(steps.argmax() if rises else steps.argmin())


def _measured(model: AnyModel, rows: Batch) -> dict[str, float]:
    assert isinstance(model, Transformer)
    frozen = deepcopy(model)
    score = in_context(frozen, rows, early=EARLY, late=LATE).value.sel(score="in_context", index=LATE)
    return {"in_context": float(score), "induction": float(_induction(frozen).max())}


def _induction(model: Transformer) -> torch.Tensor:
    """Prefix matching of every head on random tokens, one row per layer."""
    found = heads(model, repeats=RepeatedTokens(period=15, repeats=4, rows=8), sentences=None)
    return torch.from_numpy(found.value.sel(score="induction").values)
