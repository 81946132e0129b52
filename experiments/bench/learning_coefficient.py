"""Claim: where the learning coefficient is known, the chains give the mean of what they sample from, which is near it.

Losses with closed forms, many independent copies of each in one chain, so that noise is small and bias is seen: a bowl
(d / 2), monomials w1^(2 k1) w2^(2 k2) (the least 1 / (2 k), Watanabe 2009) and reduced-rank regression (Aoyagi and
Watanabe 2005). Beside lambda stands the same expectation under the localised, tempered posterior by quadrature: what
an exact sampler would give. One JSON line per loss and n; the table is in `docs/analyses/learning_coefficient.md`.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from torch import Tensor

from interp.dynamics import Langevin, learning_coefficient_of


@dataclass(frozen=True)
class Known:
    """A loss whose learning coefficient is known."""

    coefficient: float
    shape: tuple[int, ...]
    """Of the parameters of one copy."""
    loss: Callable[[Tensor], Tensor]
    """Of every copy."""
    at: Callable[[], Tensor]
    """The minimum, one copy."""
    powers: tuple[int, int] | None = None
    """Of a monomial, for the quadrature."""


def monomial(k1: int, k2: int) -> Known:
    """w1^(2 k1) w2^(2 k2)."""
    least = min(1 / (2 * k) for k in (k1, k2) if k)
    return Known(
        least, (2,), lambda w: w[..., 0] ** (2 * k1) * w[..., 1] ** (2 * k2), lambda: torch.zeros(2), (k1, k2)
    )


def rank_one_of_two() -> Known:
    """y = B A x, x of 3, y of 2, 2 hidden, the truth of rank 1, at A and B of rank 1: lambda = 5/2 (of 10 / 2)."""
    truth = torch.zeros(2, 3, dtype=torch.float64)
    truth[0, 0] = 1.0

    def loss(w: Tensor) -> Tensor:
        a, b = w[..., :6].unflatten(-1, (2, 3)), w[..., 6:].unflatten(-1, (2, 2))
        return (b @ a - truth).square().sum((-2, -1)) / 2

    def at() -> Tensor:
        point = torch.zeros(10)
        point[0] = point[6] = 1.0
        return point

    return Known(2.5, (10,), loss, at)


LOSSES = {
    "bowl, d = 10": Known(5.0, (10,), lambda w: w.square().sum(-1) / 2, lambda: torch.zeros(10)),
    "w1^4 w2^0": monomial(2, 0),
    "w1^2 w2^4": monomial(1, 2),
    "w1^2 w2^2 (m = 2)": monomial(1, 1),
    "reduced rank": rank_one_of_two(),
}


def quadrature(k1: int, k2: int, strength: float, localisation: float) -> float:
    """strength E[L] under exp(-strength L - localisation |w|^2 / 2), on a grid of log |w1| and log |w2|."""
    one, two = np.meshgrid(*[np.exp(np.linspace(-30, 4, 1500))] * 2, indexing="ij")
    loss = strength * one ** (2 * k1) * two ** (2 * k2)
    weight = np.exp(-loss - localisation / 2 * (one**2 + two**2)) * one * two
    return float((weight * loss).sum() / weight.sum())


def main(copies: int = 200, steps: int = 20_000, localisation: float = 1.0, least: float = 0.1) -> None:
    """Print what the chains give; least: the step times the curvature of the bowl."""
    for name, known in LOSSES.items():
        for n in (100, 1000, 10_000):
            strength = n / math.log(n)
            step = least / (strength + localisation) / (1 if name.startswith("bowl") else 4)
            sampler = Langevin(2, steps, steps // 2, step, localisation)
            print(json.dumps({"loss": name, "n": n, **measured(known, n, sampler, copies)}))


def measured(known: Known, n: int, sampler: Langevin, copies: int) -> dict[str, float | None]:
    """The estimate of one copy, beside lambda and the exact expectation."""
    at = {"w": known.at().double().expand(copies, *known.shape)}
    found = learning_coefficient_of(lambda point: known.loss(point["w"]).sum(), at, n, sampler)
    strength = n * sampler.beta(n)
    exact = None if known.powers is None else quadrature(*known.powers, strength, sampler.localisation)
    return {
        "lambda": known.coefficient,
        "exact_sampler": None if exact is None else round(exact, 4),
        "chains": round(float(found.value) / copies, 4),
        "chain_spread": round(float(found.spread) / copies, 4),
        "burn_in_drift": round(_drift(found.loss.to_numpy(), strength) / copies, 4),
    }


def _drift(loss: np.ndarray, strength: float) -> float:
    """The second half of the draws minus the first."""
    half = loss.shape[1] // 2
    return float(strength * (loss[:, half:].mean() - loss[:, :half].mean()))


if __name__ == "__main__":
    tyro.cli(main)
