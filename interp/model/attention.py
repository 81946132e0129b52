"""Multi-head attention (grouped or not) with every part a site, and what the blocks of a pass share.

The mixers of `interp.lab` are `Attention` with another way from queries, keys and values to z.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from interp.model.attend import attend
from interp.model.kv_cache import Past
from interp.model.mask import Layout, Mask, picked
from interp.model.norm import HeadNorm, Normalize
from interp.model.position import Rotation
from interp.model.tap import Scope, at

if TYPE_CHECKING:
    from interp.model.config import ModelConfig


T = TypeVar("T")
SPLIT_INPUTS = {"q": "hook_q_input", "k": "hook_k_input", "v": "hook_v_input"}


@dataclass(frozen=True)
class View:
    """What one kind of layers shares in a pass: whom its queries see, and how they are rotated."""

    mask: Mask
    rotation: Rotation | None

    def to(self, device: torch.device) -> "View":
        """The same on another device."""
        return View(self.mask.to(device), None if self.rotation is None else self.rotation.to(device))


@dataclass(frozen=True)
class Memory:
    """What cross-attention reads: the final states of an encoder, and which of them are real."""

    states: Float[Tensor, "b s d"]
    keep: Bool[Tensor, "b s"] | None = None

    def mask(self) -> Mask:
        """Every query sees every real state."""
        return Mask(causal=False, allowed=None if self.keep is None else self.keep[:, None, None, :])

    def to(self, device: torch.device) -> "Memory":
        """The same on another device."""
        return Memory(self.states.to(device), None if self.keep is None else self.keep.to(device))


@dataclass(frozen=True)
class Pass:
    """What all blocks of one forward pass share."""

    everywhere: View
    local: View
    """For layers with the sliding window."""
    cache: Past | None
    memory: Memory | None = None
    layout: Layout = field(default_factory=Layout)
    """Padding and documents of everything seen, the cached columns first."""
    positions: Int[Tensor, "#b p"] | None = None
    """Of the columns of this pass."""
    left: dict[int | tuple[int, str], tuple[Tensor, ...]] = field(default_factory=dict)
    """States that mixers leave behind; the cache takes them over once the pass is done."""
    _made: dict[Hashable, object] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives, made by the first block that asks for it in this pass."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]

    def to(self, device: torch.device) -> "Pass":
        """The same on another device; the cache keeps each layer where it is."""
        memory = None if self.memory is None else self.memory.to(device)
        positions = None if self.positions is None else self.positions.to(device)
        return replace(
            self,
            everywhere=self.everywhere.to(device),
            local=self.local.to(device),
            memory=memory,
            layout=self.layout.to(device),
            positions=positions,
            _made={},
        )


class Attention(nn.Module):
    """Attention of one block. Queries, keys and values come from one fused matrix, rows ordered q, k, v."""

    name = "attn"

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.local = config.is_local(layer)
        self.heads = [config.n_heads, config.kv_heads, config.kv_heads]
        self.d_head = config.head_width
        self.scale = config.score_scale(layer)
        self.softcap = config.attn_softcap
        self.out = nn.Linear(config.n_heads * self.d_head, config.d_model, bias=config.out_bias)
        self._build(config)
        self.sinks = nn.Parameter(torch.zeros(config.n_heads)) if config.sinks else None
        self.q_norm, self.k_norm = (self._head_norm(config, part) for part in "qk")

    def _head_norm(self, config: ModelConfig, part: str) -> HeadNorm | None:
        if config.qk_norm is None:
            return None
        n_heads, whole = self.heads["qk".index(part)], config.qk_norm == "width"
        return HeadNorm(config.norm, n_heads, self.d_head, f"{self.name}.{part}_norm", whole=whole)

    def _build(self, config: ModelConfig) -> None:
        """The matrices that queries, keys and values come from."""
        self.qkv = nn.Linear(config.d_model, sum(self.heads) * self.d_head, bias=config.qkv_bias)

    def forward(
        self,
        x: Float[Tensor, "b p d"],
        source: tuple[Float[Tensor, "b p d"], Normalize],
        shared: Pass,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """z W_O + b_O. `source` is the residual stream and the norm that `x` came from, for the split inputs.

        only: the columns of each row whose output is wanted.
        """
        q, k, v = self._normed(x, source, tap)
        view = shared.local if self.local else shared.everywhere
        q, k = self._placed(q, k, view, shared, tap)
        z = self._mix(q, k, v, view.mask, shared, tap, only)
        return self._write(at(tap, "attn.hook_z", z), tap)

    def _placed(
        self,
        q: Float[Tensor, "b p h e"],
        k: Float[Tensor, "b p g e"],
        view: View,
        shared: Pass,
        tap: Scope | None,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys rotated to their positions, where positions are rotations."""
        if view.rotation is None:
            return q, k
        q = at(tap, "attn.hook_rot_q", view.rotation.apply(q))
        return q, at(tap, "attn.hook_rot_k", view.rotation.apply(k))

    def _mix(
        self,
        q: Float[Tensor, "b p h e"],
        k: Float[Tensor, "b p g e"],
        v: Float[Tensor, "b p g e"],
        mask: Mask,
        shared: Pass,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n h e"]:
        """z of the wanted columns, from queries, keys and values of this pass and what the cache keeps of earlier ones.

        The one method that a mixer other than softmax attention must have.
        """
        k, v = self._with_earlier(k, v, shared)
        if only is not None:
            mask = mask.queries(only, q.shape[1], k.shape[1])
            q = picked(q, only)
        return self._attended(q, k, v, mask, tap)

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, tap: Scope | None
    ) -> Float[Tensor, "b p h e"]:
        return attend(
            q, k, v, mask, self.scale, tap, name=self.name, softcap=self.softcap, sinks=self.sinks
        )  # fmt: skip

    def _with_earlier(
        self, k: Float[Tensor, "b p g e"], v: Float[Tensor, "b p g e"], shared: Pass
    ) -> tuple[Tensor, Tensor]:
        """Keys and values with those of the columns that the cache keeps before them."""
        return (k, v) if shared.cache is None else shared.cache.append(self.layer, k, v)

    def _normed(
        self, x: Float[Tensor, "b p d"], source: tuple[Tensor, Normalize], tap: Scope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[b p h|g e]`, queries and keys after their norms where there are any."""
        q, k, v = self._project(x, source, tap)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, tap), self.k_norm(k, tap)
        return q, k, v

    def _project(
        self, x: Float[Tensor, "b p d"], source: tuple[Tensor, Normalize], tap: Scope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[b p h|g e]`, each a site."""
        qkv = rearrange(self.qkv(x), "b p (n e) -> b p n e", e=self.d_head)
        heads = dict(zip("qkv", qkv.split(self.heads, 2), strict=True))
        if tap is not None:
            heads = {part: self._from_split(part, head, *source, tap) for part, head in heads.items()}
        q, k, v = (at(tap, f"attn.hook_{part}", heads[part]) for part in "qkv")
        return q, k, v

    def _from_split(
        self, part: str, x: Float[Tensor, "b p h e"], resid: Tensor, norm: Normalize, tap: Scope
    ) -> Float[Tensor, "b p h e"]:
        """Recompute one of q, k, v from per-head copies of the residual, if those are edited or differentiated."""
        site = SPLIT_INPUTS[part]
        if not tap.wants(site):
            return x
        copies = resid.unsqueeze(2).expand(-1, -1, x.shape[2], -1)
        alters = tap.alters(site)
        if alters and tap.alters(f"{norm.name}.hook_normalized", f"{norm.name}.hook_scale"):
            raise ValueError(
                f"{site} and the sites of {norm.name} cannot be edited or differentiated in the same pass and layer"
            )
        copies = at(tap, site, copies)
        if not alters:
            return x
        weight, bias = self.part(part)
        out = einsum(norm(copies), weight, "b p h d, h e d -> b p h e")
        return out if bias is None else out + bias

    def _write(self, z: Float[Tensor, "b p h e"], tap: Scope | None) -> Float[Tensor, "b p d"]:
        """z @ W_O + b_O; per-head results only where somebody asks for them."""
        site = f"{self.name}.hook_result"
        if tap is not None and tap.wants(site):
            weight = rearrange(self.out.weight, "d (h e) -> h d e", e=self.d_head)
            result = at(tap, site, einsum(z, weight, "b p h e, h d e -> b p h d"))
            if tap.alters(site):
                summed = result.sum(2)
                return summed if self.out.bias is None else summed + self.out.bias
        return self.out(rearrange(z, "b p h e -> b p (h e)"))

    def part(self, name: str) -> tuple[Float[Tensor, "h e d"], Float[Tensor, "h e"] | None]:
        """Weight `[h e d]` and bias `[h e]` of "q", "k" or "v" as views of the fused matrix."""
        return self._cut(self.qkv, self.heads, "qkv".index(name))

    def _cut(self, fused: nn.Linear, heads: list[int], i: int) -> tuple[Tensor, Tensor | None]:
        weight = rearrange(fused.weight, "(n e) d -> n e d", e=self.d_head).split(heads)[i]
        if fused.bias is None:
            return weight, None
        return weight, rearrange(fused.bias, "(n e) -> n e", e=self.d_head).split(heads)[i]


class CrossAttention(Attention):
    """Queries from the decoder's stream, keys and values from the memory: matrices `q`, and `kv` with rows k, v."""

    name = "cross_attn"

    def _build(self, config: ModelConfig) -> None:
        self.q = nn.Linear(config.d_model, self.heads[0] * self.d_head, bias=config.qkv_bias)
        self.kv = nn.Linear(config.d_model, sum(self.heads[1:]) * self.d_head, bias=config.qkv_bias)

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "b p d"], shared: Pass, tap: Scope | None
    ) -> Float[Tensor, "b p d"]:
        """z W_O + b_O, from the normed stream and the memory."""
        assert shared.memory is not None
        q = rearrange(self.q(x), "b p (h e) -> b p h e", e=self.d_head)
        q = at(tap, "cross_attn.hook_q", q)
        cached = None if shared.cache is None else shared.cache.crossed.get(self.layer)
        if cached is None:
            kv = rearrange(self.kv(shared.memory.states), "b s (n e) -> b s n e", e=self.d_head)
            k, v = kv.split(self.heads[1:], 2)
            if shared.cache is not None:
                shared.cache.crossed[self.layer] = (k, v)
        else:
            k, v = cached
        k, v = at(tap, "cross_attn.hook_k", k), at(tap, "cross_attn.hook_v", v)
        z = self._attended(q, k, v, shared.memory.mask(), tap)
        return self._write(at(tap, "cross_attn.hook_z", z), tap)

    def part(self, name: str) -> tuple[Float[Tensor, "h e d"], Float[Tensor, "h e"] | None]:
        """Weight `[h e d]` and bias `[h e]` of "q", "k" or "v" as views of their matrices."""
        if name == "q":
            return self._cut(self.q, self.heads[:1], 0)
        return self._cut(self.kv, self.heads[1:], "kv".index(name))
