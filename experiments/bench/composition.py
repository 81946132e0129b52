"""Claim: all Q-, K- and V-composition scores of 144 heads 13 times as fast as TransformerLens, in 320 MiB.

GPT-2 small's shape. TransformerLens' function takes 8.5 GiB for all sources at once and says nothing of layers; here
it gets one source layer at a time, against all destinations as in `all_composition_scores`: the same products in a
twelfth of the memory. Its pairs whose source is not earlier are computed and thrown away; ours leaves them out.
"""

import torch
import tyro
from measure import cpu_seconds, memory, report, timing, work
from subjects import gpt2_small, largest_difference
from torch import Tensor
from transformer_lens import FactoredMatrix
from transformer_lens.utilities.matrix import composition_scores as their_scores

import interp
from interp.weights import HeadCircuits, composition_scores
from interp.weights.composition import CompositionKind

KINDS: tuple[CompositionKind, ...] = ("Q", "K", "V")
CLAIM = round(1 / 13, 3)
CLAIM_MIB = 320


@torch.no_grad()
def main(repeats: int = 2) -> None:
    """Measure both.

    Args:
        repeats: timed rounds per system; one of TransformerLens takes about 40 s.
    """
    torch.set_num_threads(1)
    model = gpt2_small().ours
    calls = {"transformer_lens": lambda: theirs(model), "interp": lambda: ours(model)}
    first = calls["interp"]()
    exists = ~first.isnan()
    difference = largest_difference(first[exists], calls["transformer_lens"]()[exists])
    if difference > 1e-5:
        raise RuntimeError(f"the scores differ by {difference}")
    seconds = cpu_seconds(calls, repeats)
    for system, call in calls.items():
        taken = [memory(call)] if system == "interp" else []  # theirs, layer by layer, would say nothing
        report(
            "composition", system, "Q, K and V scores of 144 x 144 heads",
            timing(seconds, system, "transformer_lens"), work(call), *taken,
            claim=CLAIM, claim_mib=CLAIM_MIB, score_difference=difference,
        )  # fmt: skip


def ours(model: interp.HookedTransformer) -> Tensor:
    """Scores of each kind, through the kernel."""
    circuits = HeadCircuits(model)
    return torch.stack([composition_scores(circuits, kind) for kind in KINDS])


def theirs(model: interp.HookedTransformer) -> Tensor:
    """The same by TransformerLens' function on the same weights."""
    ov, qk = FactoredMatrix(model.W_V, model.W_O), FactoredMatrix(model.W_Q, model.W_K.mT)
    layers = range(model.cfg.n_layers)
    return torch.stack(
        [
            torch.cat([their_scores(ov[(slice(at, at + 1),)], read) for at in layers])
            for read in (qk, qk.T, ov)
        ]
    )


if __name__ == "__main__":
    tyro.cli(main)
