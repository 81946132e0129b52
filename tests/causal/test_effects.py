"""Rank correlation and overlap against their textbook definitions."""

import math

import pandas as pd
import pytest
import torch

from interp.causal import agreement
from interp.core.stats import ranks


def test_ranks_share_ties_and_correlation_is_that_of_ranks() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-4, 5, (50,), generator=generator).double() for _ in range(2))
    expected = [torch.tensor(list(pd.Series(x.numpy()).rank())) - 1 for x in (a, b)]
    assert torch.equal(ranks(a), expected[0]) and torch.equal(ranks(b), expected[1])
    by_pandas = pd.Series(expected[0].numpy()).corr(pd.Series(expected[1].numpy()))
    assert agreement(a, b, top=3).rank_correlation == pytest.approx(by_pandas, abs=1e-12)


def test_any_rising_map_agrees_fully_and_a_falling_one_not_at_all() -> None:
    x = torch.linspace(-2, 3, 41)
    assert agreement(x**3, x, top=5).rank_correlation == pytest.approx(1)
    assert agreement(-x, x, top=5).rank_correlation == pytest.approx(-1)
    assert agreement(-x, x, top=5).overlap == 1, "the overlap is of sizes"
    assert (agreement(-x, x, top=5).same_sign, agreement(x**3, x, top=5).same_sign) == (0, 1)


def test_overlap_counts_the_largest_in_absolute_value() -> None:
    exact = torch.tensor([[5.0, -4.0, 3.0], [0.1, 0.2, math.nan]])
    estimate = torch.tensor([[5.0, 0.0, -9.0], [1.0, 0.2, math.nan]])
    found = agreement(estimate, exact, top=2)
    assert (found.overlap, found.top, found.n, found.chance) == (0.5, 2, 5, 0.4)
    assert found.same_sign == 0.5


def test_a_constant_has_no_rank_correlation() -> None:
    assert math.isnan(agreement(torch.zeros(4), torch.arange(4.0), top=1).rank_correlation)


def test_what_cannot_be_compared_is_refused() -> None:
    x = torch.tensor([1.0, math.nan])
    with pytest.raises(ValueError, match=r"got shapes \[2\] and \[3\]"):
        agreement(x, torch.zeros(3), top=1)
    with pytest.raises(ValueError, match="cells that only one of the two has"):
        agreement(x, torch.zeros(2), top=1)
    with pytest.raises(ValueError, match=r"top in \[1, 1\] is required, got 2"):
        agreement(x, x, top=2)
