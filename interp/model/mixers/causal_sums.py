"""The causal sums behind linear attention, in chunks: a product of quadratic cost inside each, a state between them.

Katharopoulos et al. 2020, section 3.3 (the state), and Qin et al. 2024, "Lightning Attention-2", algorithm 1 (chunks,
decay). The cost is linear in the length; a chunk of one column is the recurrent form.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Decay:
    """What is left of a key at a query: exp(-rate_h (p_i - p_j)), p the positions (which count kept tokens only)."""

    rates: Float[Tensor, "h"]
    positions: Int[Tensor, "#b p"]
    before: Int[Tensor, "#b 1"]
    """The position that the state before the first column belongs to."""
    even: bool
    """Whether positions count the columns, so that every chunk decays like the first."""

    def left(self, gap: Int[Tensor, "#b *s"]) -> Float[Tensor, "#b h *s"]:
        """The factor of a distance between positions."""
        rates = self.rates.view(-1, *[1] * (gap.ndim - 1))
        return torch.exp(-rates * gap.clamp_min(0)[:, None])

    @property
    def last(self) -> Int[Tensor, "#b 1"]:
        """The position of the last column."""
        return self.positions[:, -1:]


@dataclass(frozen=True)
class _Factors:
    """A decay cut into t chunks of c columns."""

    within: Float[Tensor, "#b h _ c c"]
    query: Float[Tensor, "#b h t c 1"]
    """From the state before the chunk to the query."""
    key: Float[Tensor, "#b h t c 1"]
    """From the key to the chunk's last column."""
    step: Float[Tensor, "#b h t 1 1"]
    """From the last column of a chunk to that of the next."""

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
    """sum over j <= i of decay_ij (q_i . k_j) v_j for every i, and the state behind the last column.

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


def _cut(x: Float[Tensor, "b h p f"], c: int) -> Float[Tensor, "b h t c f"]:
    """Chunks of `c` columns, the last one filled with zeros."""
    fill = -x.shape[2] % c
    return (F.pad(x, (0, 0, 0, fill)) if fill else x).unflatten(2, (-1, c))


def _through(
    sums: Float[Tensor, "b h t r f"],
    state: Float[Tensor, "b h r f"] | None,
    step: Float[Tensor, "#b h t 1 1"] | None,
) -> Float[Tensor, "b h t1 r f"]:
    """The states before each chunk and behind the last one."""
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
        found = found * decay.left(decay.positions[:, :, None] - decay.positions[:, None, :])
    return found if allowed is None else found.masked_fill(~allowed, 0)


def from_state(
    q: Float[Tensor, "b h p r"], state: Float[Tensor, "b h r f"], decay: Decay | None
) -> Float[Tensor, "b h p f"]:
    """What the state before these columns adds to their sums."""
    return (q if decay is None else q * decay.left(decay.positions - decay.before)[..., None]) @ state


def state_after(
    k: Float[Tensor, "b h p r"],
    v: Float[Tensor, "b h p f"],
    state: Float[Tensor, "b h r f"] | None,
    decay: Decay | None,
) -> Float[Tensor, "b h r f"]:
    """The state behind the last column."""
    if decay is None:
        own = k.mT @ v
        return own if state is None else state + own
    own = (k * decay.left(decay.last - decay.positions)[..., None]).mT @ v
    return own if state is None else state * decay.left(decay.last - decay.before)[..., None] + own
