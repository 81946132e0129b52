"""Scores other than q . k, and what multiplies a row of them."""

import torch
import torch.nn.functional as F
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from interp.core.temperature import adaptive_temperature
from interp.model.mask import Mask

BLOCK = 1 << 24
"""Numbers of `[b q k h e]` held at once."""


def unit(x: Float[Tensor, "*b e"]) -> Float[Tensor, "*b e"]:
    """x / |x|; zeros stay zeros."""
    return F.normalize(x, dim=-1)


def additive_scores(
    q: Float[Tensor, "b q h e"], k: Float[Tensor, "b k h e"], weight: Float[Tensor, "h e"]
) -> Float[Tensor, "b h q k"]:
    """w_h . tanh(q_i + k_j) (Bahdanau et al. 2015, section A.1.2): b h q k e products, and no fused kernel.

    Blocks of queries, so that `[b q k h e]` is never whole in memory; gradients compute a block again.
    """

    def block(some: Float[Tensor, "b q h e"]) -> Float[Tensor, "b h q k"]:
        return einsum((some[:, :, None] + k[:, None]).tanh(), weight, "b q k h e, h e -> b h q k")

    blocks = q.split(max(1, BLOCK // k.numel()), 1)
    if len(blocks) == 1:
        return block(q)
    return torch.cat([checkpoint(block, some, use_reentrant=False) for some in blocks], 2)


def visible_keys(mask: Mask, n_query: int, n_key: int, device: torch.device) -> Int[Tensor, "#b q"]:
    """How many keys each query sees."""
    if mask.causal:
        return torch.arange(1, n_query + 1, device=device)[None]
    if mask.allowed is None:
        return torch.full((1, n_query), n_key, device=device)
    return mask.allowed[:, 0].sum(-1)


def sharpened(hidden_bhqk: Float[Tensor, "b h q k"], mask: Mask) -> Float[Tensor, "b h q k"]:
    """Hidden scores times beta(H), H the entropy of their row's softmax (Velickovic et al. 2024, section 4)."""
    forbidden = hidden_bhqk == -torch.inf
    scores = hidden_bhqk if mask.blind is None else hidden_bhqk.masked_fill(mask.blind, 0.0)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    shown = hidden_bhqk.masked_fill(forbidden, 0.0)  # 0 x inf has no gradient
    mean = (scores.softmax(-1) * shown).sum(-1, keepdim=True)
    beta = adaptive_temperature(scores.logsumexp(-1, keepdim=True) - mean)
    return (shown * beta).to(hidden_bhqk.dtype).masked_fill(forbidden, -torch.inf)
