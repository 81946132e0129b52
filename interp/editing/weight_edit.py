"""A change of one weight matrix as data: put into the parameter and taken out again bit by bit, or made as `Edit`s.

A matrix is called what the field calls it (`blocks.3.mlp.W_out`) and stands in the row convention `x @ W`, whatever the
layout of the parameter that holds it: queries, keys and values share one parameter, gate and in another, and the
unembedding may be the embedding itself.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from interp.core.factored import FactoredMatrix
from interp.core.precision import wide
from interp.core.shapes import shape_text
from interp.model.tap import Edit
from interp.passes.observe import Subject
from interp.weights.matrices import ends, held

Change = FactoredMatrix | Float[Tensor, "*h i o"]
"""What is added to a matrix: two thin factors, or a tensor of its shape."""


@dataclass(frozen=True)
class WeightEdit:
    """W' = W + change, for one matrix of a model.

    name: `blocks.<layer>.attn.W_Q|W_K|W_V|W_O`, `blocks.<layer>.mlp.W_in|W_gate|W_out`, `embed.W_E`,
    `pos_embed.W_pos` or `unembed.W_U`; in tied models the last is the first, transposed.
    change: as `FactoredMatrix` A B (A `[.. d_in r]`, B `[.. r d_out]`; rank 0 changes nothing) or dense, in the layout
    of `Weights`: heads in front, `[h d e]` for W_Q.

    Example:
        >>> edit = WeightEdit("blocks.1.mlp.W_out", FactoredMatrix(torch.ones(40, 1), torch.ones(1, 24)))
        >>> with edit.applied(model):
        ...     logits = model.transformer(model.to_tokens(prompt))
    """

    name: str
    change: Change

    @property
    def rank(self) -> int | None:
        """The inner size of the factors; None for a dense change."""
        return self.change.A.shape[-1] if isinstance(self.change, FactoredMatrix) else None

    @property
    def dense(self) -> Float[Tensor, "*h i o"]:
        """The change as one tensor."""
        return self.change.AB if isinstance(self.change, FactoredMatrix) else self.change

    @contextmanager
    def applied(self, model: Subject) -> Iterator[None]:
        """Inside `with`, the model has the changed weights; afterwards the old ones, bit for bit, whatever happened.

        The sum is formed in float32 at least and rounded once. Edits nest. The parameter itself is written, so a pass
        whose graph is still waiting for its backward must not span the block.
        Errors: KeyError, IndexError or ValueError for a matrix the model lacks, a change of another shape, NaN or inf.
        """
        network = model.transformer
        weight = held(network, self.name).in_(network)
        change = self._fitting(weight)
        dtype = torch.promote_types(weight.dtype, change.dtype)
        with torch.no_grad():
            before = weight.clone()
            changed = (weight.to(dtype) + change.to(weight.device)).to(weight.dtype)
        try:
            with torch.no_grad():
                weight.copy_(changed)
            yield
        finally:
            with torch.no_grad():
                weight.copy_(before)

    def as_edits(self, model: Subject, *, rows: tuple[int, ...] | None = None) -> tuple[Edit, Edit]:
        """The same change without touching a weight: y' = y + (x A) B at the site of the matrix' output.

        The first edit remembers x, the second adds to y; both belong into the same pass, `rows` limits them to some
        batch rows, so one batch can hold many edited models. They agree with `applied` to rounding. Edits of y's
        own site by others come before or after it in the order given.
        Errors: as `applied`; ValueError for the embeddings and the unembedding, whose ends are no sites, and for
        W_out or W_O where the family norms what the sublayer adds (the raw output is no site).
        """
        self._fitting(held(model.transformer, self.name).in_(model.transformer))
        change, route = self.change, ends(model.transformer.config, self.name)
        if not isinstance(change, FactoredMatrix):
            change = FactoredMatrix(change, torch.eye(change.shape[-1], dtype=change.dtype))
        latest: list[Tensor] = []

        def remember(x: Tensor) -> Tensor:
            latest[:] = [x]
            return x

        def add(y: Tensor) -> Tensor:  # takes x away: nothing of a pass stays behind
            return y + route.factor * _through(latest.pop(), change, route.axes)

        return Edit(route.reads, remember, rows=rows), Edit(route.writes, add, rows=rows)

    def _fitting(self, weight: Tensor) -> Tensor:
        """The change, dense and in float32 at least; ValueError unless it fits the matrix."""
        if self.change.shape != weight.shape:
            raise ValueError(
                f"a change of {self.name} must have its shape {shape_text(weight.shape)}, got "
                f"{shape_text(self.change.shape)}"
            )
        dense = wide(self.dense)
        if not bool(dense.isfinite().all()):
            raise ValueError(f"a finite change of {self.name} is required, got NaN or inf")
        return dense


def _through(x: Tensor, change: FactoredMatrix, axes: str) -> Tensor:
    """x A B, in float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.promote_types(change.A.dtype, torch.float32))
    return einsum(x.to(dtype), change.A.to(x.device, dtype), change.B.to(x.device, dtype), axes)
