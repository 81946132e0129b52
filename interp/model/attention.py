"""Multi-head attention (grouped or not) with every part a site: which query sees which key, the kernel, the module.

Masks are built from what is said of padding and documents, never from tokens. `attend` has two ways: fused, and
explicit where scores or pattern are observed; both give the same `z` (a contract test holds them together), and a query
that may see nothing, as in left padding, gets 0. The mixers of `interp.lab` are `Attention` with another way from
queries, keys and values to z.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from interp.model.kv_cache import Past
from interp.model.layout import Layout
from interp.model.norm import HeadNorm, Normalize
from interp.model.position import Rotation
from interp.model.rules import NO_RULES, Rule, constant_pattern, halves
from interp.model.tap import Scope, at

if TYPE_CHECKING:
    from interp.model.config import ModelConfig


def picked(x: Shaped[Tensor, "b p *rest"], columns: Int[Tensor, "b n"]) -> Shaped[Tensor, "b n *rest"]:
    """The entries of `x` at `columns[b]` of each row b."""
    return x[torch.arange(len(x), device=x.device)[:, None], columns]


PART = 2**20
"""Scores of the rows whose patterns are read together on a CPU: 4 MiB in float32, which stay in the cache.

The entropies of 32 rows of 125 tokens and 8 heads take three quarters of the time of all rows at once, and half the
bytes (one thread, AVX-512).
"""


@dataclass(frozen=True)
class Mask:
    """Which keys each query may see, and the bias of its scores, in the cheapest form for the kernel."""

    causal: bool
    """Whether the mask is the plain triangle, which the fused kernel knows without a matrix; then `allowed` is None.
    """
    allowed: Bool[Tensor, "b 1 q k"] | None
    """True where a query sees a key: the joined mask (causal, window, padding); None with `causal=False`: every query
    sees every key.
    """
    bias: Float[Tensor, "b h q k"] | None = None
    """Added to the scores (ALiBi, T5)."""

    def matrix(self, n_query: int, n_key: int, device: torch.device) -> Bool[Tensor, "b 1 q k"] | None:
        """The mask as a matrix, written out also for the plain triangle; None if nothing is hidden."""
        if not self.causal:
            return self.allowed
        return torch.ones(n_query, n_key, dtype=torch.bool, device=device).tril()[None, None]

    @cached_property
    def blind(self) -> Bool[Tensor, "b 1 q 1"] | None:
        """True at queries that may see no key, whose z is 0; None if there cannot be any."""
        return None if self.allowed is None else ~self.allowed.any(-1, keepdim=True)

    def with_bias(self, bias: Float[Tensor, "b h q k"]) -> "Mask":
        """This mask with a bias of the scores, as one matrix that is -inf where the mask hides a key.

        Blind queries keep finite scores (their attention is set to 0 afterwards), for the sake of the gradients.
        """
        allowed = self.matrix(bias.shape[-2], bias.shape[-1], bias.device)
        if allowed is not None:
            bias = bias.masked_fill(~allowed & allowed.any(-1, keepdim=True), -torch.inf)
        return Mask(causal=False, allowed=allowed, bias=bias)

    def queries(self, columns: Int[Tensor, "b n"], n_query: int, n_key: int) -> "Mask":
        """This mask for the queries at `columns[b]` of each row b alone."""
        rows = columns[:, None, :, None]
        unpicked = (self.matrix(n_query, n_key, columns.device), self.bias)
        allowed, bias = (
            None if x is None else x.expand(len(columns), -1, -1, -1).take_along_dim(rows, 2)
            for x in unpicked
        )
        return Mask(causal=False, allowed=allowed, bias=bias)

    def rows(self, rows: slice) -> "Mask":
        """This mask for a slice of the batch rows."""
        allowed, bias = (x if x is None or len(x) == 1 else x[rows] for x in (self.allowed, self.bias))
        return Mask(self.causal, allowed, bias)

    def to(self, device: torch.device) -> "Mask":
        """This mask on another device."""
        moved = [None if x is None else x.to(device) for x in (self.allowed, self.bias)]
        return Mask(self.causal, moved[0], moved[1])


def attention_mask(
    config: ModelConfig, n: int, past: int, layout: Layout, device: torch.device, *, local: bool
) -> Mask:
    """The mask for the last `n` of `past + n` positions, for layers with the window (`local`) or without.

    Padding hides keys, so a padded query row may see nothing. The window counts kept positions, so a padded row sees
    what the unpadded one would. Of several continuations of a row each sees itself and what they share.
    """
    total, keep, documents, branches = past + n, layout.keep, layout.documents, layout.branches
    window = total if config.window is None or not local else min(config.window, total)
    windowed = window < total
    if keep is None and documents is None and branches is None and not windowed:
        if not config.causal or n == 1:
            return Mask(causal=False, allowed=None)
        if past == 0:
            return Mask(causal=True, allowed=None)
    allowed = torch.ones(1, n, total, dtype=torch.bool, device=device)
    if config.causal:
        allowed = allowed.tril(past)  # columns up to the query's own
    if windowed:
        place = layout.positions(total, 0, device)
        distance = place[:, past:, None] - place[:, None, :]  # [b k] -> [b q k]
        allowed = allowed & (distance.abs() < window)
    if documents is not None:
        allowed = allowed & (documents[:, past:, None] == documents[:, None, :])
    if branches is not None:
        own = branches[:, past:, None] == branches[:, None, :]
        allowed = allowed & (own | (branches == 0)[:, None, :])
    if keep is not None:
        allowed = allowed & keep[:, None, :]
    return Mask(causal=False, allowed=allowed[:, None])  # [b q k] -> [b 1 q k]


def attend(
    q: Float[Tensor, "b q h r"],
    k: Float[Tensor, "b k g r"],
    v: Float[Tensor, "b k g e"],
    mask: Mask,
    scale: float,
    tap: Scope | None,
    *,
    name: str = "attn",
    softcap: float | None = None,
    sinks: Float[Tensor, "h"] | None = None,
    rules: frozenset[Rule] = NO_RULES,
) -> Float[Tensor, "b q h e"]:
    """softmax(scale * q k^T + bias + mask) v per head, `[batch, pos, head, d_head]`; key/value heads may be grouped.

    Queries and keys may have another width than values.

    Args:
        softcap: cap tanh(score / cap) before bias and mask.
        sinks: a further score per head whose value is zero, so that the pattern's rows sum to less than 1.
    """
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [b p h e] -> [b h p e]
    observed = tap is not None and tap.wants(f"{name}.hook_attn_scores", f"{name}.hook_pattern")
    if observed or softcap is not None:
        z = _explicit_attention(q, k, v, mask, scale, tap, name, softcap, sinks, rules)
    else:
        z = _fused_attention(q, k, v, mask, scale, sinks, rules)
    return z.transpose(1, 2)  # [b h q e] -> [b q h e]


def _fused_attention(
    q: Float[Tensor, "b h q r"],
    k: Float[Tensor, "b g k r"],
    v: Float[Tensor, "b g k e"],
    mask: Mask,
    scale: float,
    sinks: Float[Tensor, "h"] | None,
    rules: frozenset[Rule],
) -> Float[Tensor, "b h q e"]:
    """z by torch's fused kernel, which never stores the whole `[b h q k]` scores or pattern."""
    q, k = (constant_pattern(halves(x, rules), rules) for x in (q, k))
    if sinks is not None:
        k, v, mask = _with_sink(k, v, mask, sinks, q.shape[2])  # one key more
    width = v.shape[-1]
    if width < q.shape[-1]:  # where widths differ the fused kernel falls back to a slow form
        v = F.pad(v, (0, q.shape[-1] - width))  # 192 and 128, 1024 tokens on a CPU: 0.06 s for 0.13 s
    z = F.scaled_dot_product_attention(
        q, k, v,
        attn_mask=mask.allowed if mask.bias is None else mask.bias,
        is_causal=mask.causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    z = z if width == v.shape[-1] else z[..., :width]
    if mask.bias is not None and mask.blind is not None:
        z = z.masked_fill(mask.blind, 0.0)
    return halves(z, rules)


def _with_sink(
    k: Float[Tensor, "b g k r"],
    v: Float[Tensor, "b g k e"],
    mask: Mask,
    sinks: Float[Tensor, "h"],
    n_query: int,
) -> tuple[Tensor, Tensor, Mask]:
    """Keys, values and mask with one more key of zeros and value of zeros, whose score is the sink's."""
    allowed = mask.matrix(n_query, k.shape[2], k.device)
    bias = k.new_zeros(1, 1, n_query, k.shape[2]) if mask.bias is None else mask.bias
    if allowed is not None:
        bias = bias.masked_fill(~allowed, -torch.inf)
    rows = bias.shape[0]
    sink = rearrange(sinks, "h -> 1 h 1 1").to(bias.dtype).expand(rows, -1, n_query, -1)
    bias = torch.cat((bias.expand(-1, len(sinks), -1, -1), sink), -1)  # [b h q k] -> [b h q k+1]
    k, v = (torch.cat((x, torch.zeros_like(x[:, :, :1])), 2) for x in (k, v))  # [b g k e] -> [b g k+1 e]
    return k, v, Mask(causal=False, allowed=None, bias=bias)


def _explicit_attention(
    q: Float[Tensor, "b h q r"],
    k: Float[Tensor, "b g k r"],
    v: Float[Tensor, "b g k e"],
    mask: Mask,
    scale: float,
    tap: Scope | None,
    name: str,
    softcap: float | None,
    sinks: Float[Tensor, "h"] | None,
    rules: frozenset[Rule],
) -> Float[Tensor, "b h q e"]:
    """z with scores and pattern as sites, computed for some batch rows at a time if all reads allow it."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))  # [b g k e] -> [b h k e]

    def of_rows(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Float[Tensor, "_ h q e"]:
        scores_bhqk = halves((q * scale) @ k.mT, rules)  # [b h q r] [b h r k] -> [b h q k]
        return attend_scores(scores_bhqk, v, mask, tap, name=name, softcap=softcap, sinks=sinks, rules=rules)

    if tap is not None and q.is_cpu and tap.by_row(f"{name}.hook_attn_scores", f"{name}.hook_pattern"):
        size = max(1, PART // (q.shape[1] * q.shape[2] * k.shape[2]))
        if size < len(q):
            parts = tap.parts(len(q), size)
            return torch.cat([of_rows(q[rows], k[rows], v[rows], mask.rows(rows)) for rows in parts])
    return of_rows(q, k, v, mask)


def attend_scores(
    scores_bhqk: Float[Tensor, "#b h q k"],
    v: Float[Tensor, "b h k e"],
    mask: Mask,
    tap: Scope | None,
    *,
    name: str = "attn",
    softcap: float | None = None,
    sinks: Float[Tensor, "h"] | None = None,
    rules: frozenset[Rule] = NO_RULES,
) -> Float[Tensor, "b h q e"]:
    """softmax(scores + bias + mask) v with scores and pattern as sites, from given raw scores `[b h q k]`.

    The scores are overwritten in place.
    """
    site = f"{name}.hook_attn_scores"
    scores_bhqk = at(tap, site, hidden_scores(scores_bhqk, mask, softcap))
    spent = tap is not None and not tap.wants(site)
    pattern_bhqk = constant_pattern(row_softmax(scores_bhqk, mask, sinks, spent=spent).to(v.dtype), rules)
    pattern_bhqk = at(tap, f"{name}.hook_pattern", pattern_bhqk)
    return halves(pattern_bhqk @ v, rules)  # [b h q k] [b h k e] -> [b h q e]


def hidden_scores(
    scores_bhqk: Float[Tensor, "b h q k"], mask: Mask, softcap: float | None = None
) -> Float[Tensor, "b h q k"]:
    """Soft-capped scores plus bias, -inf where the mask hides a key; the given scores may be overwritten in place."""
    if softcap is not None:
        scores_bhqk = softcap * (scores_bhqk / softcap).tanh()
    if mask.bias is not None:
        scores_bhqk = scores_bhqk + mask.bias
    if mask.causal:
        ahead_qk = scores_bhqk.new_ones(scores_bhqk.shape[2:], dtype=torch.bool).triu(1)
        return scores_bhqk.masked_fill_(ahead_qk, -torch.inf)
    return scores_bhqk if mask.allowed is None else scores_bhqk.masked_fill_(~mask.allowed, -torch.inf)


def row_softmax(
    scores_bhqk: Float[Tensor, "b h q k"],
    mask: Mask,
    sinks: Float[Tensor, "h"] | None = None,
    *,
    spent: bool = False,
) -> Float[Tensor, "b h q k"]:
    """The softmax of hidden scores, in float32 at least; zeros for a query that may see nothing.

    Args:
        spent: whether the scores may be overwritten with the pattern.
    """
    if mask.blind is None:
        return _softmax(scores_bhqk, sinks, spent)
    finite_bhqk = scores_bhqk.masked_fill(mask.blind, 0.0)
    return _softmax(finite_bhqk, sinks, spent).masked_fill(mask.blind, 0.0)


def _softmax(
    scores_bhqk: Float[Tensor, "b h q k"], sinks: Float[Tensor, "h"] | None, spent: bool
) -> Float[Tensor, "b h q k"]:
    wide = torch.promote_types(scores_bhqk.dtype, torch.float32)
    if sinks is not None:
        sink = rearrange(sinks, "h -> 1 h 1 1").to(wide).expand(*scores_bhqk.shape[:3], 1)
        joined = torch.cat((scores_bhqk.to(wide), sink), -1)  # [b h q k] -> [b h q k+1]
        return joined.softmax(-1)[..., :-1]  # [b h q k+1] -> [b h q k], without the sink
    if spent and scores_bhqk.is_cpu and scores_bhqk.dtype == wide and not torch.is_grad_enabled():
        # Copy scores of 400 tokens, SmolLM2 on a CPU: 15.0 MiB for 19.7, and 0.9 of the time.
        return torch.softmax(scores_bhqk, -1, out=scores_bhqk)
    return scores_bhqk.softmax(-1, dtype=wide)


T = TypeVar("T")
SPLIT_INPUTS = {"q": "hook_q_input", "k": "hook_k_input", "v": "hook_v_input"}


@dataclass(frozen=True)
class View:
    """Mask and rotation that all layers of one kind (with a window, or without) share in a pass."""

    mask: Mask
    rotation: Rotation | None

    def to(self, device: torch.device) -> "View":
        """This view on another device."""
        return View(self.mask.to(device), None if self.rotation is None else self.rotation.to(device))


@dataclass(frozen=True)
class Memory:
    """The final states `[b s d]` of an encoder, which cross-attention reads, and their mask of real tokens."""

    states: Float[Tensor, "b s d"]
    keep: Bool[Tensor, "b s"] | None = None

    def mask(self) -> Mask:
        """Every query sees every real state."""
        return Mask(causal=False, allowed=None if self.keep is None else self.keep[:, None, None, :])

    def to(self, device: torch.device) -> "Memory":
        """This memory on another device."""
        return Memory(self.states.to(device), None if self.keep is None else self.keep.to(device))


@dataclass(frozen=True)
class PassState:
    """What all blocks of one forward pass share: masks, rotations, layout and cache."""

    everywhere: View
    local: View
    """Mask and rotation of layers with the sliding window."""
    cache: Past | None
    memory: Memory | None = None
    layout: Layout = field(default_factory=Layout)
    """Padding and documents of everything seen, the cached columns first."""
    positions: Int[Tensor, "#b p"] | None = None
    """Positions of the columns of this pass."""
    left: dict[int | tuple[int, str], tuple[Tensor, ...]] = field(default_factory=dict)
    """States of stateful mixers after the last column of the pass, which are then stored in the cache."""
    _made: dict[Hashable, object] = field(default_factory=dict)

    def made_once(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of `make`, computed by the first block of this pass that needs it."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]  # type: ignore[return-value]

    def to(self, device: torch.device) -> "PassState":
        """The shared values on another device; the cache, which has its layers on their own devices, is not moved."""
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
    rules = NO_RULES

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.local = config.is_local(layer)
        traits = config.mixers[layer].traits
        self.rotated = traits.queries and traits.rotated
        self.heads = [config.n_heads, config.kv_heads, config.kv_heads]
        self.d_head = self._width(config)
        self.scale = config.score_scale(layer)
        self.softcap = config.attn_softcap
        self.out = nn.Linear(config.n_heads * self.d_head, config.d_model, bias=config.out_bias)
        self._build(config)
        self.sinks = nn.Parameter(torch.zeros(config.n_heads)) if config.sinks else None
        self.q_norm, self.k_norm = (self._head_norm(config, part) for part in "qk")

    def _width(self, config: ModelConfig) -> int:
        """Width of a head's z."""
        return config.mixers[self.layer].z_width(config)

    def _head_norm(self, config: ModelConfig, part: str) -> HeadNorm | None:
        norm_and_kind = config.mixers[self.layer].qk_norm(config)
        if norm_and_kind is None:
            return None
        norm, kind = norm_and_kind
        return HeadNorm(norm, self.heads["qk".index(part)], self.d_head, f"{self.name}.{part}_norm", kind)

    def _build(self, config: ModelConfig) -> None:
        """Make the matrices of queries, keys and values."""
        self.qkv = nn.Linear(config.d_model, sum(self.heads) * self.d_head, bias=config.qkv_bias)

    def forward(
        self,
        x: Float[Tensor, "b p d"],
        source: tuple[Float[Tensor, "b p d"], Normalize],
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """z W_O + b_O. `source` is the residual stream and the norm that `x` came from, for the split inputs.

        Args:
            only: the columns of each row at which the output is computed; None: all.
        """
        return self._output(*self._normed(x, source, tap), x, shared, tap, only)

    def _output(
        self,
        q: Float[Tensor, "b p h e"],
        k: Float[Tensor, "b p g k"],
        v: Float[Tensor, "b p g v"],
        x: Float[Tensor, "b p *h d"],
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n d"]:
        """z W_O + b_O, from queries, keys and values before rotation; `x` is the normed stream they were made from."""
        view = shared.local if self.local else shared.everywhere
        q, k = self._placed(q, k, view, shared, tap)
        z = self._mix(q, k, v, view.mask, shared, tap, only)
        z = self._finished(z, x if only is None else picked(x, only), tap)
        return self._write(at(tap, "attn.hook_z", z), tap)

    def _finished(
        self, z: Float[Tensor, "b n h e"], x: Float[Tensor, "b n *h d"], tap: Scope | None
    ) -> Float[Tensor, "b n h e"]:
        """z after a norm or gate of the mixer, if it has one; `x` is the normed stream."""
        return z

    def _placed(
        self,
        q: Float[Tensor, "b p h e"],
        k: Float[Tensor, "b p g k"],
        view: View,
        shared: PassState,
        tap: Scope | None,
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys rotated to their positions; unchanged without rotary positions."""
        if view.rotation is None or not self.rotated:
            return q, k
        q = at(tap, "attn.hook_rot_q", view.rotation.apply(q))
        return q, at(tap, "attn.hook_rot_k", view.rotation.apply(k))

    def _mix(
        self,
        q: Float[Tensor, "b p h r"],
        k: Float[Tensor, "b k g r"],
        v: Float[Tensor, "b k g e"],
        mask: Mask,
        shared: PassState,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None,
    ) -> Float[Tensor, "b n h e"]:
        """z at the columns `only` (None: all), from queries, keys and values of this pass and those in the cache.

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
            q, k, v, mask, self.scale, tap, name=self.name, softcap=self.softcap, sinks=self.sinks, rules=self.rules
        )  # fmt: skip

    def score_factor(self, seen: Int[Tensor, "#b q"], like: Tensor) -> Float[Tensor, "#b #q"]:
        """The factor from q . k to the raw score, for queries that see `seen` keys."""
        return like.new_full((1, 1), self.scale)

    def _with_earlier(
        self, k: Float[Tensor, "b p g r"], v: Float[Tensor, "b p g e"], shared: PassState
    ) -> tuple[Tensor, Tensor]:
        """The cached keys and values of earlier columns, followed by these."""
        return (k, v) if shared.cache is None else shared.cache.append(self.layer, k, v)

    def _normed(
        self, x: Float[Tensor, "b p d"], source: tuple[Tensor, Normalize], tap: Scope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[b p h|g e]`, queries and keys normed in models with a QK norm."""
        q, k, v = self._project(x, source, tap)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, tap), self.k_norm(k, tap)
        return q, k, v

    def _project(
        self, x: Float[Tensor, "b p d"], source: tuple[Tensor, Normalize], tap: Scope | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values `[b p h|g e]`, each a site."""
        if tap is not None and all(tap.alters(site) for site in SPLIT_INPUTS.values()):
            # `_from_split` recomputes q, k and v below: an expanded zero (no memory) replaces the fused product
            fused = x.new_zeros(()).expand(*x.shape[:2], len(self.qkv.weight))
        else:
            fused = self.qkv(x)  # [b p d] -> [b p (n e)], n heads of q, then k, then v
        # unflatten and split instead of einops, which costs an eighth of the overhead of a generation step
        parts = fused.unflatten(2, (-1, self.d_head)).split(self.heads, 2)  # [b p (n e)] -> [b p h|g e] each
        heads = dict(zip("qkv", parts, strict=True))
        if tap is not None:
            heads = {part: self._from_split(part, head, *source, tap) for part, head in heads.items()}
        q, k, v = (at(tap, f"attn.hook_{part}", heads[part]) for part in "qkv")
        return q, k, v

    def _from_split(
        self, part: str, x: Float[Tensor, "b p h e"], resid: Tensor, norm: Normalize, tap: Scope
    ) -> Float[Tensor, "b p h e"]:
        """q, k or v, recomputed from per-head copies of the residual if those are edited or differentiated."""
        site = SPLIT_INPUTS[part]
        if not tap.wants(site):
            return x
        copies = resid.unsqueeze(2).expand(-1, -1, x.shape[2], -1)  # [b p d] -> [b p h d]
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
        """z @ W_O + b_O; per-head results only where they are read or edited."""
        site = f"{self.name}.hook_result"
        if tap is not None and tap.wants(site):
            weight = rearrange(self.out.weight, "d (h e) -> h d e", e=self.d_head)
            result = at(tap, site, einsum(z, weight, "b p h e, h d e -> b p h d"))
            if tap.alters(site):
                summed = result.sum(2)  # [b p h d] -> [b p d]
                return summed if self.out.bias is None else summed + self.out.bias
        return self.out(z.flatten(2))  # [b p h e] -> [b p (h e)] -> [b p d]

    def part(self, name: str) -> tuple[Float[Tensor, "h e d"], Float[Tensor, "h e"] | None]:
        """Weight `[h e d]` and bias `[h e]` of "q", "k" or "v" as views of the fused matrix."""
        return self._cut(self.qkv, self.heads, "qkv".index(name))

    def _cut(self, fused: nn.Linear, heads: list[int], i: int) -> tuple[Tensor, Tensor | None]:
        weight = rearrange(fused.weight, "(n e) d -> n e d", e=self.d_head).split(heads)[i]
        if fused.bias is None:
            return weight, None
        return weight, rearrange(fused.bias, "(n e) -> n e", e=self.d_head).split(heads)[i]


class CrossAttention(Attention):
    """Attention with queries from the decoder's stream, and keys and values from the memory.

    Matrices: `q`, and `kv` with rows k, v.
    """

    name = "cross_attn"

    def _width(self, config: ModelConfig) -> int:
        return config.head_width

    def _build(self, config: ModelConfig) -> None:
        self.q = nn.Linear(config.d_model, self.heads[0] * self.d_head, bias=config.qkv_bias)
        self.kv = nn.Linear(config.d_model, sum(self.heads[1:]) * self.d_head, bias=config.qkv_bias)

    def forward(  # type: ignore[override]
        self, x: Float[Tensor, "b p d"], shared: PassState, tap: Scope | None
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
