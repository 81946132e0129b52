"""Synthesizer: attention weights without keys (Tay et al. 2021, "Rethinking Self-Attention")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.model.attention import Attention, Mask, PassState, attend_scores, picked
from interp.model.config import ModelConfig
from interp.model.norm import Normalize
from interp.model.records import Mixer, Traits
from interp.model.tap import Scope, at


@dataclass(frozen=True)
class Synthesizer(Mixer):
    """Synthesizer attention (Tay et al. 2021): scores from the query's token only, or trained as they are."""

    scores: Literal["dense", "random"] = "dense"
    """How scores are made. `dense`: two layers on what the query reads; `random`: one trained matrix `[query, key]`
    per head.
    """

    traits = Traits(
        queries=False,
        rotated=False,
        reads_by_qkv=False,
        scaled=False,
        scored=True,
        distribution=True,
        grouped=False,
    )

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """Two maps and a product with every pair; dense: a hidden layer, and a product for the scores."""
        h, e, maps = config.n_heads, config.head_width, 2 * n * config.d_model
        if self.scores == "random":
            return 2 * maps * h * e + 2 * h * n**2 * e
        return 3 * maps * h * e + 4 * h * n**2 * (e + 1)

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return SynthesizerAttention(config, layer)


class SynthesizerAttention(Attention):
    """pattern = softmax(scores) over what the mask shows, z = pattern @ v; no scale on the scores.

    dense (equations 2 and 3): scores of a query for the positions 0 to n_ctx - 1 are relu(x W_1 + b_1) W_2 + b_2, x
    what attention reads; a hidden layer of d_head for each head; `keys [position, head, e + 1]` is W_2 beside b_2.
    random (equation 4): scores are `keys [query position, head, key position]`, trained as they are.
    Positions count the kept tokens of a text, so that the score of a key is that of its place in it.
    """

    def _build(self, config: ModelConfig) -> None:
        kind = config.mixers[self.layer]
        assert isinstance(kind, Synthesizer)
        n_heads = config.n_heads
        width = n_heads * self.d_head
        self.scale = 1.0
        self.v = nn.Linear(config.d_model, width, bias=config.qkv_bias)
        self.dense = nn.Linear(config.d_model, width) if kind.scores == "dense" else None
        columns = config.n_ctx if self.dense is None else self.d_head + 1
        self.keys = nn.Parameter(torch.randn(config.n_ctx, n_heads, columns))

    def _project(
        self, x: Float[Tensor, "b p d"], source: tuple[Tensor, Normalize], tap: Scope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The hidden layer with a 1 after it (dense) in the place of queries, and values; keys are not used."""
        v = rearrange(self.v(x), "b p (h e) -> b p h e", e=self.d_head)
        if tap is not None:
            v = self._from_split("v", v, *source, tap)
        v = at(tap, "attn.hook_v", v)
        if self.dense is None:
            return v, v, v
        hidden = rearrange(self.dense(x).relu(), "b p (h e) -> b p h e", e=self.d_head)
        return F.pad(hidden, (0, 1), value=1.0), v, v

    def _mix(
        self,
        q: Float[Tensor, "b p h _"],
        k: Float[Tensor, "b p h e"],
        v: Float[Tensor, "b p h e"],
        mask: Mask,
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n h e"]:
        assert shared.positions is not None
        n, query = q.shape[1], shared.positions
        _, v = self._with_earlier(v, v, shared)
        if only is not None:
            mask, q = mask.queries(only, n, v.shape[1]), picked(q, only)
            query = query.expand(len(only), -1).gather(1, only)
        key = shared.made_once("key positions", lambda: shared.layout.positions(v.shape[1], 0, v.device))
        if self.dense is None:
            return self._attend_random(query, key, v, mask, tap)
        keys, z = self.keys[key].expand(len(v), -1, -1, -1), F.pad(v, (0, 1))
        return self._attended(q, keys, z, mask, tap)[..., : self.d_head]

    def _attend_random(
        self, query: Int[Tensor, "#b q"], key: Int[Tensor, "#b k"], v: Float[Tensor, "b k h e"], mask: Mask,
        tap: Scope | None,
    ) -> Float[Tensor, "b q h e"]:  # fmt: skip
        """z by one matrix of scores for all rows of the batch, unless it is read or rows count otherwise."""
        rows = self.keys[query].movedim(2, 1)  # [#b h q position]
        scores = rows.take_along_dim(key[:, None, None], -1)
        if tap is not None:
            scores = scores.expand(len(v), -1, -1, -1).contiguous()
        return attend_scores(scores, v.transpose(1, 2), mask, tap).transpose(1, 2)

    def part(self, name: str) -> tuple[Float[Tensor, "h e d"], Float[Tensor, "h e"] | None]:
        """Weight `[h e d]` and bias `[h e]` of "v" as views; AttributeError for "q" and "k"."""
        if name != "v":
            raise AttributeError(
                "a Synthesizer has no queries and keys: its scores are synthesised without keys"
            )
        return self._cut(self.v, self.heads[:1], 0)
