"""Claim: attention under a sparse mask costs in proportion to what the mask lets through, in time and in memory.

Density is the share of the causal triangle that runs of 64 queries gather; the reference is fused causal attention of
the same size, which knows the triangle without a mask. `plan_s` is what finding the keys costs, once per pass.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
import tyro
from measure import cpu_seconds, memory, report, timing
from torch import Tensor

from interp.lab import BigBird, Dilated, FixedBlocks, Longformer, Strided
from interp.model.attention import Mask, attend
from interp.model.sparsity import QueryPiece, Sparsity, attend_pieces, pieces, visible

KINDS: tuple[Sparsity, ...] = (
    Longformer(128), Longformer(512), Longformer(2048), BigBird(64), BigBird(64, 9, 8, 2), FixedBlocks(128, 2),
    Dilated(128, 4), Strided(512),
)  # fmt: skip
CHECKED, SCALE = 1024, 0.1
Call = Callable[[], Tensor]


@torch.no_grad()
def main(lengths: tuple[int, ...] = (8192, 16384), heads: int = 8, width: int = 64, repeats: int = 3) -> None:
    """Measure every pattern against fused causal attention.

    Args:
        lengths: tokens of one text.
        heads: heads of the one layer.
        width: of a head.
        repeats: timed rounds per pattern.
    """
    torch.set_num_threads(1)
    for kind in KINDS:
        _check(kind, heads, width)
    for n in lengths:
        q, k, v = torch.randn(3, 1, n, heads, width)
        calls: dict[str, Call] = {"causal": partial(attend, q, k, v, Mask(True, None), SCALE, None)}
        plans: dict[str, tuple[tuple[QueryPiece, ...], float]] = {}
        for kind in KINDS:
            start = time.process_time()
            plan = pieces(kind, n, n, q.device, causal=True)
            plans[str(kind)] = (plan, time.process_time() - start)
            calls[str(kind)] = partial(attend_pieces, q, k, v, plan, SCALE)
        seconds = cpu_seconds(calls, repeats)
        for name, call in calls.items():
            plan, planned = plans.get(name, ((), 0.0))
            pairs = sum(piece.allowed.numel() for piece in plan)
            report(
                "sparse_attention", name, f"one layer of {heads} heads, {n} tokens",
                timing(seconds, name, "causal"), memory(call), density=round(pairs / (n * (n + 1) / 2), 4),
                plan_s=round(planned, 3), mask_mib=round(pairs / 2**20, 1),
            )  # fmt: skip


def _check(kind: Sparsity, heads: int, width: int) -> None:
    """RuntimeError unless the dense mask gives the same."""
    q, k, v = torch.randn(3, 1, CHECKED, heads, width)
    place = torch.arange(CHECKED)[None]
    dense = Mask(causal=False, allowed=visible(kind, place, place).tril()[:, None])
    expected = attend(q, k, v, dense, SCALE, None)
    found = attend_pieces(q, k, v, pieces(kind, CHECKED, CHECKED, q.device, causal=True), SCALE)
    difference = float((found - expected).abs().max())
    if difference > 1e-5:
        raise RuntimeError(f"{kind}: the two differ by {difference}")


if __name__ == "__main__":
    tyro.cli(main)
