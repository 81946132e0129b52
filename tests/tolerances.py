"""The one tolerance table, by dtype: how far two ways to compute the same number may stand apart."""

from typing import NamedTuple

import scipy.stats
import torch
from torch import Tensor


class Tolerance(NamedTuple):
    """|actual - expected| <= atol + rtol * |expected|."""

    rtol: float
    atol: float


TOLERANCES = {
    torch.float64: Tolerance(1e-9, 1e-9),
    torch.float32: Tolerance(1e-4, 2e-5),
    torch.bfloat16: Tolerance(5e-2, 1e-1),
}

UNIT = {torch.bfloat16: 2**-9, torch.float16: 2**-12, torch.float32: 2**-25}
"""Half of what rounding to a dtype moves a number by at most, relative to it."""


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """AssertionError with the largest difference unless both agree to the tolerance of `dtype` (theirs if None)."""
    tolerance = TOLERANCES[dtype or actual.dtype]
    torch.testing.assert_close(
        actual, expected, rtol=tolerance.rtol, atol=tolerance.atol, check_dtype=dtype is None
    )


def student95(n: int) -> float:
    """Half a 95 % interval of the mean of n rows, in standard errors; NaN where there are too few for one."""
    return float(scipy.stats.t.ppf(0.975, n - 1)) if n > 2 else float("nan")
