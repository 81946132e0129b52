"""Sparse autoencoders with random weights, and the slow loop over vectors and features they are checked against."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from interp.features import Dictionary, JumpReLU, ReLU, TopK
from interp.features.activations import DictionaryKind
from interp.features.dictionary import Normalisation

KINDS: tuple[DictionaryKind, ...] = (ReLU(), TopK(3), JumpReLU(0.5))


def random_weights(kind: DictionaryKind, d_in: int, d_sae: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = {
        "W_enc": normal(d_in, d_sae) / d_in**0.5, "b_enc": 0.3 * normal(d_sae),
        "W_dec": normal(d_sae, d_in) / d_in**0.5, "b_dec": normal(d_in),
    }  # fmt: skip
    if isinstance(kind, JumpReLU):
        weights["threshold"] = normal(d_sae).abs()
    return weights


def random_sae(
    kind: DictionaryKind, d_in: int = 24, d_sae: int = 40, normalize: Normalisation = "none"
) -> Dictionary:
    return Dictionary(kind, random_weights(kind, d_in, d_sae), normalize_activations=normalize)


def identity_sae(d: int) -> Dictionary:
    """Square, orthogonal and without a threshold that any vector falls below: it gives back what it gets."""
    generator = torch.Generator().manual_seed(1)
    q = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q
    lift = torch.full((d,), 1e4, dtype=torch.float64)
    return Dictionary(
        ReLU(), {"W_enc": q, "b_enc": lift, "W_dec": q.T, "b_dec": -lift @ q.T}, apply_b_dec_to_input=False
    )


def constant_sae(value: Tensor, d_sae: int = 5) -> Dictionary:
    """No feature is ever active: it answers `value`."""
    d = len(value)
    zero = torch.zeros(d, d_sae, dtype=value.dtype)
    return Dictionary(ReLU(), {"W_enc": zero, "b_enc": zero[0], "W_dec": zero.T, "b_dec": value})


def slow_forward(
    weights: Mapping[str, np.ndarray],
    x: np.ndarray,
    kind: DictionaryKind,
    *,
    centred: bool = True,
    normalize: str = "none",
) -> tuple[np.ndarray, np.ndarray]:
    """Features and reconstruction of each vector, one number at a time."""
    features = np.zeros((len(x), weights["W_enc"].shape[1]))
    output = np.zeros_like(x)
    for i, vector in enumerate(x):
        shift, scale, eps = 0.0, 1.0, 0.0
        if normalize == "layer_norm":
            shift, scale, eps = vector.mean(), vector.std(ddof=1), 1e-5
        if normalize == "constant_norm_rescale":
            scale = np.sqrt((vector**2).sum() / len(vector))
        scaled = (vector - shift) / (scale + eps)
        if centred:
            scaled = scaled - weights["b_dec"]
        z = [sum(a * b for a, b in zip(scaled, column, strict=True)) for column in weights["W_enc"].T]
        z = [a + b for a, b in zip(z, weights["b_enc"], strict=True)]
        for j, value in enumerate(z):
            rank = sum(other > value for other in z)
            if isinstance(kind, TopK) and rank >= kind.k:
                continue
            if isinstance(kind, JumpReLU) and value <= weights["threshold"][j]:
                continue
            features[i, j] = max(value, 0.0)
        output[i] = weights["b_dec"]
        for j, value in enumerate(features[i]):
            output[i] += value * weights["W_dec"][j]
        output[i] = output[i] * scale + shift
    return features, output


def arrays(weights: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    return {name: weight.double().numpy() for name, weight in weights.items()}
