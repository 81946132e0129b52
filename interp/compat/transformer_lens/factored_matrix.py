"""TransformerLens' `FactoredMatrix`: a product `A @ B` kept as its factors, under the names its users know.

`interp.core.factored.FactoredMatrix` is ours; this one has their indexing, their errors and their duck typing, and
takes its spectra from ours.
"""

import operator
import warnings
from functools import cached_property
from typing import Any, Protocol, Union, cast, overload, runtime_checkable

import numpy as np
import torch
from jaxtyping import Complex, Shaped
from torch import Tensor

from interp.core import factored
from interp.core.stats import upcast


@runtime_checkable
class TensorLike(Protocol):
    """Protocol of a factor that is no torch.Tensor; enough for `@`, `AB` and `BA`."""

    @property
    def ndim(self) -> int:
        """Number of dimensions."""

    @property
    def shape(self) -> Any:
        """Sizes of the dimensions."""

    def size(self, dim: int) -> int:
        """Size of one dimension."""

    def unsqueeze(self, dim: int) -> Any:
        """The tensor with a dimension of size one."""

    def squeeze(self, dim: int) -> Any:
        """The tensor without a dimension of size one."""

    def broadcast_to(self, shape: Any) -> Any:
        """The tensor, repeated to a shape."""

    def __matmul__(self, other: Any) -> Any: ...


Scalar = int | float | Tensor
Index = Any  # whatever a tensor may be indexed with


class FactoredMatrix:
    """`A @ B` with A `[... ldim mdim]` and B `[... mdim rdim]`; leading dimensions (layer, head) broadcast.

    The product is formed only when `AB` is asked for. Spectra come from two thin QR decompositions and one SVD of at
    most `mdim x mdim`, in float32 at least (TransformerLens cannot decompose 16-bit factors). They are computed once
    and kept: factors edited in place afterwards are not noticed.

    Errors, as theirs: AssertionError for inner sizes that differ, RuntimeError for leading sizes that do not broadcast.

    Example:
        >>> FactoredMatrix(torch.ones(5, 2), torch.ones(2, 7))
        FactoredMatrix: Shape(torch.Size([5, 7])), Hidden Dim(2)
    """

    def __init__(self, A: Tensor | TensorLike, B: Tensor | TensorLike) -> None:  # noqa: N803
        if A.size(-1) != B.size(-2):
            raise AssertionError(
                f"Factored matrix must match on inner dimension, shapes were a: {A.shape}, b:{B.shape}"
            )
        self.ldim, self.mdim, self.rdim = A.size(-2), A.size(-1), B.size(-1)
        self.has_leading_dims = A.ndim > 2 or B.ndim > 2
        try:
            lead = np.broadcast_shapes(A.shape[:-2], B.shape[:-2])
        except ValueError as cause:
            raise RuntimeError(
                f"Shape mismatch: Cannot broadcast leading dimensions. A has shape {A.shape}, B has shape {B.shape}."
            ) from cause
        self.shape = torch.Size((*lead, self.ldim, self.rdim))
        self.A: Tensor = A.broadcast_to((*lead, self.ldim, self.mdim))
        self.B: Tensor = B.broadcast_to((*lead, self.mdim, self.rdim))

    @property
    def ndim(self) -> int:
        """Number of dimensions of the product."""
        return len(self.shape)

    @property
    def pair(self) -> tuple[Tensor | TensorLike, Tensor | TensorLike]:
        """Both factors."""
        return self.A, self.B

    @property
    def AB(self) -> Any:
        """The product `[... ldim rdim]`; this is where the memory goes."""
        return self.A @ self.B

    @property
    def BA(self) -> Any:
        """The small product `[... mdim mdim]` in the other order. AssertionError unless AB is square."""
        if self.ldim != self.rdim:
            raise AssertionError(f"Can only take ba if ldim==rdim, shapes were self: {self.shape}")
        return self.B @ self.A

    @property
    def T(self) -> "FactoredMatrix":
        """The transpose of the last two dimensions."""
        return FactoredMatrix(self.B.transpose(-2, -1), self.A.transpose(-2, -1))

    @overload
    def __matmul__(self, other: "FactoredMatrix") -> "FactoredMatrix": ...
    @overload
    def __matmul__(self, other: Tensor | TensorLike) -> Any: ...
    def __matmul__(self, other: Union["FactoredMatrix", Tensor, TensorLike]) -> Any:
        """Factored for a matrix or a FactoredMatrix, a tensor `[... ldim]` for a vector `[rdim]`."""
        if isinstance(other, FactoredMatrix):
            return (self @ other.A) @ other.B
        if other.ndim < 2:
            return (self.A @ (self.B @ other.unsqueeze(-1))).squeeze(-1)
        if other.size(-2) != self.rdim:
            raise AssertionError(
                f"Right matrix must match on inner dimension, shapes were self: {self.shape}, other:{other.shape}"
            )
        if self.rdim > self.mdim:
            return FactoredMatrix(self.A, self.B @ cast(Tensor, other))
        return FactoredMatrix(self.AB, other)

    @overload
    def __rmatmul__(self, other: "FactoredMatrix") -> "FactoredMatrix": ...
    @overload
    def __rmatmul__(self, other: Tensor | TensorLike) -> Any: ...
    def __rmatmul__(self, other: Union["FactoredMatrix", Tensor, TensorLike]) -> Any:
        """Factored for a matrix or a FactoredMatrix on the left, a tensor `[... rdim]` for a vector `[ldim]`."""
        if isinstance(other, FactoredMatrix):
            return other.A @ (other.B @ self)
        if other.size(-1) != self.ldim:
            raise AssertionError(
                f"Left matrix must match on inner dimension, shapes were self: {self.shape}, other:{other.shape}"
            )
        if other.ndim < 2:
            return ((other.unsqueeze(-2) @ self.A) @ self.B).squeeze(-2)
        if self.ldim > self.mdim:
            return FactoredMatrix(cast(Tensor, other) @ self.A, self.B)
        return FactoredMatrix(other, self.AB)

    def __mul__(self, scalar: Scalar) -> "FactoredMatrix":
        """The product scaled by one number. AssertionError for a tensor of several."""
        if isinstance(scalar, Tensor) and scalar.numel() != 1:
            raise AssertionError(
                f"Tensor must be a scalar for use with * but was of shape {scalar.shape}; @ multiplies matrices"
            )
        return FactoredMatrix(self.A * scalar, self.B)

    __rmul__ = __mul__

    def __getitem__(self, idx: Index) -> "FactoredMatrix":
        """Index the product as a tensor, but rows and columns given by a number stay, with size one.

        Raises:
            ValueError: more indices than dimensions.
            IndexError: as a tensor's.
        """
        given = idx if isinstance(idx, tuple) else (idx,)
        count, n_lead = sum(i is not None for i in given), self.ndim - 2
        if any(i is Ellipsis for i in given):
            at = next(k for k, i in enumerate(given) if i is Ellipsis)
            given = (*given[:at], *[slice(None)] * (self.ndim - count + 1), *given[at + 1 :])
            count = self.ndim
        if count <= n_lead:
            return FactoredMatrix(self.A[given], self.B[given])
        lead, tail = given[: n_lead - count], given[n_lead - count :]
        if count > self.ndim or any(i is None for i in tail):
            raise ValueError(f"{idx} is too long an index for a FactoredMatrix with shape {self.shape}")
        row, column = _kept(tail[0], self.ldim), _kept(tail[-1], self.rdim) if len(tail) == 2 else slice(None)
        return FactoredMatrix(self.A[(*lead, row)], self.B[(*lead, slice(None), column)])

    @cached_property
    def _svd(self) -> tuple[Tensor, Tensor, Tensor]:
        return factored.FactoredMatrix(self.A, self.B).svd()

    def svd(
        self,
    ) -> tuple[Shaped[Tensor, "... ldim k"], Shaped[Tensor, "... k"], Shaped[Tensor, "... rdim k"]]:
        """U, S (descending) and V with `AB = U diag(S) V^T`; k = the smallest of ldim, mdim and rdim.

        Signs are arbitrary (TransformerLens' may differ), and so are rotations among equal singular values.
        """
        return self._svd

    @property
    def U(self) -> Shaped[Tensor, "... ldim k"]:  # noqa: N802
        """Left singular vectors in columns."""
        return self._svd[0]

    @property
    def S(self) -> Shaped[Tensor, "... k"]:  # noqa: N802
        """Singular values, descending."""
        return self._svd[1]

    @property
    def V(self) -> Shaped[Tensor, "... rdim k"]:  # noqa: N802
        """Right singular vectors in columns."""
        return self._svd[2]

    @property
    def Vh(self) -> Shaped[Tensor, "... rdim k"]:  # noqa: N802
        """V, in spite of the name, as in TransformerLens. Deprecated: DeprecationWarning."""
        warnings.warn("FactoredMatrix.Vh is V, not its transpose; use .V", DeprecationWarning, stacklevel=2)
        return self._svd[2]

    @property
    def eigenvalues(self) -> Complex[Tensor, "... mdim"]:
        """The eigenvalues of AB that can be nonzero, read off BA; order is arbitrary. AssertionError unless square."""
        return torch.linalg.eig(upcast(self.BA)).eigenvalues

    def norm(self) -> Shaped[Tensor, "..."]:
        """Frobenius norm of the product, from the singular values."""
        return self.S.pow(2).sum(-1).sqrt()

    def make_even(self) -> "FactoredMatrix":
        """The product with each factor carrying the root of the singular values."""
        root = self.S.sqrt()
        return FactoredMatrix(self.U * root[..., None, :], root[..., :, None] * self.V.mT)

    def collapse_l(self) -> Shaped[Tensor, "... k rdim"]:
        """The product without its orthogonal left factor U: `diag(S) V^T`, with the same row Gram and norm."""
        return self.S[..., :, None] * self.V.mT

    def collapse_r(self) -> Shaped[Tensor, "... ldim k"]:
        """The product without its orthogonal right factor V^T: `U diag(S)`."""
        return self.U * self.S[..., None, :]

    def get_corner(self, k: int = 3) -> Tensor:
        """The first k entries of the product along every dimension."""
        lead = (slice(k),) * (self.ndim - 2)
        return self.A[(*lead, slice(k))] @ self.B[(*lead, slice(None), slice(k))]

    def unsqueeze(self, k: int) -> "FactoredMatrix":
        """The matrix with a leading dimension of size one at k."""
        return FactoredMatrix(self.A.unsqueeze(k), self.B.unsqueeze(k))

    def __repr__(self) -> str:
        return f"FactoredMatrix: Shape({self.shape}), Hidden Dim({self.mdim})"


def _kept(index: Index, size: int) -> Index:
    """A single number as a slice of one, so that the axis stays; anything else as it is."""
    if isinstance(index, Tensor) and index.ndim:
        return index
    try:
        start = operator.index(index)
    except TypeError:
        return index
    if not -size <= start < size:
        raise IndexError(f"index {start} is out of bounds for a dimension with size {size}")
    return slice(start, start + 1 or None)
