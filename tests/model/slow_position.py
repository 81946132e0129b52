"""Positions again, one number at a time, from the papers: rotations and their scaling, sinusoids, score biases."""

import math

import torch
from torch import Tensor

from interp.model import (
    Alibi,
    Buckets,
    DynamicScaling,
    Learned,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    ModelConfig,
    Rotary,
    Sinusoidal,
    YarnScaling,
)


def position_vector(p: dict[str, Tensor], config: ModelConfig, i: int) -> Tensor:
    """What is added to the embedding at position i."""
    if isinstance(config.position, Learned):
        return p["pos_embed.weight"][i + config.position.offset]
    assert isinstance(config.position, Sinusoidal)
    return torch.tensor(slow_sinusoid(config.position, i, config.d_model), dtype=torch.float64)


def slow_sinusoid(kind: Sinusoidal, i: int, d: int) -> list[float]:
    """PE(pos, 2i) = sin(pos / 10000^(2i/d)), PE(pos, 2i+1) = cos(same); Vaswani et al. 2017, section 3.5."""
    sines = [math.sin(i / 10000 ** (2 * pair / d)) for pair in range(d // 2)]
    cosines = [math.cos(i / 10000 ** (2 * pair / d)) for pair in range(d // 2)]
    if not kind.interleaved:
        return sines + cosines
    return [x for pair in zip(sines, cosines, strict=True) for x in pair]


def score_bias(p: dict[str, Tensor], config: ModelConfig, h: int, i: int, j: int) -> Tensor | float:
    """What positions add to the score of query i and key j in head h."""
    if isinstance(config.position, Alibi):
        return -slow_slopes(config.n_heads)[h] * abs(i - j)
    if isinstance(config.position, Buckets):
        bucket = slow_bucket(config.position, j - i, two_sided=not config.causal)
        return p["score_bias.table.weight"][bucket, h]
    return 0.0


def slow_slopes(n_heads: int) -> list[float]:
    """A geometric sequence from 2^(-8/n) with that ratio; for other n those of the power below, then every second.

    The recursion of Press et al.'s release.
    """
    if n_heads & (n_heads - 1) == 0:
        ratio = 2 ** (-8 / n_heads)
        return [ratio ** (h + 1) for h in range(n_heads)]
    below = 1
    while 2 * below < n_heads:
        below *= 2
    return slow_slopes(below) + slow_slopes(2 * below)[0::2][: n_heads - below]


def slow_bucket(kind: Buckets, offset: int, *, two_sided: bool) -> int:
    """T5's bucket of one offset key - query, branch by branch (Raffel et al. 2020, section 2.1, and their release)."""
    n, first = kind.n_buckets, 0
    if two_sided:
        n = n // 2
        first, distance = (n if offset > 0 else 0), abs(offset)
    else:
        distance = -offset if offset < 0 else 0
    exact = n // 2
    if distance < exact:
        return first + distance
    steps = math.log(distance / exact) / math.log(kind.max_distance / exact) * (n - exact)
    return first + min(exact + math.floor(steps + 1e-6), n - 1)


def rotary_of(config: ModelConfig, layer: int) -> Rotary | None:
    """The rotation of a layer, if it has one."""
    local = config.window is not None and (config.local_layers is None or layer in config.local_layers)
    rotary = config.local_position if local and config.local_position is not None else config.position
    return rotary if isinstance(rotary, Rotary) and getattr(config.mixers[layer], "rotated", True) else None


def rotated(config: ModelConfig, layer: int, x: Tensor) -> Tensor:
    """Rows of `x` turned by their index, pair after pair; angles in float32, as all checkpoints were trained."""
    rotary = rotary_of(config, layer)
    if rotary is None:
        return x
    dim = rotary.dim or config.head_width
    stretched = isinstance(rotary.scaling, YarnScaling | LongScaling)
    factor = rotary.scaling.attention_factor if stretched else 1.0  # type: ignore[union-attr]
    out = x.clone()
    for pair in range(dim // 2):
        a, b = (2 * pair, 2 * pair + 1) if rotary.interleaved else (pair, pair + dim // 2)
        frequency = torch.tensor(slow_frequency(rotary, pair, dim, len(x)), dtype=torch.float32)
        for position in range(len(x)):
            angle = position * frequency
            cos, sin = factor * angle.cos().to(x), factor * angle.sin().to(x)
            out[position, a] = x[position, a] * cos - x[position, b] * sin
            out[position, b] = x[position, b] * cos + x[position, a] * sin
    return out


def slow_frequency(rotary: Rotary, pair: int, dim: int, length: int = 1) -> float:
    """Angle per position of one rotated pair in a text of `length` tokens, by the rule of its paper."""
    frequency, rule = rotary.base ** (-2 * pair / dim), rotary.scaling
    if isinstance(rule, LinearScaling):
        return frequency / rule.factor
    if isinstance(rule, DynamicScaling):
        return _dynamic(rotary.base, rule, pair, dim, length)
    if isinstance(rule, Llama3Scaling):
        return _llama3(frequency, rule)
    if isinstance(rule, YarnScaling):
        return _yarn(frequency, rule, rotary.base, pair, dim)
    if isinstance(rule, LongScaling):
        return frequency / (rule.long if length > rule.original_n_ctx else rule.short)[pair]
    return frequency


def _dynamic(base: float, rule: DynamicScaling, pair: int, dim: int, length: int) -> float:
    """Base b (s L / L0 - (s - 1))^(d / (d - 2)) beyond L0 tokens (dynamic NTK; Peng et al. 2023, app. B)."""
    if length > rule.original_n_ctx:
        base *= (rule.factor * length / rule.original_n_ctx - (rule.factor - 1)) ** (dim / (dim - 2))
    return float(base ** (-2 * pair / dim))


def _llama3(frequency: float, rule: Llama3Scaling) -> float:
    """The case analysis of the Llama 3.1 release."""
    wavelength = 2 * math.pi / frequency
    if wavelength < rule.original_n_ctx / rule.high_freq_factor:
        return frequency
    if wavelength > rule.original_n_ctx / rule.low_freq_factor:
        return frequency / rule.factor
    smooth = (rule.original_n_ctx / wavelength - rule.low_freq_factor) / (
        rule.high_freq_factor - rule.low_freq_factor
    )
    return (1 - smooth) * frequency / rule.factor + smooth * frequency


def _yarn(frequency: float, rule: YarnScaling, base: float, pair: int, dim: int) -> float:
    """NTK by parts, Peng et al. 2023, section 3.2, with the ramp over dimensions of their release."""

    def dimension_with(turns: float) -> float:
        """The pair that turns this often within the original context."""
        return dim * math.log(rule.original_n_ctx / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_with(rule.beta_fast), dimension_with(rule.beta_slow)
    if rule.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high > low else 0.001
    interpolated = min(max((pair - low) / width, 0.0), 1.0)
    return interpolated * frequency / rule.factor + (1 - interpolated) * frequency
