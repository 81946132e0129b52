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
"""Most branches of a search that is begun: as many as a search for five of fifty neurons can take."""


class Subset(NamedTuple):
    """The best neurons of one size."""

    neurons: Int[Tensor, "k"]
    """The neurons, ordered by how much the loss would rise without each, the largest rise first."""
    loss: float
    """The minimised ridge loss per example: weighted squared errors plus the ridge, both classes with equal weight."""


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
    difference = (z[labels].mean(0) - z[~labels].mean(0)).abs()
    pool = difference.argsort(descending=True, stable=True)[:candidates]
    check_sizes(sizes, len(pool))
    y = torch.where(labels, 1.0, -1.0).double()
    weight = torch.where(labels, 0.5 / labels.double().mean(), 0.5 / (~labels).double().mean())
    z = z[:, pool] - (weight[:, None] * z[:, pool]).mean(0)  # b is free: both sides are centred
    y = y - (weight * y).mean()
    gram = (z.mT * weight) @ z + RIDGE * torch.eye(len(pool)).double()
    response = z.mT @ (weight * y)
    total = float((weight * y.square()).sum())
    subsets = []
    for k in sizes:
        search = SubsetSearch(k)
        search.descend(gram.numpy(), response.numpy(), np.arange(len(pool)), (), 0.0)
        inner = torch.tensor(search.best)
        coefficient = torch.linalg.solve(gram[inner][:, inner], response[inner])
        cost = coefficient.square() / torch.linalg.inv(gram[inner][:, inner]).diagonal()
        order = cost.argsort(descending=True, stable=True)
        subsets.append(Subset(pool[inner[order]], (total - search.gain) / len(y)))
    return subsets


def check_sizes(sizes: Sequence[int], candidates: int) -> None:
    """Raise ValueError for a size of which a full search could take more than `MOST` branches."""
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
    """A branch-and-bound search for the k neurons that lower the loss most; `gain` is how much `best` lowers it."""

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
        """Search all subsets of size k that hold the chosen neurons, the others from `free`, and update `best`.

        Args:
            gram, response: Gram matrix and correlations with the labels of the free neurons, after projecting out the
                chosen ones (Schur complement): one more neuron j gains response_j^2 / gram_jj, all free neurons
                together gain response . gram^-1 response.
            free: numbers of the neurons that may be added.
            chosen: numbers of the neurons that every subset holds.
            gain: by how much the chosen neurons lower the loss.
        """
        self.branches += 1
        single = response**2 / gram.diagonal()
        missing = self.k - len(chosen)
        if missing == 1:
            j = int(single.argmax())
            if gain + single[j] > self.gain:
                self.gain, self.best = gain + float(single[j]), (*chosen, int(free[j]))
            return
        order = np.argsort(-single, kind="stable")
        for place, j in enumerate(order[: len(order) - missing + 1]):
            remaining = order[place:]
            inner = gram[np.ix_(remaining, remaining)]
            if gain + response[remaining] @ np.linalg.solve(inner, response[remaining]) <= self.gain:
                return  # all of them together do not beat the best subset, so fewer cannot
            others = remaining[1:]
            column = gram[others, j]
            self.descend(
                gram[np.ix_(others, others)] - np.outer(column, column) / gram[j, j],
                response[others] - column * response[j] / gram[j, j],
                free[others],
                (*chosen, int(free[j])),
                gain + float(single[j]),
            )
