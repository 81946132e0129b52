"""Scaling a weight matrix by its singular values, W' = U diag(sigma z) V^T: apply, take back, interpolate, train z.

Sun et al. 2025, Transformer^2 (singular value fine-tuning): one number per direction of a matrix is all that is
trained.
The change W' - W is a `WeightEdit`, so the model gets its old weights back bit for bit, and z = 1 changes nothing at
all. W_Q, W_K, W_V and W_O are decomposed over all heads, `[d, h e]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.boundary import public
from interp.core.factored import FactoredMatrix
from interp.core.stats import upcast
from interp.core.viewer import Brief
from interp.core.wording import value_text
from interp.data.batch import Prompts
from interp.editing.editors import FineTuning
from interp.editing.weight_edit import WeightEdit, changed, own_matrix_place
from interp.passes.observe import Model, as_model, as_network
from interp.weights.matrices import by_head, side_by_side

LogitLoss = Callable[[Float[Tensor, "b p v"]], Float[Tensor, ""]]
"""A function from all logits of the prompts to the number that training minimises."""


@dataclass(frozen=True, eq=False, repr=False)
class SingularValues(Brief):
    """Singular value decomposition of one matrix, W = U diag(sigma) V^T, and its change when sigma is scaled by z."""

    name: str
    """The name of the matrix, as in `WeightEdit`."""
    U: Float[Tensor, "i r"]
    sigma: Float[Tensor, "r"]
    V: Float[Tensor, "o r"]
    heads: int | None = None
    """How many heads stand side by side in the columns (W_Q, W_K, W_V) or rows (W_O); None outside attention."""

    @classmethod
    @public()
    def of(cls, model: Model, name: str) -> SingularValues:
        """The decomposition of a matrix as it is now, in float32 at least.

        Args:
            model: the model with the matrix.
            name: of the matrix, as in `WeightEdit`.

        Raises:
            KeyError, IndexError, ValueError: a matrix that the model lacks.
            ValueError: one with NaN or inf.

        Example:
            >>> SingularValues.of(model, "blocks.1.mlp.W_out").sigma.shape
            torch.Size([24])
        """
        network = as_network(model)
        weight = upcast(own_matrix_place(network, name).in_(network).detach())
        if not bool(weight.isfinite().all()):
            raise ValueError(f"a finite matrix is required, {name} has NaN or inf")
        u, sigma, vh = torch.linalg.svd(side_by_side(weight, name), full_matrices=False)
        return cls(name, u, sigma, vh.mT, len(weight) if weight.ndim == 3 else None)

    @public()
    def factor(self, z: Float[Tensor, "r"], *, rescale: bool = False) -> Float[Tensor, "r"]:
        """The multiplier of every singular value: z, or with `rescale` z sum(sigma) / sum(sigma z).

        The paper's formula has no rescale; its released code has: then a constant z changes nothing, and where z >= 0
        the nuclear norm stays.

        Args:
            z: [r], one number per singular value.
            rescale: whether z is rescaled so that the sum of the singular values stays.

        Returns:
            [r].

        Raises:
            ValueError: another number of entries, or a sum of 0 to divide by.
        """
        if z.shape != self.sigma.shape:
            raise ValueError(
                f"z requires one entry per singular value of {self.name}, {shape_text(self.sigma.shape)}, got "
                f"{shape_text(z.shape)}"
            )
        z = z.to(self.sigma)
        if not rescale:
            return z
        total = (self.sigma * z).sum()
        if float(total.detach()) == 0:
            raise ValueError(f"rescale requires sum(sigma z) other than 0 in {self.name}")
        return z * self.sigma.sum() / total

    @public()
    def scaled(self, z: Float[Tensor, "r"], *, rescale: bool = False) -> Float[Tensor, "i o"]:
        """W' = U diag(sigma z) V^T, heads side by side; up to rounding the matrix under `edit`.

        Args:
            z, rescale: as in `factor`.

        Example:
            >>> parts = SingularValues.of(model, "blocks.1.mlp.W_out")
            >>> first = torch.zeros_like(parts.sigma).index_fill(0, torch.tensor([0]), 1.0)
            >>> int(torch.linalg.matrix_rank(parts.scaled(first)))
            1
        """
        return (self.U * (self.sigma * self.factor(z, rescale=rescale))) @ self.V.mT

    @public()
    def change(self, z: Float[Tensor, "r"], *, rescale: bool = False) -> FactoredMatrix:
        """W' - W = U diag(sigma (z - 1)) V^T in the layout of `Weights`, heads in front; exactly 0 for z = 1.

        Args:
            z, rescale: as in `factor`.
        """
        scaled_u = self.U * (self.sigma * (self.factor(z, rescale=rescale) - 1))
        return by_head(scaled_u, self.V.mT, self.name, self.heads)

    @public()
    def edit(self, z: Float[Tensor, "r"], *, rescale: bool = False) -> WeightEdit:
        """The scaling as a `WeightEdit`, which can be applied and taken back bit for bit.

        Args:
            z, rescale: as in `factor`.

        Example:
            >>> parts = SingularValues.of(model, "blocks.1.mlp.W_out")
            >>> with parts.edit(0.5 * torch.ones_like(parts.sigma)).applied(model):
            ...     logits = model.transformer(model.to_tokens(prompt))
        """
        if not bool(z.isfinite().all()):
            raise ValueError(f"z must be finite, got {value_text(z)} with NaN or infinity")
        return WeightEdit(self.name, self.change(z.detach(), rescale=rescale))


@public()
def interpolated(vectors: Sequence[Float[Tensor, "r"]], weights: Sequence[float]) -> Float[Tensor, "r"]:
    """Weighted sum of several trained vectors z as one vector, sum_k alpha_k z_k.

    W' is linear in it without the rescale, not with it.

    Args:
        vectors: [r] each, vectors z of one matrix.
        weights: alpha, one number per vector.

    Returns:
        [r], in the dtype of the vectors.

    Raises:
        ValueError: another number of weights than of vectors, or no vector.

    Source:
        Sun et al. 2025, Transformer^2.

    See Also:
        `two_passes`: picks one vector per prompt instead.

    Example:
        >>> interpolated([torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0])], [0.5, 0.5]).tolist()
        [2.0, 1.0]
    """
    if not vectors or len(vectors) != len(weights):
        raise ValueError(f"one weight per vector is required, got {len(weights)} for {len(vectors)}")
    stacked = torch.stack(list(vectors))
    return torch.tensor(weights, dtype=stacked.dtype, device=stacked.device) @ stacked


@public()
@torch.enable_grad()
def train_z(
    model: Model,
    data: Prompts,
    loss: LogitLoss,
    names: Sequence[str],
    *,
    rescale: bool = False,
    tuning: FineTuning | None = None,
    prepend_bos: bool | None = None,
) -> tuple[dict[str, Float[Tensor, "r"]], list[float]]:
    """Train one vector z per matrix, which scales its singular values, by gradient descent on a loss of the logits.

    z begin at 1 and are the only leaves: the model's parameters are neither written nor given gradients. Differs from
    the paper: plain gradients where it has REINFORCE (`reinforce_z`), and z itself where the released code trains
    sigmoid(p) times a largest value.

    Args:
        data: prompts, all in one pass.
        loss: function from their logits [b p v], in float32 at least, to one number.
        names: the matrices, as `WeightEdit` names them.
        rescale: whether z is rescaled so that the sum of the singular values stays.
        tuning: steps, learning rate and optimiser; None: 25 steps of Adam at 1e-3. Every step is taken.
        prepend_bos: whether texts begin with BOS; None: as the model does by default.

    Returns:
        z [r] by the name of the matrix, for `SingularValues.edit`, and the loss before every step.

    Raises:
        ValueError: as `SingularValues.of`; no or repeated names, a model without logits, a loss that is not one finite
            number.

    Source:
        Sun et al. 2025, Transformer^2 (singular value fine-tuning).

    See Also:
        `reinforce_z`: from a reward without a gradient. `adapted`: the model under z.

    Example:
        >>> tokens = model.to_tokens(prompt)
        >>> def loss(logits):
        ...     return torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
        >>> z, losses = train_z(model, tokens, loss, ["blocks.0.mlp.W_out"])
        >>> losses[-1] < losses[0]
        True
    """
    if not names or len(set(names)) != len(names):
        raise ValueError(f"names must be those of distinct matrices, got {list(names)}")
    subject, tuning = as_model(model), tuning or FineTuning()
    network = subject.transformer
    if not network.config.unembed:
        raise ValueError("training z requires logits; this model ends in its residual stream")
    batch = subject.text.batch(data, prepend_bos=prepend_bos).to(network.device)
    parts = {name: SingularValues.of(network, name) for name in names}
    z = {name: torch.ones_like(matrix.sigma).requires_grad_() for name, matrix in parts.items()}
    optimiser = tuning.optimiser_of(z.values())
    losses = []
    for _ in range(tuning.steps):
        changes = {name: matrix.change(z[name], rescale=rescale).AB for name, matrix in parts.items()}
        value = loss(upcast(network.with_parameters(changed(network, changes))(batch.tokens, **batch.inputs)))
        if not isinstance(value, Tensor):
            raise ValueError(f"loss must be one number, a tensor, got {value_text(value)}")
        if value.numel() != 1 or not bool(value.isfinite().all()):
            raise ValueError(f"the loss must be one finite number, got {value.detach()}")
        losses.append(float(value.detach()))
        for leaf, slope in zip(z.values(), torch.autograd.grad(value, list(z.values())), strict=True):
            leaf.grad = slope
        optimiser.step()
    return {name: leaf.detach() for name, leaf in z.items()}, losses
