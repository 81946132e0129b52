"""Maximum-activating examples: a slow sort, ties in every place, and bits that no split changes."""

import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from interp.core.extremes import Extremes, TopRows
from interp.core.stats import Reduction
from tests.core.splits import CUTS, ORDERS, identical, merged, whole

Entry = tuple[float, int, int]
TIES = torch.tensor([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0, math.nan, math.inf, -math.inf], dtype=torch.float64)
SEEDS = st.integers(0, 10**6)
RULES = [
    TopRows(3, "x", context="tokens", before=2, after=1),
    TopRows(3, "x", largest=False),
    TopRows(5, "x", once_per_row=False, context="tokens", before=0, after=2),
    TopRows(40, "x", once_per_row=False, largest=False),
    TopRows(20, "x"),
]


def slow_list(values: Tensor, rows: list[int], rule: TopRows) -> list[Entry]:
    """The list of one cell: sort all entries by value, row and position, and strike a row's second one."""
    sign = -1 if rule.largest else 1
    found = [
        (sign * values[i, p].item(), rows[i], p)
        for i in range(values.shape[0])
        for p in range(values.shape[1])
        if values[i, p].item() == values[i, p].item() and sign * values[i, p].item() != math.inf
    ]
    listed: list[Entry] = []
    for score, row, p in sorted(found):
        if not (rule.once_per_row and row in [entry[1] for entry in listed]):
            listed.append((sign * score, row, p))
    return listed[: rule.k]


def entries(found: Extremes, cell: int) -> list[Entry]:
    """What a list says of one cell, without its empty places, which must come last."""
    n = int((found.rows[cell] >= 0).sum())
    assert (found.rows[cell, n:] == -1).all() and (found.positions[cell, n:] == -1).all()
    assert found.values[cell, n:].isnan().all()
    rows, positions = found.rows[cell, :n].tolist(), found.positions[cell, :n].tolist()
    return list(zip(found.values[cell, :n].tolist(), rows, positions, strict=True))


def tied(seed: int) -> dict[str, Tensor]:
    """Twelve rows of four positions and two cells, full of ties, beside tokens that name their place."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "x": TIES[torch.randint(len(TIES), (12, 4, 2), generator=generator)],
        "tokens": torch.arange(48).view(12, 4),
    }


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40)
@given(seed=SEEDS)
def test_the_list_is_that_of_a_slow_sort(rule: TopRows, seed: int) -> None:
    values = tied(seed)
    found = rule.of(values, torch.arange(12))
    for cell in range(2):
        assert entries(found, cell) == slow_list(values["x"][..., cell], list(range(12)), rule)


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=40)
@given(cuts=CUTS, order=ORDERS, seed=SEEDS)
def test_any_split_and_order_gives_the_same_bits(
    rule: Reduction, cuts: list[int], order: list[int], seed: int
) -> None:
    assert identical(merged(rule, tied(seed), cuts, order), whole(rule, tied(seed)))


@given(order=ORDERS, cut=st.integers(0, 12), seed=SEEDS)
def test_pieces_of_one_row_are_listed_once(order: list[int], cut: int, seed: int) -> None:
    """Long texts in pieces: several rows of a batch, or of two batches, bear one identity."""
    rule, values, ids = TopRows(3, "x"), tied(seed)["x"], torch.arange(12) // 3
    index = torch.tensor(order)
    one, other = (rule.of({"x": values[i]}, ids[i]) for i in (index[:cut], index[cut:]))
    for cell in range(2):
        assert entries(one.merge(other), cell) == slow_list(values[..., cell], ids.tolist(), rule)


def test_the_context_holds_the_tokens_around_the_entry() -> None:
    rule = TopRows(2, "x", cells=0, context="tokens", before=2, after=1)
    values = torch.tensor([[0.0, 9.0, 0.0, 0.0], [0.0, 0.0, 0.0, 7.0], [5.0, 0.0, 0.0, 0.0]])
    tokens = torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33]])
    found = rule.of({"x": values, "tokens": tokens}, torch.tensor([4, 5, 6]))
    assert found.context is not None
    assert found.context.tolist() == [[-1, 10, 11, 12], [21, 22, 23, -1]]
    more = rule.of({"x": values[2:] + 3, "tokens": tokens[2:]}, torch.tensor([6]))
    assert more.context is not None
    assert more.context.tolist() == [[-1, -1, 30, 31], [-1] * 4]
    both = found.merge(more)
    assert both.context is not None
    assert both.context.tolist() == [[-1, 10, 11, 12], [-1, -1, 30, 31]]


@given(st.permutations(range(12)))
def test_a_planted_maximum_is_found_at_its_row_and_position(order: list[int]) -> None:
    values = torch.zeros(12, 7, 3)
    values[5, 2, 0], values[8, 6, 1], values[0, 0, 2] = 1.0, 2.0, 3.0
    index = torch.tensor(order)
    found = TopRows(1, "x").of({"x": values[index]}, index)
    assert (found.rows.flatten().tolist(), found.positions.flatten().tolist()) == ([5, 8, 0], [2, 6, 0])
    assert found.values.flatten().tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("largest", [True, False])
def test_numbers_of_any_type_are_listed(dtype: torch.dtype, largest: bool) -> None:
    values = torch.tensor([0, 1, 0, 1]).to(dtype)
    found = TopRows(3, "x", cells=0, largest=largest).of({"x": values}, torch.arange(4))
    assert found.rows.tolist() == ([1, 3, 0] if largest else [0, 2, 1])


@pytest.mark.parametrize("once", [True, False])
def test_several_axes_of_cells_keep_their_shape(once: bool) -> None:
    values = torch.randn(6, 5, 2, 3)
    found = TopRows(4, "x", cells=2, once_per_row=once).of({"x": values}, torch.arange(6))
    flat = TopRows(4, "x", cells=1, once_per_row=once).of({"x": values.flatten(2)}, torch.arange(6))
    assert found.rows.shape == (2, 3, 4)
    assert torch.equal(found.rows.flatten(0, 1), flat.rows)
    assert torch.equal(found.values.flatten(0, 1), flat.values)


def test_zeros_are_alike_whatever_their_sign() -> None:
    found = TopRows(3, "x", cells=0).of({"x": torch.tensor([0.0, -0.0, 0.0])}, torch.arange(3))
    assert not found.scores.signbit().any() and found.rows.tolist() == [0, 1, 2]


def test_errors_say_what_is_required() -> None:
    values, rows = {"x": torch.rand(3, 4), "tokens": torch.ones(3, 5, dtype=torch.long)}, torch.arange(3)
    with pytest.raises(ValueError, match=r"requires rows with identities: number the batch"):
        TopRows(2, "x").of(values)
    with pytest.raises(
        ValueError, match=r"k >= 1, cells >= 0, before >= 0 and after >= 0 are required, got Top"
    ):
        TopRows(0, "x")
    with pytest.raises(ValueError, match=r"k >= 1, .* required, got TopRows\(k=2, .*before=-1"):
        TopRows(2, "x", before=-1)
    with pytest.raises(ValueError, match=r"a value named 'y' is required, .*; got \['tokens', 'x'\]"):
        TopRows(2, "y").of(values, rows)
    with pytest.raises(ValueError, match=r"a value named 'text' is required"):
        TopRows(2, "x", cells=0, context="text").of(values, rows)
    for cells in (2, 3):
        with pytest.raises(
            ValueError, match=rf"perhaps one of positions, and {cells} of cells, got shape \[3, 4\]"
        ):
            TopRows(2, "x", cells=cells).of(values, rows)
    for cells in (0, 1):
        with pytest.raises(ValueError, match=r"got shape \[3, 4\] beside tokens of shape \[3, 5\]"):
            TopRows(2, "x", cells=cells, context="tokens").of(values, rows)
    lists = [TopRows(k, "x").of(values, rows) for k in (2, 3)]
    with pytest.raises(ValueError, match=r"lists made by one rule are required, got TopRows\(k=2"):
        lists[0].merge(lists[1])
