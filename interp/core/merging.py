"""Numbered parts merged along one fixed binary tree, so that the order of arrival changes no bit of the sum."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class MergeTree(Generic[T]):
    """Parts 0, 1, 2, ... of a whole, whichever comes first; holds at most the roots of what is complete.

    A node of level n is the merge of parts `i 2^n ... (i + 1) 2^n - 1`; it is built once both halves are there, always
    left with right. So sums in float arithmetic are the same whether the parts came from one process or from many, with
    or without a restart between. Of parts that come in order it holds log2(n) nodes, and rounding errors grow with
    log2(n) too. A part may be None: nothing to add.
    """

    def __init__(self, merge: Callable[[T, T], T]) -> None:
        self._merge = merge
        self.nodes: dict[tuple[int, int], T | None] = {}
        """(level, index) -> merged parts."""

    def __contains__(self, part: int) -> bool:
        return any((level, part >> level) in self.nodes for level in range(64))

    def __len__(self) -> int:
        """How many parts have arrived."""
        return sum(1 << level for level, _ in self.nodes)

    def add(self, part: int, value: T | None) -> None:
        """Take one part in; ValueError if it is in already."""
        self.put(0, part, value)

    def put(self, level: int, index: int, value: T | None) -> None:
        """Take in a whole node, merged elsewhere; ValueError if any of its parts is in already."""
        first = index << level
        there = [first] if first in self else []
        if level:
            there += [i << low for low, i in self.nodes if low < level and i >> (level - low) == index]
        if there:
            raise ValueError(f"part {min(there)} was merged already")
        while (sibling := (level, index ^ 1)) in self.nodes:
            other = self.nodes.pop(sibling)
            value = self._joined(other, value) if index & 1 else self._joined(value, other)
            level, index = level + 1, index >> 1
        self.nodes[level, index] = value

    def total(self) -> T | None:
        """All parts so far together, in their order; the largest nodes are merged last."""
        total: T | None = None
        for _, value in reversed(list(self._in_order())):
            total = self._joined(value, total)
        return total

    def _in_order(self) -> Iterator[tuple[int, T | None]]:
        """First part and value of every node, left to right."""
        starts = {index << level: value for (level, index), value in self.nodes.items()}
        yield from sorted(starts.items(), key=lambda entry: entry[0])

    def _joined(self, one: T | None, other: T | None) -> T | None:
        if one is None:
            return other
        return one if other is None else self._merge(one, other)
