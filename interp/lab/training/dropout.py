"""Dropout as edits of a training pass: the model itself has none, so whatever is not an update runs without it.

Srivastava et al. 2014; in the places of Vaswani et al. 2017, section 5.4. What is dropped at an update is a function of
(seed, step) and the site, so a run that was killed goes on to the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from interp.core.boundary import public
from interp.model import sites
from interp.model.config import WITH_HEADS, AnyConfig, EncoderDecoderConfig, ModelConfig
from interp.model.edits import Edit

STREAM = 1
"""Key that keeps these random numbers apart from those of the data, which are drawn from seed and step only."""


@public()
@dataclass(frozen=True)
class Dropout:
    """Shares of the numbers of a training pass that are set to 0; the others are divided by what is kept.

    Raises:
        ValueError: a share outside [0, 1).
    """

    residual: float = 0.0
    """Rate of dropout of what each sublayer adds to the stream, bias, norm and factor included."""
    attention: float = 0.0
    """Rate of dropout of the attention weights, after their softmax; the pattern is then written out, unlike in the
    fused kernel.
    """
    embedding: float = 0.0
    """Rate of dropout of the stream that enters the first block."""

    def __post_init__(self) -> None:
        for name in ("residual", "attention", "embedding"):
            share = getattr(self, name)
            if not 0 <= share < 1:
                raise ValueError(f"Dropout requires {name} in [0, 1), got {share}")

    def edits(
        self, config: AnyConfig, seed: int, step: int, device: torch.device | str = "cpu"
    ) -> tuple[Edit, ...]:
        """The edits of the update after `step` others, every site with random numbers of its own.

        Another kind of device draws others.

        Raises:
            ValueError: attention dropout in a layer without a pattern.
        """
        places = [(site, share) for site, share in self._places(config) if share > 0]
        seeds = np.random.SeedSequence([step + 1, seed, STREAM]).generate_state(len(places), np.uint64)
        return tuple(
            Edit(site, Drop(share, torch.Generator(device).manual_seed(int(own))))
            for (site, share), own in zip(places, seeds, strict=True)
        )

    def _places(self, config: AnyConfig) -> Iterator[tuple[str, float]]:
        if isinstance(config, EncoderDecoderConfig):
            for side in ("encoder", "decoder"):
                yield from ((f"{side}.{site}", share) for site, share in self._places(getattr(config, side)))
            return
        yield sites.first_stream(config), self.embedding
        for layer in range(config.n_layers):
            for sublayer in config.sublayers:
                yield f"blocks.{layer}.hook_{sublayer}", self.residual
                if sublayer in WITH_HEADS and self.attention:
                    yield self._pattern(config, layer, sublayer.removesuffix("_out")), self.attention

    @staticmethod
    def _pattern(config: ModelConfig, layer: int, attention: str) -> str:
        if attention == "attn" and not config.mixers[layer].traits.patterned:
            raise ValueError(
                f"attention dropout requires an attention pattern; layer {layer} has none: {config.mixers[layer]}"
            )
        return f"blocks.{layer}.{attention}.hook_pattern"


@dataclass(frozen=True, eq=False)
class Drop:
    """The change of one site: each number is 0 with probability `share`, else divided by 1 - `share`."""

    share: float
    generator: torch.Generator

    def __call__(self, value: Tensor) -> Tensor:
        """The value with some numbers dropped."""
        kept = torch.rand(value.shape, generator=self.generator, device=value.device) >= self.share
        return value * kept / (1 - self.share)
