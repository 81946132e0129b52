"""Constants that other tools apply when a dictionary runs, folded into its weights, so that no number changes.

The weights are those of `Dictionary`, by name. Each function returns new ones; of those that it does not change it
returns the same tensors.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

PER_FEATURE = ("b_enc", "b_gate", "b_mag", "threshold")
"""Weights in units of the pre-activations, one number for each feature."""
SMALLEST_NORM = 1e-8
"""A decoder row that is shorter counts as so long; its feature says nothing."""


def shifted(weights: Mapping[str, Tensor], z: Float[Tensor, "s"]) -> dict[str, Tensor]:
    """The weights whose pre-activations are larger by z, and of a gated dictionary both of them."""
    if "b_gate" in weights:
        return {
            **weights,
            "b_gate": weights["b_gate"] + z,
            "b_mag": weights["b_mag"] + z * weights["r_mag"].exp(),
        }
    return {**weights, "b_enc": weights["b_enc"] + z}


def uncentred(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights that encode x where these encode x - b_dec: the same features without the subtraction."""
    return shifted(weights, -(weights["b_dec"] @ weights["W_enc"]))


def with_unit_decoder(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights with decoder rows of norm 1 and features that are larger by what these norms were."""
    norm = weights["W_dec"].norm(dim=1).clamp_min(SMALLEST_NORM)
    scaled = {name: weights[name] * norm for name in (*PER_FEATURE, "W_enc") if name in weights}
    return {**weights, **scaled, "W_dec": weights["W_dec"] / norm[:, None]}


def with_scaled_input(weights: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    """The weights that read x where these read factor * x, and whose output is divided by the factor."""
    return {
        **weights,
        "W_enc": weights["W_enc"] * factor,
        "W_dec": weights["W_dec"] / factor,
        "b_dec": weights["b_dec"] / factor,
    }


def unwhitened(
    weights: Mapping[str, Tensor],
    mean: Float[Tensor, "d"],
    matrix: Float[Tensor, "d d"],
    inverse: Float[Tensor, "d d"],
    *,
    centred: bool,
) -> dict[str, Tensor]:
    """The weights that read x where these read (x - mean) @ matrix, and whose output y is y @ inverse + mean.

    Args:
        weights: of an autoencoder.
        mean, matrix, inverse: the whitening of its inputs, and the matrix that undoes it.
        centred: whether b_dec is subtracted before encoding; it then brings the mean along.

    Source:
        SAELens, `fold_activation_whitening`; arXiv:2511.13981.
    """
    wide = torch.promote_types(weights["W_enc"].dtype, matrix.dtype)
    mean, matrix, inverse = (x.to(wide) for x in (mean, matrix, inverse))
    folded = {
        **weights,
        "W_enc": matrix @ weights["W_enc"].to(wide),
        "W_dec": weights["W_dec"].to(wide) @ inverse,
        "b_dec": weights["b_dec"].to(wide) @ inverse + mean,
    }
    if not centred:
        folded = shifted(folded, -(mean @ folded["W_enc"]))
    return {name: weight.to(weights[name].dtype) for name, weight in folded.items()}
