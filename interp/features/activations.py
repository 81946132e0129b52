"""What turns pre-activations z into features f, the rule that tells the kinds of dictionaries apart.

The rules are those of inference: BatchTopK and Matryoshka are ways to train, and answer with a threshold (`JumpReLU`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import FunctionCtx

from interp.core.boundary import public
from interp.core.kinds import Finite, Positive, PositiveCount


@dataclass(frozen=True)
class ReLU:
    """Kind of dictionary with f = max(z, 0) (Bricken et al. 2023)."""

    def __call__(self, z: Float[Tensor, "*n s"]) -> Float[Tensor, "*n s"]:
        """The features from the pre-activations."""
        return z.relu()


@public()
@dataclass(frozen=True)
class TopK:
    """Kind of dictionary with f = max(z, 0) for the k largest z of each vector, 0 for the others (Gao et al. 2024).

    Args:
        k: number of features that are kept.
        relu: False: the k largest z are kept with their sign, as circuit-tracer does.

    Raises:
        ValueError: k below 1.
    """

    k: PositiveCount
    relu: bool = True

    def __call__(self, z: Float[Tensor, "*n s"]) -> Float[Tensor, "*n s"]:
        """The features from the pre-activations."""
        values, index = z.topk(self.k)
        return torch.zeros_like(z).scatter(-1, index, values.relu() if self.relu else values)


@public()
@dataclass(frozen=True)
class NormTopK:
    """Kind of dictionary with f = max(z, 0) for the k features of largest z times the norm of their direction.

    It is "topk" of OpenMOSS' llamascopium, which takes norms of the decoder into account (`W_dec` of a `Dictionary`).

    Args:
        k: number of features that are kept.

    Raises:
        ValueError: k below 1.
    """

    k: PositiveCount

    def __call__(self, z: Float[Tensor, "*n s"], norm: Float[Tensor, "s"]) -> Float[Tensor, "*n s"]:
        """The features from the pre-activations and the norm of each feature's direction."""
        index = (z * norm).topk(self.k).indices
        return torch.zeros_like(z).scatter(-1, index, z.gather(-1, index).relu())


@public()
@dataclass(frozen=True)
class AbsTopK:
    """Kind of dictionary with f = z, of either sign, for the k largest |z| of each vector, 0 for the others.

    Source:
        Zhu et al. 2025, "AbsTopK: Rethinking Sparse Autoencoders For Bidirectional Features" (arXiv:2510.00404).
    """

    k: PositiveCount

    def __call__(self, z: Float[Tensor, "*n s"]) -> Float[Tensor, "*n s"]:
        """The features from the pre-activations."""
        index = z.abs().topk(self.k).indices
        return torch.zeros_like(z).scatter(-1, index, z.gather(-1, index))


@public()
@dataclass(frozen=True)
class GroupMax:
    """Kind of dictionary with one feature of each of k groups of neighbours: the largest max(z, 0) of s / k.

    It is the activation "groupmax" of EleutherAI's sparsify.
    """

    k: PositiveCount

    def __call__(self, z: Float[Tensor, "*n s"]) -> Float[Tensor, "*n s"]:
        """The features from the pre-activations."""
        groups = z.relu().unflatten(-1, (self.k, -1))
        values, index = groups.max(-1, keepdim=True)
        return torch.zeros_like(groups).scatter(-1, index, values).flatten(-2)


@public()
@dataclass(frozen=True)
class JumpReLU:
    """Kind of dictionary with f = z where z > threshold, 0 elsewhere; one threshold for each feature.

    A dictionary trained with BatchTopK is of this kind: all its thresholds are alike.

    Args:
        bandwidth: width of the kernel that approximates the derivative of the jump; used in training alone.
        relu: whether thresholds below 0 count as 0. Without it, as in circuit-tracer, a z below 0 that exceeds its
            threshold is a feature below 0.

    Raises:
        ValueError: a bandwidth that is not above 0 and finite.

    Source:
        Rajamanoharan et al. 2024, "Jumping Ahead" (arXiv:2407.14435).
    """

    bandwidth: Positive = 0.5
    relu: bool = True

    def compared_with(self, threshold: Float[Tensor, "s"]) -> Float[Tensor, "s"]:
        """What z must exceed: the thresholds of the weights, those below 0 as 0 with `relu`."""
        return threshold.clamp_min(0.0) if self.relu else threshold


@dataclass(frozen=True)
class Gated:
    """Kind of dictionary that decides by one pre-activation which features are active, and by another how much.

    With z = x W_enc: f = max(exp(r_mag) z + b_mag, 0) where z + b_gate > 0, 0 elsewhere.

    Source:
        Rajamanoharan et al. 2024, "Improving Dictionary Learning with Gated Sparse Autoencoders" (arXiv:2404.16014).
    """


@public()
@dataclass(frozen=True)
class MatchingPursuit:
    """Kind of dictionary whose features are found one after another, each the one that explains the rest best.

    The rest r is x - b_dec at first. In each step the feature j with the largest r . W_dec[j] grows by that number,
    where it is positive, and r loses that much of W_dec[j]. It is tied: W_enc is W_dec transposed, and there is no
    b_enc.

    Args:
        residual_threshold: length of r below which no more features are sought; 0: none.
        max_iterations: the most steps; None: as many as x has entries.
        stop_on_duplicate_support: whether a step that finds no new feature is the last one.

    Raises:
        ValueError: a threshold below 0.

    Source:
        Costa et al. 2025, "From Flat to Hierarchical: Extracting Sparse Representations with Matching Pursuit"
        (arXiv:2506.03093), as SAELens computes it.
    """

    residual_threshold: Finite = 1e-2
    max_iterations: PositiveCount | None = None
    stop_on_duplicate_support: bool = True

    def __post_init__(self) -> None:
        if self.residual_threshold < 0:
            raise ValueError(f"the residual_threshold must be at least 0, got {self.residual_threshold}")

    def features(self, rest: Float[Tensor, "*n d"], W_dec: Float[Tensor, "s d"]) -> Float[Tensor, "*n s"]:
        """The features of vectors from which b_dec is subtracted."""
        features = rest.new_zeros(*rest.shape[:-1], len(W_dec))
        going = torch.ones_like(rest[..., :1], dtype=torch.bool)
        for _ in range(self.max_iterations or W_dec.shape[1]):
            size, index = (rest @ W_dec.mT).max(-1, keepdim=True)
            size = size.relu() * going
            found = features.scatter_add(-1, index, size)
            rest = rest - size * W_dec[index.squeeze(-1)]
            if self.stop_on_duplicate_support:
                going = going & ((found != 0) != (features != 0)).any(-1, keepdim=True)
            if self.residual_threshold > 0:
                going = going & (rest.norm(dim=-1, keepdim=True) >= self.residual_threshold)
            features = found
            if not bool(going.any()):  # a step costs as much as encoding, and few of the d are needed
                break
        return features


DictionaryKind = ReLU | TopK | NormTopK | AbsTopK | GroupMax | JumpReLU | Gated | MatchingPursuit
"""The kinds of dictionaries."""


class _Jump(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, z: Tensor, threshold: Tensor, bandwidth: Tensor) -> Tensor:
        ctx.save_for_backward(z, threshold, bandwidth)
        return z * (z > threshold)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        z, threshold, bandwidth = ctx.saved_tensors  # type: ignore[attr-defined]
        to_threshold = -(threshold / bandwidth) * _rectangle(z, threshold, bandwidth) * grad
        return grad * (z > threshold), to_threshold.sum_to_size(threshold.shape), None


class _Step(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, z: Tensor, threshold: Tensor, bandwidth: Tensor) -> Tensor:
        ctx.save_for_backward(z, threshold, bandwidth)
        return (z > threshold).to(z.dtype)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[None, Tensor, None]:
        z, threshold, bandwidth = ctx.saved_tensors  # type: ignore[attr-defined]
        to_threshold = -_rectangle(z, threshold, bandwidth) / bandwidth * grad
        return None, to_threshold.sum_to_size(threshold.shape), None


def _rectangle(z: Tensor, threshold: Tensor, bandwidth: Tensor) -> Tensor:
    return ((z - threshold).abs() < bandwidth / 2).to(z.dtype)


def jump_relu(
    z: Float[Tensor, "*n s"], threshold: Float[Tensor, "s"], bandwidth: float
) -> Float[Tensor, "*n s"]:
    """z where z > threshold, 0 elsewhere; differentiable in the threshold by a straight-through estimator.

    With g the gradient of the output: z receives g where it is active, the threshold receives
    -(threshold / bandwidth) 1[|z - threshold| < bandwidth / 2] g, summed over vectors (Rajamanoharan et al.
    2024).

    Example:
        >>> jump_relu(torch.tensor([[0.5, 2.0]]), torch.ones(2), 0.1).tolist()
        [[0.0, 2.0]]
    """
    return _Jump.apply(z, threshold, z.new_tensor(bandwidth))  # type: ignore[no-untyped-call]


def step(z: Float[Tensor, "*n s"], threshold: Float[Tensor, "s"], bandwidth: float) -> Float[Tensor, "*n s"]:
    """1 where z > threshold, 0 elsewhere; its sum over features is the L0 that a JumpReLU is trained on.

    With g the gradient of the output: the threshold receives -(1 / bandwidth) 1[|z - threshold| < bandwidth / 2] g,
    summed over vectors (Rajamanoharan et al. 2024); z receives none.

    Example:
        >>> step(torch.tensor([[0.5, 2.0]]), torch.ones(2), 0.1).sum().item()
        1.0
    """
    return _Step.apply(z, threshold, z.new_tensor(bandwidth))  # type: ignore[no-untyped-call]


def activated(
    kind: DictionaryKind, z: Float[Tensor, "*n s"], weights: Mapping[str, Tensor]
) -> Float[Tensor, "*n s"]:
    """The features from pre-activations, by the rule of a kind.

    Args:
        kind: the rule.
        z: pre-activations [*n s].
        weights: what the rule takes from the weights, each [s]: `threshold` (`JumpReLU`), `r_mag`, `b_mag` and
            `b_gate` (`Gated`), `norm` of the decoder's rows (`NormTopK`).

    Raises:
        ValueError: matching pursuit, whose features are no function of pre-activations.
    """
    match kind:
        case MatchingPursuit():
            raise ValueError(
                "matching pursuit finds features of vectors, not of pre-activations: use encode(x)"
            )
        case JumpReLU(bandwidth):
            return jump_relu(z, kind.compared_with(weights["threshold"]), bandwidth)
        case Gated():
            size = z * weights["r_mag"].exp() + weights["b_mag"]
            return size.relu() * (z + weights["b_gate"] > 0)
        case NormTopK():
            return kind(z, weights["norm"])
        case _:
            return kind(z)
