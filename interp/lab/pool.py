"""Mean pooling, the plainest token mixer, without trained parameters.

Yu et al. 2022, "MetaFormer Is Actually What You Need for Vision", equation 4, over what a token sees of its text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.model.attention import Attention, Mask, PassState
from interp.model.config import ModelConfig
from interp.model.norm import Normalize
from interp.model.records import Mixer, Traits, requires
from interp.model.tap import Scope, at


@dataclass(frozen=True)
class Pool(Mixer):
    """The mean of what came before minus the token itself, no parameter (MetaFormer's pooling; Yu et al. 2022)."""

    traits = Traits(queries=False, rotated=False, reads_by_qkv=False, grouped=False)

    def check(self, config: ModelConfig) -> None:
        """ValueError unless heads are slices of the stream."""
        whole = config.n_heads * config.head_width == config.d_model
        requires(whole, "n_heads * d_head = d_model under Pool")

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """None but for the means that no running sum gives."""
        return 0 if config.causal else 2 * config.d_model * n**2

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return PoolMixer(config, layer)


class Identity(nn.Linear):
    """The identity in the place of a matrix; nothing to train or to store."""

    def __init__(self, width: int) -> None:
        nn.Module.__init__(self)
        self.in_features = self.out_features = width
        self.register_buffer("weight", torch.eye(width), persistent=False)
        self.bias = None  # type: ignore[assignment]

    def forward(self, x: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
        """The input."""
        return x


class PoolMixer(Attention):
    """z_i = mean of the x_j that i sees, minus x_i; heads are slices of the stream, W_V and W_O their identity."""

    def _build(self, config: ModelConfig) -> None:
        self.v, self.out = Identity(config.d_model), Identity(config.d_model)

    def _project(
        self, x: Float[Tensor, "b p d"], source: tuple[Tensor, Normalize], tap: Scope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The slices of `x` as values; queries and keys are not used."""
        v = rearrange(x, "b p (h e) -> b p h e", e=self.d_head)
        if tap is not None:
            v = self._from_split("v", v, *source, tap)
        v = at(tap, "attn.hook_v", v)
        return v, v, v

    def _mix(
        self,
        q: Float[Tensor, "b p h e"],
        k: Float[Tensor, "b p h e"],
        v: Float[Tensor, "b p h e"],
        mask: Mask,
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n h e"]:
        n = v.shape[1]
        _, v = self._with_earlier(v, v, shared)
        if only is not None:
            mask = mask.queries(only, n, v.shape[1])
        observed = tap is not None and tap.wants("attn.hook_pattern")
        if mask.causal and not observed:  # every query sees all columns up to its own
            seen = torch.arange(1, n + 1, device=v.device, dtype=v.dtype)
            return v.cumsum(1) / seen[:, None, None] - v
        pattern_bqk = self._pattern(mask, n, v, only)
        pattern_bhqk = at(tap, "attn.hook_pattern", pattern_bqk[:, None].expand(len(v), v.shape[2], -1, -1))
        return torch.einsum("bhqk,bkhe->bqhe", pattern_bhqk, v)

    def _pattern(
        self, mask: Mask, n: int, v: Float[Tensor, "b k h e"], only: Int[Tensor, "b n"] | None
    ) -> Float[Tensor, "#b q k"]:
        """1 / count at what a query sees, minus 1 at itself; zeros for a query that sees nothing."""
        total = v.shape[1]
        own = torch.arange(total - n, total, device=v.device)[None] if only is None else only + total - n
        itself = torch.zeros(*own.shape, total, device=v.device, dtype=v.dtype).scatter(-1, own[..., None], 1)
        allowed = mask.matrix(own.shape[1], total, v.device)
        if allowed is None:
            return torch.full_like(itself, 1 / total) - itself
        seen = allowed[:, 0].to(v.dtype)
        count = seen.sum(-1, keepdim=True)
        return seen / count.clamp_min(1) - itself * (count > 0)

    def part(self, name: str) -> tuple[Float[Tensor, "h e d"], Float[Tensor, "h e"] | None]:
        """The slice of the stream that each head moves, as "v"; AttributeError for "q" and "k"."""
        if name != "v":
            raise AttributeError("a Pool has no queries and keys")
        return self._cut(self.v, self.heads[:1], 0)
