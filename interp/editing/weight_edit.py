"""A change of one weight matrix as data: added to the parameter and undone bit for bit, or made by activation `Edit`s.

A matrix has its usual name (`blocks.3.mlp.W_out`) and the row convention `x @ W`, whatever the layout of the parameter
that holds it: W_Q, W_K and W_V share one parameter, W_gate and W_in another, and the unembedding may be the embedding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from threading import RLock

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor, nn

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.entering import entering
from interp.core.factored import FactoredMatrix
from interp.core.stats import upcast
from interp.core.transfers import to_host
from interp.core.viewer import Brief
from interp.model.edits import Edit, Remember
from interp.model.transformer import Transformer
from interp.passes.observe import Model, as_network
from interp.weights.matrices import MatrixPlace, ends, matrix_place

WeightChange = FactoredMatrix | Float[Tensor, "*h i o"]
"""What is added to a matrix: two thin factors, or a tensor of its shape."""


def own_matrix_place(model: Transformer, name: str) -> MatrixPlace:
    """Where a matrix stands, for a change of it; ValueError for one that all layers share, errors of `matrix_place`."""
    if model.config.shared_blocks and name.startswith("blocks."):
        matrix = name.split(".", 2)[-1]
        raise ValueError(
            f"all layers share {matrix} in this model (shared_blocks), so that an edit of one layer would change every "
            "layer: give each its own matrices, `replace(config, shared_blocks=False)`"
        )
    return matrix_place(model, name)


@public()
@dataclass(frozen=True, repr=False)
class WeightEdit(Brief):
    """A change of one weight matrix of a model, W' = W + change, that can be applied and taken back.

    Args:
        name: `blocks.<layer>.attn.W_Q|W_K|W_V|W_O`, `blocks.<layer>.mlp.W_in|W_gate|W_out`, `embed.W_E`,
            `pos_embed.W_pos` or `unembed.W_U`; in tied models the last is the first, transposed.
        change: as `FactoredMatrix` A B (A `[.. d_in r]`, B `[.. r d_out]`; rank 0 changes nothing) or dense, in the
            layout of `Weights`: heads in front, `[h d e]` for W_Q.

    Raises:
        ValueError: a change that is NaN or infinite.

    Example:
        >>> edit = WeightEdit("blocks.1.mlp.W_out", FactoredMatrix(torch.ones(40, 1), torch.ones(1, 24)))
        >>> with edit.applied(model):
        ...     logits = model.transformer(model.to_tokens(prompt))
    """

    name: str
    change: WeightChange

    def __post_init__(self) -> None:
        """ValueError for a change that is NaN or infinite."""
        factors = (
            (self.change.A, self.change.B) if isinstance(self.change, FactoredMatrix) else (self.change,)
        )
        if not all(
            map(bool, to_host({i: factor.isfinite().all() for i, factor in enumerate(factors)}).values())
        ):
            raise ValueError(f"a finite change of {self.name} is required, got NaN or inf")

    @property
    def rank(self) -> int | None:
        """The inner size of the factors; None for a dense change."""
        return self.change.A.shape[-1] if isinstance(self.change, FactoredMatrix) else None

    @property
    def dense(self) -> Float[Tensor, "*h i o"]:
        """The change as one tensor."""
        return self.change.AB if isinstance(self.change, FactoredMatrix) else self.change

    @public()
    @entering
    def applied(self, model: Model) -> Iterator[None]:
        """Context in which the model has the changed weights; on exit, also by an error, it has the old bits back.

        The sum is formed in float32 at least and rounded once. Blocks may overlap and be left in any order: the matrix
        has the changes of those that are open, added in the order in which they began. The parameter itself is written,
        so a pass whose graph is still waiting for its backward must not span the block.

        Raises:
            KeyError, IndexError, ValueError: a matrix that the model lacks, a change of another shape, NaN or inf.
        """
        network = as_network(model)
        where = own_matrix_place(network, self.name)
        change = self._dense_change(where.in_(network))
        applied_change = _AppliedChange(network.get_parameter(where.parameter), where, change)
        applied_change.begin()
        try:
            yield
        finally:
            applied_change.end()

    @public()
    def as_edits(self, model: Model, *, rows: tuple[int, ...] | None = None) -> tuple[Edit, Edit]:
        """The change as edits of activations, without writing a weight: y' = y + (x A) B at the output's site.

        The first edit remembers x, the second adds to y; both belong into the same pass. They agree with `applied` to
        rounding. Other edits of y's own site come before or after it in the order given.

        Args:
            model: the model that is edited.
            rows: batch rows that they are limited to, so that one batch can hold many edited models; None: all.

        Raises:
            ValueError: as `applied`; the embeddings and the unembedding, whose ends are no sites, and W_out or W_O
                where the family norms what the sublayer adds (the raw output is no site).
        """
        network = as_network(model)
        self._dense_change(own_matrix_place(network, self.name).in_(network))
        change, route = self.change, ends(network.config, self.name)
        if not isinstance(change, FactoredMatrix):
            change = FactoredMatrix(change, torch.eye(change.shape[-1], dtype=change.dtype))
        read = Remember()
        return Edit(route.reads, read, rows=rows), Edit(
            route.writes, _Product(read, change, route.factor, route.axes), rows=rows
        )

    def _dense_change(self, weight: Tensor) -> Tensor:
        """The change, dense and in float32 at least; ValueError unless it fits the matrix."""
        if self.change.shape != weight.shape:
            raise ValueError(
                f"a change of {self.name} must have its shape {shape_text(weight.shape)}, got "
                f"{shape_text(self.change.shape)}"
            )
        dense = upcast(self.dense)
        if not bool(dense.isfinite().all()):
            raise ValueError(f"a finite change of {self.name} is required, got NaN or inf")
        return dense


@dataclass(frozen=True, eq=False)
class _Product:
    """The edit function that adds the stored input times the change of the matrix to a site."""

    input: Remember
    change: FactoredMatrix
    factor: float
    axes: str

    def at_site(self, site: str, memory: dict[str, object]) -> Callable[[Tensor], Tensor]:
        """The change in one pass."""

        def add(y: Tensor) -> Tensor:
            return y + self.factor * _times_factors(self.input.value(memory), self.change, self.axes)

        return add


def changed(
    network: Transformer, changes: Mapping[str, Float[Tensor, "*h i o"]]
) -> dict[str, Float[Tensor, "..."]]:
    """Every parameter that holds one of these matrices with all changes in it, differentiable in them.

    For `Transformer.with_parameters`: the model's own parameters are not written. The sums are formed in float32 at
    least.
    """
    parameters = dict[str, Tensor]()
    for name, change in changes.items():
        where = own_matrix_place(network, name)
        if where.parameter not in parameters:
            parameters[where.parameter] = upcast(network.get_parameter(where.parameter).detach()).clone()
        where.view(parameters[where.parameter]).add_(change)
    return {name: value.to(network.get_parameter(name).dtype) for name, value in parameters.items()}


_APPLIED: dict[int, list[_AppliedChange]] = {}
"""The changes that are applied to each parameter, by its `id`, in the order in which they were applied."""
_LOCK = RLock()


@dataclass(eq=False)
class _AppliedChange:
    """A change that is applied to a parameter until its `with` block is left."""

    parameter: nn.Parameter
    where: MatrixPlace
    change: Tensor
    before: Tensor = field(init=False)
    """The matrix without this change and all later ones."""

    @torch.no_grad()
    def begin(self) -> None:
        """Add the change to the parameter, on top of the changes already applied."""
        with _LOCK:
            self._add()
            _APPLIED.setdefault(id(self.parameter), []).append(self)

    @torch.no_grad()
    def end(self) -> None:
        """Undo the change: undo later ones with it, last first, then add these again."""
        with _LOCK:
            applied = _APPLIED[id(self.parameter)]
            later = applied[applied.index(self) + 1 :]
            for applied_change in [*reversed(later), self]:
                applied_change.where.view(applied_change.parameter).copy_(applied_change.before)
            for applied_change in later:
                applied_change._add()
            applied.remove(self)
            if not applied:
                del _APPLIED[id(self.parameter)]

    def _add(self) -> None:
        weight = self.where.view(self.parameter)
        self.before = weight.clone()
        dtype = torch.promote_types(weight.dtype, self.change.dtype)
        weight.copy_((weight.to(dtype) + self.change.to(weight.device)).to(weight.dtype))


def _times_factors(x: Tensor, change: FactoredMatrix, axes: str) -> Tensor:
    """x A B, in float32 at least."""
    dtype = torch.promote_types(x.dtype, torch.promote_types(change.A.dtype, torch.float32))
    return einsum(x.to(dtype), change.A.to(x.device, dtype), change.B.to(x.device, dtype), axes)
