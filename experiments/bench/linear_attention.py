"""Claim: linear and lightning attention cost the same per token at every length, from 1k to 16k tokens.

Log-log slope of CPU seconds against the length <= 1.15, softmax attention's own slope beside it. Two attention-only
blocks 256 wide with four heads, one row, float32, without logits; forward alone, and forward with backward to all
weights. Narrow: up to 8k.
"""

import math
import statistics
from functools import partial
from itertools import product

import torch
import tyro
from measure import NARROW, cpu_seconds, memory, report, work
from torch import Tensor

from interp.lab import Lightning, Linear, Polar
from interp.model import ModelConfig, NoPosition, Softmax, Transformer
from interp.model.records import Mixer

LENGTHS = (1024, 2048, 4096, 8192) if NARROW else (1024, 2048, 4096, 8192, 16384)
MIXERS: dict[str, Mixer] = {
    "softmax": Softmax(), "linear": Linear(), "lightning": Lightning(), "polar": Polar(),
}  # fmt: skip
SLOPE = 1.15


def main(repeats: int = 3) -> None:
    """Measure every mixer at every length.

    Args:
        repeats: timed rounds.
    """
    torch.set_num_threads(1)
    models = {name: _model(mixer) for name, mixer in MIXERS.items()}
    runs = {"forward": _forward, "forward and backward": _backward}
    calls = {
        what: {
            f"{name} {n}": partial(run, model, _tokens(n)) for name, model in models.items() for n in LENGTHS
        }
        for what, run in runs.items()
    }
    seconds = {what: cpu_seconds(some, repeats) for what, some in calls.items()}  # before any `memory`
    for what, name in product(runs, MIXERS):
        medians = [statistics.median(seconds[what][f"{name} {n}"]) for n in LENGTHS]
        least, most = (calls[what][f"{name} {n}"] for n in (LENGTHS[0], LENGTHS[-1]))
        exact = (work(most), memory(most)) if what == "forward" else ()
        report(
            "linear_attention", name, f"{what}, {LENGTHS[0]} to {LENGTHS[-1]} tokens", *exact,
            claim=None if name == "softmax" else SLOPE, slope=round(_slope(medians), 3), rounds=repeats,
            microseconds_per_token=[round(1e6 * s / n, 1) for s, n in zip(medians, LENGTHS, strict=True)],
            operators_at_least=work(least).operators,
        )  # fmt: skip


def _model(mixer: Mixer) -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(
        n_layers=2, d_model=256, n_heads=4, n_ctx=LENGTHS[-1], d_vocab=64, position=NoPosition(), mixer=mixer
    )
    return Transformer(config)


def _tokens(n: int) -> Tensor:
    return torch.randint(0, 64, (1, n), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def _forward(model: Transformer, tokens: Tensor) -> Tensor:
    return model(tokens, stop=2)


def _backward(model: Transformer, tokens: Tensor) -> tuple[Tensor | None, ...]:
    final = model(tokens, stop=2)
    return torch.autograd.grad(final.square().sum(), list(model.parameters()), allow_unused=True)


def _slope(seconds: list[float]) -> float:
    """Least squares of log seconds on log tokens."""
    x, y = [math.log(n) for n in LENGTHS], [math.log(s) for s in seconds]
    return statistics.linear_regression(x, y).slope


if __name__ == "__main__":
    tyro.cli(main)
