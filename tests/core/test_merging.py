"""The fixed tree: any order of arrival gives the same bits, and a node may come whole."""

import pytest
from hypothesis import given, strategies as st

from interp.core.results import MergeTree


def summed(values: list[float], order: list[int]) -> MergeTree[float]:
    tree: MergeTree[float] = MergeTree(lambda one, other: one + other)
    for i in order:
        tree.add(i, values[i])
    return tree


def by_recursion(values: list[float]) -> float:
    """The largest power of two of the parts first, halves within halves; what is left over after it."""
    n = len(values)
    if n == 1:
        return values[0]
    largest = 1 << (n.bit_length() - 1)
    if largest == n:
        return by_recursion(values[: n // 2]) + by_recursion(values[n // 2 :])
    return by_recursion(values[:largest]) + by_recursion(values[largest:])


VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


@given(VALUES, st.randoms())
def test_the_order_of_arrival_changes_no_bit(values: list[float], generator: object) -> None:
    order = list(range(len(values)))
    generator.shuffle(order)  # type: ignore[attr-defined]
    assert summed(values, order).total() == by_recursion(values)


@given(VALUES, st.integers(0, 40))
def test_nodes_merged_elsewhere_give_the_same_bits(values: list[float], cut: int) -> None:
    cut = min(cut, len(values))
    here, there = summed(values, list(range(cut))), summed(values, list(range(cut, len(values))))
    for (level, index), value in there.nodes.items():
        here.put_node(level, index, value)
    assert here.total() == by_recursion(values)
    assert len(here) == len(values)


def test_parts_in_order_leave_few_nodes() -> None:
    tree = summed([1.0] * 1000, list(range(1000)))
    assert len(tree.nodes) == bin(1000).count("1")
    assert all(i in tree for i in range(1000)) and 1000 not in tree


def test_a_part_without_anything_counts_and_adds_nothing() -> None:
    tree: MergeTree[float] = MergeTree(lambda one, other: one + other)
    assert tree.total() is None
    for i, value in enumerate([None, 2.0, None, 3.0, None]):
        tree.add(i, value)
    assert tree.total() == 5.0 and len(tree) == 5


@pytest.mark.parametrize("again", [0, 2, 5])
def test_a_part_that_is_in_is_refused(again: int) -> None:
    tree = summed([1.0] * 6, list(range(6)))
    with pytest.raises(ValueError, match=f"part {again} was merged already"):
        tree.add(again, 1.0)
