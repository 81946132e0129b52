"""Linformer: keys and values as `rank` trained mixtures of the positions, at a cost linear in the length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.model.attention import Attention, Mask, PassState, picked
from interp.model.config import ModelConfig
from interp.model.records import Mixer, at_least_one, maps_flops, requires
from interp.model.tap import Scope, at


@dataclass(frozen=True)
class Linformer(Mixer):
    """Linformer: keys and values projected along the length to `rank` of each (Wang et al. 2020); bidirectional."""

    rank: int

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "rank")

    def check(self, config: ModelConfig) -> None:
        """ValueError for a causal model, and for more mixtures than positions."""
        requires(not config.causal, "causal=False under Linformer, which mixes later keys into earlier")
        fits = self.rank <= config.n_ctx
        requires(fits, f"Linformer's rank <= n_ctx, got {self.rank} > {config.n_ctx}")

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """Four maps, two mixtures of the positions, and two products with the mixtures."""
        mixed = 4 * self.rank * n * config.head_width * (config.n_heads + config.kv_heads)
        return maps_flops(config, n) + mixed

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return LinformerAttention(config, layer)


class LinformerAttention(Attention):
    """z = softmax(q (E k)^T) F v (Wang et al. 2020, equation 7), E and F `[rank, n_ctx]` of all heads of a layer.

    The column of E and F that a token takes is its position, so that padding has none. The pattern is
    softmax(q (E k)^T) F: real weights of the tokens' values, of either sign, whose rows sum to anything.
    """

    def _build(self, config: ModelConfig) -> None:
        kind = config.mixers[self.layer]
        assert isinstance(kind, Linformer)
        super()._build(config)
        self.key_mix, self.value_mix = (nn.Parameter(torch.zeros(kind.rank, config.n_ctx)) for _ in range(2))

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
        if only is not None:
            q = picked(q, only)
        mixes = [self._columns(weight, shared, len(q)) for weight in (self.key_mix, self.value_mix)]
        packed = shared.layout.documents is not None
        if packed or (tap is not None and tap.wants("attn.hook_pattern")):
            k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
            seen = (mask if only is None else mask.queries(only, n, n)).allowed if packed else None
            return self._explicit(q, k, v, mixes, seen, tap)
        k, v = (einsum(mix, x, "b r p, b p g e -> b g r e") for mix, x in zip(mixes, (k, v), strict=True))
        q = q.transpose(1, 2)
        z = F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=q.shape[1] != k.shape[1])
        return z.transpose(1, 2)

    def _columns(self, weight: Float[Tensor, "r c"], shared: PassState, rows: int) -> Float[Tensor, "b r p"]:
        """The column of each token's position; zeros for padding."""
        assert shared.positions is not None
        mix = rearrange(weight[:, shared.positions], "r b p -> b r p")
        if shared.layout.keep is not None:
            mix = mix * shared.layout.keep[:, None]
        return mix.expand(rows, -1, -1)

    def _explicit(
        self,
        q: Float[Tensor, "b n h e"],
        k: Float[Tensor, "b p h e"],
        v: Float[Tensor, "b p h e"],
        mixes: list[Float[Tensor, "b r p"]],
        seen: Tensor | None,
        tap: Scope | None,
    ) -> Float[Tensor, "b n h e"]:
        """z from the written-out pattern; with `seen` `[b 1 n p]` from mixtures of the query's own document."""
        products = einsum(q * self.scale, k, "b n h e, b p h e -> b h n p")
        if seen is not None:
            products = products * seen
        scores = einsum(products, mixes[0], "b h n p, b r p -> b h n r")
        wide = torch.promote_types(scores.dtype, torch.float32)
        share = scores.softmax(-1, dtype=wide).to(v.dtype)
        pattern_bhqk = einsum(share, mixes[1], "b h n r, b r p -> b h n p")
        if seen is not None:
            pattern_bhqk = pattern_bhqk * seen
        pattern_bhqk = at(tap, "attn.hook_pattern", pattern_bhqk)
        return einsum(pattern_bhqk, v, "b h n p, b p h e -> b n h e")
