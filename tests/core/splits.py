"""What every mergeable reduction owes: the same partial for any split of the rows, in any order."""

from collections.abc import Mapping

import torch
from hypothesis import strategies as st
from torch import Tensor

from interp.core.stats import Partial, Reduction

CUTS = st.lists(st.integers(0, 12), max_size=4)
"""Where to cut twelve rows; empty parts are parts."""
ORDERS = st.permutations(range(12))


def merged(reduction: Reduction, values: Mapping[str, Tensor], cuts: list[int], order: list[int]) -> Partial:
    """The rows in this order, cut here, reduced part by part, carried through `tensors` and merged as a tree."""
    index = torch.tensor(order)
    parts = [
        reduction.load(reduction.of({name: x[i] for name, x in values.items()}, i).tensors())
        for i in index.tensor_split(sorted(cuts))
    ]
    while len(parts) > 1:
        pairs = [parts[i].merge(parts[i + 1]) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[len(parts) - len(parts) % 2 :]
    return parts[0]


def whole(reduction: Reduction, values: Mapping[str, Tensor]) -> Partial:
    """All twelve rows at once."""
    return reduction.of(values, torch.arange(12))


def identical(one: Partial, other: Partial) -> bool:
    """Whether both hold the same bits."""
    a, b = one.tensors(), other.tensors()
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())
