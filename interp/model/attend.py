"""The only file that picks an attention kernel: fused unless scores or pattern are observed.

Both give the same `z` (a contract test holds them together). A query that may see nothing, as in left padding, gets 0.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from interp.model.mask import Mask
from interp.model.tap import Scope, at


def attend(
    q: Float[Tensor, "b q h e"],
    k: Float[Tensor, "b k g e"],
    v: Float[Tensor, "b k g e"],
    mask: Mask,
    scale: float,
    tap: Scope | None,
) -> Float[Tensor, "b q h e"]:
    """softmax(scale * q k^T + mask) v per head, `[batch, pos, head, d_head]`; key/value heads may be grouped."""
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    if tap is not None and tap.wants("attn.hook_attn_scores", "attn.hook_pattern"):
        z = _explicit(q, k, v, mask, scale, tap)
    else:
        z = F.scaled_dot_product_attention(
            q, k, v,
            attn_mask=mask.allowed,
            is_causal=mask.causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
    return z.transpose(1, 2)


def _explicit(
    q: Float[Tensor, "b h q e"],
    k: Float[Tensor, "b g k e"],
    v: Float[Tensor, "b g k e"],
    mask: Mask,
    scale: float,
    tap: Scope,
) -> Float[Tensor, "b h q e"]:
    """The same with scores and pattern as sites; the softmax runs in float32 at least."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores_bhqk = (q * scale) @ k.mT
    allowed = mask.matrix(q.shape[2], k.shape[2], q.device)
    blind = None
    if allowed is not None:
        blind = ~allowed.any(-1, keepdim=True)
        scores_bhqk = scores_bhqk.masked_fill(~allowed, -torch.inf)
    scores_bhqk = at(tap, "attn.hook_attn_scores", scores_bhqk)
    if blind is not None and mask.allowed is not None:
        scores_bhqk = scores_bhqk.masked_fill(blind, 0.0)
    wide = torch.promote_types(scores_bhqk.dtype, torch.float32)
    pattern_bhqk = scores_bhqk.softmax(-1, dtype=wide).to(v.dtype)
    if blind is not None and mask.allowed is not None:
        pattern_bhqk = pattern_bhqk.masked_fill(blind, 0.0)
    pattern_bhqk = at(tap, "attn.hook_pattern", pattern_bhqk)
    return pattern_bhqk @ v
