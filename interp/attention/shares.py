"""Attention rows as shares, also where a mixer's weights are none, so that scores of attention mass compare.

Softmax weights are never negative and sum to 1. Those of differential, lightning and pooling layers may be negative and
sum to anything, and a norm per head or layer after them takes their size away: only their proportions count.
"""

from jaxtyping import Float
from torch import Tensor

from interp.core.precision import wide
from interp.model.config import ModelConfig
from interp.model.tap import Read

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
    return tuple(layer for layer, mixer in enumerate(config.mixers) if not mixer.traits.distribution)


def last_attention(config: ModelConfig, layer: int) -> Read:
    """What the last query of a layer pays to each key `[b h k]`, as signed shares where weights are no shares."""
    via = _last_shares if layer in without_shares(config) else _last
    return Read(f"blocks.{layer}.attn.hook_pattern", via)


def _last(pattern_bhqk: Tensor) -> Tensor:
    return pattern_bhqk[:, :, -1]


def _last_shares(pattern_bhqk: Tensor) -> Tensor:
    return signed_shares(pattern_bhqk[:, :, -1])
