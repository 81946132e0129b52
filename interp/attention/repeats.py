"""Repeated random tokens: they have no meaning, so only copying from the earlier repeat can explain attention there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from interp.core.boundary import public

SAMPLE = 25
"""Most tokens of a row on which copying is scored: those of Olsson et al."""
FARTHEST = 16
"""Largest distance of the attention kernel."""


@public()
@dataclass(frozen=True)
class RepeatedTokens:
    """Rows of BOS, then `period` distinct random tokens repeated `repeats` times (Olsson et al.: 25 x 4)."""

    period: int = 25
    repeats: int = 4
    rows: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.period < 2 or self.repeats < 2 or self.rows < 1:
            raise ValueError(f"period and repeats of at least 2 and one row are required, got {self}")

    @property
    def length(self) -> int:
        """Tokens per row, BOS included."""
        return 1 + self.period * self.repeats

    @property
    def farthest(self) -> int:
        """Largest distance of the attention kernel: no copy, nor what followed one, is as near as that."""
        return min(FARTHEST, self.period - 2)

    @property
    def sample(self) -> int:
        """Tokens at the beginning of the first copy on which copying is scored."""
        return min(SAMPLE, self.period)

    def tokens(self, d_vocab: int, bos: int) -> Int[Tensor, "b p"]:
        """The rows; BOS never occurs inside. ValueError if the vocabulary is smaller than the period."""
        if d_vocab - 1 < self.period:
            raise ValueError(
                f"{self.period} distinct tokens besides BOS are required, the vocabulary has {d_vocab - 1}"
            )
        generator = torch.Generator().manual_seed(self.seed)
        order = torch.stack(
            [torch.randperm(d_vocab - 1, generator=generator)[: self.period] for _ in range(self.rows)]
        )
        chosen = order + (order >= bos)
        return torch.cat((torch.full((self.rows, 1), bos), chosen.repeat(1, self.repeats)), 1)
