"""Permutation tests against scipy, against every labelling by hand, and under a null that is true."""

from itertools import combinations, product
from math import comb

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats
from torch import Tensor

from interp.core import permutation
from interp.core.permutation import permutation_test
from tests.tolerances import assert_close


def samples(n: int, cells: int = 3, seed: int = 0) -> Tensor:
    """Few distinct numbers, so that labellings tie."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 5, (n, cells), generator=generator).double() / 10


def labellings(first: Tensor, second: Tensor, paired: bool) -> Tensor:
    """The difference under every labelling, one after the other: [labelling cell]."""
    if paired:
        flips = torch.tensor(list(product([1.0, -1.0], repeat=len(first)))).double()
        return torch.stack([(flip[:, None] * (first - second)).mean(0) for flip in flips])
    both, found = torch.cat((first, second)), []
    for chosen in combinations(range(len(both)), len(first)):
        rest = [i for i in range(len(both)) if i not in chosen]
        found.append(both[list(chosen)].mean(0) - both[rest].mean(0))
    return torch.stack(found)


def t_value(difference: Tensor, first: Tensor, second: Tensor, paired: bool) -> Tensor:
    """|Student's t| of a labelling with this difference: flips and deals keep the sum of squares."""
    if paired:
        n, squares = len(first), (first - second).square().sum(0)
        variance = (squares - n * difference.square()) / (n - 1) / n
    else:
        n, m, both = len(first), len(second), torch.cat((first, second))
        squares = (both - both.mean(0)).square().sum(0)
        variance = (squares - difference.square() * n * m / (n + m)) / (n + m - 2) * (1 / n + 1 / m)
    return difference.abs() / variance.clamp_min(1e-30).sqrt()


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_few_labellings_are_all_tried(paired: bool, seed: int) -> None:
    first, second = samples(6, seed=seed), samples(6 if paired else 4, seed=seed + 50)
    first[:, 1] += 0.3
    found = permutation_test(first, second, paired=paired)
    every = labellings(first, second, paired)
    observed = first.mean(0) - second.mean(0)
    assert found.exact and found.permutations == (2**6 if paired else comb(10, 6)) == len(every)
    assert_close(found.difference, observed)
    assert_close(found.p, (every.abs() >= observed.abs() - 1e-9).double().mean(0))
    t, largest = (t_value(x, first, second, paired) for x in (observed, every))
    expected = (largest.amax(1, keepdim=True) >= t * (1 - 1e-9)).double().mean(0)
    assert_close(found.p_adjusted, expected)


def test_the_t_value_of_the_oracle_is_that_of_scipy() -> None:
    first, second = torch.randn(2, 9, 3, dtype=torch.float64)
    difference = first.mean(0) - second.mean(0)
    for paired, test in ((True, stats.ttest_rel), (False, stats.ttest_ind)):
        expected = np.abs(test(first.numpy(), second.numpy()).statistic)
        assert_close(t_value(difference, first, second, paired), torch.from_numpy(expected))


@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize(("n", "permutations"), [(7, 10_000), (40, 4000)])
def test_p_values_are_those_of_scipy(paired: bool, n: int, permutations: int) -> None:
    """Exactly for few rows; for many, both are draws of one number."""
    first, second = torch.randn(n, 2, dtype=torch.float64) + 0.25, torch.randn(n, 2, dtype=torch.float64)
    found = permutation_test(first, second, paired=paired, permutations=permutations)

    def statistic(a: np.ndarray, b: np.ndarray, axis: int) -> np.ndarray:
        return np.abs(a.mean(axis) - b.mean(axis))

    expected = stats.permutation_test(
        (first.numpy(), second.numpy()), statistic, vectorized=True, alternative="greater",
        permutation_type="samples" if paired else "independent", n_resamples=permutations, rng=0,
    ).pvalue  # fmt: skip
    assert found.exact == (n == 7)
    error = 1e-9 if found.exact else 5 * np.sqrt(expected * (1 - expected) * 2 / permutations).max()
    assert float((found.p - torch.from_numpy(expected)).abs().max()) <= error


@pytest.mark.parametrize("paired", [True, False])
def test_drawn_labellings_approach_all_of_them(paired: bool) -> None:
    first, second = samples(10, seed=3) + 0.1, samples(10, seed=4)
    exact = permutation_test(first, second, paired=paired, permutations=200_000)
    drawn = permutation_test(first, second, paired=paired, permutations=1000 if paired else 20_000)
    assert exact.exact and not drawn.exact
    for one, other in ((exact.p, drawn.p), (exact.p_adjusted, drawn.p_adjusted)):
        assert float((one - other).abs().max()) < 5 * (0.25 / drawn.permutations) ** 0.5


@pytest.mark.parametrize("paired", [True, False])
def test_a_true_null_is_rejected_as_often_as_it_says(paired: bool) -> None:
    """2 000 cells without a difference: p-values are uniform; in 200 families of ten, 5 % have one below 0.05."""
    first, second = torch.randn(2, 25, 2000, dtype=torch.float64)
    p = permutation_test(first, second, paired=paired, permutations=999).p
    assert stats.kstest(p.numpy(), "uniform").pvalue > 0.01
    families = zip(first.split(10, 1), second.split(10, 1), strict=True)
    errors = [
        bool((permutation_test(a, b, paired=paired, permutations=199).p_adjusted <= 0.05).any())
        for a, b in families
    ]
    assert stats.binomtest(sum(errors), len(errors), 0.05).pvalue > 0.01


@pytest.mark.parametrize("paired", [True, False])
def test_a_planted_difference_is_found_among_noisier_cells(paired: bool) -> None:
    first, second = torch.randn(2, 40, 50, dtype=torch.float64)
    first[:, 1:] *= 1000
    first[:, 0] += 1.5
    found = permutation_test(first, second, paired=paired, permutations=999)
    assert found.p_adjusted[0] == found.p[0] == 1 / 1000
    assert (found.p_adjusted >= found.p).all() and found.p_adjusted[1:].min() > 0.01


def test_of_one_cell_both_p_values_are_the_same() -> None:
    found = permutation_test(samples(30, 1), samples(25, 1, seed=1), paired=False, permutations=500)
    assert torch.equal(found.p, found.p_adjusted) and not found.exact


@pytest.mark.parametrize("paired", [True, False])
@settings(max_examples=20)
@given(order=st.permutations(range(16)), entries=st.sampled_from([1, 100, 1000]))
def test_the_order_of_the_rows_and_the_chunks_do_not_matter(
    paired: bool, order: list[int], entries: int
) -> None:
    first, second, rows = samples(16), samples(16, seed=1), torch.arange(100, 132)
    index = torch.tensor(order)
    ids = (rows[:16], rows[:16][index]) if paired else (rows, torch.cat((rows[:16][index], rows[16:])))
    other = second[index] if paired else second
    expected = permutation_test(first, second, paired=paired, permutations=50, rows=ids[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(permutation, "ENTRIES", entries)
        found = permutation_test(first[index], other, paired=paired, permutations=50, rows=ids[1])
    assert torch.equal(found.p, expected.p) and torch.equal(found.p_adjusted, expected.p_adjusted)


def test_the_seed_and_the_identities_choose_the_labellings() -> None:
    first = torch.randn(30, 20, dtype=torch.float64)
    p = [
        permutation_test(first, paired=True, permutations=100, seed=seed, rows=rows).p
        for seed, rows in ((0, None), (0, torch.arange(30)), (1, None), (0, torch.arange(1, 31)))
    ]
    assert torch.equal(p[0], p[1])
    assert not torch.equal(p[0], p[2]) and not torch.equal(p[0], p[3])


def test_pairs_of_one_identity_flip_together() -> None:
    differences, rows = samples(12), torch.arange(12) // 3
    found = permutation_test(differences, paired=True, rows=rows)
    sums = differences.view(4, 3, -1).sum(1)
    expected = permutation_test(sums, paired=True)
    assert found.permutations == 16
    assert torch.equal(found.p, expected.p) and torch.equal(found.p_adjusted, expected.p_adjusted)
    assert_close(found.difference, differences.mean(0))


def test_rounding_makes_no_difference_where_there_is_none() -> None:
    """0.1 + 0.2 is not 0.3, but not less alike for that; nor are equal constants."""
    first, second = (torch.full((20, 1), x, dtype=torch.float64) for x in (0.1 + 0.2, 0.3))
    first[::2] = 0.3
    for paired in (True, False):
        assert permutation_test(first, second, paired=paired, permutations=100).p.item() == 1.0


def test_axes_of_cells_and_their_type_are_free() -> None:
    first, second = torch.randn(2, 9, 2, 3)
    found = permutation_test(first, second, paired=True)
    flat = permutation_test(first.flatten(1).double(), second.flatten(1).double(), paired=True)
    assert found.p.shape == (2, 3) and found.p.dtype == torch.float64
    assert torch.equal(found.p.flatten(), flat.p)
    assert permutation_test(first[:, 0, 0], second[:, 0, 0], paired=False).p.shape == ()


def test_errors_say_what_is_required() -> None:
    ones = torch.ones(4, 2)
    with pytest.raises(ValueError, match="at least one permutation is required, got 0"):
        permutation_test(ones, paired=True, permutations=0)
    with pytest.raises(ValueError, match="unpaired test requires a second condition"):
        permutation_test(ones, paired=False)
    with pytest.raises(ValueError, match=r"of one shape, none of them empty, .* got \[4, 2\] and \[3, 2\]"):
        permutation_test(ones, ones[:3], paired=True)
    with pytest.raises(ValueError, match=r"up to the number of rows, .* got \[4, 2\] and \[4, 1\]"):
        permutation_test(ones, ones[:, :1], paired=False)
    with pytest.raises(ValueError, match=r"none of them empty, are required, got \[4, 2\] and \[0, 2\]"):
        permutation_test(ones, ones[:0], paired=False)
    with pytest.raises(ValueError, match="finite values are required, got NaN or infinity"):
        permutation_test(ones * torch.nan, paired=True)
    with pytest.raises(ValueError, match="8 row identities are required, got 4"):
        permutation_test(ones, ones, paired=False, rows=torch.arange(4))
    with pytest.raises(ValueError, match="requires rows of different identities, got some twice"):
        permutation_test(ones, ones, paired=False, rows=torch.arange(8) // 2)
