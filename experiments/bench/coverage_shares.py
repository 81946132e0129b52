"""Claim: the interval of a share holds its mean at least 93 times in 100, however skewed and however few the rows.

From each law on a list, n rows are drawn a few thousand times; counted is how often `low` and `high` hold its mean,
printed with the mean width. Beside `gaffke`, what results print (`interp.core.stats.share_interval`), stand what was
considered: Student's t; Student's t with Johnson's correction for skewness (1978); Student's t of the logit; Wilson's
with as many trials as rows; Wilson's with the rows' own variance; Maurer and Pontil's empirical Bernstein bound (2009);
the hedged bets of Waudby-Smith and Ramdas (2023); Gaffke's bound by drawn weights; its Beta law with half a row at the
far end. Unbounded laws have Student's t alone. One JSON line per law and interval.

`above`: how often the mean is above `high`. Where `low` is 0 an interval says "at most `high`": asked is that this
is wrong in at most 2.5 % of all draws.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

import numpy as np
import torch
import tyro
from numpy.typing import NDArray
from scipy import special, stats

from interp.core.stats import Moments

Array = NDArray[np.float64]
Ends = tuple[Array, Array]
ROWS = (3, 4, 8, 16, 32)
"""How many rows are drawn."""


@dataclass(frozen=True)
class Law:
    """Independent rows with a known mean."""

    mean: float
    rows: Callable[[np.random.Generator, tuple[int, int]], Array]
    """Draws `[n, repetitions]`."""


def hits(p: float) -> Law:
    """Rows that are 1 with probability p, else 0."""
    return Law(p, lambda draw, size: (draw.random(size) < p).astype(float))


def beta(a: float, b: float) -> Law:
    """Beta's law."""
    return Law(a / (a + b), lambda draw, size: draw.beta(a, b, size))


def mixed(share: float, point: float, tail: Law) -> Law:
    """A point in this share of the rows, else a draw of the tail."""

    def rows(draw: np.random.Generator, size: tuple[int, int]) -> Array:
        return np.where(draw.random(size) < share, point, tail.rows(draw, size))

    return Law(share * point + (1 - share) * tail.mean, rows)


def clipped_lognormal(location: float, scale: float) -> Law:
    """min(1, e^x) of a normal x: its mean is that of the lognormal below 1 and the mass above."""
    below = exp(location + scale**2 / 2) * stats.norm.cdf(-location / scale - scale)
    above = stats.norm.cdf(location / scale)
    return Law(
        float(below + above), lambda draw, size: np.exp(draw.normal(location, scale, size)).clip(max=1.0)
    )


SHARES: Mapping[str, Law] = {
    **{f"hits {p}": hits(p) for p in (0.02, 0.1, 0.5, 0.9)},
    **{f"beta {a} {b}": beta(a, b) for a, b in ((0.1, 5), (0.5, 0.5), (0.5, 50), (2, 2), (2, 30), (30, 2))},
    "uniform": beta(1, 1),
    "zero-inflated beta": mixed(0.8, 0.0, beta(2, 3)),
    "point and tail": mixed(0.95, 0.01, beta(1, 1)),
    "clipped lognormal": clipped_lognormal(-4, 1.5),
}
"""Laws of rows between 0 and 1."""
UNBOUNDED: Mapping[str, Law] = {
    "normal": Law(0.0, lambda draw, size: draw.normal(size=size)),
    "t of 3": Law(0.0, lambda draw, size: draw.standard_t(3, size)),
    "exponential": Law(1.0, lambda draw, size: draw.exponential(size=size)),
    "lognormal 1": Law(exp(0.5), lambda draw, size: np.exp(draw.normal(size=size))),
    "lognormal 1.5": Law(exp(1.125), lambda draw, size: np.exp(draw.normal(0.0, 1.5, size))),
}
"""Laws of other rows."""


def student(rows: Array) -> Ends:
    """Mean and Student's t."""
    half = stats.t.ppf(0.975, len(rows) - 1) * rows.std(0, ddof=1) / sqrt(len(rows))
    return rows.mean(0) - half, rows.mean(0) + half


def johnson(rows: Array) -> Ends:
    """The middle moved by a sixth of the third moment by variance and rows."""
    low, high = student(rows)
    third = ((rows - rows.mean(0)) ** 3).mean(0)
    step = third / (6 * len(rows) * rows.var(0, ddof=1).clip(1e-300))
    return low + step, high + step


def logit(rows: Array) -> Ends:
    """Student's t of the logit of the mean."""
    mean = rows.mean(0).clip(1e-12, 1 - 1e-12)
    half = (student(rows)[1] - rows.mean(0)) / (mean * (1 - mean))
    middle = special.logit(mean)
    return special.expit(middle - half), special.expit(middle + half)


def score_ends(mean: Array, n: Array | float, z: float) -> Ends:
    """Wilson's ends of so many trials."""
    z2 = z * z / n
    middle, half = (mean + z2 / 2) / (1 + z2), z / (1 + z2) * np.sqrt(mean * (1 - mean) / n + z2 / n / 4)
    return middle - half, middle + half


def wilson(rows: Array) -> Ends:
    """As many trials as rows."""
    return score_ends(rows.mean(0), len(rows), stats.norm.ppf(0.975))


def wilson_by_variance(rows: Array) -> Ends:
    """As many trials as have the variance of the rows' mean, with Student's quantile."""
    n, mean = len(rows), rows.mean(0)
    most = (mean * (1 - mean)).clip(1e-300)
    ratio = np.where(rows.mean(0) * (1 - rows.mean(0)) > 0, rows.var(0, ddof=1) / most, 1.0).clip(1e-12, 1.0)
    return score_ends(mean, n / ratio, stats.t.ppf(0.975, n - 1))


def bernstein(rows: Array) -> Ends:
    """Maurer and Pontil 2009, theorem 4, half of the level on either side."""
    n, level = len(rows), log(4 / 0.05)
    half = np.sqrt(2 * rows.var(0, ddof=1) * level / n) + 7 * level / 3 / (n - 1)
    return (rows.mean(0) - half).clip(0, 1), (rows.mean(0) + half).clip(0, 1)


def bets(rows: Array) -> Ends:
    """Waudby-Smith and Ramdas 2023, hedged capital of fixed time, on a grid of 500 means."""
    n, grid = len(rows), np.linspace(0.0005, 0.9995, 500)[:, None]
    gains = np.zeros((2, len(grid), rows.shape[1]))
    total, spread, variance = (np.full(rows.shape[1], x) for x in (0.5, 0.25, 0.25))
    refuted = np.zeros(gains.shape[1:], dtype=bool)
    for i, row in enumerate(rows):
        bet = np.sqrt(2 * log(2 / 0.05) / (n * variance))
        gains[0] += np.log1p(np.minimum(bet, 0.75 / grid) * (row - grid))
        gains[1] += np.log1p(-np.minimum(bet, 0.75 / (1 - grid)) * (row - grid))
        refuted |= gains.max(0) > log(2 / 0.05)
        total = total + row
        spread = spread + (row - total / (i + 2)) ** 2
        variance = spread / (i + 2)
    return grid[(~refuted).argmax(0), 0], grid[len(grid) - 1 - (~refuted)[::-1].argmax(0), 0]


def drawn_weights(rows: Array, draws: int = 1000) -> Ends:
    """Gaffke's bound by its definition: quantiles over uniform draws from the simplex."""
    weights = np.random.default_rng(0).dirichlet(np.ones(len(rows) + 1), draws)
    mean = weights[:, :-1] @ rows
    return np.quantile(mean, 0.025, 0), np.quantile(mean + weights[:, -1:], 0.975, 0)


def half_a_row(rows: Array) -> Ends:
    """The Beta law of `gaffke` with half a row at the far end; NaN ends where it is no law count as missed."""
    n = len(rows)

    def lower(mean: Array, square: Array) -> Array:
        mu, second = n * mean / (n + 0.5), n * square / (n + 0.5)
        size = mu * (1 - mu) * (n + 1.5) / (second - mu**2).clip(1e-300) - 1
        return np.where(mean > 0, special.betaincinv((mu * size).clip(5e-3), (1 - mu) * size, 0.025), 0.0)

    mean, square = rows.mean(0), (rows**2).mean(0)
    return lower(mean, square), 1 - lower(1 - mean, 1 - 2 * mean + square)


def gaffke(rows: Array) -> Ends:
    """What results print."""
    low, high = Moments.of(torch.from_numpy(rows)).interval(share=True)
    return low.numpy(), high.numpy()


INTERVALS: Mapping[str, Callable[[Array], Ends]] = {
    "gaffke": gaffke, "student": student, "johnson": johnson, "logit": logit, "wilson": wilson,
    "wilson by variance": wilson_by_variance, "bernstein": bernstein, "bets": bets, "drawn weights": drawn_weights,
    "half a row": half_a_row,
}  # fmt: skip


def simulated(
    law: Law, interval: Callable[[Array], Ends], n: int, repetitions: int, seed: int
) -> dict[str, float]:
    """How often the interval of n rows holds the mean, its mean width, and how often the mean is above it."""
    rows = law.rows(np.random.default_rng(seed), (n, repetitions))
    low, high = interval(rows)
    found = {
        "covered": ((low <= law.mean) & (law.mean <= high)).mean(),
        "width": (high - low).mean(),
        "above": (law.mean > high).mean(),
    }
    return {name: round(float(x), 3) for name, x in found.items()}


def main(
    names: Sequence[str] = ("gaffke", "student"),
    repetitions: int = 4000,
    rows: Sequence[int] = ROWS,
    seed: int = 0,
) -> None:
    """Simulate and print.

    Args:
        names: intervals; "all" for every one.
        repetitions: draws of each number of rows.
        rows: how many are drawn.
        seed: of the draws.
    """
    chosen = INTERVALS if "all" in names else {name: INTERVALS[name] for name in names}
    for kind, laws in (("share", SHARES), ("unbounded", UNBOUNDED)):
        for law_name, law in laws.items():
            for name in chosen if kind == "share" else ["student"]:
                found = {str(n): simulated(law, INTERVALS[name], n, repetitions, seed) for n in rows}
                print(json.dumps({"bench": "coverage_shares", "kind": kind, "law": law_name, "interval": name,
                                  "mean": round(law.mean, 4), "rows": found}), flush=True)  # fmt: skip


if __name__ == "__main__":
    tyro.cli(main)
