"""Factors on attention scores against dispersion: by the number of visible keys, and by the entropy of the row."""

import torch
from jaxtyping import Float, Real
from torch import Tensor

POLYNOMIAL = (-0.037, 0.481, -2.3, 4.917, -1.791)
"""Coefficients of beta(H), highest power first (Veličković et al. 2024)."""
SHARP = 0.5
"""Entropy, in nats, up to which the scores of a row are not changed."""


def log_n_factor(n_visible: Real[Tensor, "*b"], train_length: int) -> Float[Tensor, "*b"]:
    """log(n) / log(m) for a query that sees n keys, in a model trained on m: a factor on its scores.

    n is counted for each query, not for the text: i + 1 in a causal row i. A key ahead of n - 1 equal ones by the gap
    log m then keeps the weight n / (2 n - 1), about one half, at every length. Below m the factor is less than 1;
    clamp it (`.clamp_min(1)`) for the variant that never flattens. Whole numbers give float64.

    Raises:
        ValueError: a train_length below 2.

    Source:
        Log-n scaling (Su 2021).

    Example:
        >>> log_n_factor(torch.tensor([16, 256]), 16).tolist()
        [1.0, 2.0]
    """
    if train_length < 2:
        raise ValueError(f"a train_length of at least 2 is required, got {train_length}")
    n = n_visible if n_visible.is_floating_point() else n_visible.double()
    return n.log() / torch.full((), train_length, dtype=n.dtype, device=n.device).log()


def adaptive_temperature(entropy: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    """beta(H), a factor on the scores of a row whose softmax has entropy H (nats): never below 1.

    beta = max(p(H), 1) where H > 0.5, else 1, with p of degree 4 (Veličković et al. 2024, "softmax is not enough",
    adaptive temperature). Caveat: p falls below 1 before H = 6, so rows spread evenly over more than about 400 keys
    are not sharpened at all.

    Example:
        >>> [round(float(b), 3) for b in adaptive_temperature(torch.tensor([0.4, 2.0, 6.0]))]
        [1.0, 2.099, 1.0]
    """
    value = torch.zeros_like(entropy)
    for coefficient in POLYNOMIAL:
        value = value * entropy + coefficient
    return torch.where(entropy > SHARP, value.clamp_min(1.0), torch.ones_like(entropy))
