"""FactoredMatrix and SVDInterpreter: what TransformerLens 3.9 answers, and that the parts are those of the product."""

import itertools
from functools import cache as once
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from interp.compat.transformer_lens.factored_matrix import FactoredMatrix, TensorLike
from interp.compat.transformer_lens.svd_interpreter import SVDInterpreter
from tests.compat.oracle.make_activation_cache import MODELS
from tests.compat.oracle.make_factored_matrix import FILE, TABLE, answer
from tests.loops import over
from tests.tolerances import assert_close


@once
def oracle() -> dict[str, Any]:
    return torch.load(FILE)


@over("expression", TABLE)
def test_every_expression_gives_what_transformer_lens_gives(expression: str) -> None:
    expected, got = oracle()["table"][expression], answer(FactoredMatrix, expression)
    assert got.keys() == expected.keys()
    for kind in ("error", "plain", "factored", "leading"):
        assert got.get(kind) == expected.get(kind)
    if "value" in expected:
        torch.testing.assert_close(got["value"], expected["value"], rtol=1e-10, atol=1e-10)
    if "message" in expected:
        assert got["message"][:40] == expected["message"][:40]


SHAPES = [((5, 3), (3, 6)), ((3, 7), (7, 4)), ((2, 1, 5, 3), (4, 3, 5)), ((6, 2), (3, 2, 6))]


def drawn(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype = torch.float64
) -> FactoredMatrix:
    return FactoredMatrix(*(torch.randn(shape, dtype=dtype) for shape in shapes))


@pytest.mark.parametrize("shapes", SHAPES)
def test_spectra_and_norms_are_those_of_the_product(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    matrix = drawn(shapes)
    u, s, v = matrix.svd()
    assert_close(u @ s.diag_embed() @ v.mT, matrix.AB)
    eye = torch.eye(s.shape[-1], dtype=s.dtype).expand(*s.shape, -1)
    assert_close(u.mT @ u, eye)
    assert_close(v.mT @ v, eye)
    assert_close(s, torch.linalg.svdvals(matrix.AB)[..., : s.shape[-1]])
    assert_close(matrix.norm(), torch.linalg.matrix_norm(matrix.AB))
    assert_close(matrix.make_even().AB, matrix.AB)
    assert_close(matrix.collapse_l().mT @ matrix.collapse_l(), matrix.AB.mT @ matrix.AB)
    assert_close(matrix.collapse_r() @ matrix.collapse_r().mT, matrix.AB @ matrix.AB.mT)


def test_eigenvalues_are_the_nonzero_ones_of_the_product() -> None:
    matrix = drawn(((2, 6, 3), (2, 3, 6)))
    full = torch.linalg.eigvals(matrix.AB)
    top = full.gather(-1, full.abs().argsort(-1, descending=True)[..., :3])
    for ours, theirs in zip(matrix.eigenvalues, top, strict=True):
        assert_close(torch.view_as_real(ours).sum(0), torch.view_as_real(theirs).sum(0))
        assert_close(ours.abs().sort().values, theirs.abs().sort().values)


def test_the_decomposition_is_computed_once_and_vh_is_v() -> None:
    matrix = drawn(SHAPES[0])
    assert matrix.svd()[0] is matrix.U and matrix.S is matrix.svd()[1]
    with pytest.warns(DeprecationWarning, match="Vh is V"):
        assert matrix.Vh is matrix.V


def test_gradients_of_the_norm_are_those_of_the_product() -> None:
    a, b = torch.randn(5, 3, dtype=torch.float64), torch.randn(3, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda *x: FactoredMatrix(*x).norm(), (a.requires_grad_(), b.requires_grad_())
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_decomposed_in_float32(dtype: torch.dtype) -> None:
    matrix = drawn(((6, 2), (2, 6)), dtype)
    wide = FactoredMatrix(matrix.A.float(), matrix.B.float())
    assert matrix.S.dtype == torch.float32
    assert_close(matrix.S, wide.S)
    assert matrix.eigenvalues.shape == (2,)


cuts = st.builds(slice, st.integers(-3, 2), st.integers(-2, 3), st.integers(1, 2))


@given(st.lists(st.one_of(st.integers(-2, 1), cuts, st.just(...)), max_size=4))
def test_an_index_selects_what_it_selects_in_the_product(index: list[Any]) -> None:
    if index.count(...) > 1:
        index = [i for i in index if i is not ...]
    matrix = drawn(((2, 3, 4, 2), (2, 3, 2, 5)))
    expected = matrix.AB[tuple(index)]
    got = matrix[tuple(index)]
    assert got.mdim == 2
    assert torch.allclose(got.AB.reshape(expected.shape), expected)


def test_numpy_integers_and_one_number_tensors_are_numbers() -> None:
    matrix = drawn(SHAPES[0])
    for index in (np.int64(2), torch.tensor(2)):
        assert matrix[index].shape == (1, 6)
        assert torch.equal(matrix[:, index].AB, matrix[:, 2].AB)


def test_rows_that_do_not_exist_are_refused() -> None:
    matrix = drawn(SHAPES[0])
    with pytest.raises(IndexError, match="index 5 is out of bounds for a dimension with size 5"):
        matrix[5]
    with pytest.raises(IndexError, match="index -7 is out of bounds"):
        matrix[0, -7]
    with pytest.raises(ValueError, match="too long an index"):
        matrix[0, None]


@pytest.mark.parametrize(("left", "right"), list(itertools.product(SHAPES[:2], repeat=2)))
def test_products_are_associative(left: Any, right: Any) -> None:
    one, other = drawn(left), drawn(right)
    middle = torch.randn(one.rdim, other.ldim, dtype=torch.float64)
    expected = one.AB @ middle @ other.AB
    assert_close((one @ middle @ other).AB, expected)
    assert_close((one @ (middle @ other)).AB, expected)
    assert_close((one @ FactoredMatrix(middle, other.AB)).AB, expected)


def test_a_large_product_is_never_formed_by_thin_factors() -> None:
    thin = FactoredMatrix(torch.ones(10**6, 2), torch.ones(2, 10**6))  # 4 TB if formed
    assert thin.norm() == pytest.approx(2e6)
    assert (thin @ thin).mdim == 2
    assert thin.get_corner().shape == (3, 3)
    assert thin[10**6 - 1, 0].AB.item() == 2
    assert (torch.ones(10**6) @ thin)[0] == 2e6


class Duck:
    """A tensor in all but type: what may be a factor."""

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @property
    def ndim(self) -> int:
        return self.held.ndim

    @property
    def shape(self) -> torch.Size:
        return self.held.shape

    def size(self, dim: int) -> int:
        return self.held.size(dim)

    def unsqueeze(self, dim: int) -> "Duck":
        return Duck(self.held.unsqueeze(dim))

    def squeeze(self, dim: int) -> "Duck":
        return Duck(self.held.squeeze(dim))

    def broadcast_to(self, shape: tuple[int, ...]) -> "Duck":
        return Duck(self.held.broadcast_to(shape))

    def __matmul__(self, other: Any) -> "Duck":
        return Duck(self.held @ getattr(other, "held", other))

    def __rmatmul__(self, other: Tensor) -> "Duck":
        return Duck(other @ self.held)


def test_ducks_are_factors() -> None:
    a, b, x = torch.randn(5, 2), torch.randn(2, 5), torch.randn(5, 3)
    assert isinstance(Duck(a), TensorLike) and isinstance(a, TensorLike)
    for matrix in (FactoredMatrix(Duck(a), Duck(b)), FactoredMatrix(a, Duck(b)), FactoredMatrix(Duck(a), b)):
        assert torch.equal(matrix.AB.held, a @ b)
        assert torch.equal(matrix.BA.held, b @ a)
        assert_close((matrix @ Duck(x)).AB.held, a @ b @ x)
        assert_close((matrix @ x).AB.held, a @ b @ x)
        assert_close((matrix @ Duck(x[:, 0])).held, a @ b @ x[:, 0])
        assert repr(matrix) == "FactoredMatrix: Shape(torch.Size([5, 5])), Hidden Dim(2)"
    assert_close((FactoredMatrix(a, b) @ Duck(x)).AB.held, a @ b @ x)


def interpreter(**changes: Tensor) -> SVDInterpreter:
    weights = oracle()["weights"] | changes
    fields = MODELS["layer-norm"]
    return SVDInterpreter(SimpleNamespace(cfg=SimpleNamespace(**fields), named_parameters=weights.items))


@pytest.mark.parametrize("asked", [("OV", 1, 3, 1), ("w_in", 0, 4), ("w_out", 1, 2)])
def test_singular_vectors_are_those_of_transformer_lens_up_to_sign(asked: tuple[Any, ...]) -> None:
    expected, got = oracle()["vectors"][asked[0]], interpreter().get_singular_vectors(*asked)
    assert got.shape == expected.shape
    signs = (got * expected).sum(0, keepdim=True).sign()
    torch.testing.assert_close(got * signs, expected, rtol=1e-4, atol=1e-5)


def test_a_query_head_has_the_vectors_of_its_value_head() -> None:
    weights = oracle()["weights"]
    grouped = interpreter(**{"blocks.0.attn.W_V": weights["blocks.0.attn.W_V"][:1]})
    for head in range(2):
        ov = FactoredMatrix(weights["blocks.0.attn.W_V"][0], weights["blocks.0.attn.W_O"][head])
        expected = ov.V.mT @ weights["unembed.W_U"]
        got = grouped.get_singular_vectors("OV", 0, 3, head)[:, 0].mT
        assert_close(got.abs(), expected.abs())


def test_singular_vectors_that_are_not_there_are_refused() -> None:
    get = interpreter().get_singular_vectors
    with pytest.raises(AssertionError, match="Head index optional only for w_in and w_out, got OV"):
        get("OV", 0)
    with pytest.raises(AssertionError, match="Layer index must be between 0 and 1 but got 2"):
        get("w_in", 2)
    with pytest.raises(AssertionError, match="Head index must be between 0 and 1 but got 2"):
        get("OV", 0, head_index=2)
    with pytest.raises(ValueError, match="Vector type must be in"):
        get("QK", 0, head_index=0)
    with pytest.raises(IndexError, match="at most 3 singular vectors"):
        get("OV", 0, 4, 0)
