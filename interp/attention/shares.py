"""Which layers have an attention pattern, and which weigh by what is no share: negative, or of any sum."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.core.stats import wide
from interp.model.config import ModelConfig

NO_SHARES = "weights that are no shares count as a_ij / sum_j |a_ij|"
"""What results say of `without_shares`."""


def signed_shares(rows: Float[Tensor, "*b k"]) -> Float[Tensor, "*b k"]:
    """a_ij / sum_j |a_ij|: the part of all that a query weighs, negative where it is subtracted; in [-1, 1].

    Shares stay what they are (but attention of a row with a sink is brought to sum 1). A row of zeros stays that.
    """
    values = wide(rows)
    total = values.abs().sum(-1, keepdim=True)
    return values / total.masked_fill(total == 0, 1)


def without_shares(config: ModelConfig) -> tuple[int, ...]:
    """The layers whose weights may be negative or sum to anything."""
    return tuple(layer for layer in with_pattern(config) if not config.mixers[layer].traits.distribution)


def with_pattern(config: ModelConfig) -> tuple[int, ...]:
    """The layers whose heads have an attention pattern; others mix positions by a state or a convolution."""
    return tuple(layer for layer, mixer in enumerate(config.mixers) if mixer.traits.patterned)


def in_every_layer(found: Float[Tensor, "b k *rest"], config: ModelConfig) -> Float[Tensor, "b l *rest"]:
    """What was found of the layers with a pattern, with zeros for the others."""
    layers = with_pattern(config)
    if len(layers) == config.n_layers:
        return found
    every = found.new_zeros(len(found), config.n_layers, *found.shape[2:])
    every[:, list(layers)] = found
    return every


def without_pattern(config: ModelConfig) -> Bool[Tensor, "l 1"]:
    """Whether a layer has no pattern, so that what is said of its attention is NaN."""
    return torch.tensor([[not mixer.traits.patterned] for mixer in config.mixers])
