"""The chance overlap of two matrices against simulated Haar frames, exact special cases and mpmath."""

import functools
import math

import mpmath
import pytest
import torch
from torch import Tensor

from interp.core.haar import (
    SERIES_FROM,
    Nakagami,
    concentration,
    gaussian_concentration,
    haar_frames,
    overlap_null,
)
from tests.loops import over
from tests.tolerances import assert_close

DRAWS = 40_000
ERRORS = 5
"""Standard errors that a simulated mean may stand from its expectation."""


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def f64(value: float | list[float]) -> Tensor:
    return torch.tensor(value, dtype=torch.float64)


@functools.cache
def haar(d: int, columns: int) -> Tensor:
    """Columns of Haar orthogonal matrices."""
    return haar_frames(DRAWS, d, columns, torch.Generator().manual_seed(d))


def close_in_mean(samples: Tensor, expected: float) -> None:
    """The mean of independent samples within ERRORS standard errors, which must be small enough to say something."""
    error = float(samples.std() / len(samples) ** 0.5)
    assert error < 0.05 * abs(expected)
    assert abs(float(samples.mean()) - expected) < ERRORS * error


def spectrum(kind: str, d: int) -> Tensor:
    """Squared singular values that sum to 1."""
    steep = 0.5 ** torch.arange(d - 1, dtype=torch.float64)
    values = {"one": steep[:1], "flat": torch.ones_like(steep[: d // 2]), "steep": steep}[kind]
    return values / values.sum()


def test_frames_are_orthonormal_and_have_no_preferred_sign() -> None:
    """Every entry has mean 0, and so has the overlap of two frames."""
    q = haar(6, 4)
    assert_close(q.mT @ q, torch.eye(4).double().expand(DRAWS, 4, 4))
    bound = ERRORS / (6 * DRAWS) ** 0.5  # entries have variance 1/6
    assert float(q.mean(0).abs().max()) < bound
    overlap = torch.einsum("ndk, ndk -> n", q[::2], q[1::2])  # of variance 4/6
    assert abs(float(overlap.mean())) < ERRORS * (4 / 6 / len(overlap)) ** 0.5
    assert bool((torch.linalg.qr(gaussian(100, 6, 4))[0][:, 0, 0] < 0).all()), "the signs are needed"


@pytest.mark.parametrize("d", [3, 6])
def test_fourth_moments_are_those_of_simulated_haar_matrices(d: int) -> None:
    squares = haar(d, d).square()
    close_in_mean(squares[:, 0, 0].square(), 3 / (d * (d + 2)))
    close_in_mean(squares[:, 0, 0] * squares[:, 0, 1], 1 / (d * (d + 2)))
    close_in_mean(squares[:, 0, 0] * squares[:, 1, 0], 1 / (d * (d + 2)))
    close_in_mean(squares[:, 0, 0] * squares[:, 1, 1], (d + 1) / (d * (d - 1) * (d + 2)))


@over("first", ["one", "flat", "steep"])
@over("second", ["one", "flat", "steep"])
def test_mean_and_variance_are_those_of_simulated_frames(first: str, second: str) -> None:
    d = 6
    a, b = spectrum(first, d), spectrum(second, d)
    y = torch.einsum("i,nij,j->n", a, haar(d, d)[:, : len(a), : len(b)].square(), b)
    law = overlap_null(a.square().sum(), b.square().sum(), d)
    mean, variance = float(law.mean_square), float(law.mean_square.square() / law.shape)
    close_in_mean(y, mean)
    close_in_mean((y - mean).square(), variance)


def test_the_variance_is_the_sum_over_all_pairs_of_entries() -> None:
    d = 5
    a, b = spectrum("steep", d), spectrum("flat", d)
    same, line, apart = 3 / (d * (d + 2)), 1 / (d * (d + 2)), (d + 1) / (d * (d - 1) * (d + 2))
    second = 0.0
    for i, j, k, m in torch.cartesian_prod(*(torch.arange(len(x)) for x in (a, b, a, b))).tolist():
        moment = same if (i, j) == (k, m) else line if i == k or j == m else apart
        second += float(a[i] * b[j] * a[k] * b[m]) * moment
    law = overlap_null(a.square().sum(), b.square().sum(), d)
    assert float(law.mean_square.square() / law.shape) == pytest.approx(second - 1 / d**2, rel=1e-10)


def test_two_rank_one_matrices_overlap_like_one_beta_number() -> None:
    """Y = q^2 of one entry is Beta(1/2, (d - 1)/2), for large d the Gamma law of shape 1/2."""
    d, one = 768, f64(1.0)
    law = overlap_null(one, one, d)
    assert float(law.mean_square.square() / law.shape) == pytest.approx(2 * (d - 1) / (d**2 * (d + 2)))
    assert float(law.shape) == pytest.approx(0.5, rel=0.005)


@pytest.mark.parametrize("kind", ["flat", "steep"])
def test_chance_levels_hold_under_the_null(kind: str) -> None:
    """The fitted law is not Y's: a tail of 5 % may be off by a tenth, one of 1 % by half, as its docstring says."""
    d, rank = 48, 6
    a = spectrum(kind, 2 * rank)[:rank]
    a = a / a.sum()
    y = torch.einsum("i,nij,j->n", a, haar(d, rank)[:, :rank].square(), a)
    law = overlap_null(a.square().sum(), a.square().sum(), d)
    p = law.upper(y.sqrt())
    assert float((p < 0.5).double().mean()) == pytest.approx(0.5, rel=0.05)
    assert float((p < 0.05).double().mean()) == pytest.approx(0.05, rel=0.12)
    assert float((p < 0.01).double().mean()) == pytest.approx(0.01, rel=0.6)
    z = (y.sqrt() - law.mean()) / law.sd()
    assert abs(float(z.mean())) < 0.02
    assert float(z.std()) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("shape", [0.5, 1.0, 3.3, SERIES_FROM * 0.999, SERIES_FROM * 1.001, 3657.0, 1e9])
def test_moments_of_the_ratio_are_those_of_mpmath(shape: float) -> None:
    mpmath.mp.dps = 50
    k, omega = mpmath.mpf(shape), mpmath.mpf("0.02")
    mean = mpmath.exp(mpmath.loggamma(k + 0.5) - mpmath.loggamma(k)) * mpmath.sqrt(omega / k)
    law = Nakagami(f64(shape), f64(0.02))
    assert float(law.mean()) == pytest.approx(float(mean), rel=1e-12)
    assert float(law.sd()) == pytest.approx(float(mpmath.sqrt(omega - mean**2)), rel=1e-11)


@over("shape", [0.5, 3.3, 250.0, 3657.0])
@over("sds", [-3.0, 0.0, 4.0, 12.0])
def test_tail_and_density_are_those_of_mpmath(shape: float, sds: float) -> None:
    mpmath.mp.dps = 30
    law = Nakagami(f64(shape), f64(0.02))
    ratio = (law.mean() + sds * law.sd()).clamp_min(0.01)
    k, theta, y = mpmath.mpf(shape), mpmath.mpf("0.02") / shape, mpmath.mpf(float(ratio)) ** 2
    tail = mpmath.gammainc(k, y / theta, mpmath.inf, regularized=True)
    log_gamma_density = (k - 1) * mpmath.log(y) - y / theta - mpmath.loggamma(k) - k * mpmath.log(theta)
    assert float(law.upper(ratio)) == pytest.approx(float(tail), rel=1e-8)
    density = mpmath.exp(log_gamma_density) * 2 * mpmath.sqrt(y)
    assert float(law.density(ratio)) == pytest.approx(float(density), rel=1e-8)


def test_half_a_degree_of_freedom_is_the_half_normal_law() -> None:
    half = Nakagami(f64(0.5), f64(1.0))
    assert float(half.mean()) == pytest.approx(math.sqrt(2 / math.pi))
    assert float(half.upper(f64(1.959963984540054))) == pytest.approx(0.05)


def test_concentration_is_that_of_the_singular_values() -> None:
    half = gaussian(2, 5, 4, 9)
    squared = torch.linalg.svdvals(half).square()
    assert_close(concentration(half), squared.square().sum(-1) / squared.sum(-1).square())
    flat = torch.linalg.qr(gaussian(9, 4)).Q.mT * 3
    assert_close(concentration(flat), f64(0.25))
    assert_close(concentration(flat[:1]), f64(1.0))
    assert concentration(torch.zeros(3, 5)).isnan()


def test_gaussian_factors_have_the_concentration_of_large_random_matrices() -> None:
    """Free probability: 1/e + 2/d for e, d -> infinity at any ratio; the same seed gives the same number."""
    found = gaussian_concentration(256, 32)
    assert float(found) == pytest.approx(1 / 32 + 2 / 256, rel=0.01)
    assert found == gaussian_concentration(256, 32)
    assert found != gaussian_concentration(256, 32, seed=1)


def test_what_overlaps_with_everything_alike_has_no_null() -> None:
    a = torch.tensor([0.25, 0.25 * (1 + 1e-7), 0.5]).double()
    law = overlap_null(a, a.flip(0), 4)
    assert law.sd().isnan().tolist() == [True, True, True]
    assert overlap_null(a[2], a[2], 4).sd() > 0
    assert overlap_null(torch.ones(1), torch.ones(1), 1).sd().isnan().all()
