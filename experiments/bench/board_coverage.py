"""How often does the board's interval over seeds hold the mean of all seeds?

Takes some programs with many seeds each for the world, draws a few seeds of every program with replacement, and asks
how often the interval of the board holds the mean of the world: per score, the mean over methods and the least.

Run: `python -m experiments.board max min count --seeds 24 --csv world.csv`, then
`python experiments/bench/board_coverage.py world.csv`
"""

import sys

import numpy as np
import pandas as pd
import torch

from experiments.board.benchmark import _over_seeds

DRAWS = 2000
SIZES = (2, 3, 5, 10)


def coverage(world: torch.Tensor, seeds: int, generator: np.random.Generator) -> float:
    """The share of draws of so many seeds of every program [program, seed] that hold the mean of the world."""
    programs, there = world.shape
    drawn = generator.integers(there, size=(programs, seeds, DRAWS))
    rows = world[torch.arange(programs)[:, None, None], torch.from_numpy(drawn)]
    _, low, high = _over_seeds(list(rows))
    mean = world.mean()
    return float(((low <= mean + 1e-12) & (mean <= high + 1e-12)).double().mean())


def main(file: str) -> None:
    """Print a line per score."""
    table, generator = pd.read_csv(file), np.random.default_rng(0)
    lines = []
    for (method, score), rows in table.groupby(["attribution", "score"]):
        world = torch.tensor(rows.pivot(index="program", columns="seed", values="value").to_numpy())
        if score not in ("passes", "seconds") and float(world.var(1).sum()) > 0:
            lines += [
                {"score": score, "method": method, "seeds": n, "held": coverage(world, n, generator)}
                for n in SIZES
            ]
    found = pd.DataFrame(lines).groupby(["score", "seeds"]).held.agg(["mean", "min"]).unstack("seeds")
    print(found.round(3).to_string())


if __name__ == "__main__":
    main(sys.argv[1])
