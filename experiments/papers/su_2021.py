"""Su 2021 ("From entropy invariance to the scale of attention"): scores times log n, sharp at any length."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from experiments.papers.claim import Claim, Measured, above, below, near
from experiments.papers.effort import Effort
from interp.lab import LogN

TRAINED, LONG = 16, 4096
"""The length at which a head was sharp, and one at which it has to be."""
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)


def su_2021(effort: Effort) -> Iterator[Claim]:
    """What a key keeps that is ahead by a fixed gap, and how the entropy of random scores grows."""
    gap = math.log(TRAINED)
    yield Claim(
        f"a key ahead of {LONG - 1} others by log {TRAINED}: its weight, scores times log n / log {TRAINED}",
        f"closed form: n / (2 n - 1) = {LONG / (2 * LONG - 1):.4f}",
        Measured.exact(needle(gap, LONG, scaled=True)),
        near(LONG / (2 * LONG - 1), 1e-4),
    )
    yield Claim(
        "the same without the factor",
        f"closed form: 1 / (1 + (n - 1) / {TRAINED}), to 0",
        Measured.exact(needle(gap, LONG, scaled=False)),
        near(1 / (1 + (LONG - 1) / TRAINED), 1e-4),
    )
    seeds = range(effort.of(12))
    bare = Measured.mean([entropy_slope(seed, scaled=False) for seed in seeds], "seeds")
    scaled = Measured.mean([entropy_slope(seed, scaled=True) for seed in seeds], "seeds")
    yield Claim(
        "Gaussian scores of std 1: growth of entropy per log n",
        "closed form (H = log n - s^2 / 2): 1",
        bare,
        near(1.0, 0.02),
    )
    yield Claim(
        "the factor makes the entropy grow less: growth without it minus with it",
        "entropy drifts less",
        Measured.mean(
            [entropy_slope(seed, scaled=False) - entropy_slope(seed, scaled=True) for seed in seeds], "seeds"
        ),
        above(0.0),
    )
    yield Claim(
        "the factor makes the entropy invariant: growth per log n with it, in size",
        "entropy invariance: about 0",
        scaled,
        below(0.1),
        note="holds for a fixed gap, above, not for scores of a fixed spread",
    )


def needle(gap: float, n: int, *, scaled: bool) -> float:
    """The weight of one key that is ahead of n - 1 others by a gap."""
    scores = torch.zeros(n, dtype=torch.float64)
    scores[0] = gap
    return float((scores * _factor(n, scaled=scaled)).softmax(0)[0])


def entropy_slope(seed: int, *, scaled: bool) -> float:
    """By how much the entropy of one softmax row grows with log n, over `LENGTHS`; 64 rows of scores each."""
    generator, found = torch.Generator().manual_seed(seed), []
    for n in LENGTHS:
        rows = torch.randn(64, n, generator=generator, dtype=torch.float64) * _factor(n, scaled=scaled)
        found.append(float(torch.distributions.Categorical(logits=rows).entropy().mean()))
    return float(np.polyfit(np.log(LENGTHS), found, 1)[0])


def _factor(n: int, *, scaled: bool) -> float:
    return float(LogN(TRAINED).factor(torch.tensor([[n]]))) if scaled else 1.0
