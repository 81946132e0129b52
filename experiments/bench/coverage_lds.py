"""Claim: the 95 % interval of `interp.dynamics.lds` holds the score of all queries and groups 94 times in 100 or more.

A world is a law of exact and predicted effects: queries differ in how well they are predicted, groups have effects that
all queries share. Its score is that of very many groups and queries; a thousand times g groups and q queries are
drawn, and it is counted how often the interval of their score holds it. One JSON line per world and size.
"""

import json
from dataclasses import dataclass

import torch
import tyro
from torch import Tensor

from interp.dynamics.lds import correlations, interval

SIZES = ((10, 10), (30, 10), (10, 30), (30, 30), (100, 30), (30, 100))
"""Groups and queries."""
MANY = 10_000, 300
"""Groups and queries of the whole world, twenty times over."""


@dataclass(frozen=True)
class World:
    """How predictions and exact effects hang together."""

    mean: float
    """The mean weight of what is predicted in an exact effect."""
    spread: float
    """How much queries differ in it."""
    shared: float
    """The share of errors and predictions that all queries have in common."""
    cubed: bool = False
    """Whether exact effects have heavy tails."""

    def drawn(self, groups: int, queries: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Predicted and exact effects `[query, group]`."""

        def effects() -> Tensor:
            own, common = (torch.randn(n, groups, generator=generator) for n in (queries, 1))
            return self.shared**0.5 * common + (1 - self.shared) ** 0.5 * own

        weight = self.mean + self.spread * torch.randn(queries, 1, generator=generator)
        predicted = effects()
        exact = weight * predicted + effects()
        return predicted.double(), (exact**3 if self.cubed else exact).double()


WORLDS = {
    "no relation": World(0.0, 0.0, 0.0),
    "no relation, shared": World(0.0, 0.0, 0.5),
    "weak": World(0.3, 0.3, 0.0),
    "weak, shared": World(0.3, 0.3, 0.5),
    "strong, shared": World(1.5, 0.5, 0.5),
    "strong, heavy tails": World(1.5, 0.5, 0.2, cubed=True),
}


def main(draws: int = 1000, seed: int = 0) -> None:
    """Print how often the interval holds the truth."""
    for name, world in WORLDS.items():
        generator = torch.Generator().manual_seed(seed)
        truth = _score_of_all(world, generator)
        for groups, queries in SIZES:
            held = []
            for _ in range(draws):
                low, high = interval(*correlations(*world.drawn(groups, queries, generator)))
                held.append(bool(low <= truth <= high))
            line = {"world": name, "score": round(truth, 3), "groups": groups, "queries": queries}
            print(json.dumps(line | {"held": sum(held) / draws}))


def _score_of_all(world: World, generator: torch.Generator) -> float:
    """The mean correlation of very many queries over very many groups, by ranks."""
    scores = []
    for _ in range(20):
        x, y = (side.argsort(1).argsort(1).double() for side in world.drawn(*MANY, generator))
        x, y = (side - side.mean(1, keepdim=True) for side in (x, y))
        scores.append(float(((x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1))).mean()))
    return sum(scores) / len(scores)


if __name__ == "__main__":
    tyro.cli(main)
