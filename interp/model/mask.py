"""Who may look at whom, and at which position everybody stands: built from an explicit keep-mask, never from tokens."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from interp.model.config import ModelConfig


def position_ids(
    n: int, past: int, keep: Bool[Tensor, "b k"] | None, device: torch.device
) -> Int[Tensor, "b n"]:
    """Position of the last `n` tokens: the column index, or the count of kept tokens before it under padding."""
    if keep is None:
        return torch.arange(past, past + n, device=device)[None]
    return (keep.cumsum(1) - 1).clamp_min(0)[:, past:]


@dataclass(frozen=True)
class Mask:
    """What each query may see, in the cheapest form that says it."""

    causal: bool
    """The plain triangle, which the fused kernel knows without a matrix; then `allowed` is None."""
    allowed: Bool[Tensor, "b 1 q k"] | None
    """The joined mask (causal, window, padding); None with `causal=False` means everybody sees everything."""

    def matrix(self, n_query: int, n_key: int, device: torch.device) -> Bool[Tensor, "b 1 q k"] | None:
        """`allowed`, written out also for the plain triangle; None if nothing is hidden."""
        if not self.causal:
            return self.allowed
        return torch.ones(n_query, n_key, dtype=torch.bool, device=device).tril()[None, None]


def attention_mask(
    config: ModelConfig,
    n: int,
    past: int,
    keep: Bool[Tensor, "b k"] | None,
    device: torch.device,
) -> Mask:
    """The mask for the last `n` of `past + n` positions; padding hides keys, so a padded query row may see nothing.

    The window counts kept positions, so a padded row sees what the unpadded one would.
    """
    total = past + n
    window = total if config.window is None else min(config.window, total)
    windowed = window < total
    if keep is None and not windowed:
        if not config.causal or n == 1:
            return Mask(causal=False, allowed=None)
        if past == 0:
            return Mask(causal=True, allowed=None)
    columns = torch.arange(total, device=device)
    allowed = torch.ones(1, n, total, dtype=torch.bool, device=device)
    if config.causal:
        allowed = allowed & (columns[None, None, :] <= columns[None, past:, None])
    if windowed:
        place = position_ids(total, 0, keep, device)
        distance = place[:, past:, None] - place[:, None, :]
        allowed = allowed & (distance.abs() < window)
    if keep is not None:
        allowed = allowed & keep[:, None, :]
    return Mask(causal=False, allowed=allowed[:, None])
