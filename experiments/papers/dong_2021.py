"""Dong, Cordonnier and Loukas 2021 (arXiv:2103.03404): attention alone makes tokens alike, doubly exponentially."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from experiments.papers.claim import Claim, Measured, above, below, near
from experiments.papers.effort import Effort
from interp.lab.depth import rank_collapse
from interp.model import ModelConfig, NoNorm, NoPosition, Transformer

TOKENS, WIDTH = 8, 32
SPREADS = (3e-4, 1e-3, 3e-3)
"""How far tokens are from their mean before the layer: small, for the law is that of small residuals."""
PUBLISHED = "res(layer) <= c res(stream)^3, so doubly exponential in depth"


def dong_2021(effort: Effort) -> Iterator[Claim]:
    """The order of one layer with and without a causal mask, what is left after six, and what skips do."""
    seeds = range(effort.of(8))
    for causal, order in ((False, 3.0), (True, 1.0)):
        slopes = [_slope(seed, causal=causal) for seed in seeds]
        yield Claim(
            f"one layer of attention alone, {'causal' if causal else 'bidirectional'}: slope of log residual after it "
            "against before",
            f"closed form: {order:g}" if causal else f"{PUBLISHED}; closed form: {order:g}",
            Measured.mean(slopes, "seeds"),
            near(order, 0.02),
            note="the paper's bound is for bidirectional attention; a mask makes rows differ"
            if causal
            else "",
        )
    found = [_by_depth(seed) for seed in seeds]
    yield Claim(
        "six layers without skips: relative residual, log10",
        "below any power: the floor of float64 (-14) after six",
        Measured.mean([float(np.log10(max(san[-1], 1e-18))) for san, _ in found], "seeds"),
        below(-13.0),
        "log10 of a share",
    )
    yield Claim(
        "six layers with skips: relative residual, of that at the start",
        "skips: no such decay",
        Measured.mean([float(skip[-1] / skip[0]) for _, skip in found], "seeds"),
        above(0.1),
    )


def encoder(seed: int, layers: int, spread: float, *, causal: bool = False) -> Transformer:
    """Attention alone with random weights, reading tokens that lie `spread` from their mean; float64."""
    config = ModelConfig(
        layers, WIDTH, 1, TOKENS, TOKENS, causal=causal, position=NoPosition(), norm=NoNorm(), qkv_bias=False,
        out_bias=False, final_norm=False,
    )  # fmt: skip
    model, generator = Transformer(config).double().requires_grad_(False), torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for layer in range(layers):
        attention = model.block(layer).attn
        for weight in (attention.qkv.weight, attention.out.weight):
            weight.copy_(drawn(*weight.shape) / WIDTH**0.5)
    model.embed.weight.copy_(drawn(1, WIDTH) + spread * drawn(TOKENS, WIDTH))
    return model


def _slope(seed: int, *, causal: bool) -> float:
    """Of the log residual after one layer against the log residual before it."""
    every = [_residuals(encoder(seed, 1, spread, causal=causal), "SAN") for spread in SPREADS]
    before, after = np.log10(np.array(every)).T
    return float(np.polyfit(before, after, 1)[0])


def _by_depth(seed: int) -> tuple[np.ndarray, np.ndarray]:
    model = encoder(seed, 6, 0.3)
    return _residuals(model, "SAN"), _residuals(model, "SAN+skip")


def _residuals(model: Transformer, line: str) -> np.ndarray:
    found = rank_collapse(model, torch.arange(TOKENS)[None], lines=[line])
    return np.asarray(found.value.sel(line=line))
