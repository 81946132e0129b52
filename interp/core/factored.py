"""A matrix stored as the product A @ B of two thin factors, and what can be computed from the factors alone."""

from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor

from interp.core import tiles
from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.stats import upcast
from interp.core.viewer import Viewable
from interp.core.wording import value_text

FactoredIndex = int | slice | Tensor | list[int]


@public(plain_pass=True)
@dataclass(frozen=True, eq=False)
class FactoredMatrix(Viewable):
    """`A @ B` with A `[... left mid]` and B `[... mid right]`; leading dimensions (layer, head) are batched.

    Nothing forms the `left x right` product unless `AB` is asked for. Spectra and norms are computed in float32 at
    least. Row-vector convention: `x @ M`.

    Example:
        >>> FactoredMatrix(torch.ones(5, 2), torch.ones(2, 7)).norm()
        tensor(11.8322)
    """

    A: Float[Tensor, "... left mid"]
    B: Float[Tensor, "... mid right"]

    def __post_init__(self) -> None:
        if self.A.shape[-1] != self.B.shape[-2]:
            raise ValueError(
                f"A @ B requires equal inner sizes, got A {shape_text(self.A.shape)} and B {shape_text(self.B.shape)}"
            )
        lead = np.broadcast_shapes(self.A.shape[:-2], self.B.shape[:-2])
        for name, factor in (("A", self.A), ("B", self.B)):
            if factor.shape[:-2] != lead:
                object.__setattr__(self, name, factor.expand(*lead, *factor.shape[-2:]))

    @property
    def shape(self) -> torch.Size:
        """Shape of the product."""
        return torch.Size((*self.A.shape[:-1], self.B.shape[-1]))

    @property
    def ndim(self) -> int:
        """Number of dimensions of the product."""
        return self.A.ndim

    @property
    def AB(self) -> Float[Tensor, "... left right"]:
        """The full product, `left x right` numbers in memory."""
        return self.A @ self.B

    @property
    def BA(self) -> Float[Tensor, "... mid mid"]:
        """The small product in the other order, which shares its nonzero eigenvalues with AB (square AB only)."""
        if self.shape[-1] != self.shape[-2]:
            raise ValueError(f"BA requires a square product, got {shape_text(self.shape)}")
        return self.B @ self.A

    @property
    def T(self) -> "FactoredMatrix":
        """The transpose of the product."""
        return FactoredMatrix(self.B.mT, self.A.mT)

    def __getitem__(self, index: int | slice | tuple[int | slice, ...]) -> "FactoredMatrix":
        """Select along the leading dimensions: `OV[3, 7]` is head 7 of layer 3."""
        depth = len(index) if isinstance(index, tuple) else 1
        if depth > self.ndim - 2:
            raise IndexError(
                f"{self.ndim - 2} leading dimensions can be indexed, got {depth}; the product's rows and columns "
                "are selected on .A and .B"
            )
        return FactoredMatrix(self.A[index], self.B[index])

    @public()
    def rows(self, index: FactoredIndex) -> "FactoredMatrix":
        """The product with these rows only; one row given as a number stays a row.

        `m.rows(i).columns(j)` is a block.
        """
        return FactoredMatrix(self.A[..., _as_list(index, self.shape[-2], "rows"), :], self.B)

    @public()
    def columns(self, index: FactoredIndex) -> "FactoredMatrix":
        """The product with these columns only; one column given as a number stays a column."""
        return FactoredMatrix(self.A, self.B[..., _as_list(index, self.shape[-1], "columns")])

    @overload
    def __matmul__(self, other: "FactoredMatrix") -> "FactoredMatrix": ...
    @overload
    def __matmul__(self, other: Tensor) -> "FactoredMatrix | Tensor": ...
    def __matmul__(self, other: "FactoredMatrix | Tensor") -> "FactoredMatrix | Tensor":
        """Product with a matrix or a factored matrix (factored) or with a vector (a tensor)."""
        if isinstance(other, FactoredMatrix):
            mid = self.B @ other.A
            small_left = self.A.shape[-1] <= other.B.shape[-2]
            if small_left:
                return FactoredMatrix(self.A, mid @ other.B)
            return FactoredMatrix(self.A @ mid, other.B)
        if other.ndim == 1:
            return (self.A @ (self.B @ other).unsqueeze(-1)).squeeze(-1)
        return FactoredMatrix(self.A, self.B @ other)

    def __rmatmul__(self, other: Tensor) -> "FactoredMatrix | Tensor":
        """Product with a matrix (factored) or a row vector (a tensor) on the left."""
        if other.ndim == 1:
            return ((other @ self.A).unsqueeze(-2) @ self.B).squeeze(-2)
        return FactoredMatrix(other @ self.A, self.B)

    def __mul__(self, scalar: int | float | Tensor) -> "FactoredMatrix":
        """The product scaled by one number."""
        if isinstance(scalar, Tensor) and scalar.ndim:
            raise ValueError(f"one number is required, got shape {shape_text(scalar.shape)}")
        return FactoredMatrix(self.A * scalar, self.B)

    __rmul__ = __mul__

    def __add__(self, other: "FactoredMatrix") -> "FactoredMatrix":
        """The sum, whose inner size is the sum of both inner sizes; ValueError unless rows and columns are equal."""
        if self.shape[-2:] != other.shape[-2:]:
            raise ValueError(
                f"a sum requires equal rows and columns, got {shape_text(self.shape)} and {shape_text(other.shape)}"
            )
        lead = np.broadcast_shapes(self.A.shape[:-2], other.A.shape[:-2])
        sides = ((self.A, other.A, -1), (self.B, other.B, -2))
        a, b = (torch.cat([x.expand(*lead, *x.shape[-2:]) for x in pair], dim) for *pair, dim in sides)
        return FactoredMatrix(a, b)

    def norm(self) -> Float[Tensor, "..."]:
        """Frobenius norm through the Gram matrices of the factors: `sqrt(tr(A^T A B B^T))`."""
        a, b = upcast(self.A), upcast(self.B)
        square = ((a.mT @ a) * (b @ b.mT)).sum((-2, -1))
        return square.clamp_min(0).sqrt()

    def trace(self) -> Float[Tensor, "..."]:
        """Trace of a square product, computed as the trace of BA."""
        return self._wide_BA().diagonal(dim1=-2, dim2=-1).sum(-1)

    def eigenvalues(self) -> Complex[Tensor, "... mid"]:
        """The `mid` eigenvalues of a square product that can be nonzero, from BA; order is arbitrary."""
        return torch.linalg.eigvals(self._wide_BA())

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """U `[... left mid]`, S `[... mid]` descending, V `[... right mid]` with `AB = U diag(S) V^T`.

        Signs are arbitrary, and so are rotations among equal singular values.
        """
        qa, core, qb = self._qr_and_core()
        u, s, vh = torch.linalg.svd(core, full_matrices=False)
        return qa @ u, s, qb @ vh.mT

    def core(self) -> Float[Tensor, "... mid mid"]:
        """A small matrix with the singular values of the product: `R_A R_B^T` of the factors' QR decompositions."""
        return self._qr_and_core()[1]

    def _qr_and_core(self) -> tuple[Tensor, Tensor, Tensor]:
        qa, ra = torch.linalg.qr(upcast(self.A))
        qb, rb = torch.linalg.qr(upcast(self.B).mT)
        return qa, ra @ rb.mT, qb

    def diagonal(self) -> Float[Tensor, "... n"]:
        """The diagonal of the product."""
        n = min(self.shape[-2:])
        return (upcast(self.A)[..., :n, :] * upcast(self.B)[..., :n].mT).sum(-1)

    @public()
    def top_entries(
        self, k: int, *, largest: bool = True
    ) -> tuple[Float[Tensor, "k"], Int[Tensor, "k"], Int[Tensor, "k"]]:
        """The k largest (or smallest) entries of one product, computed tile by tile.

        Args:
            k: number of entries.
            largest: False: the smallest ones.

        Returns:
            Values, rows and columns [k], in order.
        """
        return tiles.top_entries(*self._single_factors(), k, largest=largest)

    @public()
    def row_top(self, k: int, *, largest: bool = True) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
        """The k largest (or smallest) entries of every row of one product, computed tile by tile.

        Args:
            k: number of entries per row.
            largest: False: the smallest ones.

        Returns:
            Values and columns [n, k], in order.
        """
        return tiles.row_top(*self._single_factors(), k, largest=largest)

    def diagonal_ranks(self) -> Int[Tensor, "n"]:
        """Rank of the diagonal's entry in each row of one product: how many entries are larger; tile by tile.

        Returns:
            [n], 0 where none is larger.

        Raises:
            ValueError: more rows than columns.
        """
        return tiles.diagonal_ranks(*self._single_factors())

    def wide(self) -> "FactoredMatrix":
        """This matrix with both factors in float32 at least."""
        return FactoredMatrix(upcast(self.A), upcast(self.B))

    def _single_factors(self) -> tuple[Float[Tensor, "left mid"], Float[Tensor, "mid right"]]:
        if self.ndim != 2:
            raise ValueError(f"one product is required (select it first), got {shape_text(self.shape)}")
        return self.A, self.B

    def _wide_BA(self) -> Float[Tensor, "... mid mid"]:  # noqa: N802
        return self.wide().BA

    def __repr__(self) -> str:
        return f"FactoredMatrix({shape_text(self.shape)}, rank <= {self.A.shape[-1]})"


def _as_list(index: FactoredIndex, count: int, what: str) -> slice | Tensor | list[int]:
    """The index, a single number as a list of one, so that indexing keeps the axis. IndexError for one that is none."""
    if isinstance(index, slice):
        return index
    if not isinstance(index, Tensor):
        many = torch.tensor([index] if isinstance(index, int) else index, dtype=torch.long)
    else:
        many = index[None] if index.ndim == 0 else index
    allowed = many.dtype != torch.bool or many.shape == (count,)
    if not allowed or many.is_floating_point() or many.ndim != 1:
        raise IndexError(f"index must be a list of {what}, one row of numbers, got {value_text(index)}")
    if many.dtype != torch.bool and bool(((many < -count) | (many >= count)).any()):
        raise IndexError(f"index must be {what} from 0 to {count - 1}, got {value_text(index)}")
    return many
