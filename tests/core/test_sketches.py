"""Counts per bin: numpy's histogram, quantiles within their error of the sorted data, bits that no split changes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from interp.core.sketches import Histogram, Histograms, logarithmic_edges, quantiles
from interp.core.stats import Partial, Reduction
from tests.core.splits import CUTS, ORDERS, identical, merged, whole

FLOATS = st.floats(-1e5, 1e5, allow_nan=False) | st.sampled_from([math.inf, -math.inf, math.nan, 0.0])
EDGES = (-2.0, -0.5, 0.0, 1.0, 4.0)


def true_quantile(values: list[float], q: float) -> float:
    """The smallest value that a share of q does not exceed."""
    n = len(values)
    return next(x for i, x in enumerate(sorted(values), start=1) if i / n >= q)


def test_counts_are_those_of_numpy() -> None:
    """Small integers, so that many stand on an edge."""
    values = torch.randint(-4, 7, (200, 2, 3)).double()
    histogram = Histogram.of(values, torch.tensor(EDGES).double())
    for i in range(2):
        for j in range(3):
            expected = np.histogram(values[:, i, j].numpy(), np.array(EDGES))[0]
            assert histogram.counts[i, j].tolist() == expected.tolist()


def test_everything_outside_is_counted() -> None:
    values = torch.tensor([-torch.inf, -3.0, -2.0, 4.0, 4.5, 9.0, torch.inf, torch.nan])
    histogram = Histogram.of(values, torch.tensor(EDGES).double())
    assert (int(histogram.below), int(histogram.above), int(histogram.absent)) == (2, 3, 1)
    assert histogram.counts.tolist() == [1, 0, 0, 1]
    assert int(histogram.n) == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_numbers_of_any_type_are_counted(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    assert Histogram.of(values, torch.tensor([0.0, 0.5, 1.0])).counts.tolist() == [2, 3]


@pytest.mark.parametrize("reduction", [Histograms("x", EDGES, cells=1), quantiles("x", cells=1)])
@given(cuts=CUTS, order=ORDERS, data=st.lists(FLOATS, min_size=24, max_size=24))
def test_any_split_and_order_gives_the_same_bits(
    reduction: Reduction, cuts: list[int], order: list[int], data: list[float]
) -> None:
    values = {"x": torch.tensor(data, dtype=torch.float64).view(12, 2)}
    assert identical(merged(reduction, values, cuts, order), whole(reduction, values))


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40),
    st.floats(0, 1) | st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.55, 1.0]),
    st.sampled_from([0.01, 0.05, 0.3]),
)
def test_a_quantile_is_within_its_relative_error(data: list[float], q: float, error: float) -> None:
    sketch = quantiles("x", relative_error=error, low=1e-3)
    found = sketch.of({"x": torch.tensor(data, dtype=torch.float64)}).quantile(q).item()
    truth = true_quantile(data, q)
    bound = error * (1 + 1e-9) * abs(truth) if abs(truth) >= 1e-3 else 1e-3
    assert abs(found - truth) <= bound


@pytest.mark.parametrize("q", [0.0, 0.001, 0.1, 0.5, 0.9, 0.999, 1.0])
def test_quantiles_of_heavy_tails_agree_with_numpy(q: float) -> None:
    values = torch.randn(4000, 2, dtype=torch.float64).mul(3).exp() * torch.tensor([1.0, -1.0])
    found = quantiles("x", cells=1).of({"x": values}).quantile(q)
    expected = np.quantile(values.numpy(), q, axis=0, method="inverted_cdf")
    assert (found / torch.tensor(expected) - 1).abs().max() <= 0.01 * (1 + 1e-9)


def test_outside_the_range_the_answer_is_zero_or_infinite() -> None:
    sketch = quantiles("x", low=0.1, high=10.0)
    values = torch.tensor([-200.0, -0.01, 0.0, 0.09, 1e9])
    found = [sketch.of({"x": values}).quantile(q).item() for q in (0.0, 0.3, 0.5, 0.7, 1.0)]
    assert found == [-math.inf, 0.0, 0.0, 0.0, math.inf]


def test_without_observations_there_is_no_quantile() -> None:
    values = {"x": torch.tensor([[math.nan, 1.0], [math.nan, 1.0]])}
    assert quantiles("x", cells=1).of(values).quantile(0.5).isnan().tolist() == [True, False]


def test_a_bin_with_zero_at_its_end_answers_with_its_middle() -> None:
    histogram = Histograms("x", (0.0, 4.0, 8.0)).of({"x": torch.tensor([1.0, 7.0])})
    assert histogram.quantile(0.5).item() == 2.0
    assert histogram.quantile(1.0).item() == pytest.approx(2 * 4 * 8 / 12)


@pytest.mark.parametrize("error", [0.3, 0.01])
def test_logarithmic_edges_cover_the_range_in_steps_of_the_error(error: float) -> None:
    edges = logarithmic_edges(error, 0.01, 100.0)
    positive = edges[edges > 0]
    assert torch.equal(edges, -edges.flip(0))
    assert positive[0] == 0.01 and positive[-2] < 100.0 <= positive[-1]
    steps = (positive[1:] - positive[:-1]) / (positive[1:] + positive[:-1])
    torch.testing.assert_close(steps, torch.full_like(steps, error), rtol=1e-9, atol=0)


@pytest.mark.parametrize(("cells", "shape"), [(0, ()), (1, (3,)), (2, (4, 3))])
def test_all_axes_but_the_cells_are_pooled(cells: int, shape: tuple[int, ...]) -> None:
    values = torch.rand(5, 4, 3)
    tally = Histograms("x", EDGES, cells=cells).of({"x": values}).tally
    assert tally.shape == (*shape, len(EDGES) + 2)
    assert (tally.sum(-1) == 60 // math.prod(shape)).all()


def bad(reduction: Reduction, value: Tensor) -> Partial:
    return reduction.of({"x": value})


def test_errors_say_what_is_required() -> None:
    for edges in ((1.0,), (0.0, 0.0), (1.0, 0.0), (0.0, math.inf), (0.0, math.nan)):
        with pytest.raises(ValueError, match="two or more finite, increasing edges are required"):
            Histograms("x", edges)
    with pytest.raises(ValueError, match=r"a value named 'loss' is required, nearest: los; got \['los'\]"):
        Histograms("loss", EDGES).of({"los": torch.rand(3)})
    with pytest.raises(
        ValueError, match=r"x requires rows and 2 axes of cells after them, got shape \[3, 4\]"
    ):
        bad(Histograms("x", EDGES, cells=2), torch.rand(3, 4))
    with pytest.raises(ValueError, match="same edges are required, got 5 from -2 to 4 and 2 from 0 to 1"):
        bad(Histograms("x", EDGES), torch.rand(3)).merge(bad(Histograms("x", (0.0, 1.0)), torch.rand(3)))
    with pytest.raises(ValueError, match="quantile between 0 and 1 is required, got 50"):
        Histograms("x", EDGES).of({"x": torch.rand(3)}).quantile(50.0)
    for arguments in (
        {"relative_error": 0.0},
        {"relative_error": 1.0},
        {"low": 0.0},
        {"low": 2.0, "high": 1.0},
    ):
        with pytest.raises(ValueError, match="1e-5 <= relative_error < 1 and 1e-300 <= low < high"):
            quantiles("x", **arguments)
