"""Covariance against numpy, over any split."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from interp.core.covariance import Covariance, Covariances
from tests.core.splits import CUTS, ORDERS, merged, whole
from tests.tolerances import assert_close


def numbers(gaps: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """Twelve rows of five positions; x has three columns, y two that depend on them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 5, 3, generator=generator, dtype=torch.float64) + 4
    y = x[..., :2].square() + torch.randn(12, 5, 2, generator=generator, dtype=torch.float64)
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


def test_errors_say_what_is_required() -> None:
    reduction = Covariances("x", "y")
    with pytest.raises(ValueError, match=r"as many observations of x as of y are required, got 12 and 4"):
        reduction.of({"x": torch.rand(4, 3, 2), "y": torch.rand(4, 2)})
    with pytest.raises(ValueError, match=r"a value named 'y' is required"):
        reduction.of({"x": torch.rand(4, 2)})
    with pytest.raises(ValueError, match=r"x requires rows and 1 axes of cells after them, got shape \[4\]"):
        reduction.of({"x": torch.rand(4)})
