"""Positions as vectors and as rotations: sinusoids, rotary frequencies under every scaling rule, a pass's angles."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.model.config import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rotary,
    Sinusoidal,
    YarnScaling,
)


def sinusoids(
    kind: Sinusoidal, positions: Int[Tensor, "b p"], d_model: int, dtype: torch.dtype
) -> Float[Tensor, "b p d"]:
    """Sines and cosines of position / 10000^(2i/d), Vaswani et al. 2017, section 3.5; computed in float64."""
    half = torch.arange(0, d_model, 2, dtype=torch.float64, device=positions.device)
    angle = positions[..., None].double() / 10_000 ** (half / d_model)
    waves = (angle.sin(), angle.cos())
    table = torch.stack(waves, -1).flatten(-2) if kind.interleaved else torch.cat(waves, -1)
    return table[..., :d_model].to(dtype)


def inverse_frequencies(
    rotary: Rotary,
    dim: int,
    device: torch.device,
    length: Int[Tensor, "b"] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "#b half"]:
    """Angle per position of each rotated pair, `base^(-2i/dim)`, after the scaling rule, computed in `dtype`.

    length: tokens of each row, where the rule depends on it (dynamic NTK, LongRoPE); None = within the original.
    """
    exponent = torch.arange(0, dim, 2, dtype=torch.int64, device=device).to(dtype) / dim
    rule = rotary.scaling
    if isinstance(rule, DynamicScaling):
        return _dynamic(rotary.base, exponent, rule, dim, length)
    period = (rotary.base**exponent)[None]
    if isinstance(rule, LinearScaling):
        return 1.0 / period / rule.factor
    if isinstance(rule, Llama3Scaling):
        return _llama3(1.0 / period, rule)
    if isinstance(rule, YarnScaling):
        return _yarn(period, rule, rotary.base, dim)
    if isinstance(rule, LongScaling):
        short, long = (torch.tensor(x, device=device) for x in (rule.short, rule.long))
        if length is None:
            return 1.0 / (short * period)
        return 1.0 / (torch.where(length[:, None] > rule.original_n_ctx, long, short) * period)
    return 1.0 / period


def _dynamic(
    base: float,
    exponent: Float[Tensor, "half"],
    rule: DynamicScaling,
    dim: int,
    length: Int[Tensor, "b"] | None,
) -> Float[Tensor, "#b half"]:
    """NTK-aware scaling whose base grows with the tokens beyond the original context."""
    if length is None:
        return (1.0 / (base**exponent))[None]
    stretch = rule.factor * length.clamp_min(rule.original_n_ctx).float() / rule.original_n_ctx
    grown = base * (stretch - (rule.factor - 1)) ** (dim / (dim - 2))
    return 1.0 / (grown[:, None] ** exponent)


def _llama3(frequency: Float[Tensor, "1 half"], rule: Llama3Scaling) -> Float[Tensor, "1 half"]:
    """Llama 3.1: wavelengths over n/low are divided, under n/high kept, in between mixed linearly in n/wavelength."""
    turns = rule.original_n_ctx * frequency / (2 * math.pi)
    ramp = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    keep = ramp.clamp(0, 1)
    return keep * frequency + (1 - keep) * frequency / rule.factor


def _yarn(
    period: Float[Tensor, "1 half"], rule: YarnScaling, base: float, dim: int
) -> Float[Tensor, "1 half"]:
    """NTK-by-parts: pairs with more than beta_fast turns in the original context are kept, below beta_slow divided."""
    ends = [
        dim * math.log(rule.original_n_ctx / (turns * 2 * math.pi)) / (2 * math.log(base))
        for turns in (rule.beta_fast, rule.beta_slow)
    ]
    if rule.truncate:
        ends = [math.floor(ends[0]), math.ceil(ends[1])]
    low, high = max(ends[0], 0), min(ends[1], dim - 1)
    pair = torch.arange(dim // 2, dtype=period.dtype, device=period.device)
    kept = 1 - ((pair - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return 1.0 / (rule.factor * period) * (1 - kept) + 1.0 / period * kept


def depends_on_length(rotary: Rotary) -> int | None:
    """The context beyond which the frequencies change with the length of the text; None if they never do."""
    fixed = not isinstance(rotary.scaling, DynamicScaling | LongScaling)
    return None if fixed or rotary.scaling is None else rotary.scaling.original_n_ctx  # type: ignore[union-attr]


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of one pass, `[batch or 1, pos, 1, dim/2]`, applied to any number of heads."""

    cos: Float[Tensor, "b p 1 half"]
    sin: Float[Tensor, "b p 1 half"]
    interleaved: bool

    @classmethod
    def at(cls, rotary: Rotary, d_head: int, positions: Int[Tensor, "b p"], dtype: torch.dtype) -> "Rotation":
        """The rotation for these position ids; angles are computed in float32 whatever the dtype.

        Where the frequencies depend on the length, each row's length counts, so that padding changes nothing.
        """
        dim = d_head if rotary.dim is None else rotary.dim
        length = None if depends_on_length(rotary) is None else positions.amax(-1) + 1
        frequency = inverse_frequencies(rotary, dim, positions.device, length)
        angle = positions[..., None].float() * frequency[:, None]
        waves = (angle.cos(), angle.sin())
        if isinstance(rotary.scaling, YarnScaling | LongScaling):
            waves = (waves[0] * rotary.scaling.attention_factor, waves[1] * rotary.scaling.attention_factor)
        cos, sin = (wave.to(dtype)[..., None, :] for wave in waves)
        return cls(cos, sin, rotary.interleaved)

    def to(self, device: torch.device) -> "Rotation":
        """The same on another device."""
        return Rotation(self.cos.to(device), self.sin.to(device), self.interleaved)

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
