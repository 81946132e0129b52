"""Covariance against numpy, co-occurrence against a slow count and scikit-learn, both over any split."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import matthews_corrcoef
from torch import Tensor

from interp.core.covariance import CoOccurrence, CoOccurrences, Covariance, Covariances
from tests.core.splits import CUTS, ORDERS, identical, merged, whole
from tests.tolerances import assert_close


def numbers(gaps: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Twelve rows of five positions; x has three columns, y two that depend on them."""
    dice = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 5, 3, generator=dice, dtype=torch.float64) + 4
    y = x[..., :2].square() + torch.randn(12, 5, 2, generator=dice, dtype=torch.float64)
    if gaps:
        x[3, 1, 0], y[7, 2:, 1] = torch.nan, torch.nan
    return {"x": x, "y": y}


@pytest.mark.parametrize("other", [None, "y"])
def test_covariance_and_correlation_are_those_of_numpy(other: str | None) -> None:
    values = numbers()
    found = Covariances("x", other).of(values)
    x, y = (values[name].flatten(0, 1).numpy() for name in ("x", other or "x"))
    assert_close(found.covariance(), torch.from_numpy(np.cov(x.T, y.T)[:3, 3:]))
    assert_close(found.correlation(), torch.from_numpy(np.corrcoef(x.T, y.T)[:3, 3:]))


def test_observations_with_a_gap_are_left_out() -> None:
    values = numbers(gaps=True)
    found = Covariances("x", "y").of(values)
    x, y = values["x"].flatten(0, 1), values["y"].flatten(0, 1)
    known = ~(x.isnan().any(1) | y.isnan().any(1))
    assert int(found.n) == 60 - 1 - 3
    assert_close(found.covariance(), Covariance.of(x[known], y[known]).covariance())
    assert_close(found.mean, x[known].mean(0))


@given(cuts=CUTS, order=ORDERS, seed=st.integers(0, 99))
def test_any_split_and_order_gives_the_same_covariance(cuts: list[int], order: list[int], seed: int) -> None:
    values, reduction = numbers(gaps=True, seed=seed), Covariances("x", "y")
    found, expected = merged(reduction, values, cuts, order), whole(reduction, values)
    for name, value in expected.tensors().items():
        assert_close(found.tensors()[name].double(), value.double())


def test_a_large_common_offset_costs_no_digits() -> None:
    x = numbers()["x"].flatten(0, 1)
    one, other = (Covariance.of(part + 1e8) for part in x.split(30))
    torch.testing.assert_close(
        one.merge(other).covariance(), Covariance.of(x).covariance(), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_run_in_float64(dtype: torch.dtype) -> None:
    x = torch.randn(5000, 2).to(dtype)
    found = Covariance.of(x)
    assert found.scatter.dtype == torch.float64
    assert_close(found.covariance(), torch.from_numpy(np.cov(x.double().numpy().T)))


@pytest.mark.parametrize("n", [7, 50, 101])
def test_a_constant_column_has_no_correlation(n: int) -> None:
    """Whatever rounding makes of its mean and of the merge."""
    x = torch.stack([torch.full((n,), 0.1, dtype=torch.float64), torch.arange(n).double()], 1)
    r = Covariance.of(x[:3]).merge(Covariance.of(x[3:])).correlation()
    assert r.isnan().tolist() == [[True, True], [True, False]]
    assert_close(r[1, 1], torch.tensor(1.0).double())


def test_fewer_than_two_observations_have_no_covariance() -> None:
    one, none = Covariance.of(torch.ones(1, 2)), Covariance.of(torch.full((3, 2), math.nan))
    assert one.covariance().isnan().all() and none.covariance().isnan().all()
    assert_close(none.merge(one).mean, torch.ones(2).double())
    assert int(none.merge(none).n) == 0


def features(seed: int = 0) -> dict[str, Tensor]:
    """Twelve rows of three positions; f has four features, g two; about half are active."""
    dice = torch.Generator().manual_seed(seed)
    f, g = (torch.randn(12, 3, n, generator=dice) for n in (4, 2))
    f[2, 1] = torch.nan
    return {"f": f, "g": g}


@pytest.mark.parametrize("other", [None, "g"])
def test_counts_are_those_of_a_slow_loop(other: str | None) -> None:
    values = features()
    found = CoOccurrences("f", other, threshold=0.3).of(values)
    f, g = (values[name].flatten(0, 1).tolist() for name in ("f", other or "f"))
    pairs = [(a, b) for a, b in zip(f, g, strict=True) if not any(math.isnan(v) for v in (*a, *b))]
    assert int(found.n) == len(pairs) == 35
    for i, j in np.ndindex(4, len(g[0])):
        assert found.together[i, j] == sum(a[i] > 0.3 and b[j] > 0.3 for a, b in pairs)
        assert found.active[i] == sum(a[i] > 0.3 for a, _ in pairs)
        assert found.active_other[j] == sum(b[j] > 0.3 for _, b in pairs)


@given(cuts=CUTS, order=ORDERS, seed=st.integers(0, 99))
def test_any_split_and_order_gives_the_same_counts(cuts: list[int], order: list[int], seed: int) -> None:
    values, reduction = features(seed), CoOccurrences("f", "g")
    assert identical(merged(reduction, values, cuts, order), whole(reduction, values))


def test_phi_is_the_correlation_of_the_indicators() -> None:
    a, b = torch.rand(200, 3) < 0.3, torch.rand(200, 2) < 0.6
    b[:, 0] |= a[:, 1]
    phi = CoOccurrence.of(a, b).phi()
    assert_close(phi, Covariance.of(a.double(), b.double()).correlation())
    for i, j in np.ndindex(3, 2):
        assert float(phi[i, j]) == pytest.approx(matthews_corrcoef(a[:, i].numpy(), b[:, j].numpy()))


def test_pmi_is_the_log_of_observed_over_expected() -> None:
    a, b = torch.rand(300, 3) < 0.3, torch.rand(300, 2) < 0.6
    both = (a[:, :, None] & b[:, None]).double().mean(0)
    expected = a.double().mean(0)[:, None] * b.double().mean(0)
    assert_close(CoOccurrence.of(a, b).pmi(), (both / expected).log())


def test_features_that_never_meet_or_never_rest_are_said_so() -> None:
    on, off = [True, True, False, False], [False, False, True, True]
    found = CoOccurrence.of(torch.tensor([on, off, [False] * 4, [True] * 4]).mT)
    assert found.phi()[:2, :2].tolist() == [[1.0, -1.0], [-1.0, 1.0]]
    assert found.phi()[2:].isnan().all()
    assert found.pmi()[0].tolist()[:2] == [pytest.approx(math.log(2)), -math.inf]
    assert found.pmi()[0, 2].isnan() and found.pmi()[0, 3] == 0


def test_errors_say_what_is_required() -> None:
    for reduction in (Covariances("x", "y"), CoOccurrences("x", "y")):
        with pytest.raises(ValueError, match=r"as many observations of x as of y are required, got 12 and 4"):
            reduction.of({"x": torch.rand(4, 3, 2), "y": torch.rand(4, 2)})
        with pytest.raises(ValueError, match=r"a value named 'y' is required"):
            reduction.of({"x": torch.rand(4, 2)})
        with pytest.raises(
            ValueError, match=r"x requires rows and 1 axes of cells after them, got shape \[4\]"
        ):
            reduction.of({"x": torch.rand(4)})
