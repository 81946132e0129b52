"""Layers with an attention pattern, and layers whose weights are no shares: negative, or of any sum."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.core.stats import upcast
from interp.model.config import ModelConfig

NO_SHARES = "weights that are no shares count as a_ij / sum_j |a_ij|"
"""Note of results about layers in `without_shares`."""


def signed_shares(rows: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
    """Weights as shares of all that a query weighs: a_ij / sum_j |a_ij|, negative where it is subtracted; in [-1, 1].

    Rows of shares do not change (but those with a sink, which sum to less than 1, now sum to 1), nor do rows of zeros.
    """
    values = upcast(rows)
    total = values.abs().sum(-1, keepdim=True)
    return values / total.masked_fill(total == 0, 1)


def without_shares(config: ModelConfig) -> tuple[int, ...]:
    """The layers whose weights may be negative or sum to anything."""
    return tuple(layer for layer in with_pattern(config) if not config.mixers[layer].traits.distribution)


def with_pattern(config: ModelConfig) -> tuple[int, ...]:
    """The layers whose heads have an attention pattern; others mix positions by a state or a convolution."""
    return tuple(layer for layer, mixer in enumerate(config.mixers) if mixer.traits.patterned)


def in_every_layer(values: Float[Tensor, "b k *rest"], config: ModelConfig) -> Float[Tensor, "b l *rest"]:
    """Values of all layers, from those of the layers with a pattern; zeros for the others."""
    layers = with_pattern(config)
    if len(layers) == config.n_layers:
        return values
    all_layers = values.new_zeros(len(values), config.n_layers, *values.shape[2:])
    all_layers[:, list(layers)] = values
    return all_layers


def without_pattern(config: ModelConfig) -> Bool[Tensor, "l 1"]:
    """True for layers without a pattern, whose attention scores are NaN."""
    return torch.tensor([[not mixer.traits.patterned] for mixer in config.mixers])
