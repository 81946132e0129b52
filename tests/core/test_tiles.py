"""Streamed answers about a product against the same questions asked of the product multiplied out."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interp.core import tiles
from interp.core.factored import FactoredMatrix
from tests.loops import over
from tests.tolerances import assert_close

DTYPES = over("dtype", [torch.float64, torch.float32, torch.bfloat16])
SHAPES = over("rows, columns", [(13, 13), (7, 20), (9, 16), (1, 5), (4, 4)])


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 4 x 4, runs of at most 40 entries: every product here takes several, the last of them smaller."""
    monkeypatch.setattr(tiles, "TILE", 40)
    monkeypatch.setattr(tiles, "WIDENED", 40)
    monkeypatch.setattr(tiles, "CACHED", 4)


def whole(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> FactoredMatrix:
    """Small integers: every dtype holds the product exactly, and many entries are equal."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randint(-2, 3, (rows, 3), generator=generator)
    return FactoredMatrix(a.to(dtype), torch.randint(-2, 3, (3, columns), generator=generator).to(dtype))


def dense(matrix: FactoredMatrix) -> Tensor:
    return matrix.A.double() @ matrix.B.double()


@over("make", [tiles.row_tiles, tiles.blocks])
@SHAPES
def test_tiles_cover_the_product_once_and_stay_small(
    make: Callable[..., object], rows: int, columns: int
) -> None:
    matrix, seen = whole(rows, columns, torch.float64), torch.full((rows, columns), torch.nan).double()
    for *at, tile in make(matrix.A, matrix.B):  # type: ignore[attr-defined]
        row, column = (*at, 0)[:2]
        here = seen[row : row + tile.shape[0], column : column + tile.shape[1]]
        assert bool(here.isnan().all())
        assert tile.numel() <= 40
        here.copy_(tile)
    assert torch.equal(seen, dense(matrix))


@DTYPES
@SHAPES
@over("largest", [True, False])
def test_the_top_entries_are_those_of_the_sorted_product(
    rows: int, columns: int, dtype: torch.dtype, largest: bool
) -> None:
    matrix = whole(rows, columns, dtype)
    expected = dense(matrix)
    for k in {1, min(3, rows * columns), min(17, rows * columns), rows * columns}:
        values, row, column = matrix.top_entries(k, largest=largest)
        assert values.dtype == torch.promote_types(dtype, torch.float32)
        assert torch.equal(values.double(), expected.flatten().sort(descending=largest).values[:k])
        assert torch.equal(expected[row, column], values.double())
        assert len(set(zip(row.tolist(), column.tolist(), strict=True))) == k


@DTYPES
@SHAPES
@over("largest", [True, False])
def test_the_top_of_every_row_is_that_of_the_sorted_product(
    rows: int, columns: int, dtype: torch.dtype, largest: bool
) -> None:
    matrix = whole(rows, columns, dtype)
    expected = dense(matrix)
    for k in (1, 3, columns):
        values, column = matrix.row_top(min(k, columns), largest=largest)
        assert torch.equal(values.double(), expected.sort(-1, descending=largest).values[:, :k])
        assert torch.equal(expected.gather(1, column), values.double())
        assert all(len(set(each)) == min(k, columns) for each in column.tolist())


@DTYPES
@SHAPES
def test_diagonal_ranks_count_the_larger_entries_of_the_row(
    rows: int, columns: int, dtype: torch.dtype
) -> None:
    matrix = whole(rows, columns, dtype)
    slow = [sum(bool(x > row[i]) for x in row) for i, row in enumerate(dense(matrix))]
    assert matrix.diagonal_ranks().tolist() == slow
    assert torch.equal(matrix.diagonal().double(), dense(matrix).diagonal())


def test_distinct_entries_are_found_in_their_places() -> None:
    matrix = FactoredMatrix(
        torch.randn(11, 3, generator=torch.Generator().manual_seed(0)).double(), torch.randn(3, 14).double()
    )
    order = matrix.AB.flatten().argsort(descending=True)
    values, row, column = matrix.top_entries(30)
    assert torch.equal(row * 14 + column, order[:30])
    assert_close(values, matrix.AB.flatten()[order[:30]])


def test_counts_over_wide_blocks_stay_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are summed in the block's own dtype."""
    monkeypatch.setattr(tiles, "CACHED", 1024)
    matrix = FactoredMatrix(torch.ones(2, 1), torch.cat((torch.zeros(1, 2), torch.ones(1, 3001)), 1))
    assert matrix.diagonal_ranks().tolist() == [3001, 3001]


def test_the_product_is_never_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No question multiplies out more than one tile: every product is written to memory of a tile's size."""
    sizes: list[int] = []
    plain = torch.mm

    def watched(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        sizes.append(out.numel())
        return plain(a, b, out=out)

    def refuse(_: FactoredMatrix) -> Tensor:
        raise AssertionError("the product was formed")

    matrix = whole(13, 13, torch.float64)
    monkeypatch.setattr(FactoredMatrix, "AB", property(refuse))
    monkeypatch.setattr(torch, "mm", watched)
    matrix.top_entries(5), matrix.row_top(2), matrix.diagonal_ranks(), matrix.diagonal()
    matrix.norm(), matrix.trace(), matrix.eigenvalues(), matrix.svd()
    (matrix @ matrix), (matrix + matrix), matrix.rows([1, 2]).columns([0]), matrix.T, repr(matrix)
    assert len(sizes) == 16 + 5 + 16
    assert max(sizes) <= 40


def test_answers_carry_no_gradient() -> None:
    a, b = torch.randn(9, 2, requires_grad=True), torch.randn(2, 9, requires_grad=True)
    matrix = FactoredMatrix(a, b)
    assert not matrix.top_entries(3)[0].requires_grad
    assert not matrix.row_top(3)[0].requires_grad
    assert torch.equal(matrix.diagonal_ranks(), (matrix.AB.diagonal()[:, None] < matrix.AB).sum(-1))


@pytest.mark.parametrize("k", [0, -1, 21])
def test_more_entries_than_there_are_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"1 to 20 entries are required, got {k}"):
        whole(4, 5, torch.float64).top_entries(k)
    with pytest.raises(ValueError, match=f"1 to 5 entries are required, got {k}"):
        whole(4, 5, torch.float64).row_top(k)


def test_rows_without_a_diagonal_entry_have_no_rank() -> None:
    with pytest.raises(ValueError, match=r"a diagonal entry in every row is required, .* \[5, 4\]"):
        whole(5, 4, torch.float64).diagonal_ranks()


def test_questions_about_entries_are_asked_of_one_product() -> None:
    several = FactoredMatrix(torch.ones(2, 5, 3), torch.ones(3, 5))
    for ask in (lambda: several.top_entries(1), lambda: several.row_top(1), several.diagonal_ranks):
        with pytest.raises(ValueError, match=r"one product is required \(select it first\), got \[2, 5, 5\]"):
            ask()


@over("dtype", [torch.bfloat16, torch.float16])
@over("rows", [1, 13, 50])
def test_a_product_with_narrow_weights_is_that_of_their_copies_in_float32(
    dtype: torch.dtype, rows: int
) -> None:
    """And so is the gradient; the weights get one where they ask for it, and no copy of them is kept."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, 6, generator=generator).requires_grad_()
    weight, towards = (
        torch.randn(rows, 6, generator=generator).to(dtype),
        torch.randn(2, 5, rows, generator=generator),
    )
    found, expected = tiles.wide_product(x, weight), x @ weight.float().mT
    assert found.dtype == torch.float32
    assert_close(found, expected)
    assert [kept.dtype for kept in found.grad_fn.saved_tensors] == [dtype]  # type: ignore[union-attr]
    assert_close(*(torch.autograd.grad(y, x, towards)[0] for y in (found, expected)))
    trained = weight.clone().requires_grad_()
    (own,) = torch.autograd.grad(tiles.wide_product(x, trained), trained, towards)
    assert_close(own.float(), torch.einsum("bpm,bpd->md", towards, x).to(dtype).float())
