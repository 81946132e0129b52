"""Positions: vectors added to the embedding, rotations of queries and keys, biases of the scores.

The records of a config first; then sinusoids, rotary frequencies under every scaling rule and a pass's angles, and what
positions add to the scores (ALiBi's slopes, T5's table of buckets).
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.core.kinds import Finite, Positive
from interp.model.records import ConfigRecord, at_least_one, not_negative, positive

if TYPE_CHECKING:
    from interp.model.config import ModelConfig


@dataclass(frozen=True)
class Learned(ConfigRecord):
    """Learned positions: a trained vector per position, added to the embedding (GPT-2)."""

    offset: int = 0
    """Rows of the table before that of position 0 (OPT, BART and RoBERTa keep 2)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        not_negative(self, "offset")


@dataclass(frozen=True)
class Sinusoidal(ConfigRecord):
    """Sinusoidal positions: fixed sines and cosines, added to the embedding (Vaswani et al. 2017, section 3.5)."""

    interleaved: bool = True
    """True: sin, cos, sin, cos, ... (the paper); False: all sines, then all cosines (Marian)."""


@dataclass(frozen=True)
class Alibi(ConfigRecord):
    """ALiBi: scores lowered by the distance, with a slope per head (Press et al. 2022); no position embedding."""

    scaled: bool = False
    """True: the bias is multiplied by 1/sqrt(d_head), like products of queries and keys (Falcon)."""
    rounded: bool = False
    """True: the bias is slope times the key's position instead, both and the product in bfloat16 (Falcon).

    The softmax of a row does not see the difference of a constant, but it sees the rounding: from position 256 on the
    bias moves in steps.
    """


@dataclass(frozen=True)
class Buckets(ConfigRecord):
    """Relative position biases of T5: a trained score per head and bucket of the distance, equal in every layer."""

    n_buckets: int = 32
    max_distance: int = 128
    """Distances from here on share the last bucket."""

    def check(self, config: "ModelConfig") -> None:
        """ValueError for fewer buckets than the directions need, or a largest distance among the exact ones."""
        n = self.n_buckets if config.causal else self.n_buckets // 2
        least = 2 if config.causal else 4
        if self.n_buckets < least or self.max_distance <= n // 2:
            raise ValueError(
                f"Buckets requires n_buckets >= {least} and a max_distance above {max(n // 2, 1)}, the distances with "
                f"buckets of their own, got {self.n_buckets} and {self.max_distance}"
            )


@dataclass(frozen=True)
class NoPosition(ConfigRecord):
    """No position information beyond the causal mask."""


@dataclass(frozen=True)
class LinearScaling(ConfigRecord):
    """Position interpolation: every rotary frequency is divided by `factor` (Chen et al. 2023)."""

    factor: Positive


@dataclass(frozen=True)
class DynamicScaling(ConfigRecord):
    """Dynamic NTK scaling: beyond the original context the base grows with the length of the pass."""

    factor: Positive
    original_n_ctx: int

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "original_n_ctx")


@dataclass(frozen=True)
class Llama3Scaling(ConfigRecord):
    """Llama 3.1's scaling: low frequencies divided by `factor`, high ones kept, a ramp in between."""

    factor: Positive
    low_freq_factor: Finite
    high_freq_factor: Finite
    original_n_ctx: int

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "original_n_ctx")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"Llama3Scaling requires 0 < low_freq_factor < high_freq_factor, got {self.low_freq_factor} and "
                f"{self.high_freq_factor}"
            )


@dataclass(frozen=True)
class YarnScaling(ConfigRecord):
    """YaRN scaling (Peng et al. 2023): interpolated by wavelength, and sines and cosines multiplied by a factor."""

    factor: Positive
    original_n_ctx: int
    attention_factor: Positive
    """Factor on sines and cosines; 0.1 ln(factor) + 1 in the paper."""
    beta_fast: Finite = 32.0
    beta_slow: Finite = 1.0
    truncate: bool = True
    """Whether the ends of the ramp are rounded to whole dimensions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "original_n_ctx")
        positive(self, "beta_fast", "beta_slow")


@dataclass(frozen=True)
class LongScaling(ConfigRecord):
    """LongRoPE scaling (Phi-3): one divisor per frequency, from a short list within the original context.

    Beyond the original context from a long list.
    """

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_n_ctx: int
    attention_factor: Positive
    """Factor on sines and cosines, at any length."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "original_n_ctx")
        if not (self.short and len(self.short) == len(self.long) and min(*self.short, *self.long) > 0):
            raise ValueError(
                "LongScaling requires as many divisors above 0 in short as in long, one or more, got "
                f"{len(self.short)} and {len(self.long)}"
            )


RotaryScaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling


@dataclass(frozen=True)
class Rotary(ConfigRecord):
    """Rotary positions: queries and keys rotated by an angle that grows with the position (Su et al. 2021)."""

    base: float = 10_000.0
    dim: int | None = None
    """Leading dimensions of each head that are rotated; None = all of them."""
    interleaved: bool = False
    """True pairs (0, 1), (2, 3), ... (GPT-J); False pairs i with i + dim/2 (NeoX, Llama)."""
    scaling: RotaryScaling | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "base")
        if isinstance(self.scaling, YarnScaling) and self.base == 1:
            raise ValueError(
                "Rotary requires a base other than 1 for YarnScaling, got 1: all frequencies are equal"
            )


Position = Learned | Sinusoidal | Rotary | Alibi | Buckets | NoPosition


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

    Args:
        length: tokens of each row, where the rule depends on it (dynamic NTK, LongRoPE); None = within the original.
    """
    exponent = torch.arange(0, dim, 2, dtype=torch.int64, device=device).to(dtype) / dim
    rule = rotary.scaling
    if isinstance(rule, DynamicScaling):
        return _dynamic_frequencies(rotary.base, exponent, rule, dim, length)
    period = (rotary.base**exponent)[None]
    if isinstance(rule, LinearScaling):
        return 1.0 / period / rule.factor
    if isinstance(rule, Llama3Scaling):
        return _llama3_frequencies(1.0 / period, rule)
    if isinstance(rule, YarnScaling):
        return _yarn_frequencies(period, rule, rotary.base, dim)
    if isinstance(rule, LongScaling):
        short, long = (torch.tensor(x, device=device) for x in (rule.short, rule.long))
        if length is None:
            return 1.0 / (short * period)
        return 1.0 / (torch.where(length[:, None] > rule.original_n_ctx, long, short) * period)
    return 1.0 / period


def _dynamic_frequencies(
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


def _llama3_frequencies(frequency: Float[Tensor, "1 half"], rule: Llama3Scaling) -> Float[Tensor, "1 half"]:
    """Llama 3.1: wavelengths over n/low are divided, under n/high kept, in between mixed linearly in n/wavelength."""
    turns = rule.original_n_ctx * frequency / (2 * math.pi)
    ramp = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    keep = ramp.clamp(0, 1)
    return keep * frequency + (1 - keep) * frequency / rule.factor


def _yarn_frequencies(
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
    unscaled = 1 - ((pair - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return 1.0 / (rule.factor * period) * (1 - unscaled) + 1.0 / period * unscaled


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
        """This rotation on another device."""
        return Rotation(self.cos.to(device), self.sin.to(device), self.interleaved)

    def apply(self, x: Float[Tensor, "b p h e"]) -> Float[Tensor, "b p h e"]:
        """`x` with its leading dimensions rotated pair by pair; the rest is passed through."""
        half = self.cos.shape[-1]
        all_rotated = x.shape[-1] == 2 * half
        turned = x if all_rotated else x[..., : 2 * half]
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
            pairs = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
            out = torch.stack(pairs, -1).flatten(-2)
        else:  # four operators where two halves take ten: 300 of the 2 100 of a step of a 30-layer model
            cos, sin = self._cos_sin_of_halves
            out = (turned.roll(half, -1) * sin).add_(turned * cos)
        return out if all_rotated else torch.cat((out, x[..., 2 * half :]), -1)

    @cached_property
    def _cos_sin_of_halves(self) -> tuple[Float[Tensor, "b p 1 e"], Float[Tensor, "b p 1 e"]]:
        """cos and sin `[b p 1 e]` for `x.roll(half) * sin + x * cos`: sin is negated in the first half."""
        return torch.cat((self.cos, self.cos), -1), torch.cat((-self.sin, self.sin), -1)


def table(rows: int, width: int) -> nn.Embedding:
    """An embedding. On the device "meta" nothing is drawn: to draw nothing there PyTorch loads its compiler (2 s)."""
    weight = torch.empty(rows, width)
    return nn.Embedding(rows, width, _weight=weight) if weight.is_meta else nn.Embedding(rows, width)


class ScoreBias(nn.Module):
    """The bias of one pass, the same in every layer; only T5's has parameters."""

    def __init__(self, kind: Alibi | Buckets, n_heads: int, d_head: int, *, causal: bool) -> None:
        super().__init__()
        self.kind, self.n_heads, self.d_head, self.causal = kind, n_heads, d_head, causal
        self.table = table(kind.n_buckets, n_heads) if isinstance(kind, Buckets) else None

    def forward(
        self, query: Int[Tensor, "b q"], key: Int[Tensor, "b k"], dtype: torch.dtype
    ) -> Float[Tensor, "b h q k"]:
        """The bias between queries and keys at these positions."""
        offset = key[:, None, :] - query[:, :, None]
        if isinstance(self.kind, Buckets):
            assert self.table is not None
            bucket = buckets(offset, self.kind, two_sided=not self.causal)
            return rearrange(self.table(bucket), "b q k h -> b h q k").to(dtype)
        slopes = alibi_slopes(self.n_heads).to(key.device)[:, None, None]
        if self.kind.rounded:
            bias = (slopes.bfloat16() * key[:, None, None, :]).expand(-1, -1, query.shape[1], -1)
        else:
            bias = -offset.abs()[:, None] * slopes
        return bias.to(dtype) * self.d_head**-0.5 if self.kind.scaled else bias.to(dtype)


def alibi_slopes(n_heads: int) -> Float[Tensor, "h"]:
    """Slopes 2^(-8h/H) of H heads, h from 1.

    For numbers of heads other than powers of two: the slopes of the next lower power P, then odd ones of 2P. Press et
    al. 2022, section 3 and their reference code.
    """
    power = 2 ** math.floor(math.log2(n_heads))
    first = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    interleaved = [2 ** (-4 * h / power) for h in range(1, 2 * (n_heads - power), 2)]
    return torch.tensor(first + interleaved, device="cpu")


def buckets(offset: Int[Tensor, "*s"], kind: Buckets, *, two_sided: bool) -> Int[Tensor, "*s"]:
    """T5's bucket of key position - query position: exact for small distances, logarithmic up to `max_distance`.

    One-sided, keys after the query share bucket 0; two-sided, they have the upper half of the buckets. Raffel et al.
    2020, section 2.1.
    """
    n = kind.n_buckets // 2 if two_sided else kind.n_buckets
    first = torch.where(offset > 0, n, 0) if two_sided else torch.zeros_like(offset)
    distance = offset.abs() if two_sided else (-offset).clamp_min(0)
    exact = n // 2
    ratio = (distance.clamp_min(1).float() / exact).log() / math.log(kind.max_distance / exact)
    far = (exact + (ratio * (n - exact)).long()).clamp_max(n - 1)
    return first + torch.where(distance < exact, distance, far)
