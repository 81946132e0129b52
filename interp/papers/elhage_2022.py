"""Elhage et al. 2022, Toy Models of Superposition: sparse features are kept in fewer dimensions than there are.

x' = ReLU(W^T W x + b), features 0 with probability 1 - p and uniform on [0, 1] otherwise, loss sum_i I_i (x_i - x'_i)^2.
Two features in one dimension have three honest solutions: the first alone, the second alone, both on one line with
opposite signs. Their losses are known: p^2 (1 + r) / 6 for the pair, r (p / 3 - p^2 / 4) for the first alone (the
second guessed by its mean), so that the pair wins below p* = 4 r / (2 + 5 r).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from interp.papers.claim import Claim, Measured, above, below, near
from interp.papers.effort import Effort

DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 0.75, 0.9, 1.0)
RATIOS = (0.3, 0.5, 0.8, 1.0)
"""Probabilities of a feature, and importances of the second beside the first."""
CLOSE = 0.25
"""Densities this close to p*, relatively, are left out: both solutions are nearly as good there."""


def elhage_2022(effort: Effort) -> Iterator[Claim]:
    """The two-feature phase diagram against its closed form, and how many features five dimensions hold."""
    seeds, steps = effort.of(8), effort.of(2500, least=200)
    grid = torch.tensor([(p, r) for p in DENSITIES for r in RATIOS]).repeat_interleave(seeds, 0)
    importance = torch.stack((torch.ones(len(grid)), grid[:, 1]), 1)
    W, loss = trained(1, grid[:, 0], importance, steps)
    pair = (W[:, 0, 0] * W[:, 0, 1]) < -0.1
    wanted = 4 * grid[:, 1] / (2 + 5 * grid[:, 1])
    clear = (grid[:, 0] / wanted - 1).abs() > CLOSE
    right = (pair == (grid[:, 0] < wanted))[clear]
    yield Claim(
        "two features, one dimension: share of trained models with the solution of lower closed-form loss",
        "two phases, superposed and not; closed form of their border: p* = 4 r / (2 + 5 r)",
        Measured.share(int(right.sum()), len(right), "models"),
        above(0.9),
        note=f"densities within {CLOSE:.0%} of the border left out",
    )
    dense = (grid[:, 0] == 1.0) & (grid[:, 1] == 0.5)
    yield Claim(
        "dense features, the second half as important: loss",
        "closed form (principal components): r / 12 = 0.0417",
        Measured.mean(loss[dense], "models"),
        near(0.5 / 12, 0.003),
        "weighted squared error",
    )
    sparse = (grid[:, 0] == DENSITIES[0]) & (grid[:, 1] == 1.0)
    yield Claim(
        "features present once in twenty: loss over that of keeping the first alone",
        "superposition is cheaper; closed form: 2 p / (4 - 3 p) = 0.026 ... below 1",
        Measured.mean(loss[sparse] / (DENSITIES[0] / 3 - DENSITIES[0] ** 2 / 4), "models"),
        below(0.5),
    )
    yield from _many(effort)


def _many(effort: Effort) -> Iterator[Claim]:
    """Twenty features in five dimensions, dense and sparse."""
    seeds, steps = effort.of(8), effort.of(4000, least=200)
    importance = 0.9 ** torch.arange(20.0)
    for p, text, published, region in (
        (1.0, "dense", "no superposition: as many as there are dimensions, 5", near(5.0, 0.5)),
        (0.03, "present in 3 of 100", "superposition: more than there are dimensions", above(6.0)),
    ):
        W, _ = trained(5, torch.full((seeds,), p), importance.expand(seeds, -1), steps)
        kept = (W.norm(dim=1) > 0.5).sum(1).double()
        yield Claim(
            f"twenty features in five dimensions, {text}: features with a direction longer than 0.5",
            published,
            Measured.mean(kept, "models"),
            region,
            "features",
        )
    share = 5 / W.square().sum((1, 2))
    yield Claim(
        "of the sparse ones: dimensions per feature, 5 / |W|^2",
        "first plateau at 1/2: antipodal pairs",
        Measured.mean(share, "models"),
        near(0.5, 0.05),
        "dimensions",
        note="the paper's 400 features in 30 dimensions are of one importance, these are not",
    )


def trained(
    width: int, density: Float[Tensor, "g"], importance: Float[Tensor, "g n"], steps: int, seed: int = 0
) -> tuple[Float[Tensor, "g w n"], Float[Tensor, "g"]]:
    """W of g toy models trained side by side on fresh features, and their losses on 8192 others."""
    generator, (g, n) = torch.Generator().manual_seed(seed), importance.shape
    W = (torch.randn(g, width, n, generator=generator) / n**0.5).requires_grad_()
    b = torch.zeros(g, 1, n, requires_grad=True)
    adam = torch.optim.Adam([W, b], lr=5e-3)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)

    def loss(rows: int) -> Float[Tensor, "g"]:
        there = torch.rand(g, rows, n, generator=generator) < density[:, None, None]
        x = torch.rand(g, rows, n, generator=generator) * there
        found = (x @ W.transpose(1, 2) @ W + b).relu()
        return ((x - found).square() * importance[:, None]).sum(-1).mean(-1)

    for _ in range(steps):
        adam.zero_grad()
        loss(128).sum().backward()
        adam.step()
        decay.step()
    with torch.no_grad():
        return W.detach(), loss(8192)
