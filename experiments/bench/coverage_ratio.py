"""Claim: which interval of a ratio of means, such as the loss an autoencoder recovers, holds it from how few texts on.

A text has a clean loss, a loss with the site set to 0 (clean + cost) and one with the reconstruction (clean + lost);
loss recovered is 1 - mean lost / mean cost. Laws of cost and lost over texts, independent or related, with and without
a tail; intervals: `delta`, linearised with Student's t; `fieller`, what results print, the ratios that Student's t of
lost - ratio x cost does not refute; `bootstrap`, percentiles of resampled texts; `both`, the wider end of delta and
bootstrap on each side. Coverage and mean width, one JSON line per law.
"""

import json
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tyro
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[np.float64]
LAWS: Mapping[str, Callable[[np.random.Generator, tuple[int, int]], tuple[Array, Array]]] = {
    "even": lambda g, s: (cost := g.normal(5.0, 1.0, s), cost * g.normal(0.1, 0.03, s)),
    "skewed cost": lambda g, s: (cost := g.gamma(2.0, 2.0, s), cost * g.beta(2, 18, s)),
    "skewed both": lambda g, s: (g.gamma(2.0, 2.0, s), g.gamma(0.5, 0.8, s)),
    "heavy lost": lambda g, s: (g.gamma(4.0, 1.0, s), np.exp(g.normal(-2.0, 1.2, s))),
}


def truth(law: Callable[[np.random.Generator, tuple[int, int]], tuple[Array, Array]]) -> float:
    """The ratio of means, from four million texts."""
    cost, lost = law(np.random.default_rng(99), (4_000_000, 1))
    return float(1 - lost.mean() / cost.mean())


def delta(cost: Array, lost: Array) -> tuple[Array, Array]:
    """Linearised."""
    n, ratio = len(cost), lost.mean(0) / cost.mean(0)
    half = stats.t.ppf(0.975, n - 1) * (lost - ratio * cost).std(0, ddof=1) / n**0.5 / np.abs(cost.mean(0))
    return 1 - ratio - half, 1 - ratio + half


def fieller(cost: Array, lost: Array) -> tuple[Array, Array]:
    """Roots of (mean lost - r mean cost)^2 = t^2 var(lost - r cost) / n; everything where cost may be 0."""
    n = len(cost)
    t2 = stats.t.ppf(0.975, n - 1) ** 2 / n
    x, y = cost.mean(0), lost.mean(0)
    cross = ((cost - x) * (lost - y)).sum(0) / (n - 1)
    a, b, c = x**2 - t2 * cost.var(0, ddof=1), x * y - t2 * cross, y**2 - t2 * lost.var(0, ddof=1)
    root = np.sqrt(np.maximum(b**2 - a * c, 0))
    known = a > 0
    low, high = (
        np.where(known, (b + sign * root) / np.where(known, a, 1), sign * np.inf) for sign in (-1, 1)
    )
    return 1 - high, 1 - low


def bootstrap(cost: Array, lost: Array, draws: int = 400) -> tuple[Array, Array]:
    """Percentiles over resampled texts."""
    generator, n = np.random.default_rng(0), len(cost)
    weights = generator.multinomial(n, np.full(n, 1 / n), draws).astype(float)
    ratio = 1 - (weights @ lost) / (weights @ cost)
    return np.quantile(ratio, 0.025, 0), np.quantile(ratio, 0.975, 0)


def both(cost: Array, lost: Array) -> tuple[Array, Array]:
    """The wider end on each side."""
    ends = (delta(cost, lost), bootstrap(cost, lost))
    return np.minimum(ends[0][0], ends[1][0]), np.maximum(ends[0][1], ends[1][1])


INTERVALS = {"delta": delta, "fieller": fieller, "bootstrap": bootstrap, "both": both}


def main(rows: Sequence[int] = (4, 8, 16, 32, 64, 128), repetitions: int = 2000, seed: int = 0) -> None:
    """Simulate and print.

    Args:
        rows: how many texts are drawn.
        repetitions: draws of each number.
        seed: of the draws.
    """
    for name, law in LAWS.items():
        value = truth(law)
        for interval, ends in INTERVALS.items():
            found = {}
            for n in rows:
                low, high = ends(*law(np.random.default_rng(seed + n), (n, repetitions)))
                held, width = ((low <= value) & (value <= high)).mean(), np.median(high - low)
                found[str(n)] = [round(float(held), 3), round(float(width), 3)]
            print(json.dumps({"bench": "coverage_ratio", "law": name, "interval": interval, "value": round(value, 3),
                              "coverage, median width": found}), flush=True)  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main)
