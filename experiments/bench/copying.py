"""Claims: full-vocabulary copying costs little more than its matrix products, and never a vocab x vocab tensor.

GPT-2 small's shape, float32, random weights, 50 257 tokens. Eigenvalue scores of 144 heads: at most 1.5x the time of
the products they need (U E once, then d_head x d_model x d_model per head), 300 MiB. Rank of every token in its row of
one head's full OV circuit: at most 1.3x the time of the 2 V^2 d_head products alone, in the same tiles; 290 MiB.
"""

from collections.abc import Callable, Mapping

import torch
import tyro
from measure import cpu_seconds, memory, report, timing, work
from subjects import D_MODEL, D_VOCAB
from torch import Tensor

import interp
from interp.core import tiles
from interp.model import ModelConfig
from interp.weights import HeadCircuits, eigenvalue_scores

SHAPE = ModelConfig(n_layers=12, d_model=D_MODEL, n_heads=12, n_ctx=1024, d_vocab=D_VOCAB)
HEAD = "L5H1"


@torch.no_grad()
def main(repeats: int = 3) -> None:
    """Measure both.

    Args:
        repeats: timed rounds per system.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = interp.model.Transformer(SHAPE).eval().requires_grad_(False)
    circuits = HeadCircuits(model, folded=True)
    eigenvalues = {
        "products": lambda: eigenvalue_products(circuits),
        "interp": lambda: eigenvalue_scores(HeadCircuits(model, folded=True)),
    }
    measured("eigenvalue scores of 144 heads", eigenvalues, repeats, claim=1.5, claim_mib=300)
    full = circuits.full_ov(HEAD)
    a, b = full.A.contiguous(), full.B.contiguous()
    del circuits, full
    ranks = {
        "products": lambda: products(tiles.blocks(a, b)),
        "products in 64 MiB runs of rows": lambda: products(tiles.row_tiles(a, b)),
        "interp": lambda: tiles.diagonal_ranks(a, b),
        "interp with embedding and folding": lambda: (
            HeadCircuits(model, folded=True).full_ov(HEAD).diagonal_ranks()
        ),
    }
    measured("rank of every token, one head", ranks, repeats, claim=1.3, claim_mib=290)


def measured(
    what: str, calls: Mapping[str, Callable[[], object]], repeats: int, *, claim: float, claim_mib: int
) -> None:
    """One line for each system."""
    seconds = cpu_seconds(calls, repeats)
    for system, call in calls.items():
        times = timing(seconds, system, "products")
        report("copying", system, what, times, work(call), memory(call), claim=claim, claim_mib=claim_mib)


def eigenvalue_products(circuits: HeadCircuits) -> Tensor:
    """The small products of all heads `[l h e e]`, from an embedding that is there already."""
    through = circuits.network.unembed.weight.mT @ circuits.embedded  # type: ignore[union-attr]
    found = []
    for layer in range(SHAPE.n_layers):
        ov = circuits.ov(f"L{layer}.attn")
        found.append(ov.B @ through @ ov.A)
    return torch.stack(found)


def products(each: object) -> None:
    """Run through the tiles and ask nothing."""
    for _ in each:  # type: ignore[attr-defined]
        pass


if __name__ == "__main__":
    tyro.cli(main)
