"""Mixing of positions by trained matrices, whatever the tokens: gMLP's spatial gating and MLP-Mixer's token mixing.

Liu et al. 2021, "Pay Attention to MLPs", section 2.1; Tolstikhin et al. 2021, "MLP-Mixer", equation 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.lab.pool import Identity
from interp.model.attention import Attention, Mask, PassState
from interp.model.config import ModelConfig
from interp.model.norm import Normalize
from interp.model.records import Mixer, Traits, at_least_one, requires
from interp.model.sites import GATE, Site, norm_sites
from interp.model.tap import Scope, at


@dataclass(frozen=True)
class SpatialGating(Mixer):
    """Spatial gating (gMLP): a trained matrix `[query, key]` per head mixes the tokens, and each gates the result."""

    traits = Traits(
        queries=False,
        values=False,
        reads_by_qkv=False,
        rotated=False,
        scaled=False,
        additive=False,
        beside="GELU and a norm stand before it, and a gate after it",
        grouped=False,
    )
    own_sites = (
        Site("attn.hook_channels", "b p u", "the half that is mixed, before its norm", before="attn.hook_v"),
        *norm_sites("attn.gating_norm", "of what is mixed", axes=("b p 1", "b p u"), before="attn.hook_v"),
        GATE,
    )  # fmt: skip

    def sites(self, config: ModelConfig) -> tuple[Site, ...]:
        """Sites of the norm, in models with norms."""
        return self.own_sites if config.normed else (self.own_sites[0], GATE)

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """Three maps and one product with every pair."""
        width = config.n_heads * config.head_width
        return 6 * n * config.d_model * width + 2 * width * n**2

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return SpatialGatingUnit(config, layer)


class SpatialGatingUnit(Attention):
    """z_i = (sum_j W_ij v_j + b_i) * u_i, v = norm(gelu(x W_V + b_V)), u = gelu(x W_U + b_U) (equations 1 to 3).

    W `[query, head, key]` and b are trained as they are, a matrix for each head (the paper: one, `n_heads=1`), j the
    positions that i sees: in causal models the triangle. They begin near 0 and at 1, so that the unit begins near
    u. The norm is the config's. Positions count the kept tokens of a text. The pattern is W where the mask shows it:
    signed, the same for every text, and mixed with neither W_V alone (GELU and norm stand between) nor W_O alone.
    """

    def _build(self, config: ModelConfig) -> None:
        width = config.n_heads * self.d_head
        self.v, self.gate = (nn.Linear(config.d_model, width, bias=config.qkv_bias) for _ in range(2))
        self.gating_norm = Normalize(config.norm, width, "attn.gating_norm")
        self.spatial = nn.Parameter(torch.zeros(config.n_ctx, config.n_heads, config.n_ctx))
        self.shift = nn.Parameter(torch.ones(config.n_ctx * config.n_heads))

    def _project(
        self, x: Float[Tensor, "b p d"], source: tuple[Tensor, Normalize], tap: Scope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The values that are mixed; queries and keys are not used."""
        mixed = self.gating_norm(at(tap, "attn.hook_channels", F.gelu(self.v(x))), tap)
        v = at(tap, "attn.hook_v", rearrange(mixed, "b p (h e) -> b p h e", e=self.d_head))
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
        assert shared.positions is not None
        n, query = v.shape[1], shared.positions
        _, v = self._with_earlier(v, v, shared)
        total = v.shape[1]
        if only is not None:
            mask, query = mask.queries(only, n, total), query.expand(len(only), -1).gather(1, only)
        key = shared.made_once("key positions", lambda: shared.layout.positions(total, 0, v.device))
        pattern = self.spatial[query].movedim(2, 1).take_along_dim(key[:, None, None], -1)
        allowed = mask.matrix(query.shape[1], total, v.device)
        pattern = pattern if allowed is None else pattern.masked_fill(~allowed, 0)
        pattern_bhqk = at(tap, "attn.hook_pattern", pattern.expand(len(v), -1, -1, -1))
        shift = self.shift.unflatten(0, (-1, v.shape[2]))[query]
        return einsum(pattern_bhqk, v, "b h q k, b k h e -> b q h e") + shift[..., None]

    def _finished(
        self, z: Float[Tensor, "b n h e"], x: Float[Tensor, "b n d"], tap: Scope | None
    ) -> Float[Tensor, "b n h e"]:
        return z * at(tap, GATE.name, F.gelu(self.gate(x)).unflatten(-1, (-1, self.d_head)))

    def part(self, name: str) -> tuple[Float[Tensor, "h e d"], Float[Tensor, "h e"] | None]:
        """AttributeError: there are no queries and keys, and values are read after GELU and a norm."""
        raise AttributeError(f"a spatial gating unit has no matrix of {name!r}: GELU and a norm follow it")


@dataclass(frozen=True)
class TokenMixing(Mixer):
    """Token mixing (MLP-Mixer): two layers over the positions, equal for every channel; bidirectional."""

    hidden: int
    """Number of units between the two layers."""

    traits = Traits(
        queries=False,
        values=False,
        reads_by_qkv=False,
        rotated=False,
        scaled=False,
        patterned=False,
        additive=False,
        grouped=False,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "hidden")

    def check(self, config: ModelConfig) -> None:
        """ValueError for a causal model, and unless heads are slices of the stream."""
        requires(not config.causal, "causal=False under TokenMixing, whose hidden units see every token")
        whole = config.n_heads * config.head_width == config.d_model
        requires(whole, "n_heads * d_head = d_model under TokenMixing")

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """Two products of the positions with the hidden units."""
        return 4 * n * self.hidden * config.d_model

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return TokenMixer(config, layer)


class TokenMixer(Attention):
    """z_i = sum_r B_ir gelu(a_r + sum_j A_rj x_j) + b_i, channel by channel; W_V and W_O are the identity.

    A `[hidden, n_ctx]`, B `[n_ctx, hidden]`; the column of A and the row of B that a token takes are its position, so
    that padding has none. Heads are slices of the stream. No weights of tokens: a non-linearity stands between.
    """

    def _build(self, config: ModelConfig) -> None:
        kind = config.mixers[self.layer]
        assert isinstance(kind, TokenMixing)
        self.v, self.out = Identity(config.d_model), Identity(config.d_model)
        self.first = nn.Parameter(torch.zeros(kind.hidden, config.n_ctx))
        self.second = nn.Parameter(torch.zeros(config.n_ctx, kind.hidden))
        self.first_bias = nn.Parameter(torch.zeros(kind.hidden))
        self.second_bias = nn.Parameter(torch.zeros(config.n_ctx))

    def _project(
        self, x: Float[Tensor, "b p d"], source: tuple[Tensor, Normalize], tap: Scope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The slices of `x` as values; queries and keys are not used."""
        v = at(tap, "attn.hook_v", rearrange(x, "b p (h e) -> b p h e", e=self.d_head))
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
        assert shared.positions is not None
        n, place, x = v.shape[1], shared.positions, v.flatten(2)
        into = rearrange(self.first[:, place], "r b p -> b r p").expand(len(x), -1, -1)
        if shared.layout.keep is not None:
            into = into * shared.layout.keep[:, None]
        if only is not None:
            place = place.expand(len(only), -1).gather(1, only)
        back = self.second[place].expand(len(x), -1, -1)
        if shared.layout.documents is None:
            hidden = F.gelu(into @ x + self.first_bias[:, None])
            z = back @ hidden
        else:  # the hidden units of the query's own text
            allowed = (mask if only is None else mask.queries(only, n, n)).allowed
            assert allowed is not None
            own = into[:, None] * allowed[:, 0, :, None]
            hidden = F.gelu(einsum(own, x, "b q r p, b p d -> b q r d") + self.first_bias[:, None])
            z = einsum(back, hidden, "b q r, b q r d -> b q d")
        return (z + self.second_bias[place][..., None]).unflatten(-1, (-1, self.d_head))

    def part(self, name: str) -> tuple[Float[Tensor, "h e d"], Float[Tensor, "h e"] | None]:
        """AttributeError: two layers over the positions have no queries, keys and values of a head."""
        raise AttributeError(f"token mixing has no matrix of {name!r}")
