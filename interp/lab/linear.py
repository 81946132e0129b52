"""Linear attention: weights phi(q) . phi(k) over their sum, at a cost linear in the length.

Katharopoulos et al. 2020, "Transformers are RNNs", equations 5, 7 and 9; with phi = relu the mixer of Sana (Xie et al.
2024, section 2.2), which is bidirectional.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.kinds import NotNegative
from interp.model.attention import Attention, Mask, PassState, picked
from interp.model.config import ModelConfig
from interp.model.records import Mixer, Traits, at_least_one, maps_flops
from interp.model.tap import Scope, at


class OfSums(Mixer):
    """Base class of linear attention that is computed in chunks."""

    chunk: int
    eps: NotNegative

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "chunk")


@dataclass(frozen=True)
class Linear(OfSums):
    """Linear attention: weights phi(q) . phi(k) over their sum (Katharopoulos et al. 2020)."""

    feature: Literal["elu", "relu"] = "elu"
    """Feature map phi: elu(x) + 1, or relu(x) (Sana)."""
    eps: NotNegative = 1e-6
    """Constant added to the sum that the weights are divided by."""
    chunk: int = 64
    """Positions computed at once by the fused form."""

    traits = Traits(scaled=False, distribution=True, keyed=False, stateful=True)

    def flops(self, config: ModelConfig, layer: int, n: int) -> int:
        """Four maps and sums in chunks, the values with a column of ones."""
        e = config.head_width
        sums = sums_flops(n, self.chunk, e, e + 1, causal=config.causal)
        return maps_flops(config, n) + config.n_heads * sums

    def build(self, config: ModelConfig, layer: int) -> Attention:
        """The module of a layer."""
        return LinearMixer(config, layer)


class LinearMixer(Attention):
    """z_i = sum_j phi(q_i) . phi(k_j) v_j / (eps + sum_j phi(q_i) . phi(k_j)), j the kept tokens up to i.

    In a bidirectional model j are all kept tokens of the text, and nothing is computed in chunks but a decay.

    phi is elu(x) + 1 or relu(x), applied after the rotation of a rotary model, so that weights are never negative; no
    scale. Where every relu weight of a query is 0 its z is 0, by eps. Sums run in float32 at least.

    A pass whose pattern is observed, or whose rows pack documents, writes the weights out; the others use chunks. In a
    pass that continues a cache the pattern has this pass's columns only: the columns before are a state, the pattern's
    rows sum to what it leaves them.
    """

    pattern = "attn.hook_pattern"
    normalised = True

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        kind = config.mixers[layer]
        assert isinstance(kind, OfSums)
        self.chunk, self.eps, self.causal = kind.chunk, kind.eps, config.causal
        self.relu = isinstance(kind, Linear) and kind.feature == "relu"

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
        cache, n, past = shared.cache, q.shape[1], 0 if shared.cache is None else shared.cache.length
        state = None if cache is None else next(iter(cache.states.get(self.layer, ())), None)
        decay = self._decay(shared, v)
        observed = tap is not None and tap.wants(self.pattern)
        with torch.autocast(q.device.type, enabled=False):
            features = self._operands(q, k, v, shared.layout.keep)
            if observed or shared.layout.documents is not None:
                allowed = mask.matrix(n, past + n, q.device)
                allowed = None if allowed is None else allowed[..., past:]
                sums = self._written_out(features, allowed, state, decay, tap if observed else None, v.dtype)
                after = None if cache is None else state_after(*features[1:], state, decay)
            else:
                if self.causal:
                    sums, after = causal_sums(*features, chunk=self.chunk, state=state, decay=decay)
                else:
                    sums, after = all_sums(*features, chunk=self.chunk, decay=decay), None
                sums = sums[..., :-1] / (sums[..., -1:] + self.eps) if self.normalised else sums
        if cache is not None and after is not None:
            shared.left[self.layer] = (after,)
        z = self._heads(sums).transpose(1, 2).to(v.dtype)
        return z if only is None else picked(z, only)

    def _written_out(
        self,
        features: tuple[Tensor, Tensor, Tensor],
        allowed: Bool[Tensor, "#b 1 p p"] | None,
        state: Tensor | None,
        decay: Decay | None,
        tap: Scope | None,
        dtype: torch.dtype,
    ) -> Float[Tensor, "b s p f"]:
        """pattern @ values, and what a state adds to them."""
        q, k, v = features
        pattern = weights(q, k, allowed, decay)
        before = None if state is None else from_state(q, state, decay)
        if self.normalised:
            total = pattern.sum(-1, keepdim=True) + self.eps
            if before is not None:
                total = total + before[..., -1:]
                before = before[..., :-1] / total
            pattern, v = pattern / total, v[..., :-1]
        if tap is not None:
            pattern = self._observed(pattern, tap, dtype).to(v.dtype)
        found = pattern @ v
        return found if before is None else found + before

    def _operands(
        self,
        q: Float[Tensor, "b p h e"],
        k: Float[Tensor, "b p g e"],
        v: Float[Tensor, "b p g e"],
        keep: Bool[Tensor, "b k"] | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Features of queries and keys, and values, `[b h p _]`; normalised, the values end in a column of ones."""
        q, k, v = (_wide(x).transpose(1, 2) for x in (q, k, v))
        q, k = self._query_feature(q), _real(self._feature(k), keep)
        v = F.pad(v, (0, 1), value=1.0) if self.normalised else v
        group = q.shape[1] // k.shape[1]
        return (q, k, v) if group == 1 else (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))

    def _feature(self, x: Float[Tensor, "b h p e"]) -> Float[Tensor, "b h p r"]:
        return F.relu(x) if self.relu else F.elu(x) + 1

    def _query_feature(self, q: Float[Tensor, "b h p e"]) -> Float[Tensor, "b h p r"]:
        return self._feature(q)

    def _decay(self, shared: PassState, like: Tensor) -> Decay | None:
        return None

    def _observed(
        self, pattern: Float[Tensor, "b s p p"], tap: Scope, dtype: torch.dtype
    ) -> Float[Tensor, "b s p p"]:
        """The pattern after its site, in the dtype of the values."""
        return at(tap, self.pattern, pattern.to(dtype))

    def _heads(self, sums: Float[Tensor, "b s p f"]) -> Float[Tensor, "b h p e"]:
        return sums


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _real(k: Float[Tensor, "b g p r"], keep: Bool[Tensor, "b k"] | None) -> Float[Tensor, "b g p r"]:
    """The features of the keys, 0 at padding."""
    return k if keep is None else k.masked_fill(~keep[:, None, -k.shape[2] :, None], 0)


# The causal sums of linear attention, in chunks: a product of quadratic cost inside each, a state between them.
# Katharopoulos et al. 2020, section 3.3 (the state), and Qin et al. 2024, "Lightning Attention-2", algorithm 1 (chunks,
# decay). The cost is linear in the length; a chunk of one column is the recurrent form.


@dataclass(frozen=True)
class Decay:
    """A factor on keys that falls with the distance: exp(-rate_h (p_i - p_j)), p positions of kept tokens."""

    rates: Float[Tensor, "h"]
    positions: Int[Tensor, "#b p"]
    before: Int[Tensor, "#b 1"]
    """Position of the state before the first column."""
    even: bool
    """Whether positions count the columns, so that every chunk decays like the first."""

    def left(self, gap: Int[Tensor, "#b *s"]) -> Float[Tensor, "#b h *s"]:
        """The factor of a distance between positions."""
        rates = self.rates.view(-1, *[1] * (gap.ndim - 1))
        return torch.exp(-rates * gap.clamp_min(0)[:, None])

    def reversed(self) -> "Decay":
        """The decay of the text turned round."""
        positions = (self.last - self.positions).flip(1)
        return Decay(self.rates, positions, positions[:, :1], self.even)

    @property
    def last(self) -> Int[Tensor, "#b 1"]:
        """The position of the last column."""
        return self.positions[:, -1:]


@dataclass(frozen=True)
class _Factors:
    """A decay cut into t chunks of c columns."""

    within: Float[Tensor, "#b h _ c c"]
    query: Float[Tensor, "#b h t c 1"]
    """Factors from the state before the chunk to the query."""
    key: Float[Tensor, "#b h t c 1"]
    """Factors from the key to the chunk's last column."""
    step: Float[Tensor, "#b h t 1 1"]
    """Factors from the last column of a chunk to that of the next."""

    @classmethod
    def of(cls, decay: Decay, c: int) -> "_Factors":
        """The factors of chunks of `c` columns; those added to the last chunk stand at the last position."""
        added = decay.last.expand(-1, -decay.positions.shape[1] % c)
        places = torch.cat((decay.positions, added), 1).unflatten(1, (-1, c))
        ends = places[..., -1]
        starts = torch.cat((decay.before.expand(len(ends), -1), ends[:, :-1]), 1)
        own = places[:, :1] if decay.even else places
        return cls(
            decay.left(own[..., :, None] - own[..., None, :]).tril(),
            decay.left(places - starts[..., None])[..., None],
            decay.left(ends[..., None] - places)[..., None],
            decay.left(ends - starts)[..., None, None],
        )


def causal_sums(
    q: Float[Tensor, "b h p r"],
    k: Float[Tensor, "b h p r"],
    v: Float[Tensor, "b h p f"],
    *,
    chunk: int,
    state: Float[Tensor, "b h r f"] | None = None,
    decay: Decay | None = None,
) -> tuple[Float[Tensor, "b h p f"], Float[Tensor, "b h r f"]]:
    """sum over j <= i of decay_ij (q_i . k_j) v_j for every i, and the state after the last column.

    The state is sum_j decay_j k_j v_j^T; `state` is that of the columns before.
    """
    n = q.shape[2]
    c = min(chunk, n)
    q, k, v = (_cut(x, c) for x in (q, k, v))
    scores = q @ k.mT
    if decay is None:
        scores, sums = scores.tril(), k.mT @ v
        states = _through(sums, state, None)
    else:
        by = _Factors.of(decay, c)
        scores, q, sums = scores * by.within, q * by.query, (k * by.key).mT @ v
        states = _through(sums, state, by.step)
    found = scores @ v + q @ states[:, :, :-1]
    return found.flatten(2, 3)[:, :, :n], states[:, :, -1]


def all_sums(
    q: Float[Tensor, "b h p r"],
    k: Float[Tensor, "b h p r"],
    v: Float[Tensor, "b h p f"],
    *,
    chunk: int,
    decay: Decay | None = None,
) -> Float[Tensor, "b h p f"]:
    """sum over all j of decay_ij (q_i . k_j) v_j, the decay of |p_i - p_j|.

    Without a decay one product for all queries; with one the sums up to i and, of the text turned round, those from i
    on, less what is in both.
    """
    if decay is None:
        return q @ (k.mT @ v)
    before, _ = causal_sums(q, k, v, chunk=chunk, decay=decay)
    after, _ = causal_sums(*(x.flip(2) for x in (q, k, v)), chunk=chunk, decay=decay.reversed())
    return before + after.flip(2) - (q * k).sum(-1, keepdim=True) * v


def sums_flops(n: int, chunk: int, r: int, f: int, *, causal: bool, decays: bool = False) -> int:
    """Operations of the sums of a head and n tokens."""
    if not causal and not decays:
        return 4 * n * r * f
    c = min(chunk, n)
    one_way = -(-n // c) * (2 * c * c * (r + f) + 4 * c * r * f)
    return one_way if causal else 2 * one_way


def _cut(x: Float[Tensor, "b h p f"], c: int) -> Float[Tensor, "b h t c f"]:
    """Chunks of `c` columns, the last one filled with zeros."""
    fill = -x.shape[2] % c
    return (F.pad(x, (0, 0, 0, fill)) if fill else x).unflatten(2, (-1, c))


def _through(
    sums: Float[Tensor, "b h t r f"],
    state: Float[Tensor, "b h r f"] | None,
    step: Float[Tensor, "#b h t 1 1"] | None,
) -> Float[Tensor, "b h t1 r f"]:
    """The states before each chunk and after the last one."""
    first = torch.zeros_like(sums[:, :, 0]) if state is None else state
    if step is None:
        return torch.cat((first[:, :, None], sums), 2).cumsum(2)
    states = [first]
    for own, factor in zip(sums.unbind(2), step.unbind(2), strict=True):
        states.append(states[-1] * factor + own)
    return torch.stack(states, 2)


def weights(
    q: Float[Tensor, "b h p r"],
    k: Float[Tensor, "b h p r"],
    allowed: Bool[Tensor, "#b 1 p p"] | None,
    decay: Decay | None,
) -> Float[Tensor, "b h p p"]:
    """decay_ij (q_i . k_j) where `allowed`, 0 elsewhere: the sums' weights, written out."""
    found = q @ k.mT
    if decay is not None:
        found = found * decay.left((decay.positions[:, :, None] - decay.positions[:, None, :]).abs())
    return found if allowed is None else found.masked_fill(~allowed, 0)


def from_state(
    q: Float[Tensor, "b h p r"], state: Float[Tensor, "b h r f"], decay: Decay | None
) -> Float[Tensor, "b h p f"]:
    """The terms of the state before these columns in their sums."""
    return (q if decay is None else q * decay.left(decay.positions - decay.before)[..., None]) @ state


def state_after(
    k: Float[Tensor, "b h p r"],
    v: Float[Tensor, "b h p f"],
    state: Float[Tensor, "b h r f"] | None,
    decay: Decay | None,
) -> Float[Tensor, "b h r f"]:
    """The state after the last column."""
    if decay is None:
        own = k.mT @ v
        return own if state is None else state + own
    own = (k * decay.left(decay.last - decay.positions)[..., None]).mT @ v
    return own if state is None else state * decay.left(decay.last - decay.before)[..., None] + own
