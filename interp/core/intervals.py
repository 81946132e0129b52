"""95 % intervals: Student's t for means, Wilson's for shares; each function says from how many rows on it holds.

`experiments/bench/coverage.py` measures how often they hold the truth, on values of trained models.
"""

import torch
from jaxtyping import Float
from torch import Tensor

FEWEST = 3
"""Rows below which a mean gets no interval: with two, Student's t is 12.7 standard errors wide and says nothing."""
Z95 = 1.959963984540054
"""Half-width of a 95 % interval in standard errors of a normal mean whose spread is known."""


def t95(n: Float[Tensor, "..."] | float) -> Float[Tensor, "..."]:
    """Half-width of a 95 % interval of the mean of `n` rows, in standard errors (Student 1908); NaN below `FEWEST`.

    n need not be whole: the effective number of rows that count in clusters.

    Example:
        >>> [round(float(x), 3) for x in t95(torch.tensor([2.0, 4.0, 1001.0]))]
        [nan, 3.182, 1.962]
    """
    from scipy.special import stdtrit

    rows = torch.as_tensor(n, dtype=torch.float64)
    found = torch.as_tensor(stdtrit((rows - 1).clamp_min(1.0).cpu().numpy(), 0.975)).to(rows)
    return found.masked_fill(rows < FEWEST, torch.nan)


def wilson(
    successes: Float[Tensor, "..."], n: Float[Tensor, "..."] | float
) -> tuple[Float[Tensor, "..."], Float[Tensor, "..."]]:
    """The ends of Wilson's 95 % interval of a share of n independent trials (Wilson 1927); 0 and 1 without trials.

    It stays inside [0, 1] and is no point where none or all succeed.

    Example:
        >>> low, high = wilson(torch.tensor(34.0), 34)
        >>> round(float(low), 3), float(high)
        (0.898, 1.0)
    """
    n, square = torch.as_tensor(n, dtype=successes.dtype, device=successes.device), Z95**2
    inside = (successes * (n - successes) / n.clamp_min(1.0)).clamp_min(0.0) + square / 4
    half = Z95 * inside.sqrt() / (n + square)
    centre = (successes + square / 2) / (n + square)
    low, high = (centre - half).clamp_min(0.0), (centre + half).clamp_max(1.0)
    return low.where(successes > 0, 0.0), high.where(
        successes < n, 1.0
    )  # rounding aside, they are that anyway
