"""Random numbers that belong to a row: every draw is a pure function of (row, draw, seed).

A bootstrap or a permutation test over a corpus must not depend on how the rows were batched, ordered or spread over
machines. So no generator is advanced: draw j of row r is output j of a SplitMix64 generator whose seed is output r of
SplitMix64(seed), and any output of that generator can be computed alone (Steele, Lea and Flood, "Fast Splittable
Pseudorandom Number Generators", OOPSLA 2014, figure 17, with the constants of Vigna's splitmix64.c).
Integer arithmetic only: the bits are the same on every device. The functions below share their bits: two uses of one
seed on the same rows are not independent of each other.
"""

from itertools import accumulate
from math import exp, factorial

import torch
from jaxtyping import Float, Int
from torch import Tensor


def uniforms(rows: Int[Tensor, "n"], draws: int, seed: int, *, start: int = 0) -> Float[Tensor, "draws n"]:
    """Draws `start` to `start + draws - 1` of each row: float64 multiples of 2^-53, uniform in [0, 1).

    `rows` are the rows' numbers in their source, `seed` any integer. Rows that repeat repeat their draws.
    Errors: ValueError for a negative number of draws.

    Example:
        >>> bool((uniforms(torch.arange(5), 3, seed=0)[:, 2:] == uniforms(torch.arange(2, 5), 3, seed=0)).all())
        True
    """
    return _shift_right(_bits(rows, draws, seed, start), 11).double() * 2.0**-53


def poisson_weights(
    rows: Int[Tensor, "n"], replicates: int, seed: int, *, start: int = 0
) -> Float[Tensor, "replicates n"]:
    """How often each row stands in each bootstrap replicate: independent Poisson(1) counts, as float64.

    The bootstrap that merges: a resample of n rows gives each a Binomial(n, 1/n) count, whose limit is Poisson(1), and
    Poisson counts of different rows do not constrain each other (Chamandy et al. 2012, "Estimating uncertainty for
    massive data streams"). By the inverse CDF of `uniforms`. Caveat: a replicate's total is n only on average; divide
    by the sum of the weights, and expect replicates without any row when n is a handful (e^-n of them).

    Example:
        >>> poisson_weights(torch.arange(1000), 200, seed=0).mean().round(decimals=1).item()
        1.0
    """
    cumulative = torch.tensor(_POISSON_CDF, dtype=torch.float64, device=rows.device)
    return torch.bucketize(uniforms(rows, replicates, seed, start=start), cumulative, right=True).double()


def signs(rows: Int[Tensor, "n"], draws: int, seed: int, *, start: int = 0) -> Float[Tensor, "draws n"]:
    """Fair coins: +1.0 where the row's uniform is below 1/2, else -1.0.

    Example:
        >>> signs(torch.tensor([4, 4]), 1, seed=0).prod().item()
        1.0
    """
    return torch.where(_bits(rows, draws, seed, start) >= 0, 1.0, -1.0).double()


_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# P(count <= k); one more term would be below half a unit in the last place of 1.
_POISSON_CDF = tuple(accumulate(exp(-1) / factorial(k) for k in range(18)))


def _bits(rows: Int[Tensor, "n"], draws: int, seed: int, start: int) -> Int[Tensor, "draws n"]:
    """64 random bits per draw and row, as int64."""
    if draws < 0 or start < 0:
        raise ValueError(f"a number of draws >= 0 from a start >= 0 is required, got {draws} from {start}")
    keys = _output(torch.tensor(_signed(seed), device=rows.device), rows.long())
    return _output(keys, torch.arange(start, start + draws, device=rows.device)[:, None])


def _output(seed: Int[Tensor, "..."], index: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Output `index` of SplitMix64 with this seed: the mixed sum of the seed and index + 1 golden increments."""
    z = seed + (index + 1) * _signed(_GOLDEN)
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        z = (z ^ _shift_right(z, shift)) * _signed(multiplier)
    return z ^ _shift_right(z, 31)


def _shift_right(z: Int[Tensor, "..."], by: int) -> Int[Tensor, "..."]:
    """The shift of an unsigned integer: zeros come in from the left, where torch repeats the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(bits: int) -> int:
    """The int64 with these low 64 bits."""
    return (bits + 2**63) % 2**64 - 2**63
