"""Elhage et al. 2022, Toy Models of Superposition: sparse features are kept in fewer dimensions than there are.

x' = ReLU(W^T W x + b), features 0 with probability 1 - p and uniform on [0, 1] otherwise, loss
sum_i I_i (x_i - x'_i)^2.
Two features in one dimension have three honest solutions: the first alone, the second alone, both on one line with
opposite signs. Their losses are known: p^2 (1 + r) / 6 for the pair, r (p / 3 - p^2 / 4) for the first alone (the
second guessed by its mean), so that the pair wins below p* = 4 r / (2 + 5 r).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from experiments.papers.claim import Claim, Measured, above, near
from experiments.papers.effort import Effort

DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0)
RATIOS = (0.3, 0.5, 0.8, 1.0)
"""Probabilities of a feature, and importances of the second beside the first."""
CLOSE = 0.25
"""Densities this close to p*, relatively, are left out: both solutions are nearly as good there."""


STARTS = 8
"""Models trained from different weights, of which the one with the lowest loss counts: others end in local minima."""


def elhage_2022(effort: Effort) -> Iterator[Claim]:
    """The two-feature phase diagram against its closed form, and how many features the dimensions of others hold."""
    groups, steps = effort.of(4), effort.of(2500, least=200)
    density, ratio = torch.tensor([(p, r) for p in DENSITIES for r in RATIOS]).repeat(groups, 1).unbind(1)
    importance = torch.stack((torch.ones(len(ratio)), ratio), 1)
    weights, loss = best(1, density, importance, steps)
    pair = (weights[:, 0, 0] * weights[:, 0, 1]) < -0.1
    border = 4 * ratio / (2 + 5 * ratio)
    clear = (density / border - 1).abs() > CLOSE
    right = (pair == (density < border))[clear]
    yield Claim(
        "two features, one dimension: share of trained models with the solution of lower closed-form loss",
        "two phases, superposed and not; closed form of their border: p* = 4 r / (2 + 5 r)",
        Measured.share(int(right.sum()), len(right), "models"),
        above(0.9),
        note=f"the best of {STARTS} starts; densities within {CLOSE:.0%} of the border left out",
    )
    dense = (density == 1.0) & (ratio == 0.5)
    yield Claim(
        "dense features, the second half as important: loss",
        "closed form (principal components): r / 12 = 0.0417",
        Measured.mean(loss[dense], "models"),
        near(0.5 / 12, 0.003),
        "weighted squared error",
        note=f"the best of {STARTS} starts",
    )
    sparse = (density == DENSITIES[0]) & (ratio == 1.0)
    alone = DENSITIES[0] / 3 - DENSITIES[0] ** 2 / 4
    yield Claim(
        "features present once in twenty: loss over that of keeping the first alone",
        "superposition is cheaper; closed form: 4 p / (4 - 3 p) = 0.052",
        Measured.mean(loss[sparse] / alone, "models"),
        near(0.052, 0.02),
        note=f"the best of {STARTS} starts",
    )
    yield from _many(effort)


def best(
    width: int, density: Float[Tensor, "g"], importance: Float[Tensor, "g n"], steps: int
) -> tuple[Float[Tensor, "g w n"], Float[Tensor, "g"]]:
    """Of `STARTS` trained models of each kind the one of lowest loss, and that loss."""
    weights, loss = trained(
        width, density.repeat_interleave(STARTS), importance.repeat_interleave(STARTS, 0), steps
    )
    lowest, chosen = loss.view(-1, STARTS).min(1)
    return weights.unflatten(0, (-1, STARTS))[torch.arange(len(chosen)), chosen], lowest


def _many(effort: Effort) -> Iterator[Claim]:
    """Twenty features in five dimensions, dense and sparse."""
    seeds, steps = effort.of(8), effort.of(4000, least=200)
    importance = 0.9 ** torch.arange(20.0)
    for p, text, published, region in (
        (1.0, "dense", "no superposition: as many as there are dimensions, 5", near(5.0, 0.5)),
        (0.03, "present in 3 of 100", "superposition: more than there are dimensions", above(6.0)),
    ):
        weights, _ = trained(5, torch.full((seeds,), p), importance.expand(seeds, -1), steps)
        yield Claim(
            f"twenty features in five dimensions, {text}: features with a direction longer than 0.5",
            published,
            Measured.mean((weights.norm(dim=1) > 0.5).sum(1).double(), "models"),
            region,
            "features",
        )
    weights, _ = trained(10, torch.full((seeds,), 0.2), torch.ones(seeds, 40), steps)
    yield Claim(
        "forty features of one importance in ten dimensions, present in a fifth: dimensions per feature, 10 / |W|^2",
        "a plateau at 1/2: antipodal pairs",
        Measured.mean(10 / weights.square().sum((1, 2)), "models"),
        near(0.5, 0.05),
        "dimensions",
        note="400 features in 30 dimensions in the paper",
    )


def trained(
    width: int, density: Float[Tensor, "g"], importance: Float[Tensor, "g n"], steps: int, seed: int = 0
) -> tuple[Float[Tensor, "g w n"], Float[Tensor, "g"]]:
    """The weights of g toy models trained side by side on fresh features, and their losses on 8192 others."""
    generator, (g, n) = torch.Generator().manual_seed(seed), importance.shape
    weights = (torch.randn(g, width, n, generator=generator) / n**0.5).requires_grad_()
    b = torch.zeros(g, 1, n, requires_grad=True)
    adam = torch.optim.Adam([weights, b], lr=5e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)

    def loss(rows: int) -> Float[Tensor, "g"]:
        there = torch.rand(g, rows, n, generator=generator) < density[:, None, None]
        x = torch.rand(g, rows, n, generator=generator) * there
        found = (x @ weights.transpose(1, 2) @ weights + b).relu()
        return ((x - found).square() * importance[:, None]).sum(-1).mean(-1)

    for _ in range(steps):
        adam.zero_grad()
        loss(128).sum().backward()
        adam.step()
        decay.step()
    with torch.no_grad():
        return weights.detach(), loss(8192)
