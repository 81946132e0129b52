"""Polarity-aware linear attention: same-sign and opposite-sign parts of q . k, each with half of the values.

Meng et al. 2025, "PolaFormer", section 4. With q = q+ - q- and k = k+ - k-, all four parts at least 0,
q . k = (q+ . k+ + q- . k-) - (q+ . k- + q- . k+); the difference is left to trained gates.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float
from torch import Tensor, nn

from interp.core.kinds import NotNegative, Positive
from interp.lab.linear import LinearMixer, OfSums, sums_flops
from interp.model.attention import Attention
from interp.model.config import ModelConfig
from interp.model.records import Traits, maps_flops, requires
from interp.model.sites import GATE, Site
from interp.model.tap import Scope, at


@dataclass(frozen=True)
class Polar(OfSums):
    """Polarity-aware linear attention (PolaFormer): same-sign and opposite-sign parts of q . k (Meng et al. 2025)."""

    max_power: Positive = 4.0
    """Range of the powers: features are x^p, with a trained 1 < p < 1 + max_power for each channel."""
    eps: NotNegative = 1e-6
    chunk: int = 64

    traits = Traits(
        reads_by_qkv=False,
        scaled=False,
        patterned=False,
        additive=False,
        keyed=False,
        stateful=True,
        halves="attn.hook_polar_pattern",
    )
    own_sites = (
        Site(
            "attn.hook_polar_pattern",
            "b c h q k",
            "weights of the values' halves: same-sign (0), opposite-sign (1); rows sum to 1",
            before="attn.hook_z",
        ),
        GATE,
    )

    def check(self, config: ModelConfig) -> None:
        """ValueError unless values fall into two halves."""
        requires(config.head_width % 2 == 0, f"an even d_head under Polar, got {config.head_width}")

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """Five maps, and sums in chunks of two streams: twice as wide features, half of the values."""
        h, e = config.n_heads, config.head_width
        gate = 2 * n * config.d_model * h * e
        sums = sums_flops(n, self.chunk, 2 * e, e // 2 + 1, causal=config.causal)
        return maps_flops(config, n) + gate + 2 * h * sums

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return PolarMixer(config, layer)


class PolarMixer(LinearMixer):
    """z = [same(v_s), opposite(v_o)] * G, v_s and v_o the halves of a head's values, G = x W_G + b_G.

    same: weights f(q+) . f(k+) + f(q-) . f(k-) over their sum plus eps; opposite: f(q+) . f(k-) + f(q-) . f(k+).
    f(x) = x^p with p = 1 + max_power sigmoid(w), w trained for each channel of a key head, so 1 < p < 1 + max_power.
    Features stand after the rotation of a rotary model. The released code also divides queries and keys by a trained
    scale and adds a depthwise convolution of the values; neither is in the equations, nor here.

    There are two patterns per head (`attn.hook_polar_pattern`, same-sign first), hence no `attn.hook_pattern` and no
    split by source. `gate.weight [h e, d]`, rows by head, same-sign half first.
    """

    pattern = "attn.hook_polar_pattern"

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        kind = config.mixers[layer]
        assert isinstance(kind, Polar)
        self.max_power = kind.max_power
        self.power = nn.Parameter(torch.zeros(config.kv_heads, self.d_head))
        self.gate = nn.Linear(config.d_model, config.n_heads * self.d_head)

    def _operands(
        self,
        q: Float[Tensor, "b p h e"],
        k: Float[Tensor, "b p g e"],
        v: Float[Tensor, "b p g e"],
        keep: Bool[Tensor, "b k"] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Both streams as heads of their own, the same-sign ones first."""
        wide = torch.promote_types(v.dtype, torch.float32)
        group = q.shape[2] // k.shape[2]
        power = 1 + self.max_power * self.power.to(wide).sigmoid()
        plus_q, minus_q = self._polar(q.to(wide), power.repeat_interleave(group, 0))
        plus_k, minus_k = self._polar(
            k.to(wide).repeat_interleave(group, 2), power.repeat_interleave(group, 0)
        )
        queries = torch.cat((torch.cat((plus_q, minus_q), -1), torch.cat((minus_q, plus_q), -1)), 2)
        keys = torch.cat((plus_k, minus_k), -1)
        if keep is not None:
            keys = keys.masked_fill(~keep[:, -k.shape[1] :, None, None], 0)
        values = rearrange(v.to(wide).repeat_interleave(group, 2), "b p h (s f) -> b (s h) p f", s=2)
        return (
            queries.transpose(1, 2),
            keys.repeat(1, 1, 2, 1).transpose(1, 2),
            F.pad(values, (0, 1), value=1.0),
        )

    @staticmethod
    def _polar(x: Float[Tensor, "b p h e"], power: Float[Tensor, "h e"]) -> tuple[Tensor, Tensor]:
        """f of the positive part and of the negative one."""
        return F.relu(x) ** power, F.relu(-x) ** power

    def _observed(
        self, pattern: Float[Tensor, "b s p p"], tap: Scope, dtype: torch.dtype
    ) -> Float[Tensor, "b s p p"]:
        both = rearrange(pattern.to(dtype), "b (c h) q k -> b c h q k", c=2)
        return rearrange(at(tap, self.pattern, both), "b c h q k -> b (c h) q k")

    def _heads(self, sums: Float[Tensor, "b s p f"]) -> Float[Tensor, "b h p e"]:
        return rearrange(sums, "b (s h) p f -> b h p (s f)", s=2)

    def _finished(
        self, z: Float[Tensor, "b n h e"], x: Float[Tensor, "b n d"], tap: Scope | None
    ) -> Float[Tensor, "b n h e"]:
        return z * at(tap, "attn.hook_gate", self.gate(x).unflatten(-1, (-1, self.d_head)))
