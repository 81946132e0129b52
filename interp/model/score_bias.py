"""What positions add to the scores: ALiBi's slopes, and T5's table of buckets."""

import math

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.model.config import Alibi, Buckets


class ScoreBias(nn.Module):
    """The bias of one pass, the same in every layer; only T5's has parameters."""

    def __init__(self, kind: Alibi | Buckets, n_heads: int, *, causal: bool) -> None:
        super().__init__()
        self.kind, self.n_heads, self.causal = kind, n_heads, causal
        self.table = nn.Embedding(kind.n_buckets, n_heads) if isinstance(kind, Buckets) else None

    def forward(
        self, query: Int[Tensor, "b q"], key: Int[Tensor, "b k"], dtype: torch.dtype
    ) -> Float[Tensor, "b h q k"]:
        """The bias between queries and keys at these positions."""
        offset = key[:, None, :] - query[:, :, None]
        if isinstance(self.kind, Buckets):
            assert self.table is not None
            bucket = buckets(offset, self.kind, two_sided=not self.causal)
            return rearrange(self.table(bucket), "b q k h -> b h q k").to(dtype)
        slopes = alibi_slopes(self.n_heads).to(key.device)
        return (-offset.abs()[:, None] * slopes[:, None, None]).to(dtype)


def alibi_slopes(n_heads: int) -> Float[Tensor, "h"]:
    """Slopes 2^(-8h/H), h from 1; for other than powers of two those of the next lower one P, then odd ones of 2P.

    Press et al. 2022, section 3 and their reference code.
    """
    power = 2 ** math.floor(math.log2(n_heads))
    first = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    rest = [2 ** (-4 * h / power) for h in range(1, 2 * (n_heads - power), 2)]
    return torch.tensor(first + rest)


def buckets(offset: Int[Tensor, "*s"], kind: Buckets, *, two_sided: bool) -> Int[Tensor, "*s"]:
    """T5's bucket of key position - query position: exact for small distances, logarithmic up to `max_distance`.

    One-sided, keys after the query share bucket 0; two-sided, they have the upper half of the buckets. Raffel et al.
    2020, section 2.1.
    """
    n = kind.n_buckets // 2 if two_sided else kind.n_buckets
    first = torch.where(offset > 0, n, 0) if two_sided else torch.zeros_like(offset)
    distance = offset.abs() if two_sided else (-offset).clamp_min(0)
    exact = n // 2
    ratio = (distance.clamp_min(1).float() / exact).log() / math.log(kind.max_distance / exact)
    far = (exact + (ratio * (n - exact)).long()).clamp_max(n - 1)
    return first + torch.where(distance < exact, distance, far)
