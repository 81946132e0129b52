"""The best k neurons for a linear probe, proven: no other k of the candidates fit the labels better.

Gurnee et al. 2023 (optimal sparse probing, after Bertsimas et al. 2021) solve a mixed-integer program over the neurons
that differ most between the classes. Here the loss is least squares with a ridge, whose gain from one more neuron has a
closed form, and the search is branch and bound over all subsets (Furnival and Wilson 1974, "Regressions by leaps and
bounds"): a branch ends where even all its neurons together would not beat the best subset found so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import comb
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

CANDIDATES = 50
"""How many neurons are searched: those of the largest mean difference in deviations, the paper's pre-filter."""
RIDGE = 1.0
"""Weight of |w|^2 against the sum of squared errors of standardised neurons."""
MOST = 300_000
"""Branches of the largest search that is begun: five of fifty neurons."""


class Subset(NamedTuple):
    """The best neurons of one size."""

    neurons: Int[Tensor, "k"]
    """Ordered by how much the loss would rise without each, the most first."""
    loss: float
    """Weighted sum of squared errors plus the ridge, classes weighing the same, per example."""


def best_subsets(
    activations: Float[Tensor, "n m"],
    labels: Bool[Tensor, "n"],
    sizes: Sequence[int],
    *,
    candidates: int = CANDIDATES,
) -> list[Subset]:
    """The best subset of each size: the k candidates that minimise a weighted ridge regression of the labels.

    Minimises sum_i c_i (y_i - b - w . z_i)^2 + ridge |w|^2 over w and b. z: the neurons in standard deviations; y: 1
    and -1; c: weights with which both classes weigh the same, of mean 1. Among equally good subsets any one is
    returned.

    Args:
        activations: [n m], of the examples.
        labels: [n], whether each example has the feature.
        sizes: how many neurons.
        candidates: how many neurons are searched, those of the largest mean difference.

    Raises:
        ValueError: a size whose search could take more than `MOST` branches.

    Example:
        >>> labels = torch.arange(20) % 2 == 0
        >>> neurons = torch.randn(20, 5)
        >>> neurons[:, 3] += 9 * labels
        >>> best_subsets(neurons, labels, [1])[0].neurons.tolist()
        [3]
    """
    x = activations.double()
    spread = x.std(0, correction=0)
    z = (x - x.mean(0)) / spread.where(spread > 0, 1.0)
    apart = (z[labels].mean(0) - z[~labels].mean(0)).abs()
    kept = apart.argsort(descending=True, stable=True)[:candidates]
    check_sizes(sizes, len(kept))
    y = torch.where(labels, 1.0, -1.0).double()
    weight = torch.where(labels, 0.5 / labels.double().mean(), 0.5 / (~labels).double().mean())
    z = z[:, kept] - (weight[:, None] * z[:, kept]).mean(0)  # b is free: both sides are centred
    y = y - (weight * y).mean()
    gram = (z.mT * weight) @ z + RIDGE * torch.eye(len(kept)).double()
    response = z.mT @ (weight * y)
    total = float((weight * y.square()).sum())
    found = []
    for k in sizes:
        search = SubsetSearch(k)
        search.descend(gram.numpy(), response.numpy(), np.arange(len(kept)), (), 0.0)
        inner = torch.tensor(search.best)
        coefficient = torch.linalg.solve(gram[inner][:, inner], response[inner])
        cost = coefficient.square() / torch.linalg.inv(gram[inner][:, inner]).diagonal()
        order = cost.argsort(descending=True, stable=True)
        found.append(Subset(kept[inner[order]], (total - search.gain) / len(y)))
    return found


def check_sizes(sizes: Sequence[int], candidates: int) -> None:
    """ValueError for sizes whose full search could take too long."""
    for k in sizes:
        if k > candidates or comb(candidates, k - 1) > MOST:
            sizes_in_reach = takewhile(lambda j: comb(candidates, j - 1) <= MOST, range(1, candidates + 1))
            largest = max(sizes_in_reach)
            raise ValueError(
                f"the best subset is sought among {candidates} neurons up to a size of {largest}, got {k}: "
                "another selector, such as 'adaptive', takes more"
            )


@dataclass
class SubsetSearch:
    """A search for the k neurons of the largest gain, which is by how much they lower the loss."""

    k: int
    gain: float = -1.0
    best: tuple[int, ...] = ()
    branches: int = field(default=0)
    """How many branches were searched."""

    def descend(
        self,
        gram: NDArray[np.float64],
        response: NDArray[np.float64],
        free: NDArray[np.int64],
        chosen: tuple[int, ...],
        gain: float,
    ) -> None:
        """Search all subsets that hold the chosen neurons and some of the free ones.

        Args:
            gram, response: of the free ones, after the chosen ones have explained what they can (Schur complement): one
                more neuron j gains response_j^2 / gram_jj, all of them response . gram^-1 response.
            free: the numbers of the neurons that may be added.
            chosen: those of the neurons that the subsets hold.
            gain: of the chosen ones.
        """
        self.branches += 1
        single = response**2 / gram.diagonal()
        left = self.k - len(chosen)
        if left == 1:
            j = int(single.argmax())
            if gain + single[j] > self.gain:
                self.gain, self.best = gain + float(single[j]), (*chosen, int(free[j]))
            return
        order = np.argsort(-single, kind="stable")
        for place, j in enumerate(order[: len(order) - left + 1]):
            rest = order[place:]
            inner = gram[np.ix_(rest, rest)]
            if gain + response[rest] @ np.linalg.solve(inner, response[rest]) <= self.gain:
                return  # nor can fewer of them
            others = rest[1:]
            column = gram[others, j]
            self.descend(
                gram[np.ix_(others, others)] - np.outer(column, column) / gram[j, j],
                response[others] - column * response[j] / gram[j, j],
                free[others],
                (*chosen, int(free[j])),
                gain + float(single[j]),
            )
