"""Nanda et al. 2023 (arXiv:2301.05217), Progress measures for grokking: addition modulo a prime, trained here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from experiments.papers.claim import Claim, Measured, above, below
from experiments.papers.effort import Effort
from interp.data.batch import Batch
from interp.families.convert import AnyModel
from interp.lab.training import FixedRows, Training, train
from interp.model import MLP, ModelConfig, NoNorm, Transformer
from interp.tasks import Examples

PRIME, TRAINED, KEYS = 31, 0.7, 5
"""The modulus, the share of all sums that are trained on, and how many frequencies are called key."""
LEARNED = 0.9
"""The accuracy at which sums count as learned."""


@dataclass(frozen=True)
class Sums:
    """One trained model, in numbers."""

    lag: float
    """Log of the updates until other sums were learned over those until the trained ones were; NaN if never."""
    accuracy: float
    """Of sums that were not trained on."""
    embedding: float
    """The share of the embedding's power that the key frequencies hold."""
    explained: float
    """The share of the logits' variance that cosines of w (a + b - c) explain."""
    excluded: float
    """Nats on trained sums without the key cosines, minus those of the whole model."""
    restricted: float
    """Nats on other sums with the key cosines alone, minus those of the whole model."""


def nanda_2023(effort: Effort) -> Iterator[Claim]:
    """Late generalisation, Fourier embeddings, cosine logits, and both progress measures."""
    every = [trained_sums(seed, effort) for seed in range(effort.of(3))]

    def over(name: str) -> Measured:
        return Measured.mean([getattr(each, name) for each in every], "seeds")

    there = sum(not math.isnan(each.lag) for each in every)
    small = f"modulus {PRIME}, {TRAINED:.0%} of all sums, width 64; the paper: 113, 30 %, 128"
    yield Claim(
        "accuracy on sums that were not trained on",
        "all of them: the model generalises",
        over("accuracy"),
        above(LEARNED),
        note=small,
    )
    yield Claim(
        f"grokking: log of updates to {LEARNED:.0%} on other sums over updates to that on trained ones",
        "generalises long after it memorises (about 1 400 and 10 000 updates)",
        over("lag") if there == len(every) else None,
        above(0.0),
        "log of a ratio",
        note=f"{there} of {len(every)} seeds got there, no number unless all",
    )
    yield Claim(
        f"share of the embedding's power in its {KEYS} largest of {PRIME // 2} frequencies",
        "sparse in the Fourier basis: five key frequencies",
        over("embedding"),
        above(0.8),
        note="region: four fifths; a random embedding has about two fifths",
    )
    yield Claim(
        f"share of the logits' variance explained by cos w (a + b - c) for {KEYS} frequencies",
        "95 %",
        over("explained"),
        above(0.8),
        note="region: four fifths",
    )
    yield Claim(
        "excluded loss: trained sums without those cosines, minus the loss of the model",
        "rises: the model needs them for what it was trained on",
        over("excluded"),
        above(0.0),
        "nats",
    )
    yield Claim(
        "restricted loss: other sums with those cosines alone, minus the loss of the model",
        "no worse, or better",
        over("restricted"),
        below(0.1),
        "nats",
        note="region: a tenth of a nat",
    )


def sums() -> Int[Tensor, "n 4"]:
    """All rows [a, b, =, a + b] modulo the prime."""
    a, b = torch.meshgrid(torch.arange(PRIME), torch.arange(PRIME), indexing="ij")
    a, b = a.flatten(), b.flatten()
    return torch.stack((a, b, torch.full_like(a, PRIME), (a + b) % PRIME), 1)


def trained_sums(seed: int, effort: Effort) -> Sums:
    """Train one model on a random share of all sums, and look into it."""
    rows = sums()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    count = int(TRAINED * len(rows))
    parts = rows[order[:count]], rows[order[count:]]
    steps = effort.of(2400, least=40)
    plan = Training(
        steps=steps, rows=count, learning_rate=1e-3, warm_up=10, final_share=1.0, weight_decay=0.3, clip=100.0,
        determined_only=True, log_every=max(1, steps // 60), evaluation_rows=len(parts[1]), seed=seed,
    )  # fmt: skip
    config = ModelConfig(1, 64, 4, 4, PRIME + 1, mlp=MLP(192, act="relu"), norm=NoNorm(), final_norm=False)
    data = FixedRows(_examples(parts[0]), _examples(parts[1]))
    done = train(
        config,
        data,
        plan,
        evaluate=lambda model, step: {"trained": _accuracy(told(model, parts[0]), parts[0])},
    )
    model, log = done.model, done.log
    assert isinstance(model, Transformer)
    late, early = (log.step[log[name] >= LEARNED] for name in ("accuracy", "trained"))
    lag = math.log(late.min() / early.min()) if len(late) and len(early) else math.nan
    return Sums(lag, float(log.accuracy.iloc[-1]), embedding_share(model), *_cosines(model, *parts))


def told(model: AnyModel, rows: Int[Tensor, "n 4"]) -> Float[Tensor, "n c"]:
    """The logits of every residue as the sum."""
    assert isinstance(model, Transformer)
    with torch.no_grad():
        return model(rows[:, :3])[:, -1, :PRIME].double()


def fourier() -> Float[Tensor, "f two p"]:
    """Unit cosines and sines of every frequency from 1 to half the prime."""
    angle = 2 * math.pi * torch.outer(torch.arange(1, PRIME // 2 + 1), torch.arange(PRIME)).double() / PRIME
    return torch.stack((angle.cos(), angle.sin()), 1) * (2 / PRIME) ** 0.5


def embedding_share(model: Transformer) -> float:
    """The share of the embedding's power, its mean left out, that the key frequencies hold."""
    power = (fourier() @ model.embed.weight[:PRIME].detach().double()).square().sum((1, 2))
    return float(power.topk(KEYS).values.sum() / power.sum())


def along_cosines(logits: Float[Tensor, "n c"], rows: Int[Tensor, "n 4"]) -> Float[Tensor, "f n c"]:
    """What of centred logits lies along cos w (a + b - c), frequency by frequency; orthogonal over all sums."""
    apart = (rows[:, :1] + rows[:, 1:2] - torch.arange(PRIME)).double() % PRIME
    angle = 2 * math.pi / PRIME * torch.arange(1, PRIME // 2 + 1).double()[:, None, None] * apart
    wave = angle.cos()
    return (wave * logits).sum((1, 2), keepdim=True) / wave.square().sum((1, 2), keepdim=True) * wave


def _cosines(
    model: Transformer, trained: Int[Tensor, "n 4"], others: Int[Tensor, "m 4"]
) -> tuple[float, float, float]:
    """The share of variance along the key cosines, and both progress measures."""
    rows = torch.cat((trained, others))
    logits = told(model, rows)
    centred = logits - logits.mean(1, keepdim=True)
    waves = along_cosines(centred, rows)
    keys = waves.square().sum((1, 2)).topk(KEYS).indices
    along, n = waves[keys].sum(0), len(trained)
    explained = float(along.square().sum() / (centred - centred.mean(0)).square().sum())
    excluded = _loss((centred - along)[:n], trained) - _loss(centred[:n], trained)
    restricted = _loss(along[n:], others) - _loss(centred[n:], others)
    return explained, excluded, restricted


def _loss(logits: Float[Tensor, "n c"], rows: Int[Tensor, "n 4"]) -> float:
    return float(F.cross_entropy(logits, rows[:, 3]))


def _accuracy(logits: Float[Tensor, "n c"], rows: Int[Tensor, "n 4"]) -> float:
    return float((logits.argmax(1) == rows[:, 3]).double().mean())


def _examples(rows: Int[Tensor, "n 4"]) -> Examples:
    """Rows of which only the sum is asked."""
    asked = torch.zeros(len(rows), 3, dtype=torch.bool)
    asked[:, 2] = True
    return Examples(Batch(rows), asked)
