"""The best few neurons, proven: brute force over all subsets with scikit-learn's ridge regression finds no better."""

import itertools
from math import comb

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.svm import LinearSVC
from torch import Tensor

from interp.features.best_subset import RIDGE, SubsetSearch, best_subsets
from interp.features.probing import selected

EXAMPLES, NEURONS = 120, 9


def correlated(seed: int, shift: float) -> tuple[Tensor, Tensor]:
    """Neurons that share directions, some shifted by the label."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.rand(EXAMPLES, generator=g) < 0.3
    x = torch.randn(EXAMPLES, NEURONS, generator=g) @ torch.randn(NEURONS, NEURONS, generator=g)
    x[:, ::3] += shift * labels[:, None]
    return x, labels


def loss_of(x: Tensor, labels: Tensor, neurons: tuple[int, ...]) -> float:
    """scikit-learn's fit of a subset, its loss per example."""
    z = x.double().numpy()
    z = ((z - z.mean(0)) / z.std(0))[:, list(neurons)]
    y = np.where(labels, 1.0, -1.0)
    weight = np.where(labels, 0.5 / labels.double().mean(), 0.5 / (~labels).double().mean())
    fit = Ridge(alpha=RIDGE).fit(z, y, sample_weight=weight)
    errors = weight @ (y - fit.predict(z)) ** 2
    return float(errors + RIDGE * fit.coef_ @ fit.coef_) / len(y)


@pytest.mark.parametrize("shift", [0.0, 1.5])
@pytest.mark.parametrize("seed", range(3))
def test_no_other_subset_fits_better(seed: int, shift: float) -> None:
    x, labels = correlated(seed, shift)
    sizes = (1, 2, 3, 4, 8, 9)
    for k, found in zip(sizes, best_subsets(x, labels, sizes), strict=True):
        each = {s: loss_of(x, labels, s) for s in itertools.combinations(range(NEURONS), k)}
        best = min(each, key=each.__getitem__)
        assert set(found.neurons.tolist()) == set(best)
        assert found.loss == pytest.approx(each[best], rel=1e-9)
        without = [each_without(x, labels, found.neurons.tolist(), i) for i in range(k)] if k > 1 else [0.0]
        assert without == sorted(without, reverse=True), "best first"


def each_without(x: Tensor, labels: Tensor, neurons: list[int], i: int) -> float:
    return loss_of(x, labels, tuple(neurons[:i] + neurons[i + 1 :]))


def test_greedy_and_single_scores_miss_what_the_search_finds() -> None:
    """Two neurons that say nothing alone and all together, beside one that says something alone."""
    g = torch.Generator().manual_seed(0)
    labels = torch.arange(200) % 2 == 0
    sign = torch.where(labels, 1.0, -1.0)
    common = 10 * torch.randn(200, generator=g)
    x = torch.randn(200, 6, generator=g)
    x[:, 1], x[:, 4] = common + 0.5 * sign, -common + 0.5 * sign
    x[:, 2] += 0.8 * sign
    assert set(selected(x, labels, [2], select="optimal")[0].tolist()) == {1, 4}
    for select in ("mean_difference", "f_statistic"):
        assert set(selected(x, labels, [2], select=select)[0].tolist()) != {1, 4}  # type: ignore[arg-type]


def test_bounds_leave_out_branches_where_there_is_a_signal() -> None:
    g = torch.Generator().manual_seed(1)
    labels = torch.arange(400) % 2 == 0
    x = torch.randn(400, 30, generator=g)
    x[:, :4] += 2 * labels[:, None]
    z = (x - x.mean(0)) / x.std(0)
    y = torch.where(labels, 1.0, -1.0)
    search = SubsetSearch(4)
    gram, response = (z.mT @ z + torch.eye(30)).double().numpy(), (z.mT @ y).double().numpy()
    search.descend(gram, response, np.arange(30), (), 0.0)
    assert set(search.best) == {0, 1, 2, 3} and search.branches < comb(30, 3) / 10


def test_a_size_that_would_take_too_long_is_refused() -> None:
    x, labels = torch.randn(40, 60), torch.arange(40) % 2 == 0
    with pytest.raises(ValueError, match="among 50 neurons up to a size of 5, got 6"):
        selected(x, labels, [2, 6], select="optimal")


def test_svm_selector_ranks_by_scikit_learns_coefficients() -> None:
    x, labels = correlated(2, 1.0)
    z = x.double().numpy()
    z = (z - z.mean(0)) / z.std(0)
    machine = LinearSVC(class_weight="balanced", dual=False, max_iter=10_000).fit(z, labels.numpy())
    order = np.argsort(-np.abs(machine.coef_[0])).tolist()
    assert selected(x, labels, [NEURONS], select="svm")[0].tolist() == order
