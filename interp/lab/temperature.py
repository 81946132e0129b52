"""Temperatures of softmax attention: factors on scores so that long rows stay as sharp as short ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.kinds import Finite
from interp.core.temperature import adaptive_temperature, log_n_factor
from interp.model.attention import Mask
from interp.model.softmax import Temperature


@dataclass(frozen=True)
class LogN(Temperature):
    """Log-n temperature: scores times log n / log m, n the keys a query sees, m the length of training.

    Su 2021; Chiang 2022.
    """

    train_length: int
    floor: Finite | None = None
    """The smallest factor; None: no floor."""

    by_count = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.train_length < 2:
            raise ValueError(f"LogN requires train_length >= 2, got {self.train_length}")

    def factor(self, seen: Int[Tensor, "#b q"]) -> Float[Tensor, "#b q"]:
        """log n / log m for queries that see n keys."""
        found = log_n_factor(seen.clamp_min(1), self.train_length)
        return found if self.floor is None else found.clamp_min(self.floor)


@dataclass(frozen=True)
class AdaptiveTemperature(Temperature):
    """Adaptive temperature: scores of a row times a polynomial of its entropy, at least 1.

    Velickovic et al. 2024, section 4.
    """

    by_row = True

    def sharpened(self, hidden_bhqk: Float[Tensor, "b h q k"], mask: Mask) -> Float[Tensor, "b h q k"]:
        """Hidden scores times beta(H), H the entropy of their row's softmax."""
        forbidden = hidden_bhqk == -torch.inf
        scores = hidden_bhqk if mask.blind is None else hidden_bhqk.masked_fill(mask.blind, 0.0)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        shown = hidden_bhqk.masked_fill(forbidden, 0.0)  # 0 x inf has no gradient
        mean = (scores.softmax(-1) * shown).sum(-1, keepdim=True)
        beta = adaptive_temperature(scores.logsumexp(-1, keepdim=True) - mean)
        return (shown * beta).to(hidden_bhqk.dtype).masked_fill(forbidden, -torch.inf)
