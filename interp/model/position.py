"""Rotary positions: the angles of one pass, and the rotation of queries and keys."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.model.config import LinearScaling, Llama3Scaling, Rotary


def inverse_frequencies(rotary: Rotary, dim: int, device: torch.device) -> Float[Tensor, "half"]:
    """Angle per position of each rotated pair, `base^(-2i/dim)`, after the scaling rule; always float32."""
    exponent = torch.arange(0, dim, 2, dtype=torch.int64, device=device).float() / dim
    frequency = 1.0 / (rotary.base**exponent)
    if isinstance(rotary.scaling, LinearScaling):
        return frequency / rotary.scaling.factor
    if isinstance(rotary.scaling, Llama3Scaling):
        return _llama3(frequency, rotary.scaling)
    return frequency


def _llama3(frequency: Float[Tensor, "half"], rule: Llama3Scaling) -> Float[Tensor, "half"]:
    """Llama 3.1: wavelengths over n/low are divided, under n/high kept, in between mixed linearly in n/wavelength."""
    turns = rule.original_n_ctx * frequency / (2 * math.pi)
    ramp = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    keep = ramp.clamp(0, 1)
    return keep * frequency + (1 - keep) * frequency / rule.factor


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of one pass, `[batch or 1, pos, 1, dim/2]`, applied to any number of heads."""

    cos: Float[Tensor, "b p 1 half"]
    sin: Float[Tensor, "b p 1 half"]
    interleaved: bool

    @classmethod
    def at(cls, rotary: Rotary, dim: int, positions: Int[Tensor, "b p"], dtype: torch.dtype) -> "Rotation":
        """The rotation for these position ids; angles are computed in float32 whatever the dtype."""
        frequency = inverse_frequencies(rotary, dim, positions.device)
        angle = positions[..., None].float() * frequency
        return cls(
            angle.cos().to(dtype)[..., None, :], angle.sin().to(dtype)[..., None, :], rotary.interleaved
        )

    def apply(self, x: Float[Tensor, "b p h e"]) -> Float[Tensor, "b p h e"]:
        """`x` with its leading dimensions rotated pair by pair; the rest is passed through."""
        dim = 2 * self.cos.shape[-1]
        turned, rest = x[..., :dim], x[..., dim:]
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, -1)
        new_first = first * self.cos - second * self.sin
        new_second = second * self.cos + first * self.sin
        if self.interleaved:
            out = torch.stack((new_first, new_second), -1).flatten(-2)
        else:
            out = torch.cat((new_first, new_second), -1)
        return out if rest.shape[-1] == 0 else torch.cat((out, rest), -1)
