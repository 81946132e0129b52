"""Dictionaries by the rules of their papers, in NumPy, against which what is read of files is checked."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from interp.features import Dictionary

D, S, N, K = 6, 10, 7, 3
"""Width of x, number of features, number of vectors, and of features that are active."""
Rule = Callable[[np.ndarray], np.ndarray]
Array = np.ndarray


def rng(seed: int = 0) -> np.random.Generator:
    """A generator of the numbers of one dictionary."""
    return np.random.default_rng(seed)


def vectors() -> Array:
    """The vectors that are encoded."""
    return 2 * rng(99).normal(size=(N, D))


def weights(seed: int = 0, d_out: int = D) -> dict[str, Array]:
    """A dictionary whose encoder is not its decoder transposed, by our names."""
    draw = rng(seed)
    return {
        "W_enc": draw.normal(size=(D, S)), "b_enc": draw.normal(size=S), "W_dec": draw.normal(size=(S, d_out)),
        "b_dec": draw.normal(size=d_out),
    }  # fmt: skip


def relu(z: Array) -> Array:
    """z where it is positive."""
    return np.where(z > 0, z, 0)


def top(k: int, size: Rule = lambda z: z, after: Rule = relu) -> Rule:
    """The k entries of each row with the largest size, and 0."""

    def rule(z: Array) -> Array:
        features = np.zeros_like(z)
        for row, values in enumerate(z):
            for j in sorted(range(len(values)), key=lambda j: -size(values)[j])[:k]:
                features[row, j] = after(values)[j]
        return features

    return rule


def jump(threshold: Array | float) -> Rule:
    """z where it exceeds the threshold and 0."""
    return lambda z: np.where((z > threshold) & (z > 0), z, 0)


def group_max(k: int) -> Rule:
    """Of each of k groups of neighbours the largest, where it is positive."""

    def rule(z: Array) -> Array:
        features = np.zeros_like(z)
        size = z.shape[1] // k
        for row, values in enumerate(z):
            for start in range(0, len(values), size):
                best = max(range(start, start + size), key=lambda j: values[j])
                features[row, best] = max(values[best], 0)
        return features

    return rule


def computed(
    w: dict[str, Array], x: Array, rule: Rule, *, centred: bool = True, skip: Array | None = None
) -> tuple[Array, Array]:
    """Features and output: act((x - b_dec) W_enc + b_enc) and f W_dec + b_dec, and the skip [out in] of x."""
    features = rule((x - w["b_dec"] if centred else x) @ w["W_enc"] + w["b_enc"])
    output = features @ w["W_dec"] + w["b_dec"]
    return features, output if skip is None else output + np.array([skip @ each for each in x])


def tensors(arrays: dict[str, Array], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The arrays as tensors of their own."""
    return {name: torch.tensor(value, dtype=dtype).contiguous() for name, value in arrays.items()}


def assert_computes(
    found: Dictionary, x: Array, expected: tuple[Array, Array], tolerance: float = 1e-12
) -> None:
    """Features and output of x are those expected, and some features are active and some are not."""
    features, output = expected
    assert (features != 0).any() and (features == 0).any()
    given = torch.from_numpy(x).to(found.W_enc.dtype)
    for value, wanted in ((found.encode(given), features), (found(given), output)):
        np.testing.assert_allclose(
            value.double().numpy(), wanted, rtol=tolerance, atol=tolerance * np.abs(wanted).max()
        )
