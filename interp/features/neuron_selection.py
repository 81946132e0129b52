"""Which few neurons should a sparse probe read? The selectors of Gurnee et al. 2023, "Finding neurons in a haystack".

A selector sees training examples only and names neurons, the best first. scikit-learn does the statistics and the fits.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from sklearn.linear_model import LogisticRegression

Selection = Literal["mean_difference", "f_statistic", "mutual_information", "l1", "adaptive", "random"]
"""How neurons are chosen; `selected` says what each means."""
WEAKEST = 12
"""Doublings of the strongest L1 penalty's C after which the search for k surviving neurons ends."""


def selected(
    activations: Float[Tensor, "n m"],
    labels: Bool[Tensor, "n"],
    sizes: Sequence[int],
    *,
    select: Selection = "mean_difference",
    seed: int = 0,
) -> list[Int[Tensor, "_"]]:
    """For each size k, the k neurons that tell the labels apart best, best first; equally good ones by their number.

    mean_difference: |mean of the positive - mean of the negative examples|.
    f_statistic: of the one-way analysis of variance. mutual_information: of the neuron and the label (Kraskov's
    nearest-neighbour estimate, whose noise `seed` draws; slow, some 10 ms per neuron and thousand examples).
    l1: the largest coefficients at the strongest L1 penalty (of those that double C) that leaves k neurons.
    adaptive: a probe is fitted on all neurons, only the largest coefficients are kept, and so on with half as many,
    pausing at every size (adaptive thresholding; how fast to shrink is not in the paper).
    random: any k. Coefficients are those of activations in standard deviations. A constant neuron has difference,
    F and coefficient 0. Errors: ValueError for sizes outside 1 to m, an unknown selector, labels that are all the same.

    Example:
        >>> labels = torch.arange(20) % 2 == 0
        >>> neurons = torch.randn(20, 5)
        >>> neurons[:, 3] += 9 * labels
        >>> selected(neurons, labels, [1], select="f_statistic")[0].tolist()
        [3]
    """
    check_selection(sizes, select, activations.shape[1])
    if bool(labels.all()) or not bool(labels.any()):
        raise ValueError("examples with and without the feature are required, all labels are the same")
    if select == "l1":
        return _by_l1(activations, labels, sizes)
    if select == "adaptive":
        return _by_adaptive_thresholding(activations, labels, sizes)
    order = _descending(_SCORES[select](activations, labels, seed))
    return [order[:k] for k in sizes]


def check_selection(sizes: Sequence[int], select: str, neurons: int) -> None:
    """ValueError for sizes of probes that so many neurons do not allow, or an unknown selector."""
    if select not in get_args(Selection):
        raise ValueError(f"select must be one of {', '.join(get_args(Selection))}, got {select!r}")
    if not sizes or min(sizes) < 1 or max(sizes) > neurons:
        raise ValueError(f"sizes from 1 to {neurons}, the neurons there are, are required, got {list(sizes)}")


def standard(activations: Float[Tensor, "n m"]) -> tuple[Float[Tensor, "m"], Float[Tensor, "m"]]:
    """Mean and standard deviation of each neuron, in float64; 1 where it is constant, so that nothing divides by 0."""
    wide = activations.double()
    spread = wide.std(0, correction=0)
    constant = activations.amax(0) == activations.amin(0)
    return wide.mean(0), spread.masked_fill(constant, 1.0)


def logistic(
    x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"]
) -> tuple[Float[Tensor, "m"], Float[Tensor, ""]]:
    """Coefficients and intercept of a logistic regression, both classes weighing the same (L2 penalty, C = 1)."""
    from sklearn.linear_model import LogisticRegression

    return _coefficients(LogisticRegression(class_weight="balanced", max_iter=1000), x, labels)


def _mean_difference(x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"], seed: int) -> Float[Tensor, "m"]:
    wide = x.double()
    return (wide[labels].mean(0) - wide[~labels].mean(0)).abs()


def _f_statistic(x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"], seed: int) -> Float[Tensor, "m"]:
    import numpy as np
    from sklearn.feature_selection import f_classif

    varies = x.amax(0) > x.amin(0)
    scores = torch.zeros(x.shape[1], dtype=torch.float64)
    if bool(varies.any()):
        with np.errstate(divide="ignore"):  # a neuron that is constant within both classes scores infinity
            found, _ = f_classif(x[:, varies].double().numpy(), labels.numpy())
        scores[varies] = torch.from_numpy(found)
    return scores


def _mutual_information(x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"], seed: int) -> Float[Tensor, "m"]:
    from sklearn.feature_selection import mutual_info_classif

    return torch.from_numpy(mutual_info_classif(x.double().numpy(), labels.numpy(), random_state=seed))


def _random(x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"], seed: int) -> Float[Tensor, "m"]:
    return torch.rand(x.shape[1], dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


_SCORES: dict[str, Callable[[Tensor, Tensor, int], Float[Tensor, "m"]]] = {
    "mean_difference": _mean_difference,
    "f_statistic": _f_statistic,
    "mutual_information": _mutual_information,
    "random": _random,
}
"""Selectors that give each neuron a score of its own."""


def _descending(scores: Float[Tensor, "m"]) -> Int[Tensor, "m"]:
    return scores.argsort(descending=True, stable=True)


def _by_l1(
    x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"], sizes: Sequence[int]
) -> list[Int[Tensor, "_"]]:
    from sklearn.linear_model import LogisticRegression
    from sklearn.svm import l1_min_c

    mean, spread = standard(x)
    z = (x.double() - mean) / spread
    # Where fewer than k survive even the weakest penalty, mean differences decide among those at 0.
    first = _descending(_mean_difference(z, labels, 0))
    strongest = l1_min_c(z.numpy(), labels.numpy(), loss="log")
    found: dict[int, Tensor] = {}
    for doubling in range(WEAKEST + 1):
        model = LogisticRegression(
            C=strongest * 2**doubling, l1_ratio=1.0, solver="liblinear", class_weight="balanced",
            max_iter=1000, random_state=0,
        )  # fmt: skip
        size = _coefficients(model, z, labels)[0].abs()[first]
        order = first[_descending(size)]
        enough = len(x[0]) if doubling == WEAKEST else int((size > 0).sum())
        found |= {k: order[:k] for k in sizes if k <= enough and k not in found}
        if len(found) == len(set(sizes)):
            break
    return [found[k] for k in sizes]


def _by_adaptive_thresholding(
    x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"], sizes: Sequence[int]
) -> list[Int[Tensor, "_"]]:
    mean, spread = standard(x)
    z = (x.double() - mean) / spread
    survivors = torch.arange(x.shape[1])
    halves = {x.shape[1] >> i for i in range(1, x.shape[1].bit_length())}
    found = {}
    for size in sorted(halves | set(sizes), reverse=True):
        if size < min(sizes):
            break
        weights, _ = logistic(z[:, survivors], labels)
        survivors = survivors[_descending(weights.abs())[:size]]
        found[size] = survivors
    return [found[k] for k in sizes]


def _coefficients(
    model: "LogisticRegression", x: Float[Tensor, "n m"], labels: Bool[Tensor, "n"]
) -> tuple[Float[Tensor, "m"], Float[Tensor, ""]]:
    model.fit(x.numpy(), labels.numpy())
    return torch.from_numpy(model.coef_[0].copy()), torch.tensor(float(model.intercept_[0])).double()
