"""A product kept as its factors, against the same product multiplied out."""

import pytest
import torch
from hypothesis import given, strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor

from interp.core.factored import FactoredMatrix
from tests.loops import over
from tests.tolerances import TOLERANCES, assert_close

SHAPES = {"plain": (), "heads": (3,), "layers": (2, 3)}
LEAD = pytest.mark.parametrize("lead", SHAPES.values(), ids=SHAPES)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def factored(lead: tuple[int, ...], left: int = 7, mid: int = 3, right: int = 5) -> FactoredMatrix:
    return FactoredMatrix(gaussian(*lead, left, mid), gaussian(*lead, mid, right, seed=1))


def square(lead: tuple[int, ...], n: int = 7, mid: int = 3) -> FactoredMatrix:
    return factored(lead, n, mid, n)


def pairs(values: Tensor) -> Tensor:
    """Complex numbers as real and imaginary parts, in one fixed order."""
    parts = torch.view_as_real(values)
    key = (parts * 1e6).round()
    return parts[torch.argsort(key[:, 0] * 1e9 + key[:, 1])]


# --- spectra and norms --------------------------------------------------------------------------------------------


@LEAD
@over("left, mid, right", [(7, 3, 5), (3, 5, 4), (6, 6, 6), (5, 1, 9)])
def test_svd_is_that_of_the_dense_product(lead: tuple[int, ...], left: int, mid: int, right: int) -> None:
    matrix = factored(lead, left, mid, right)
    u, s, v = matrix.svd()
    rank = min(left, mid, right)
    assert_close(s[..., :rank], torch.linalg.svdvals(matrix.A @ matrix.B)[..., :rank])
    assert_close(u * s[..., None, :] @ v.mT, matrix.A @ matrix.B)
    eye = torch.eye(s.shape[-1], dtype=torch.float64).expand(*lead, -1, -1)
    assert_close(u.mT @ u, eye)
    assert_close(v.mT @ v, eye)


@LEAD
def test_norm_is_that_of_the_dense_product(lead: tuple[int, ...]) -> None:
    matrix = factored(lead)
    assert_close(matrix.norm(), (matrix.A @ matrix.B).square().sum((-2, -1)).sqrt())


@LEAD
def test_trace_is_that_of_the_dense_product(lead: tuple[int, ...]) -> None:
    matrix = square(lead)
    assert_close(matrix.trace(), (matrix.A @ matrix.B).diagonal(dim1=-2, dim2=-1).sum(-1))


@LEAD
def test_eigenvalues_of_the_small_product_are_the_dense_ones_nonzero_ones(
    lead: tuple[int, ...],
) -> None:
    matrix = square(lead)
    small = matrix.eigenvalues().reshape(-1, 3)
    dense = torch.linalg.eigvals(matrix.A @ matrix.B).reshape(-1, 7)
    for cycled, brute in zip(small, dense, strict=True):
        nonzero = brute[brute.abs().argsort(descending=True)]
        assert nonzero[3:].abs().max() < 1e-9
        assert_close(pairs(cycled), pairs(nonzero[:3]))


def test_eigenvalues_sum_to_the_trace() -> None:
    matrix = square((2, 3))
    assert_close(matrix.eigenvalues().sum(-1).real, matrix.trace())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_factors_have_the_spectra_of_their_exact_product(dtype: torch.dtype) -> None:
    """Oracle: the same rounded factors in float64. A product formed in half precision would be off by 1e-2."""
    half = FactoredMatrix(gaussian(64, 16).to(dtype), gaussian(16, 64, seed=1).to(dtype))
    exact = FactoredMatrix(half.A.double(), half.B.double())
    for name in ("norm", "trace"):
        got, expected = getattr(half, name)(), getattr(exact, name)()
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-4)
    ours, theirs = (m.eigenvalues().abs().sort().values for m in (half, exact))
    torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(half.svd()[1].double(), exact.svd()[1], rtol=1e-5, atol=1e-4)


def test_a_scaled_rotation_of_the_values_changes_nothing() -> None:
    """W_V -> W_V M, W_O -> M^-1 W_O is the same circuit (Elhage et al. 2021)."""
    matrix, mix = square(()), gaussian(3, 3, seed=2) + 3 * torch.eye(3, dtype=torch.float64)
    other = FactoredMatrix(matrix.A @ mix, torch.linalg.inv(mix) @ matrix.B)
    assert_close(pairs(other.eigenvalues()), pairs(matrix.eigenvalues()))
    assert_close(other.svd()[1], matrix.svd()[1])
    assert_close(other.norm(), matrix.norm())


# --- products -----------------------------------------------------------------------------------------------------


@LEAD
@over("width", [1, 2, 6])
def test_products_with_matrices_on_both_sides_stay_factored(lead: tuple[int, ...], width: int) -> None:
    matrix, dense = factored(lead), factored(lead).AB
    right, left = gaussian(*lead, 5, width), gaussian(*lead, width, 7)
    for product, expected in ((matrix @ right, dense @ right), (left @ matrix, left @ dense)):
        assert isinstance(product, FactoredMatrix)
        assert_close(product.AB, expected)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (3, 3)])
def test_products_with_one_matrix_broadcast_over_heads(lead: tuple[int, ...]) -> None:
    matrix, right, left = factored(lead), gaussian(5, 4), gaussian(4, 7)
    assert_close((matrix @ right).AB, matrix.AB @ right)
    assert_close((left @ matrix).AB, left @ matrix.AB)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (3, 3), (7,)])
def test_products_with_vectors_are_vectors(lead: tuple[int, ...]) -> None:
    """Three heads and an inner size of 3: the batch axis must not be taken for the vector's."""
    matrix, right, left = factored(lead), gaussian(5), gaussian(7)
    assert_close(matrix @ right, matrix.AB @ right)
    assert_close(left @ matrix, torch.einsum("i,...ij->...j", left, matrix.AB))


@LEAD
@over("inner", [2, 3, 6])
def test_products_of_two_factored_matrices_keep_the_thinner_middle(lead: tuple[int, ...], inner: int) -> None:
    one, other = (
        factored(lead),
        FactoredMatrix(gaussian(*lead, 5, inner, seed=3), gaussian(*lead, inner, 4, seed=4)),
    )
    product = one @ other
    assert isinstance(product, FactoredMatrix)
    assert_close(product.AB, one.AB @ other.AB)
    assert product.A.shape[-1] == min(3, inner)


@pytest.mark.parametrize("scalar", [2, -0.5, torch.tensor(3.0, dtype=torch.float64)])
def test_scaling_from_either_side_scales_the_product(scalar: float | Tensor) -> None:
    matrix = factored((2,))
    assert_close((matrix * scalar).AB, matrix.AB * scalar)
    assert_close((scalar * matrix).AB, matrix.AB * scalar)


@LEAD
def test_a_sum_is_that_of_the_products(lead: tuple[int, ...]) -> None:
    one, other = factored(lead), FactoredMatrix(gaussian(7, 2, seed=5), gaussian(2, 5, seed=6))
    assert_close((one + other).AB, one.AB + other.AB)
    assert_close((other + one).AB, one.AB + other.AB)
    assert (one + other).A.shape[-1] == 3 + 2


# --- rows, columns, blocks, diagonals -----------------------------------------------------------------------------


@LEAD
@over("index", [3, -1, slice(1, 4), [4, 0, 0], torch.tensor([2, 1]), torch.tensor(2)])
def test_rows_columns_and_blocks_are_those_of_the_product(
    lead: tuple[int, ...], index: int | slice | Tensor | list[int]
) -> None:
    """One number keeps its axis, so that every answer is a product again."""
    matrix, kept = factored(lead), torch.arange(7)[index].reshape(-1)
    columns = torch.arange(5)[index].reshape(-1)
    assert_close(matrix.rows(index).AB, matrix.AB[..., kept, :])
    assert_close(matrix.columns(index).AB, matrix.AB[..., columns])
    assert_close(matrix.rows(index).columns([0, 2]).AB, matrix.AB[..., kept, :][..., [0, 2]])


@LEAD
@over("left, right", [(7, 5), (4, 6), (5, 5)])
def test_the_diagonal_is_that_of_the_product(lead: tuple[int, ...], left: int, right: int) -> None:
    matrix = factored(lead, left, 3, right)
    assert_close(matrix.diagonal(), matrix.AB.diagonal(dim1=-2, dim2=-1))


# --- shape, indexing, transposes ----------------------------------------------------------------------------------


@LEAD
def test_shape_and_transpose_are_those_of_the_product(lead: tuple[int, ...]) -> None:
    matrix = factored(lead)
    assert matrix.shape == matrix.AB.shape
    assert matrix.ndim == matrix.AB.ndim
    assert torch.equal(matrix.T.T.AB, matrix.AB)
    assert_close(matrix.T.AB, matrix.AB.mT)
    assert_close(square(lead).BA, square(lead).B @ square(lead).A)


@pytest.mark.parametrize("index", [0, -1, slice(1, None), (1, 2), (slice(None), 0), (-1, slice(0, 2))])
def test_indexing_selects_among_layers_and_heads(index: int | slice | tuple[int | slice, ...]) -> None:
    matrix = factored((2, 3))
    assert_close(matrix[index].AB, matrix.AB[index])


def test_one_factor_may_be_shared_by_all_heads() -> None:
    shared = FactoredMatrix(gaussian(7, 3), gaussian(2, 4, 3, 5))
    assert shared.shape == (2, 4, 7, 5)
    assert_close(shared.AB, gaussian(7, 3) @ gaussian(2, 4, 3, 5))
    assert_close(shared[1, 3].AB, gaussian(7, 3) @ gaussian(2, 4, 3, 5)[1, 3])


def test_it_prints_its_shape_and_rank_and_no_numbers() -> None:
    assert repr(factored((2, 3))) == "FactoredMatrix([2, 3, 7, 5], rank <= 3)"


# --- what it refuses ----------------------------------------------------------------------------------------------


def test_factors_that_do_not_fit_are_refused_with_their_shapes() -> None:
    with pytest.raises((ValueError, TypeCheckError), match=r"A \[7, 3\] and B \[4, 5\]|f64\[4,5\]"):
        FactoredMatrix(gaussian(7, 3), gaussian(4, 5))


@pytest.mark.parametrize("question", ["trace", "eigenvalues"])
def test_a_product_that_is_not_square_has_no_trace(question: str) -> None:
    with pytest.raises(ValueError, match=r"requires a square product, got \[7, 5\]"):
        getattr(factored(()), question)()


@pytest.mark.parametrize("index", [(0, 0, 0), (0, 1, slice(None))])
def test_rows_and_columns_are_not_indexed(index: tuple[int | slice, ...]) -> None:
    with pytest.raises(IndexError, match="2 leading dimensions can be indexed, got 3"):
        factored((2, 3))[index]


def test_a_sum_of_products_of_other_sizes_is_refused() -> None:
    """Concatenated factors of equal inner size would pass for a matrix."""
    with pytest.raises(ValueError, match=r"equal rows and columns, got \[7, 5\] and \[7, 4\]"):
        factored(()) + factored((), right=4)


@pytest.mark.parametrize("index", [7, [0, 9], torch.tensor(-8)])
def test_a_row_that_does_not_exist_is_refused(index: int | list[int] | Tensor) -> None:
    with pytest.raises(IndexError, match="rows from 0 to 6"):
        factored(()).rows(index)


@pytest.mark.parametrize("index", [torch.tensor([[1]]), torch.tensor([0.5]), torch.tensor([True, False])])
def test_columns_are_numbers_or_a_mask_of_all(index: Tensor) -> None:
    with pytest.raises(IndexError, match="list of columns"):
        factored(()).columns(index)


def test_a_tensor_of_several_numbers_is_no_scalar() -> None:
    """Scaling A's columns by it would silently be another matrix."""
    with pytest.raises(ValueError, match=r"one number is required, got shape \[3\]"):
        factored((2,)) * gaussian(3)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 6), st.integers(0, 99))
def test_any_shape_agrees_with_the_dense_product(left: int, mid: int, right: int, seed: int) -> None:
    a, b = gaussian(left, mid, seed=seed), gaussian(mid, right, seed=seed + 100)
    matrix, tolerance = FactoredMatrix(a, b), TOLERANCES[torch.float64].atol
    assert abs(float(matrix.norm() - torch.linalg.matrix_norm(a @ b))) < tolerance * 100
    u, s, v = matrix.svd()
    torch.testing.assert_close(u * s @ v.mT, a @ b)
