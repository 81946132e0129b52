"""How well an estimate of effects agrees with the exact ones: in order, and in which are the largest."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.boundary import public
from interp.core.shapes import shape_text


@dataclass(frozen=True)
class Agreement:
    """Two rankings of the same things compared."""

    rank_correlation: float
    """Spearman's: the correlation of the signed effects' ranks, equal ones sharing theirs; NaN if one is constant."""
    overlap: float
    """The share of the `top` largest exact effects (by absolute value) that are among the `top` largest estimates."""
    same_sign: float
    """The share of the `top` largest exact effects whose estimates have their sign; the overlap ignores signs."""
    top: int
    n: int
    """How many things were compared."""

    @property
    def chance(self) -> float:
        """The overlap expected of a random ranking."""
        return self.top / self.n


@public()
def agreement(estimate: Float[Tensor, "..."], exact: Float[Tensor, "..."], *, top: int) -> Agreement:
    """How well two tensors of effects agree in rank and in their largest; cells that are NaN in both do not count.

    Errors: ValueError for other shapes, for cells that only one of them has, or for a `top` outside 1 to n.

    Example:
        >>> agreement(torch.tensor([3.0, -2.0, 0.1]), torch.tensor([30.0, -20.0, 0.2]), top=2).overlap
        1.0
    """
    if estimate.shape != exact.shape:
        raise ValueError(
            f"effects of the same things are required, got shapes {shape_text(estimate.shape)} and "
            f"{shape_text(exact.shape)}"
        )
    known = ~exact.isnan()
    if bool((known == estimate.isnan()).any()):
        raise ValueError("effects of the same things are required, got cells that only one of the two has")
    ours, theirs = estimate[known].double(), exact[known].double()
    n = len(ours)
    if not 1 <= top <= n:
        raise ValueError(f"top in [1, {n}] is required, got {top}")
    tops = [set(x.abs().topk(top).indices.tolist()) for x in (ours, theirs)]
    pair = torch.stack((ranks(ours), ranks(theirs)))
    correlation = float(torch.corrcoef(pair)[0, 1]) if n > 1 else float("nan")
    largest = torch.tensor(sorted(tops[1]))
    same = float((ours[largest].sign() == theirs[largest].sign()).double().mean())
    return Agreement(correlation, len(tops[0] & tops[1]) / top, same, top, n)


def ranks(values: Float[Tensor, "n"]) -> Float[Tensor, "n"]:
    """The rank of every value from 0 upwards, equal values sharing the mean of theirs."""
    _, which, count = values.unique(return_inverse=True, return_counts=True)
    last = count.cumsum(0).double() - 1
    return (last - (count.double() - 1) / 2)[which]
