"""Softmax attention, and what the literature has done to its mask, keys, scores and pattern: the record `Softmax`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from interp.core.kinds import Finite
from interp.model.attention import (
    Attention,
    Mask,
    PassState,
    View,
    hidden_scores,
    picked,
    row_softmax,
)
from interp.model.norm import Norm, Normalize, NormedHeads, RMSNorm
from interp.model.position import Alibi, Buckets
from interp.model.records import ConfigRecord, Mixer, Traits, at_least_one, maps_flops, positive, requires
from interp.model.rules import constant, constant_pattern, halves, secant
from interp.model.sites import GATE, Site
from interp.model.sparsity import QueryPiece, Sparsity, attend_pieces, pieces, visible
from interp.model.tap import Scope, at

if TYPE_CHECKING:
    from interp.model.config import ModelConfig

ScoreKind = Literal["dot", "cosine", "additive"]
ScoreRefinement = Literal["simple", "value", "additive", "stochastic"]
PIECES_FROM = 512
"""Keys from which runs of queries with gathered keys are quicker than one dense mask."""
BLOCK = 1 << 24
"""The most numbers of `[b q k h e]` in memory at once."""


class Temperature(ConfigRecord):
    """Base class of temperatures: factors on the scores of a query."""

    by_count: ClassVar[bool] = False
    """Whether the factor depends on the number of keys that a query sees through every mask: `factor`."""
    by_row: ClassVar[bool] = False
    """Whether the factor depends on the scores themselves: `sharpened`."""

    def factor(self, seen: Int[Tensor, "#b q"]) -> Float[Tensor, "#b q"]:
        """The factor on raw scores of queries that see `seen` keys."""
        raise NotImplementedError

    def sharpened(self, hidden_bhqk: Float[Tensor, "b h q k"], mask: Mask) -> Float[Tensor, "b h q k"]:
        """The scores as they enter the softmax, -inf where the mask forbids."""
        return hidden_bhqk


@dataclass(frozen=True)
class LogSteps(Temperature):
    """Logarithmic temperature in steps (Llama 4): scores times 1 + weight ln(1 + floor(n / step)), in float32.

    n is the number of keys that a query sees.
    """

    step: int
    weight: Finite

    by_count = True

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "step")

    def factor(self, seen: Int[Tensor, "#b q"]) -> Float[Tensor, "#b q"]:
        """The factor: 1 up to step - 1 keys, then higher at every step."""
        return 1.0 + self.weight * (seen.float() / self.step).floor().log1p()


@dataclass(frozen=True)
class Chunks(Sparsity):
    """Chunked attention (Llama 4): a query sees the keys of its own chunk.

    Chunks are positions 0 to size - 1, size to 2 size - 1, and so on.
    """

    size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "size")

    def run_sees(
        self, first: Int[Tensor, "..."], last: Int[Tensor, "..."], key: Int[Tensor, "..."]
    ) -> Bool[Tensor, "..."]:
        """Whether a key is in the chunks from that of the first query to that of the last."""
        begin, end, key_chunk = (torch.div(x, self.size, rounding_mode="floor") for x in (first, last, key))
        return (begin <= key_chunk) & (key_chunk <= end)


@dataclass(frozen=True)
class Softmax(Mixer):
    """Softmax attention, multi-head, grouped or multi-query, with options for its mask, keys, scores and pattern."""

    score: ScoreKind = "dot"
    """How scores are made. `cosine`: a trained factor per head times the cosine; `additive`: w . tanh(q + k)
    (Bahdanau et al. 2015).
    """
    sparsity: Sparsity | None = None
    """Fixed sparse pattern: which keys a query sees at all, beyond causality and `window`."""
    temperature: Temperature | None = None
    smeared_keys: bool = False
    """Whether each key is mixed with the one before it, by a trained share per head (Olsson et al. 2022)."""
    refinement: ScoreRefinement | None = None
    """Whether and how the pattern passes through attention between its own rows (Liu et al. 2024)."""
    rotated: bool = True
    """False: rotary positions leave its queries and keys as they are, a layer without positions (SmolLM3, Cohere2)."""
    clip: float | None = None
    """Limit to which queries, keys and values are cut, at plus and minus: after their sites, before any norm (MPT).
    """
    head_norm: float | None = None
    """Eps of an RMSNorm of its own, without gamma, of each head's queries and keys (Llama 4); None = as `qk_norm` says.

    It stands after their rotation, which changes no length: `attn.hook_rot_q` and `hook_rot_k` are rotated and normed.
    """
    gate: bool = False
    """Whether z is multiplied by a sigmoid, made from what the block reads, before it is written (Qwen3-Next)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "clip", "head_norm")

    own_sites = (
        Site(
            "attn.hook_smeared_k",
            "b p g e",
            "keys with a share of the key before, before rotation",
            before="attn.hook_rot_q",
        ),
        Site(
            "attn.hook_first_pattern",
            "b h q k",
            "the pattern before its refinement; rows sum to 1",
            before="attn.hook_pattern",
        ),
        GATE,
    )

    @property
    def traits(self) -> Traits:
        """What analyses may rely on with this attention.

        `bilinear`: a score is q . k times a factor that depends on the query alone, which smeared keys and a refinement
        of the pattern prevent. With `clip` queries, keys and values are no linear maps of the stream, so there are no
        QK and OV circuits. With `gate` z is not pattern @ values.
        """
        linear = self.clip is None
        bilinear = linear and self.score == "dot" and not self.smeared_keys and self.refinement is None
        by_row = self.temperature is not None and self.temperature.by_row
        stateful = self.smeared_keys or self.refinement is not None
        return Traits(
            bilinear=bilinear,
            additive=linear and not self.gate,
            beside="a gate follows it" if self.gate else "its queries, keys and values are clipped",
            reads_by_qkv=not self.gate,
            rotated=self.rotated,
            scaled=self.score == "dot",
            scored=True,
            softmax=True,
            softmax_of_pairs=not (stateful or by_row),
            distribution=True,
            separable=bilinear and not by_row,
            stateful=stateful,
            masked=not stateful,
        )

    @property
    def plain(self) -> bool:
        """Whether it is usual softmax attention, rotated or not."""
        return replace(self, rotated=True) == Softmax()

    def qk_norm(self, config: ModelConfig) -> tuple[Norm, NormedHeads] | None:
        """The norm of queries and keys: its own, or that of the config."""
        if self.head_norm is None:
            return super().qk_norm(config)
        return RMSNorm(self.head_norm, trained="nothing"), "head"

    def check(self, config: ModelConfig) -> None:
        """ValueError for sinks, which need plain scores, or for two norms of queries and keys."""
        requires(self.head_norm is None or config.qk_norm is None, "no qk_norm beside head_norm")
        bounded = self.score != "dot" or self.refinement is not None or self.temperature is not None
        requires(not (bounded and config.sinks), f"no sinks beside the {self}")

    def sites(self, config: ModelConfig) -> tuple[Site, ...]:
        """The sites of smeared keys, of the pattern before a refinement, and of a gate, where they exist."""
        has = (self.smeared_keys, self.refinement is not None, self.gate)
        return tuple(site for site, present in zip(self.own_sites, has, strict=True) if present)

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """Operations of four maps and two products per pair.

        A sparse pattern saves those of long texts, a window none.
        """
        h, e, width = config.n_heads, config.head_width, config.d_model
        total = maps_flops(config, n) + (2 * n * width * h * e if self.gate else 0)
        if self.refinement is not None:
            wide = 8 if self.refinement == "stochastic" else 6
            total += h * (wide * n**2 * e + (2 * n**3 if self.refinement == "value" else 0))
        return total + 4 * h * e * self._pairs(config, layer, n)

    def _pairs(self, config: ModelConfig, layer: int, n: int) -> int:
        """Pairs of query and key whose product is computed."""
        by_row = self.temperature is not None and self.temperature.by_row
        explicit = by_row or self.score == "additive" or self.refinement is not None or config.attn_softcap
        hidden = config.window is not None and config.window < n and config.is_local(layer)
        dense = explicit or hidden or config.sinks or isinstance(config.position, Alibi | Buckets)
        if self.sparsity is None or dense or n < PIECES_FROM:
            return n * (n + (1 if config.sinks and not config.attn_softcap else 0))
        query_pieces = pieces(self.sparsity, n, n, torch.device("cpu"), causal=config.causal)
        return sum(len(piece.allowed) * len(piece.keys) for piece in query_pieces)

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """`Attention`, or `SoftmaxAttention` where any option is set."""
        return Attention(config, layer) if self.plain else SoftmaxAttention(config, layer, self)


class SoftmaxAttention(Attention):
    """Softmax attention with any option of its record; with none of them it is `Attention`.

    cosine: s_h q_i . k_j / (|q_i| |k_j|) after the rotation, `sharpness` s_h trained from sqrt(d_head): scores then
    spread as scaled products of normal vectors. additive: w_h . tanh(q_i + k_j), `score` w_h trained; no fused form.
    Neither has another scale.
    A temperature multiplies raw scores, before bias and soft cap (`by_count`), or the scores as they enter the softmax
    (`by_row`; no fused form).
    """

    def __init__(self, config: ModelConfig, layer: int, kind: Softmax) -> None:
        super().__init__(config, layer)
        self.kind = kind
        self.smear = nn.Parameter(torch.zeros(config.kv_heads)) if kind.smeared_keys else None
        start = torch.full((config.n_heads,), self.d_head**0.5)
        self.sharpness = nn.Parameter(start) if kind.score == "cosine" else None
        weight = torch.randn(config.n_heads, self.d_head)
        self.score = nn.Parameter(weight) if kind.score == "additive" else None
        width = config.n_heads * self.d_head
        self.gate = nn.Linear(config.d_model, width, bias=config.qkv_bias) if kind.gate else None
        self.refinement = None if kind.refinement is None else RowAttention(config, layer, kind.refinement)
        if kind.score != "dot":
            self.scale = 1.0
        by_row = kind.temperature is not None and kind.temperature.by_row
        self.explicit = by_row or self.score is not None or self.refinement is not None

    def _project(
        self, x: Float[Tensor, "b p d"], source: tuple[Tensor, Normalize], tap: Scope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, whose sites hold what the matrices give, before any clip."""
        q, k, v = super()._project(x, source, tap)
        most = self.kind.clip
        if most is None:
            return q, k, v
        cut = partial(torch.clamp, min=-most, max=most)
        q, k, v = (secant(cut, x, self.rules) for x in (q, k, v))
        return q, k, v

    def _placed(
        self,
        q: Float[Tensor, "b p h e"],
        k: Float[Tensor, "b p g e"],
        view: View,
        shared: PassState,
        tap: Scope | None,
    ) -> tuple[Tensor, Tensor]:
        if self.smear is not None:
            k = at(tap, "attn.hook_smeared_k", self._smeared_keys(k, self.smear, shared))
        place = super()._placed if self.kind.head_norm is None else self._turned_and_normed
        q, k = place(q, k, view, shared, tap)
        if self.sharpness is None:
            return q, k
        return unit(q) * self.sharpness[:, None], unit(k)

    def _normed(
        self, x: Float[Tensor, "b p d"], source: tuple[Tensor, Normalize], tap: Scope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, not yet normed by a `head_norm`."""
        return (super()._normed if self.kind.head_norm is None else self._project)(x, source, tap)

    def _turned_and_normed(
        self,
        q: Float[Tensor, "b p h e"],
        k: Float[Tensor, "b p g e"],
        view: View,
        shared: PassState,
        tap: Scope | None,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys first rotated (with rotary positions), then normed."""
        assert self.q_norm is not None and self.k_norm is not None
        rotation = view.rotation if self.rotated else None
        if rotation is None:
            return self.q_norm(q, tap), self.k_norm(k, tap)
        q, k = self.q_norm(rotation.apply(q), tap), self.k_norm(rotation.apply(k), tap)
        return at(tap, "attn.hook_rot_q", q), at(tap, "attn.hook_rot_k", k)

    def _finished(
        self, z: Float[Tensor, "b n h e"], x: Float[Tensor, "b n d"], tap: Scope | None
    ) -> Float[Tensor, "b n h e"]:
        if self.gate is None:
            return z
        gate = constant(self.gate(x).sigmoid().unflatten(-1, (-1, self.d_head)), self.rules)
        return z * at(tap, GATE.name, gate)

    def _smeared_keys(
        self, k: Float[Tensor, "b p g e"], alpha: Float[Tensor, "g"], shared: PassState
    ) -> Float[Tensor, "b p g e"]:
        """s k_j + (1 - s) k_{j-1}, s = sigmoid(alpha), per key head; the first key of a text is unchanged.

        Olsson et al. 2022, "Smeared keys". k_{j-1} is the key of the kept token before, from the cache if need be.
        """
        assert shared.positions is not None
        cache, rows = shared.cache, len(k)
        state = () if cache is None else cache.states.get(self.layer, ())
        earlier = torch.cat((state[0] if state else torch.zeros_like(k[:, :1]), k), 1)
        source = shared.made_once("column before", lambda: _columns_before(shared, k)).expand(rows, -1)
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
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n h e"]:
        n = q.shape[1]
        k, v = self._with_earlier(k, v, shared)
        total = k.shape[1]
        if self.refinement is not None:
            mask = self._mask(mask, n, total, shared, None, k.device)
            first = at(tap, "attn.hook_first_pattern", self._pattern(q, k, mask, tap))
            return self._weighted(self.refinement(first, mask, shared, only), v, tap)
        if only is not None:
            q = picked(q, only)
        elif self._attends_in_pieces(mask, n, total, tap):
            query_pieces = self._pieces(mask, total, shared, k.device)
            if self.kind.temperature is not None and self.kind.temperature.by_count:
                q = q * self._factor(torch.cat([piece.allowed.sum(-1) for piece in query_pieces])[None], q)
            q, k = (constant_pattern(halves(x, self.rules), self.rules) for x in (q, k))
            return halves(attend_pieces(q, k, v, query_pieces, self.scale), self.rules)
        return self._attended(q, k, v, self._mask(mask, n, total, shared, only, k.device), tap)

    def _attended(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, tap: Scope | None
    ) -> Float[Tensor, "b p h e"]:
        if self.explicit:
            return self._weighted(self._pattern(q, k, mask, tap), v, tap)
        if self.kind.temperature is not None and self.kind.temperature.by_count:
            q = q * self._factor(visible_keys(mask, q.shape[1], k.shape[1], q.device), q)
        return super()._attended(q, k, v, mask, tap)

    def score_factor(self, seen: Int[Tensor, "#b q"], like: Tensor) -> Float[Tensor, "#b #q"]:
        """The scale times the temperature's factor for `seen` keys."""
        return super().score_factor(seen, like) * self._factor(seen, like)[:, :, 0, 0]

    def _factor(self, seen: Int[Tensor, "#b q"], like: Tensor) -> Float[Tensor, "#b #q 1 1"]:
        """The temperature's factor on raw scores of queries that see `seen` keys; 1 if it does not depend on them."""
        kind = self.kind.temperature
        if kind is None or not kind.by_count:
            return like.new_ones(1, 1, 1, 1)
        return kind.factor(seen).to(like.dtype)[:, :, None, None]

    def _pattern(
        self, q: Float[Tensor, "b q h e"], k: Float[Tensor, "b k g e"], mask: Mask, tap: Scope | None
    ) -> Float[Tensor, "b h q k"]:
        """The softmax of the scores, which are a site."""
        k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)  # [b k g e] -> [b k h e]
        factor = self._factor(visible_keys(mask, q.shape[1], k.shape[1], q.device), q)
        if self.score is None:
            scores = halves(einsum(q * factor * self.scale, k, "b q h e, b k h e -> b h q k"), self.rules)
        else:
            scores = additive_scores(q, k, self.score) * factor.movedim(2, 1)
        scores = hidden_scores(scores, mask, self.softcap)
        if self.kind.temperature is not None:
            scores = self.kind.temperature.sharpened(scores, mask)
        return row_softmax(at(tap, "attn.hook_attn_scores", scores), mask).to(q.dtype)

    def _weighted(
        self, pattern_bhqk: Float[Tensor, "b h q k"], v: Float[Tensor, "b k g e"], tap: Scope | None
    ) -> Float[Tensor, "b q h e"]:
        v = v.repeat_interleave(pattern_bhqk.shape[1] // v.shape[2], 2)  # [b k g e] -> [b k h e]
        weights = at(tap, "attn.hook_pattern", constant_pattern(pattern_bhqk, self.rules))
        return halves(einsum(weights, v, "b h q k, b k h e -> b q h e"), self.rules)

    def _mask(
        self,
        mask: Mask,
        n: int,
        total: int,
        shared: PassState,
        only: Int[Tensor, "b n"] | None,
        device: torch.device,
    ) -> Mask:
        """The mask of the queries at `only` (None: of all), joined with the sparse pattern."""
        kind = self.kind.sparsity
        if kind is None:
            return mask if only is None else mask.queries(only, n, total)
        columns = torch.arange(n, device=device)[None] if only is None else only
        if only is not None and not mask.causal:
            mask = mask.queries(only, n, total)
        key = ("sparse mask", kind, self.local, only is None)
        return shared.made_once(key, lambda: _joined(kind, mask, columns + total - n, total, shared))

    def _attends_in_pieces(self, mask: Mask, n: int, total: int, tap: Scope | None) -> bool:
        """Whether `attend_pieces` can be used: long text, no padding, window or bias, scores and pattern unread."""
        observed = tap is not None and tap.wants("attn.hook_attn_scores", "attn.hook_pattern")
        plain = mask.allowed is None and mask.bias is None and self.softcap is None and self.sinks is None
        plain = plain and not self.explicit
        return self.kind.sparsity is not None and plain and not observed and n > 1 and total >= PIECES_FROM

    def _pieces(
        self, mask: Mask, total: int, shared: PassState, device: torch.device
    ) -> tuple[QueryPiece, ...]:
        kind = self.kind.sparsity
        assert kind is not None
        key = ("sparse pieces", kind)
        return shared.made_once(key, lambda: pieces(kind, total, total, device, causal=mask.causal))


def _joined(kind: Sparsity, mask: Mask, columns: Int[Tensor, "#b q"], total: int, shared: PassState) -> Mask:
    """The mask of the queries at `columns` (cached ones counted), joined with the sparse pattern of `kind`."""
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


def _columns_before(shared: PassState, like: Tensor) -> Int[Tensor, "#b n"]:
    """For each column of this pass, and one past it: 1 + the column of the last real token before, 0 if none."""
    n = like.shape[1]
    column = torch.arange(1, n + 1, device=like.device)[None]
    if shared.layout.keep is not None:
        column = column.masked_fill(~shared.layout.keep[:, -n:], 0).cummax(1).values
    return F.pad(column, (1, 0))


class RowAttention(nn.Module):
    """The refined pattern (after Liu et al. 2024, "Pay Attention to Attention for Sequential Recommendation").

    Row i of the pattern A, weights of the keys' positions, becomes two vectors of width d_head: a_i = A_i U and
    b_i = A_i W, with U and W trained, `query` and `key` `[head, position, d_head]`. Then, over the rows j that i sees,
        B_ij = softmax_j(a_i . b_j / sqrt(d_head));
    simple: B; value: B A, the mean of rows; additive: (A + B) / 2.
    stochastic: a row is a normal distribution of mean A_i U and variances elu(A_i W) + 1, and rows are compared by the
    squared 2-Wasserstein distance, as STOSA compares items (Fan et al. 2022):
        B_ij = softmax_j(-(|m_i - m_j|^2 + |s_i - s_j|^2) / sqrt(d_head)), s the standard deviations.
    Rows of each sum to 1, and nothing after i enters row i. This is our reading for causal models: the paper's refined
    weights come from trained matrices and are used in these ways; its formulas we have not seen.

    The rows b_j of the past are kept in the cache, and with `value` those of A.
    """

    def __init__(self, config: ModelConfig, layer: int, kind: ScoreRefinement) -> None:
        super().__init__()
        self.kind, self.state, self.scale = kind, (layer, "refinement"), config.head_width**-0.5
        shape = (config.n_heads, config.n_ctx, config.head_width)
        self.query, self.key = (nn.Parameter(torch.randn(shape)) for _ in range(2))

    def forward(
        self,
        pattern: Float[Tensor, "b h q k"],
        mask: Mask,
        shared: PassState,
        only: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b h n k"]:
        """The refined pattern at the columns `only` (None: all), from the first pattern of all columns of this pass."""
        n, total = pattern.shape[2:]
        places = shared.made_once("key positions", lambda: shared.layout.positions(total, 0, pattern.device))
        # a_i and b_i: [b h q k] [b h k e] -> [b h q e]
        left, right = (pattern @ table[:, places].movedim(1, 0) for table in (self.query, self.key))
        if self.kind == "stochastic":
            left = right = torch.cat((left, (F.elu(right) + 1).sqrt()), -1)
        mask = Mask(mask.causal, mask.allowed)
        right, rows = self._with_past(right, pattern, shared)
        if only is not None:
            mask, columns = mask.queries(only, n, total), only[:, None, :, None]
            left, pattern = left.take_along_dim(columns, 2), pattern.take_along_dim(columns, 2)
        if self.kind == "stochastic":
            lengths = left.square().sum(-1, keepdim=True) + right.square().sum(-1)[..., None, :]
            scores = (2 * left @ right.mT - lengths) * self.scale
        else:
            scores = (left * self.scale) @ right.mT
        higher = row_softmax(hidden_scores(scores, mask), mask).to(pattern.dtype)
        if self.kind == "value":
            return higher @ rows
        return (pattern + higher) / 2 if self.kind == "additive" else higher

    def _with_past(
        self, right: Float[Tensor, "b h q r"], pattern: Float[Tensor, "b h q k"], shared: PassState
    ) -> tuple[Float[Tensor, "b h k r"], Float[Tensor, "b h _ k"]]:
        """The vectors b_j of cached and new columns; with kind "value" the rows of A of both too."""
        if shared.cache is None:
            return right, pattern
        if past := shared.cache.states.get(self.state):
            right = torch.cat((past[0], right), 2)
            if self.kind == "value":
                pattern = torch.cat((F.pad(past[1], (0, pattern.shape[3] - past[1].shape[3])), pattern), 2)
        shared.left[self.state] = (right, pattern) if self.kind == "value" else (right,)
        return right, pattern


def unit(x: Float[Tensor, "*b e"]) -> Float[Tensor, "*b e"]:
    """x / |x|; zeros stay zeros."""
    return F.normalize(x, dim=-1)


def additive_scores(
    q: Float[Tensor, "b q h e"], k: Float[Tensor, "b k h e"], weight: Float[Tensor, "h e"]
) -> Float[Tensor, "b h q k"]:
    """w_h . tanh(q_i + k_j) (Bahdanau et al. 2015, section A.1.2): b h q k e products, and no fused kernel.

    Computed in blocks of queries, so that `[b q k h e]` is never whole in memory; the backward pass recomputes them.
    """

    def block(queries: Float[Tensor, "b q h e"]) -> Float[Tensor, "b h q k"]:
        return einsum((queries[:, :, None] + k[:, None]).tanh(), weight, "b q k h e, h e -> b h q k")

    blocks = q.split(max(1, BLOCK // k.numel()), 1)
    if len(blocks) == 1:
        return block(q)
    return torch.cat([checkpoint(block, queries, use_reentrant=False) for queries in blocks], 2)


def visible_keys(mask: Mask, n_query: int, n_key: int, device: torch.device) -> Int[Tensor, "#b q"]:
    """How many keys each query sees."""
    if mask.causal:
        return torch.arange(1, n_query + 1, device=device)[None]
    if mask.allowed is None:
        return torch.full((1, n_query), n_key, device=device)
    return mask.allowed[:, 0].sum(-1)
