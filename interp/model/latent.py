"""Multi-head latent attention: queries, keys and values made of narrow latents, and a rotated key that heads share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from interp.model.attention import Attention, PassState, View
from interp.model.norm import Normalize, RMSNorm
from interp.model.records import Mixer, Traits, at_least_one, not_negative, requires
from interp.model.sites import Site, norm_sites
from interp.model.tap import Scope, at

if TYPE_CHECKING:
    from interp.model.config import ModelConfig

_NEXT = "attn.hook_attn_scores"
_site = partial(Site, before=_NEXT)


@dataclass(frozen=True)
class Latent(Mixer):
    """Multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2", section 2.1 and appendix C).

    With x the normed stream and N a norm, head h has
        q = (q^C, R q^R),  (q^C, q^R) = W_Q^h N(W_DQ x)
        k = (k^C, R k^R),  (k^C, v) = W_KV^h N(W_DKV x),  k^R = W_KR x the same in every head,
    R the rotation to the position, of the last dimensions alone: as many as the config's rotary positions rotate.
    Values and z are `d_head` wide, queries and keys `content` + those. The norm between two matrices makes q, k and v
    no linear maps of x: there are no matrices W_Q, W_K, W_V and no circuits of them; z is the pattern of the values.
    """

    rank: int
    """Width of the latent that keys and values are made of."""
    content: int
    """Dimensions of a head's queries and keys that are not rotated."""
    query_rank: int | None = None
    """Width of the queries' latent; None: queries are one matrix of the normed stream."""
    eps: float = 1e-6
    """Eps of the latents' RMSNorms."""

    traits = Traits(
        queries=False, values=False, reads_by_qkv=False, scored=True, softmax_of_pairs=True, distribution=True,
        grouped=False, masked=True,
    )  # fmt: skip
    own_sites = (
        _site("attn.hook_q_latent", "b p w", "latent that queries are made of, before its norm"),
        *norm_sites("attn.q_latent_norm", "of the queries' latent", axes=("b p 1", "b p w"), before=_NEXT),
        _site("attn.hook_kv_latent", "b p w", "latent that keys and values are made of, before its norm"),
        *norm_sites(
            "attn.kv_latent_norm", "of the latent of keys and values", axes=("b p 1", "b p w"), before=_NEXT
        ),
        _site("attn.hook_q", "b p h r", "queries, made of their latent, before rotation"),
        _site("attn.hook_k", "b p h r", "keys, the part that all heads share last, before rotation"),
        _site(
            "attn.hook_rot_q", "b p h r", "queries, their last dimensions rotated", lambda c: c.rotary_dim > 0
        ),
        _site(
            "attn.hook_rot_k", "b p h r", "keys, their last dimensions rotated", lambda c: c.rotary_dim > 0
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "rank", "content")
        not_negative(self, "eps")
        requires(self.query_rank is None or self.query_rank >= 1, f"query_rank >= 1, got {self.query_rank}")

    def __str__(self) -> str:
        return "latent attention, whose queries, keys and values pass a norm between two matrices"

    def query_width(self, config: ModelConfig) -> int:
        """Width of queries and keys: the content and the rotated dimensions."""
        return self.content + config.rotary_dim

    def sites(self, config: ModelConfig) -> tuple[Site, ...]:
        """The sites of the latents; without those of the queries' latent where there is none."""
        return self.own_sites if self.query_rank is not None else self.own_sites[3:]

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """The maps to latents and back, and two products with every pair."""
        h, r, e, d = config.n_heads, self.query_width(config), config.head_width, config.d_model
        low = self.query_rank
        queries = d * h * r if low is None else low * (d + h * r)
        keys = d * (self.rank + config.rotary_dim) + self.rank * h * (self.content + e)
        return 2 * n * (queries + keys + h * e * d) + 2 * h * n**2 * (r + max(r, e))

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return LatentAttention(config, layer)


class LatentAttention(Attention):
    """Multi-head latent attention, written out: keys and values of every head are made before they are compared.

    `q_into` and `q` are W_DQ and W_Q (`q` alone without a latent), `kv_into` the rows of W_DKV, then of W_KR, `kv`
    W_KV, each head its content and then its values. The cache keeps keys and values, not latents.
    """

    def _build(self, config: ModelConfig) -> None:
        kind = config.mixers[self.layer]
        assert isinstance(kind, Latent)
        self.kind, self.width = kind, kind.query_width(config)
        d, norm = config.d_model, RMSNorm(kind.eps)
        wide, low = config.n_heads * self.width, kind.query_rank
        self.q_into = None if low is None else nn.Linear(d, low, bias=config.qkv_bias)
        self.q_latent_norm = None if low is None else Normalize(norm, low, "attn.q_latent_norm")
        self.q = nn.Linear(d if low is None else low, wide, bias=False)
        self.kv_into = nn.Linear(d, kind.rank + config.rotary_dim, bias=config.qkv_bias)
        self.kv_latent_norm = Normalize(norm, kind.rank, "attn.kv_latent_norm")
        self.kv = nn.Linear(kind.rank, config.n_heads * (kind.content + self.d_head), bias=False)

    def _project(
        self, x: Float[Tensor, "b p d"], source: tuple[Tensor, object], tap: Scope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[b p h r|e]`, each a site."""
        n, kind = self.heads[0], self.kind
        low = x
        if self.q_into is not None and self.q_latent_norm is not None:
            low = self.q_latent_norm(at(tap, "attn.hook_q_latent", self.q_into(x)), tap)
        q = rearrange(self.q(low), "b p (h r) -> b p h r", h=n)
        latent, turned = self.kv_into(x).split([kind.rank, self.width - kind.content], -1)
        latent = self.kv_latent_norm(at(tap, "attn.hook_kv_latent", latent), tap)
        content_and_v = rearrange(self.kv(latent), "b p (h n) -> b p h n", h=n)
        content, v = content_and_v.split([kind.content, self.d_head], -1)
        k = torch.cat((content, turned[:, :, None].expand(-1, -1, n, -1)), -1)
        return at(tap, "attn.hook_q", q), at(tap, "attn.hook_k", k), at(tap, "attn.hook_v", v)

    def _placed(
        self,
        q: Float[Tensor, "b p h r"],
        k: Float[Tensor, "b p h r"],
        view: View,
        shared: PassState,
        tap: Scope | None,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys with their dimensions after `content` rotated to their positions."""
        rotation = view.rotation
        if rotation is None:
            return q, k
        start = self.kind.content
        q, k = (torch.cat((x[..., :start], rotation.apply(x[..., start:])), -1) for x in (q, k))
        return at(tap, "attn.hook_rot_q", q), at(tap, "attn.hook_rot_k", k)

    def part(self, name: str) -> tuple[Tensor, Tensor | None]:
        """AttributeError: no matrix of the normed stream gives queries, keys or values."""
        raise AttributeError(f"layer {self.layer} has no W_{name.upper()}: it mixes positions by {self.kind}")
