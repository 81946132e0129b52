"""The curvature of a loss at one matrix as a Kronecker product, and its damped inverse: K-FAC and EK-FAC.

The gradient at z = x W is sum x^T delta, so its second moment is that of x (kron) that of delta where both are
independent (Martens and Grosse 2015). In the eigenbasis of that product EK-FAC puts the true second moments of the
gradient on the diagonal (George et al. 2018). Pure tensors: nothing here has heard of a model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from interp.core.stats import upcast
from interp.core.transfers import to_device


@dataclass(frozen=True, eq=False)
class Kronecker:
    """A symmetric positive matrix over the entries of W `[i o]`: eigenvalues in the basis of two orthogonal frames."""

    basis_in: Float[Tensor, "i i"]
    """Columns are the eigenvectors of the second moment of x."""
    basis_out: Float[Tensor, "o o"]
    """Columns are the eigenvectors of the second moment of delta."""
    eigenvalues: Float[Tensor, "i o"]
    """The eigenvalue of every pair of an eigenvector of x and one of delta."""

    @classmethod
    def of(
        cls, moment_in: Float[Tensor, "i i"], moment_out: Float[Tensor, "o o"], scale: float = 1.0
    ) -> Kronecker:
        """The matrix scale * moment_in (kron) moment_out; eigenvalues below 0, which are rounding, become 0."""
        (a, basis_in), (s, basis_out) = (
            torch.linalg.eigh(moment.double()) for moment in (moment_in, moment_out)
        )
        return cls(basis_in, basis_out, scale * torch.outer(a.clamp_min(0), s.clamp_min(0)))

    def to(self, like: Tensor) -> Kronecker:
        """This matrix on the device of `like`, in its dtype (float32 at least)."""
        dtype = upcast(like).dtype
        tensors = (self.basis_in, self.basis_out, self.eigenvalues)
        return Kronecker(*(to_device(tensor.to(dtype), like.device) for tensor in tensors))

    def in_basis(self, x: Float[Tensor, "b p i"], delta: Float[Tensor, "b p o"]) -> Float[Tensor, "b i o"]:
        """The gradient of each row in the eigenbasis, Q_in^T (sum_p x_p^T delta_p) Q_out."""
        turned = upcast(x) @ self.basis_in, upcast(delta) @ self.basis_out
        return einsum(*turned, "b p i, b p o -> b i o")

    def corrected(self, eigenvalues: Float[Tensor, "i o"]) -> Kronecker:
        """The matrix with this basis and other eigenvalues; EK-FAC takes the mean squares of `in_basis`."""
        return replace(self, eigenvalues=eigenvalues)

    def solved(
        self, x: Float[Tensor, "b p i"], delta: Float[Tensor, "b p o"], damping: float
    ) -> Float[Tensor, "b i o"]:
        """(self + damping)^-1 applied to the gradient of each row, in the basis of W."""
        solved = self.in_basis(x, delta) / (self.eigenvalues + damping)
        return einsum(self.basis_in, solved, self.basis_out, "i k, b k l, o l -> b i o")


def products(
    x: Float[Tensor, "b p i"],
    delta: Float[Tensor, "b p o"],
    x_other: Float[Tensor, "c q i"],
    delta_other: Float[Tensor, "c q o"],
) -> Float[Tensor, "b c"]:
    """Inner products <G_b, G_c> of all pairs of gradients G = sum x^T delta, from their factors.

    sum over positions p, q of (x_p . x_q)(delta_p . delta_q); no gradient is formed.
    """
    along = einsum(upcast(x), upcast(x_other), "b p i, c q i -> b c p q")
    return (along * einsum(upcast(delta), upcast(delta_other), "b p o, c q o -> b c p q")).sum((2, 3))


def along(
    x: Float[Tensor, "b p i"], delta: Float[Tensor, "b p o"], other: Float[Tensor, "c i o"]
) -> Float[Tensor, "b c"]:
    """Inner products <G_b, M_c> of the gradients G = sum x^T delta of rows b with the matrices M_c in `other`."""
    projected = einsum(upcast(x), other, "b p i, c i o -> b c p o")
    return einsum(projected, upcast(delta), "b c p o, b p o -> b c")
