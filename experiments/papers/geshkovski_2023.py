"""Geshkovski et al. 2023 (arXiv:2305.05465) and Rodriguez Abella et al. 2024: tokens as particles that meet."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from experiments.papers.claim import Claim, Measured, above, near
from experiments.papers.effort import Effort
from interp.lab.depth import flow, trajectories

TOKENS, WIDTH = 10, 3


def geshkovski_2023(effort: Effort) -> Iterator[Claim]:
    """Where tokens on the sphere end under attention that attracts, that looks back only, and that repels."""
    seeds, one = range(effort.of(6)), torch.eye(WIDTH, dtype=torch.float64)
    met = [flow(start(seed, hemisphere=True), qk=one, ov=one) for seed in seeds]
    yield Claim(
        "tokens of one hemisphere, values that attract: smallest cosine between two at the end",
        "theorem: one cluster, 1",
        Measured.mean([float((end @ end.T).min()) for end in met], "starts"),
        above(0.9999),
        "cosine",
    )
    first = [start(seed) for seed in seeds]
    ends = [flow(begin, qk=one, ov=one, causal=True) for begin in first]
    yield Claim(
        "any start under a causal mask: smallest cosine with where the first token began",
        "theorem: all go to the first token, 1",
        Measured.mean(
            [float((end @ begin[0]).min()) for begin, end in zip(first, ends, strict=True)], "starts"
        ),
        above(0.9999),
        "cosine",
    )
    yield Claim(
        "any start, values that attract, keys twenty times as sharp, a short time: clusters of cosine above 0.99",
        "several clusters that last: more than one",
        Measured.mean([_clusters(start(seed, 40), 20.0) for seed in seeds], "starts"),
        above(1.0),
        "clusters",
        note="the paper's clusters are those of rescaled dynamics; long-lived ones on the sphere are of a later paper",
    )
    four = [flow(start(seed, 4), qk=one, ov=-one, steps=8000) for seed in seeds]
    yield Claim(
        "four tokens in three dimensions, values that repel: mean cosine between two",
        "closed form: the simplex, -1/3",
        Measured.mean([_mean_cosine(end) for end in four], "starts"),
        near(-1 / 3, 0.01),
        "cosine",
    )


def start(seed: int, tokens: int = TOKENS, *, hemisphere: bool = False) -> Float[Tensor, "n d"]:
    """Random tokens on the unit sphere, if asked all on one side of a plane."""
    x = torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = torch.cat((x[:, :1].abs().clamp_min(0.05), x[:, 1:]), 1) if hemisphere else x
    return x / x.norm(dim=1, keepdim=True)


def _clusters(begin: Float[Tensor, "n d"], sharpness: float) -> float:
    """How many groups of tokens with cosines above 0.99 there are at time 10."""
    qk = sharpness * torch.eye(WIDTH, dtype=begin.dtype)
    way = trajectories(begin, qk=qk, ov=torch.eye(WIDTH, dtype=begin.dtype), dt=0.02, steps=500, every=500)
    return float(way.value.sel(score="clusters")[-1])


def _mean_cosine(end: Float[Tensor, "n d"]) -> float:
    cosines, n = end @ end.T, len(end)
    return float((cosines.sum() - n) / (n * (n - 1)))
