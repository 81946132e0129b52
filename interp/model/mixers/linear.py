"""Linear attention: weights phi(q) . phi(k) over their sum, at a cost linear in the length.

Katharopoulos et al. 2020, "Transformers are RNNs", equations 5, 7 and 9; with phi = relu the mixer of Sana (Xie et al.
2024, section 2.2), here causal.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.model.attention import Attention, Pass
from interp.model.config import ModelConfig
from interp.model.mask import Mask, picked
from interp.model.mixer_variants import Lightning, Linear, Polar
from interp.model.mixers.causal_sums import Decay, causal_sums, from_state, state_after, weights
from interp.model.norm import Normalize
from interp.model.tap import Scope, at


class LinearMixer(Attention):
    """z_i = sum_j phi(q_i) . phi(k_j) v_j / (eps + sum_j phi(q_i) . phi(k_j)), j the kept tokens up to i.

    phi is elu(x) + 1 or relu(x), applied behind the rotation of a rotary model, so that weights are never negative; no
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
        assert isinstance(kind, Linear | Lightning | Polar)
        self.chunk, self.eps = kind.chunk, kind.eps
        self.relu = isinstance(kind, Linear) and kind.feature == "relu"

    def forward(
        self,
        x: Float[Tensor, "b p d"],
        source: tuple[Float[Tensor, "b p d"], Normalize],
        shared: Pass,
        tap: Scope | None,
        only: Int[Tensor, "b n"] | None = None,
    ) -> Float[Tensor, "b n d"]:
        """z W_O + b_O, where z may have passed a norm or a gate made from `x`."""
        q, k, v = self._project(x, source, tap)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q, tap), self.k_norm(k, tap)
        view = shared.everywhere
        q, k = self._placed(q, k, view, shared, tap)
        z = self._mix(q, k, v, view.mask, shared, tap, only)
        z = self._finished(z, x if only is None else picked(x, only), tap)
        return self._write(at(tap, "attn.hook_z", z), tap)

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
                sums, after = causal_sums(*features, chunk=self.chunk, state=state, decay=decay)
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
        q, k = self._feature(q), _real(self._feature(k), keep)
        v = F.pad(v, (0, 1), value=1.0) if self.normalised else v
        group = q.shape[1] // k.shape[1]
        return (q, k, v) if group == 1 else (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))

    def _feature(self, x: Float[Tensor, "b h p e"]) -> Float[Tensor, "b h p e"]:
        return F.relu(x) if self.relu else F.elu(x) + 1

    def _decay(self, shared: Pass, like: Tensor) -> Decay | None:
        return None

    def _observed(
        self, pattern: Float[Tensor, "b s p p"], tap: Scope, dtype: torch.dtype
    ) -> Float[Tensor, "b s p p"]:
        """The pattern as whoever observes it sees and leaves it, in the dtype of the values."""
        return at(tap, self.pattern, pattern.to(dtype))

    def _heads(self, sums: Float[Tensor, "b s p f"]) -> Float[Tensor, "b h p e"]:
        return sums

    def _finished(
        self, z: Float[Tensor, "b n h e"], x: Float[Tensor, "b n d"], tap: Scope | None
    ) -> Float[Tensor, "b n h e"]:
        return z


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _real(k: Float[Tensor, "b g p r"], keep: Bool[Tensor, "b k"] | None) -> Float[Tensor, "b g p r"]:
    """The features of the keys, 0 at padding."""
    return k if keep is None else k.masked_fill(~keep[:, None, -k.shape[2] :, None], 0)
