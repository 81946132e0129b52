"""What the training of a dictionary minimises, for every way to train one; they differ in how features are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import FunctionCtx

from interp.core.boundary import public
from interp.core.kinds import PositiveCount
from interp.features.activations import JumpReLU, ReLU, TopK, step
from interp.features.dictionary import Dictionary

AUX_COEFFICIENT = 1 / 32
"""Weight of the dead features' reconstruction of the error (Gao et al. 2024)."""


@public()
@dataclass(frozen=True)
class BatchTopK:
    """Way to train a dictionary: the k n largest features of a batch of n vectors are kept, k of a vector on average.

    What is trained answers for each vector by itself: it is a `JumpReLU` dictionary, all of whose thresholds are the
    mean of the smallest feature that was kept, over the last steps. Its metadata say k.

    Args:
        k: mean number of features that a vector keeps.

    Raises:
        ValueError: k below 1.

    Source:
        Bussmann et al. 2024, "BatchTopK Sparse Autoencoders" (arXiv:2412.06410).
    """

    k: PositiveCount


@public()
@dataclass(frozen=True)
class Matryoshka:
    """Way to train a dictionary as `BatchTopK`, whose first features are a dictionary by themselves.

    Features are chosen once, among all. The loss is the sum of the errors of the first `sizes[0]` features, of the
    first `sizes[1]`, and so on; `dictionary.prefix(n)` are these parts. Early features become the frequent and general
    ones. The metadata of the dictionary say k and sizes.

    Args:
        k: mean number of features that a vector keeps, of all.
        sizes: numbers of features of the nested dictionaries, increasing; the last is `d_sae`.

    Raises:
        ValueError: k below 1, no sizes, and sizes that do not increase from 1 on.

    Source:
        Bussmann et al. 2025, "Learning Multi-Level Features with Matryoshka Sparse Autoencoders" (arXiv:2503.17547).
    """

    k: PositiveCount
    sizes: tuple[PositiveCount, ...]

    def __post_init__(self) -> None:
        if not self.sizes or any(later <= earlier for earlier, later in pairwise((0, *self.sizes))):
            raise ValueError(f"sizes must increase from at least 1 to d_sae, got {self.sizes}")


OfBatch = BatchTopK | Matryoshka
"""The ways that choose features over a whole batch, and leave a threshold for single vectors."""
TrainedKind = ReLU | TopK | JumpReLU | OfBatch
"""The ways to train a dictionary."""


class Terms(NamedTuple):
    """The terms of the loss of one batch, in the unit of training."""

    loss: Float[Tensor, ""]
    error: Float[Tensor, ""]
    """Mean of ||y - y_hat||^2."""
    penalty: Float[Tensor, ""]
    """Mean L1 norm of the features (ReLU), mean number of active features (JumpReLU), or `dead_error` (the others)."""
    l0: Float[Tensor, ""]
    """Mean number of active features."""
    smallest: Float[Tensor, ""]
    """Smallest feature that was kept; 0 where the way to train chooses none, or fewer are positive than are kept."""
    fired: Bool[Tensor, "s"]
    """Which features were active on any vector."""


def objective(
    kind: TrainedKind,
    dictionary: Dictionary,
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n o"],
    sparsity: float,
    dead: Bool[Tensor, "s"],
) -> Terms:
    """The differentiable loss of a batch: the mean of ||y - y_hat||^2 plus `sparsity` times the kind's penalty.

    y is what the dictionary should give for x: of an SAE x itself.
    """
    match kind:
        case TopK(k):
            return _chosen_objective(dictionary, x, y, dead, _of_each_vector(k), (dictionary.d_sae,))
        case BatchTopK(k):
            return _chosen_objective(dictionary, x, y, dead, _of_the_batch(k), (dictionary.d_sae,))
        case Matryoshka(k, sizes):
            return _chosen_objective(dictionary, x, y, dead, _of_the_batch(k), sizes)
    z = dictionary.before(x)
    features = dictionary.activate(z)
    error = (y - dictionary.decode(features, x)).square().sum(1).mean()
    if isinstance(kind, ReLU):
        penalty = features.sum(1).mean()
    else:
        penalty = step(z, dictionary.thresholds, kind.bandwidth).sum(1).mean()
    active = features.detach() > 0
    l0 = active.sum(dtype=x.dtype) / len(x)
    return Terms(error + sparsity * penalty, error, penalty, l0, torch.zeros_like(l0), active.any(0))


class _Chosen(NamedTuple):
    """Pairs of a vector and a feature that was chosen for it, sorted by vector."""

    feature: Int[Tensor, "m"]
    vector: Int[Tensor, "m"]
    starts: Int[Tensor, "n"]
    """The first pair of each vector."""


def _of_each_vector(k: int) -> Callable[[Tensor], _Chosen]:
    """A choice: the k largest pre-activations of each vector."""

    def chosen(z: Float[Tensor, "n s"]) -> _Chosen:
        feature = z.topk(k, sorted=False).indices.flatten()
        starts = torch.arange(len(z), device=z.device) * k
        return _Chosen(feature, torch.arange(len(feature), device=z.device) // k, starts)

    return chosen


def _of_the_batch(k: int) -> Callable[[Tensor], _Chosen]:
    """A choice: the k n largest pre-activations of n vectors, k of a vector on average."""

    def chosen(z: Float[Tensor, "n s"]) -> _Chosen:
        pairs = z.flatten().topk(k * len(z), sorted=False).indices.sort().values
        vector = pairs // z.shape[1]
        starts = torch.searchsorted(vector, torch.arange(len(z), device=z.device))
        return _Chosen(pairs % z.shape[1], vector, starts)

    return chosen


def _chosen_objective(
    dictionary: Dictionary,
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n o"],
    dead: Bool[Tensor, "s"],
    choice: Callable[[Tensor], _Chosen],
    sizes: tuple[int, ...],
) -> Terms:
    """The objective of chosen features, summed over nested dictionaries of these sizes.

    z is the only dense product; decoder and gradients use only the chosen features' rows.
    """
    with torch.no_grad():
        z = dictionary.before(x)
        chosen = choice(z)
    centre = dictionary.b_dec if dictionary.apply_b_dec_to_input else None
    values = _ChosenPreActivations.apply(x, centre, dictionary.W_enc, dictionary.b_enc, z, chosen).relu()  # type: ignore[no-untyped-call]
    residuals = _residuals(dictionary, x, y, chosen, values, sizes)
    errors = [residual.square().sum(1).mean() for residual in residuals]
    penalty = dead_error(dictionary, x, residuals[-1].detach(), dead)
    active = values.detach() > 0
    counts = torch.zeros_like(dictionary.b_enc).index_add(0, chosen.feature, active.to(x.dtype))
    l0 = active.sum(dtype=x.dtype) / len(x)
    loss = sum(errors[1:], errors[0]) + AUX_COEFFICIENT * penalty
    return Terms(loss, errors[-1], penalty, l0, values.detach().min(), counts > 0)


def _residuals(
    dictionary: Dictionary,
    x: Float[Tensor, "n d"],
    y: Float[Tensor, "n o"],
    chosen: _Chosen,
    values: Float[Tensor, "m"],
    sizes: tuple[int, ...],
) -> list[Float[Tensor, "n o"]]:
    """What the first features of each of the nested sizes leave of y."""
    skip = dictionary.skip
    without = y if skip is None else y - x @ skip
    residuals, guess = [], None
    for low, high in pairwise((0, *sizes)):
        inside = (chosen.feature >= low) & (chosen.feature < high)
        weights = values if len(sizes) == 1 else values * inside
        part = F.embedding_bag(
            chosen.feature, dictionary.W_dec, chosen.starts, per_sample_weights=weights, mode="sum"
        )
        guess = part if guess is None else guess + part
        residuals.append(without - (guess + dictionary.b_dec))
    return residuals


class _ChosenPreActivations(torch.autograd.Function):
    """z = (x - centre) W_enc + b_enc at chosen features of each vector, with the gradient of these columns alone.

    `centre` is b_dec where it is subtracted, else None.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        centre: Tensor | None,
        W_enc: Tensor,
        b_enc: Tensor,
        z: Tensor,
        chosen: _Chosen,
    ) -> Float[Tensor, "m"]:
        ctx.save_for_backward(x, centre, W_enc, chosen.feature, chosen.vector)  # type: ignore[arg-type]
        return z[chosen.vector, chosen.feature]

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Float[Tensor, "m"]) -> tuple[Tensor | None, ...]:
        x, centre, W_enc, feature, vector = ctx.saved_tensors  # type: ignore[attr-defined]
        order = feature.argsort(stable=True)
        starts = torch.searchsorted(feature[order], torch.arange(W_enc.shape[1], device=x.device))
        columns = F.embedding_bag(
            vector[order],
            x if centre is None else x - centre,
            starts,
            per_sample_weights=grad[order],  # sorted by feature
            mode="sum",
        )
        bias = grad.new_zeros(W_enc.shape[1]).index_add(0, feature, grad)
        to_centre = None if centre is None else -(W_enc @ bias)
        return None, to_centre, columns.mT.contiguous(), bias, None, None


def dead_error(
    dictionary: Dictionary, x: Float[Tensor, "n d"], residual: Float[Tensor, "n o"], dead: Bool[Tensor, "s"]
) -> Float[Tensor, ""]:
    """Mean of ||residual - sum of the dead features||^2 over the o/2 dead features of largest z; 0 if none is dead.

    Gao et al. 2024, appendix A.2. z enters without the ReLU, so a dead feature with z below 0 learns too.
    """
    dead_features = dead.nonzero()[:, 0]
    if not len(dead_features):
        return residual.new_zeros(())
    centred = x - dictionary.b_dec if dictionary.apply_b_dec_to_input else x
    z = centred @ dictionary.W_enc[:, dead_features] + dictionary.b_enc[dead_features]
    best = z.topk(min(max(1, dictionary.d_out // 2), len(dead_features)))
    guess = torch.zeros_like(z).scatter(1, best.indices, best.values) @ dictionary.W_dec[dead_features]
    return (residual - guess).square().sum(1).mean()
