"""How strongly factored matrices compose."""

from jaxtyping import Float
from torch import Tensor

from interp.compat.transformer_lens.factored_matrix import FactoredMatrix
from interp.compat.transformer_lens.tensors import get_corner


def composition_scores(
    left: FactoredMatrix, right: FactoredMatrix, broadcast_dims: bool = True
) -> Float[Tensor, "..."]:
    """|L R| / (|L| |R|) in Frobenius norms (Elhage et al. 2021), `[*left's leading dims, *right's]`.

    Without `broadcast_dims` the leading dims of both are matched instead.
    Errors: AssertionError for inner sizes that differ.
    """
    if broadcast_dims:
        leading = left.ndim - 2
        for i in range(leading):
            right = right.unsqueeze(i)
        for i in range(right.ndim - 2 - leading):
            left = left.unsqueeze(i + leading)
    assert left.rdim == right.ldim, (
        f"Composition scores require left.rdim==right.ldim, shapes were left: {left.shape}, right:{right.shape}"
    )
    small_left, small_right = left.collapse_l(), right.collapse_r()
    norms = [matrix.norm(dim=(-2, -1)) for matrix in (small_left @ small_right, small_left, small_right)]
    return norms[0] / norms[1] / norms[2]


def get_matrix_corner(matrix: FactoredMatrix, n: int = 3) -> Float[Tensor, "..."]:
    """The product of the first `n` rows and columns, at the first `n` of every leading dim, cut to three each."""
    corner: Tensor = get_corner(matrix[(slice(n),) * matrix.ndim]).AB
    return corner
