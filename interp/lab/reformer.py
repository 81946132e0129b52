"""Reformer's attention: one vector per token is query and key, and sees tokens with an equal hash."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.model.attention import Attention, Mask, PassState, picked
from interp.model.config import ModelConfig
from interp.model.norm import Normalize
from interp.model.records import Mixer, Traits, at_least_one, requires
from interp.model.tap import Scope, at


@dataclass(frozen=True)
class Reformer(Mixer):
    """LSH attention (Reformer): queries that serve as keys, and see those in their bucket (Kitaev et al. 2020)."""

    n_buckets: int
    """Number of buckets of one round of hashing, even."""
    n_rounds: int = 1

    traits = Traits(scored=True, distribution=True, grouped=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "n_rounds")
        if self.n_buckets < 2 or self.n_buckets % 2:
            raise ValueError(f"Reformer requires an even n_buckets >= 2, got {self.n_buckets}")

    def check(self, config: ModelConfig) -> None:
        """ValueError for a norm of queries and keys."""
        requires(config.qk_norm is None, "no qk_norm under Reformer, whose keys are its normalised queries")

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """Three maps, the hashes of queries and keys, and two products with every pair."""
        width, buckets = config.n_heads * config.head_width, self.n_rounds * self.n_buckets
        return 6 * n * config.d_model * width + 2 * n * width * buckets + 4 * width * n**2

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return ReformerAttention(config, layer)


class ReformerAttention(Attention):
    """Softmax attention of q over q / |q|, within buckets of locality-sensitive hashing (Kitaev et al. 2020).

    A key is seen if it shares the query's bucket in one round at least, and is counted once (the set of equation 5;
    the paper's implementation sorts and cuts buckets into chunks, and so sees less). A token sees itself only where it
    sees nothing else (section 2, "Causal masking"). Buckets are compared all with all: cost is that of dense attention.
    `attn.hook_q` and `attn.hook_k` are the same vector in its two roles, so that an edit of one leaves the other.
    """

    def _build(self, config: ModelConfig) -> None:
        kind = config.mixers[self.layer]
        assert isinstance(kind, Reformer)
        self.qk, self.v = (
            nn.Linear(config.d_model, n * self.d_head, bias=config.qkv_bias) for n in self.heads[1:]
        )
        draw = torch.randn(kind.n_rounds, config.n_heads, self.d_head, kind.n_buckets // 2)
        self.rotations = nn.Parameter(
            draw, requires_grad=False
        )  # a buffer would not be stored with the weights

    def _project(
        self, x: Float[Tensor, "b p d"], source: tuple[Tensor, Normalize], tap: Scope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The shared vector twice, and values."""
        both, values = (
            rearrange(part(x), "b p (h e) -> b p h e", e=self.d_head) for part in (self.qk, self.v)
        )
        heads = {"q": both, "k": both, "v": values}
        if tap is not None:
            heads = {part: self._from_split(part, head, *source, tap) for part, head in heads.items()}
        q, k, v = (at(tap, f"attn.hook_{part}", heads[part]) for part in "qkv")
        return q, k, v

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
        n, k = q.shape[1], F.normalize(k, dim=-1)
        k, v = self._with_earlier(k, v, shared)
        total = k.shape[1]
        own = torch.arange(total - n, total, device=q.device)[None]
        if only is not None:
            mask, q, own = mask.queries(only, n, total), picked(q, only), only + total - n
        met = self._buckets(F.normalize(q, dim=-1))[:, :, :, :, None] == self._buckets(k)[:, :, :, None]
        return self._attended(q, k, v, _hiding(mask, met.any(0), own, q), tap)

    def _buckets(self, x: Float[Tensor, "b p h e"]) -> Int[Tensor, "r b h p"]:
        """h(x) = argmax([x R; -x R]) in every round (section 2, "Locality sensitive hashing")."""
        wide = torch.promote_types(x.dtype, torch.float32)
        turned = einsum(x.to(wide), self.rotations.to(wide), "b p h e, r h e c -> r b h p c")
        return torch.cat((turned, -turned), -1).argmax(-1)

    def part(self, name: str) -> tuple[Float[Tensor, "h e d"], Float[Tensor, "h e"] | None]:
        """Weight `[h e d]` and bias `[h e]` of "q", "k" (the same) or "v" as views of their matrices."""
        return self._cut(self.v if name == "v" else self.qk, self.heads[:1], 0)


def _hiding(
    mask: Mask, met: Bool[Tensor, "b h q k"], own: Int[Tensor, "#b q"], like: Float[Tensor, "..."]
) -> Mask:
    """The mask of each head: others of its bucket that it may see; itself where there are none, even if padding."""
    total = met.shape[-1]
    allowed = mask.matrix(met.shape[2], total, met.device)
    itself = (torch.arange(total, device=met.device) == own[..., None])[:, None]
    others = met & ~itself if allowed is None else met & ~itself & allowed
    lonely = ~others.any(-1, keepdim=True)
    sees = others | (lonely & itself)
    bias = like.new_zeros(()) if mask.bias is None else mask.bias
    finite = bias.clamp_min(torch.finfo(bias.dtype).min)  # of padding, which a bias hides from itself
    return Mask(causal=False, allowed=None, bias=torch.where(sees, finite, -torch.inf))
