"""Differential attention: the difference of two softmax patterns, so that attention common to both cancels."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.core.kinds import NotNegative
from interp.model.attention import (
    Attention,
    Mask,
    PassState,
    View,
    attend,
    hidden_scores,
    picked,
    row_softmax,
)
from interp.model.config import ModelConfig, RMSNorm, Rotary
from interp.model.norm import HeadNorm
from interp.model.position import Rotation
from interp.model.records import Mixer, Traits, maps_flops, requires
from interp.model.sites import Site, norm_sites
from interp.model.tap import Scope, at

_PATTERNS = ("attn.hook_pattern_1", "attn.hook_pattern_2", "attn.hook_pattern")


def lambda_init(layer: int) -> float:
    """0.8 - 0.6 exp(-0.3 l) for layer l counted from 0: 0.2, 0.3555, 0.4707, ... (Ye et al. 2024, equation 3)."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


@dataclass(frozen=True)
class Differential(Mixer):
    """Differential attention: the difference of two softmax patterns, then a norm per head (Ye et al. 2024).

    Queries and keys are split into halves, one for each pattern: `d_head` is the width of the values, twice that of a
    half, so that parameters are those of softmax attention of the same heads.
    """

    eps: NotNegative = 1e-5

    traits = Traits(additive=False, beside="a norm of each head's z follows it")
    own_sites = (
        Site(
            "attn.hook_pattern_1",
            "b h q k",
            "pattern of the first halves; rows sum to 1",
            before="attn.hook_pattern",
        ),
        Site(
            "attn.hook_pattern_2",
            "b h q k",
            "pattern of the second halves, which is subtracted",
            before="attn.hook_pattern",
        ),
        *norm_sites(
            "attn.z_norm", "of z, each head alone", axes=("b p h 1", "b p h e"), before="attn.hook_z"
        ),
    )

    def check(self, config: ModelConfig) -> None:
        """ValueError for heads that do not fall into two halves with rotations of their own."""
        half, turned = config.head_width // 2, config.position
        requires(config.head_width % 2 == 0, f"an even d_head under Differential, got {config.head_width}")
        requires(config.qk_norm is None, "no qk_norm under Differential, whose heads are two halves")
        whole = half % 2 == 0
        fits = not isinstance(turned, Rotary) or (whole if turned.dim is None else turned.dim <= half)
        requires(fits, f"rotations that fit half a head under Differential, {half} wide, got {turned}")

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """Operations of four maps and two patterns, with halves filled up to the width of the values."""
        return maps_flops(config, n) + 8 * config.n_heads * config.head_width * n**2

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return DifferentialAttention(config, layer)


class DifferentialAttention(Attention):
    """z = (1 - lambda_init) RMSNorm((A_1 - lambda A_2) v) per head (Ye et al. 2024, equations 1 to 3).

    A_i = softmax(q_i k_i^T / sqrt(e / 2)), q_i and k_i the two halves of a head's queries and keys, each rotated by
    itself; v has the full width e. lambda = exp(l_q1 . l_k1) - exp(l_q2 . l_k2) + lambda_init, one for a layer. The
    pattern is A_1 - lambda A_2: signed, its rows sum to 1 - lambda. The norm stands after it, so that heads add up but
    a head does not split by source.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        kind = config.mixers[layer]
        assert isinstance(kind, Differential)
        super().__init__(config, layer)
        self.rotary = config.position if isinstance(config.position, Rotary) else None
        if config.attn_scale is None:
            self.scale *= math.sqrt(2)
        self.lambda_init = lambda_init(layer)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(0.1 * torch.randn(self.d_head // 2)) for _ in range(4)
        )
        self.z_norm = HeadNorm(RMSNorm(kind.eps), config.n_heads, self.d_head, "attn.z_norm", "head")

    def share(self) -> Float[Tensor, ""]:
        """lambda of this layer, in float32 at least."""
        wide = torch.promote_types(self.lambda_q1.dtype, torch.float32)
        q1, k1, q2, k2 = (
            x.to(wide) for x in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2)
        )
        return (q1 @ k1).exp() - (q2 @ k2).exp() + self.lambda_init

    def _placed(
        self,
        q: Float[Tensor, "b p h e"],
        k: Float[Tensor, "b p g e"],
        view: View,
        shared: PassState,
        tap: Scope | None,
    ) -> tuple[Tensor, Tensor]:
        rotary, positions, half = self.rotary, shared.positions, self.d_head // 2
        if rotary is None:
            return q, k
        assert positions is not None
        turn = shared.made_once("half rotation", lambda: Rotation.at(rotary, half, positions, q.dtype))

        def turned(x: Tensor) -> Tensor:
            return torch.cat([turn.apply(part) for part in x.split(half, -1)], -1)

        return at(tap, "attn.hook_rot_q", turned(q)), at(tap, "attn.hook_rot_k", turned(k))

    def _mix(
        self,
        q: Float[Tensor, "b p h e"],
        k: Float[Tensor, "b p g e"],
        v: Float[Tensor, "b p g e"],
        mask: Mask,
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n h e"]:
        n = q.shape[1]
        k, v = self._with_earlier(k, v, shared)
        if only is not None:
            mask, q = mask.queries(only, n, k.shape[1]), picked(q, only)
        if tap is not None and tap.wants(*_PATTERNS):
            z = self._observed(q, k, v, mask, tap)
        else:
            first, second = attend(
                self._stacked(q), self._stacked(k), v.repeat(1, 1, 2, 1), mask, self.scale, None
            ).chunk(2, 2)
            z = first - self.share().to(v.dtype) * second
        return (1 - self.lambda_init) * self.z_norm(z, tap)

    def _stacked(self, x: Float[Tensor, "b p n e"]) -> Float[Tensor, "b p m e"]:
        """Both halves as heads, filled with zeros to the width of the values.

        One call of the fused kernel, which falls back to a slow form where widths differ (x4 at 1024 tokens on a CPU).
        """
        return F.pad(rearrange(x, "b p n (two e) -> b p (two n) e", two=2), (0, self.d_head // 2))

    def _observed(
        self, q: Float[Tensor, "b q h e"], k: Float[Tensor, "b k g e"], v: Float[Tensor, "b k g e"], mask: Mask,
        tap: Scope,
    ) -> Float[Tensor, "b q h e"]:  # fmt: skip
        """z, computed with the three patterns as sites."""
        group = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        patterns = []
        for site, q_i, k_i in zip(_PATTERNS[:2], q.chunk(2, -1), k.chunk(2, -1), strict=True):
            scores = torch.einsum("b q h e, b k h e -> b h q k", q_i * self.scale, k_i)
            pattern_bhqk = row_softmax(hidden_scores(scores, mask), mask).to(v.dtype)
            patterns.append(at(tap, site, pattern_bhqk))
        signed = at(tap, _PATTERNS[2], patterns[0] - self.share().to(v.dtype) * patterns[1])
        return torch.einsum("b h q k, b k h e -> b q h e", signed, v)
