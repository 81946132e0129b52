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
    share: Float[Tensor, "*n"], n: Float[Tensor, "*n"] | int
) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """Wilson's 95 % interval of a share of `n` independent cases (Wilson 1927), inside [0, 1] also at its ends.

    0 and 1 where there are no cases.

    Example:
        >>> low, high = wilson(torch.tensor([1.0]), 200)
        >>> 0.98 < float(low) < 0.982 and float(high) == 1
        True
    """
    count = torch.as_tensor(n, dtype=share.dtype, device=share.device)
    z2 = Z95**2 / count

    def low(share: Tensor) -> Tensor:  # the ends' product is share^2 / (1 + z2): exactly 0 at 0
        root = Z95 * (share * (1 - share) / count + z2 / (4 * count)).sqrt()
        return (share.square() / (share + z2 / 2 + root)).masked_fill(count == 0, 0.0)

    return low(share), 1 - low(1 - share)
