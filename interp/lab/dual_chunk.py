"""Dual chunk attention: rotary attention over texts longer than the model was trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.model.attention import Attention, Mask, PassState, View, attend, attend_scores, picked
from interp.model.config import DynamicScaling, LongScaling, ModelConfig, Rotary
from interp.model.position import Rotation
from interp.model.records import Mixer, Traits, maps_flops, requires
from interp.model.sites import Site
from interp.model.tap import Scope, at

QUERIES = ("attn.hook_rot_q", "attn.hook_rot_q_successive", "attn.hook_rot_q_inter")
"""The three rotations of a query: for keys of its own chunk, of the chunk before, and of earlier ones."""
RUN = 256
"""Number of queries with scores in memory at once."""


@dataclass(frozen=True)
class DualChunk(Mixer):
    """Dual chunk attention (An et al. 2024): rotary attention with relative positions below a usable length."""

    length: int
    """The largest relative position."""
    chunk: int
    """Texts up to this length are attended to as usual; `length - chunk` positions back are exact in longer ones."""

    traits = Traits(bilinear=True, scored=True, distribution=True)
    own_sites = (
        Site(
            "attn.hook_rot_q_successive",
            "b p h e",
            "queries rotated for keys of the chunk before",
            before="attn.hook_rot_k",
        ),
        Site(
            "attn.hook_rot_q_inter",
            "b p h e",
            "queries rotated for keys of earlier chunks",
            before="attn.hook_rot_k",
        ),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.chunk <= self.length <= 2 * self.chunk:
            raise ValueError(
                f"DualChunk requires 1 <= chunk <= length <= 2 chunk, got chunk {self.chunk} and length {self.length}"
            )

    def check(self, config: ModelConfig) -> None:
        """ValueError unless rotations are there, stay as they are, and chunks fit."""
        rotary = config.position if isinstance(config.position, Rotary) else None
        requires(rotary, f"rotary positions for DualChunk, got {config.position}")
        scaling = None if rotary is None else rotary.scaling
        moving = isinstance(scaling, DynamicScaling | LongScaling)
        requires(config.causal, "a causal model under DualChunk")
        requires(not moving, "rotary frequencies that do not depend on the length under DualChunk")
        requires(self.chunk <= config.n_ctx, f"a chunk <= n_ctx, got {self.chunk} > {config.n_ctx}")

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """Four maps and two products with every key up to a query's run."""
        pairs = n * n
        if n > self.chunk:
            begins = [
                i for start in range(0, n, self.chunk) for i in range(start, min(start + self.chunk, n), RUN)
            ]
            ends = [min(begin + RUN, begin // self.chunk * self.chunk + self.chunk, n) for begin in begins]
            pairs = sum((end - begin) * end for begin, end in zip(begins, ends, strict=True))
        return maps_flops(config, n) + 4 * config.n_heads * config.head_width * pairs

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return DualChunkAttention(config, layer)


def query_places(kind: DualChunk, positions: Int[Tensor, "#b p"]) -> tuple[Int[Tensor, "#b p"], ...]:
    """The positions that queries are rotated to, one for each of `QUERIES`; keys are rotated to j mod chunk.

    With s = chunk and c = length: i mod s; min(i mod s + s, c); c. So no relative position exceeds c, and those within
    a chunk and of the last c - s tokens are exact (An et al. 2024, section 3; the top index is c as in the authors'
    release, c - 1 in the paper).
    """
    inside = positions % kind.chunk
    return inside, (inside + kind.chunk).clamp_max(kind.length), torch.full_like(inside, kind.length)


class DualChunkAttention(Attention):
    """Softmax attention with rotations by the chunks of query and key; plain rotary attention up to one chunk.

    Scores are picked from the three products before one softmax, which is what the merge of three softmaxes by their
    log-sum-exp amounts to.
    """

    def _build(self, config: ModelConfig) -> None:
        kind, rotary = config.mixers[self.layer], config.position
        assert isinstance(kind, DualChunk) and isinstance(rotary, Rotary)
        super()._build(config)
        self.kind, self.rotary = kind, rotary

    def _placed(
        self,
        q: Float[Tensor, "b p h e"],
        k: Float[Tensor, "b p g e"],
        view: View,
        shared: PassState,
        tap: Scope | None,
    ) -> tuple[Tensor, Tensor]:
        """The rotated keys, and the query's three rotations side by side, or only the first where it suffices."""
        assert shared.positions is not None
        positions = shared.positions
        total = q.shape[1] + (0 if shared.cache is None else shared.cache.length)
        places = query_places(self.kind, positions)[: 1 if tap is None and total <= self.kind.chunk else 3]

        def rotation(index: int) -> Rotation:
            made = ("dual chunk", self.kind, index)
            return shared.made_once(
                made, lambda: Rotation.at(self.rotary, self.d_head, places[index], q.dtype)
            )

        q = torch.cat([at(tap, QUERIES[i], rotation(i).apply(q)) for i in range(len(places))], -1)
        return q, at(tap, "attn.hook_rot_k", rotation(0).apply(k))

    def _mix(
        self,
        q: Float[Tensor, "b p h three_e"],
        k: Float[Tensor, "b p g e"],
        v: Float[Tensor, "b p g e"],
        mask: Mask,
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n h e"]:
        n = q.shape[1]
        k, v = self._with_earlier(k, v, shared)
        total = k.shape[1]
        observed = tap is not None and tap.wants("attn.hook_attn_scores", "attn.hook_pattern")
        if only is not None:
            mask, q = mask.queries(only, n, total), picked(q, only)
        if total <= self.kind.chunk:
            return attend(q[..., : self.d_head], k, v, mask, self.scale, tap)
        if mask.causal and mask.bias is None and not observed:
            return self._by_chunks(q, k, v)
        key = shared.layout.positions(total, 0, k.device) // self.kind.chunk
        query = key[:, total - n :]
        if only is not None:
            query = query.expand(len(only), -1).gather(1, only)
        return self._joint(q, k, v, mask, query[..., None] - key[:, None], tap)

    def _joint(
        self,
        q: Float[Tensor, "b q h three_e"],
        k: Float[Tensor, "b k g e"],
        v: Float[Tensor, "b k g e"],
        mask: Mask,
        chunks_back: Int[Tensor, "#b q k"],
        tap: Scope | None,
    ) -> Float[Tensor, "b q h e"]:
        """z from the scores of all pairs: of the first, second or third rotation by how many chunks back the key is."""
        k, v = _per_query_head(k, q), _per_query_head(v, q)
        own, before, earlier = rearrange(q * self.scale, "b q h (t e) -> t b h q e", t=3)
        back = chunks_back[:, None]
        scores_bhqk = torch.where(
            back <= 0, own @ k.mT, torch.where(back == 1, before @ k.mT, earlier @ k.mT)
        )
        return attend_scores(scores_bhqk, v, mask, tap).transpose(1, 2)

    def _by_chunks(
        self, q: Float[Tensor, "b p h three_e"], k: Float[Tensor, "b p g e"], v: Float[Tensor, "b p g e"]
    ) -> Float[Tensor, "b p h e"]:
        """Attention over one text from its start, a run of queries at a time: every score is computed once."""
        n, size = q.shape[1], self.kind.chunk
        k, v = _per_query_head(k, q), _per_query_head(v, q)
        own, before_it, earlier = rearrange(q * self.scale, "b q h (t e) -> t b h q e", t=3)
        found = []
        begins = [i for start in range(0, n, size) for i in range(start, min(start + size, n), RUN)]
        for begin in begins:
            start = begin // size * size
            end, before = min(begin + RUN, start + size, n), max(start - size, 0)
            keys = (slice(before), slice(before, start), slice(start, end))
            scores = [
                q_bhqe[:, :, begin:end] @ k[:, :, of].mT
                for q_bhqe, of in zip((earlier, before_it, own), keys, strict=True)
            ]
            mask = Mask(causal=False, allowed=_triangle(end - begin, end, k.device))
            found.append(attend_scores(torch.cat(scores, -1), v[:, :, :end], mask, None).transpose(1, 2))
        return torch.cat(found, 1)


def _per_query_head(x: Float[Tensor, "b k g e"], q: Float[Tensor, "b q h _"]) -> Float[Tensor, "b h k e"]:
    """Keys or values of the head that each query head reads."""
    return x.transpose(1, 2).repeat_interleave(q.shape[2] // x.shape[2], 1)


def _triangle(n_query: int, n_key: int, device: torch.device) -> Bool[Tensor, "1 1 q k"]:
    """The last `n_query` of `n_key` positions, causal."""
    return torch.ones(n_query, n_key, dtype=torch.bool, device=device).tril(n_key - n_query)[None, None]
