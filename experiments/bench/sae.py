"""Claim: training a sparse autoencoder costs what the loop costs that one would write in a notebook, and TopK less.

The plain loop has the same start, batches, schedule and constraints (directions of norm 1, no gradient along them) and
writes its losses down; its features are dense, and nothing looks for dead ones. What TopK pays for dead features is
counted apart, for 5 % and half of all.
"""

from collections.abc import Callable
from functools import partial

import torch
import tyro
from measure import cpu_seconds, report, timing, work
from torch import Tensor

from interp.features import ReLU, TopK, train_dictionary
from interp.features.objectives import TrainedKind, objective
from interp.features.training import _initial

CLAIM = 1.05
N, D_IN, D_SAE, K, BATCH = 8192, 512, 4096, 32, 1024
SPARSITY = 0.5


def main(repeats: int = 5, steps: int = 24) -> None:
    """Measure both kinds, and the dead features of TopK.

    Args:
        repeats: timed rounds per system.
        steps: updates in a round.
    """
    torch.set_num_threads(1)
    x = torch.randn(N, D_IN, generator=torch.Generator().manual_seed(0))
    kinds: dict[str, tuple[TrainedKind, float | None]] = {
        "TopK(32)": (TopK(K), None),
        "ReLU": (ReLU(), SPARSITY),
    }
    for name, (kind, sparsity) in kinds.items():
        calls: dict[str, Callable[[], object]] = {
            "plain": partial(plain, x, kind, steps),
            "interp": partial(
                train_dictionary, x, kind, D_SAE, steps=steps, sparsity=sparsity, batch_size=BATCH, seed=0
            ),
        }
        seconds = cpu_seconds(calls, repeats)
        for system in calls:
            what = f"{steps} steps of {BATCH} vectors, {D_IN} -> {D_SAE}, {name}"
            report("sae", system, what, timing(seconds, system, "plain"), work(calls[system]), claim=CLAIM)
    for share in (0.0, 0.05, 0.5):
        report(
            "sae",
            "interp",
            f"one step of TopK, {share:.0%} of the features dead",
            work(partial(step, x, share)),
        )


def step(x: Tensor, share: float) -> None:
    """Forward and backward of one batch where so many features are dead."""
    sae = _initial((x[:BATCH],), TopK(K), D_SAE, 0).requires_grad_(True)
    objective(TopK(K), sae, x[:BATCH], x[:BATCH], 0.0, torch.arange(D_SAE) < share * D_SAE).loss.backward()


def plain(x: Tensor, kind: TrainedKind, steps: int) -> list[float]:
    """The loop of a notebook."""
    generator = torch.Generator().manual_seed(0)
    start = _initial((x[: 4 * BATCH],), kind, D_SAE, 0)
    enc, b_enc, dec, b_dec = (p.detach().clone().requires_grad_(True) for p in start.parameters())
    optimiser = torch.optim.Adam([enc, b_enc, dec, b_dec], 1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda n: min(1.0, (n + 1) / 3))
    losses = []
    order = torch.randperm(len(x), generator=generator)
    for n in range(steps):
        at = n * BATCH % len(x)
        batch = x[order[at : at + BATCH]]
        z = (batch - b_dec) @ enc + b_enc
        if isinstance(kind, TopK):
            values, index = z.topk(kind.k)
            features = torch.zeros_like(z).scatter(1, index, values.relu())
        else:
            features = z.relu()
        loss = (batch - features @ dec - b_dec).square().sum(1).mean()
        if not isinstance(kind, TopK):
            loss = loss + SPARSITY * features.sum(1).mean()
        optimiser.zero_grad()
        loss.backward()
        with torch.no_grad():
            assert dec.grad is not None
            dec.grad -= (dec.grad * dec).sum(1, keepdim=True) * dec
            optimiser.step()
            schedule.step()
            dec /= dec.norm(dim=1, keepdim=True)
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    tyro.cli(main)
