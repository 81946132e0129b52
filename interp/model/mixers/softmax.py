"""Softmax attention with what the literature has done to its mask, keys, scores and pattern (the record `Softmax`)."""

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.core.temperature import log_n_factor
from interp.model.attend import attend_pieces, hidden_scores, row_softmax
from interp.model.attention import Attention, Pass, View
from interp.model.config import ModelConfig
from interp.model.mask import Mask, picked
from interp.model.mixer_variants import AdaptiveTemperature, LogN, Softmax, Sparsity
from interp.model.mixers.refinement import RowAttention
from interp.model.mixers.scores import additive_scores, sharpened, unit, visible_keys
from interp.model.sparsity import Piece, pieces, visible
from interp.model.tap import Scope, at

PIECES_FROM = 512
"""Keys from which runs of queries with gathered keys are quicker than one dense mask."""


class SoftmaxAttention(Attention):
    """Softmax attention with any option of its record; with none of them it is `Attention`.

    cosine: s_h q_i . k_j / (|q_i| |k_j|) behind the rotation, `sharpness` s_h trained from sqrt(d_head): scores then
    spread as scaled products of normal vectors. additive: w_h . tanh(q_i + k_j), `score` w_h trained; no fused form.
    Neither has another scale.
    LogN (Su 2021; Chiang and Cholak 2022): raw scores of a query times log n / log m, n the keys that it sees through
    every mask; bias and soft cap come after. AdaptiveTemperature (Velickovic et al. 2024): scores, as they enter the
    softmax, times beta(H) of their row; no fused form.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        kind = config.mixers[layer]
        assert isinstance(kind, Softmax)
        super().__init__(config, layer)
        self.kind = kind
        self.smear = nn.Parameter(torch.zeros(config.kv_heads)) if kind.smeared_keys else None
        start = torch.full((config.n_heads,), self.d_head**0.5)
        self.sharpness = nn.Parameter(start) if kind.score == "cosine" else None
        weight = torch.randn(config.n_heads, self.d_head)
        self.score = nn.Parameter(weight) if kind.score == "additive" else None
        self.refinement = None if kind.refinement is None else RowAttention(config, layer, kind.refinement)
        if kind.score != "dot":
            self.scale = 1.0
        adaptive = isinstance(kind.temperature, AdaptiveTemperature)
        self.explicit = adaptive or self.score is not None or self.refinement is not None

    def _placed(
        self,
        q: Float[Tensor, "b p h e"],
        k: Float[Tensor, "b p g e"],
        view: View,
        shared: Pass,
        tap: Scope | None,
    ) -> tuple[Tensor, Tensor]:
        if self.smear is not None:
            k = at(tap, "attn.hook_smeared_k", self._smeared(k, self.smear, shared))
        q, k = super()._placed(q, k, view, shared, tap)
        if self.sharpness is None:
            return q, k
        return unit(q) * self.sharpness[:, None], unit(k)

    def _smeared(
        self, k: Float[Tensor, "b p g e"], alpha: Float[Tensor, "g"], shared: Pass
    ) -> Float[Tensor, "b p g e"]:
        """s k_j + (1 - s) k_{j-1}, s = sigmoid(alpha), per key head; the first key of a text as it is.

        Olsson et al. 2022, "Smeared keys". k_{j-1} is the key of the kept token before, from the cache if need be.
        """
        assert shared.positions is not None
        cache, rows = shared.cache, len(k)
        state = () if cache is None else cache.states.get(self.layer, ())
        earlier = torch.cat((state[0] if state else torch.zeros_like(k[:, :1]), k), 1)
        source = shared.once("column before", lambda: _column_before(shared, k)).expand(rows, -1)
        if cache is not None:
            shared.left[self.layer] = (picked(earlier, source[:, -1:]),)
        before = picked(earlier, source[:, :-1])
        first = (shared.positions == 0)[..., None, None]
        share = alpha.sigmoid()[:, None]
        return torch.where(first, k, share * k + (1 - share) * before)

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
        n = q.shape[1]
        if shared.cache is not None:
            k, v = shared.cache.append(self.layer, k, v)
        total = k.shape[1]
        if self.refinement is not None:
            mask = self._mask(mask, n, total, shared, None, k.device)
            first = at(tap, "attn.hook_first_pattern", self._pattern(q, k, mask, tap))
            return self._weighted(self.refinement(first, mask, shared, only), v, tap)
        if only is not None:
            q = picked(q, only)
        elif self._in_pieces(mask, n, total, tap):
            found = self._pieces(mask, total, shared, k.device)
            if isinstance(self.kind.temperature, LogN):
                q = q * self._factor(torch.cat([piece.allowed.sum(-1) for piece in found])[None], q)
            return attend_pieces(q, k, v, found, self.scale)
        return self._attended(q, k, v, self._mask(mask, n, total, shared, only, k.device), tap)

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, tap: Scope | None
    ) -> Float[Tensor, "b p h e"]:
        if self.explicit:
            return self._weighted(self._pattern(q, k, mask, tap), v, tap)
        if isinstance(self.kind.temperature, LogN):
            q = q * self._factor(visible_keys(mask, q.shape[1], k.shape[1], q.device), q)
        return super()._attended(q, k, v, mask, tap)

    def _factor(self, seen: Int[Tensor, "#b q"], like: Tensor) -> Float[Tensor, "#b #q 1 1"]:
        """log n / log m for queries that see n keys; 1 without this temperature."""
        kind = self.kind.temperature
        if not isinstance(kind, LogN):
            return like.new_ones(1, 1, 1, 1)
        factor = log_n_factor(seen.clamp_min(1), kind.train_length)
        factor = factor if kind.floor is None else factor.clamp_min(kind.floor)
        return factor.to(like.dtype)[:, :, None, None]

    def _pattern(
        self, q: Float[Tensor, "b q h e"], k: Float[Tensor, "b k g e"], mask: Mask, tap: Scope | None
    ) -> Float[Tensor, "b h q k"]:
        """The softmax of the scores, which are a site."""
        k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
        factor = self._factor(visible_keys(mask, q.shape[1], k.shape[1], q.device), q)
        if self.score is None:
            scores = einsum(q * factor * self.scale, k, "b q h e, b k h e -> b h q k")
        else:
            scores = additive_scores(q, k, self.score) * factor.movedim(2, 1)
        scores = hidden_scores(scores, mask, self.softcap)
        if isinstance(self.kind.temperature, AdaptiveTemperature):
            scores = sharpened(scores, mask)
        return row_softmax(at(tap, "attn.hook_attn_scores", scores), mask).to(q.dtype)

    def _weighted(
        self, pattern_bhqk: Float[Tensor, "b h q k"], v: Float[Tensor, "b k g e"], tap: Scope | None
    ) -> Float[Tensor, "b q h e"]:
        v = v.repeat_interleave(pattern_bhqk.shape[1] // v.shape[2], 2)
        return einsum(at(tap, "attn.hook_pattern", pattern_bhqk), v, "b h q k, b k h e -> b q h e")

    def _mask(
        self,
        mask: Mask,
        n: int,
        total: int,
        shared: Pass,
        only: Int[Tensor, "b n"] | None,
        device: torch.device,
    ) -> Mask:
        """The mask of the wanted queries (None: of all), joined with the sparse pattern."""
        kind = self.kind.sparsity
        if kind is None:
            return mask if only is None else mask.queries(only, n, total)
        columns = torch.arange(n, device=device)[None] if only is None else only
        if only is not None and not mask.causal:
            mask = mask.queries(only, n, total)
        key = ("sparse mask", kind, self.local, only is None)
        return shared.once(key, lambda: _joined(kind, mask, columns + total - n, total, shared))

    def _in_pieces(self, mask: Mask, n: int, total: int, tap: Scope | None) -> bool:
        """Whether gathered keys serve: a long text without padding, window or bias, and nobody looks."""
        observed = tap is not None and tap.wants("attn.hook_attn_scores", "attn.hook_pattern")
        plain = mask.allowed is None and mask.bias is None and self.softcap is None and self.sinks is None
        plain = plain and not self.explicit
        return self.kind.sparsity is not None and plain and not observed and n > 1 and total >= PIECES_FROM

    def _pieces(self, mask: Mask, total: int, shared: Pass, device: torch.device) -> tuple[Piece, ...]:
        kind = self.kind.sparsity
        assert kind is not None
        made = ("sparse pieces", kind)
        return shared.once(made, lambda: pieces(kind, total, total, device, causal=mask.causal))


def _joined(kind: Sparsity, mask: Mask, columns: Int[Tensor, "#b q"], total: int, shared: Pass) -> Mask:
    """The mask of the queries at these columns, of all that were seen, and the pattern on their positions."""
    key = shared.layout.positions(total, 0, columns.device)
    rows = max(len(key), len(columns))
    query = key.expand(rows, -1).gather(1, columns.expand(rows, -1))
    allowed = visible(kind, query, key)[:, None]
    if mask.causal:
        place = torch.arange(total, device=columns.device)
        return Mask(causal=False, allowed=allowed & (place <= columns[:, None, :, None]))
    if mask.allowed is not None:
        allowed = allowed & mask.allowed
    joined = Mask(causal=False, allowed=allowed)
    return joined if mask.bias is None else joined.with_bias(mask.bias)


def _column_before(shared: Pass, like: Tensor) -> Int[Tensor, "#b n"]:
    """For each column of this pass and the one after the last: 1 + the column of the kept token before, or 0."""
    n = like.shape[1]
    column = torch.arange(1, n + 1, device=like.device)[None]
    if shared.layout.keep is not None:
        column = column.masked_fill(~shared.layout.keep[:, -n:], 0).cummax(1).values
    return torch.nn.functional.pad(column, (1, 0))
