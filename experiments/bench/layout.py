"""Claim: matrices stored with their longer axis contiguous (`Transformer.packed`) make one-row passes faster.

GPT-2 small's shape, float32, logits of the last column only. One or two rows of one token are what a step of
generation computes; the other sizes show what it costs elsewhere.
"""

import copy

import torch
import tyro
from measure import cpu_seconds, report, timing
from subjects import gpt2_small

SIZES = ((1, 1), (2, 1), (1, 8), (1, 15), (1, 64), (8, 128))
CLAIM = 0.9


@torch.no_grad()
def main(repeats: int = 15) -> None:
    """Measure every size with the matrices stored [out, in] and packed.

    Args:
        repeats: timed rounds per system.
    """
    torch.set_num_threads(1)
    pair = gpt2_small()
    packed = copy.deepcopy(pair.ours.transformer).packed()
    plain = copy.deepcopy(packed)
    for linear in plain.modules():
        if isinstance(linear, torch.nn.Linear):
            linear.weight = torch.nn.Parameter(linear.weight.contiguous(), requires_grad=False)
    for rows, columns in SIZES:
        tokens = pair.tokens(rows, columns)
        last = torch.full((rows, 1), columns - 1)
        models = {"plain": plain, "packed": packed}
        calls = {
            name: lambda m=model, t=tokens, at=last: m(t, logits_at=at) for name, model in models.items()
        }
        seconds = cpu_seconds(calls, repeats)
        claim = {"claim": CLAIM} if rows * columns <= 2 else {}
        what = f"last logits of {rows} x {columns}"
        report(
            "layout", "packed", what, timing(seconds, "packed", "plain"), claim, rows=rows, columns=columns
        )


if __name__ == "__main__":
    tyro.cli(main)
