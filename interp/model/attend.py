"""The only file that picks an attention kernel: fused unless scores or pattern are observed.

Both give the same `z` (a contract test holds them together). A query that may see nothing, as in left padding, gets 0.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
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
    *,
    name: str = "attn",
    softcap: float | None = None,
    sinks: Float[Tensor, "h"] | None = None,
) -> Float[Tensor, "b q h e"]:
    """softmax(scale * q k^T + bias + mask) v per head, `[batch, pos, head, d_head]`; key/value heads may be grouped.

    softcap: cap tanh(score / cap) before bias and mask. sinks: a further score per head whose value is zero, so that
    the pattern's rows sum to less than 1.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    observed = tap is not None and tap.wants(f"{name}.hook_attn_scores", f"{name}.hook_pattern")
    if observed or softcap is not None:
        z = _explicit(q, k, v, mask, scale, tap, name, softcap, sinks)
    else:
        if sinks is not None:
            k, v, mask = _with_sink(k, v, mask, sinks, q.shape[2])
        z = F.scaled_dot_product_attention(
            q, k, v,
            attn_mask=mask.allowed if mask.bias is None else mask.bias,
            is_causal=mask.causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        if mask.bias is not None and mask.blind is not None:
            z = z.masked_fill(mask.blind, 0.0)
    return z.transpose(1, 2)


def _with_sink(
    k: Float[Tensor, "b g k e"],
    v: Float[Tensor, "b g k e"],
    mask: Mask,
    sinks: Float[Tensor, "h"],
    n_query: int,
) -> tuple[Tensor, Tensor, Mask]:
    """Keys, values and mask with one column more, a key and value of zeros whose score is the sink's."""
    allowed = mask.matrix(n_query, k.shape[2], k.device)
    bias = k.new_zeros(1, 1, n_query, k.shape[2]) if mask.bias is None else mask.bias
    if allowed is not None:
        bias = bias.masked_fill(~allowed, -torch.inf)
    rows = bias.shape[0]
    sink = rearrange(sinks, "h -> 1 h 1 1").to(bias.dtype).expand(rows, -1, n_query, -1)
    bias = torch.cat((bias.expand(-1, len(sinks), -1, -1), sink), -1)
    zero = torch.zeros_like(k[:, :, :1])
    return torch.cat((k, zero), 2), torch.cat((v, zero), 2), Mask(causal=False, allowed=None, bias=bias)


def _explicit(
    q: Float[Tensor, "b h q e"],
    k: Float[Tensor, "b g k e"],
    v: Float[Tensor, "b g k e"],
    mask: Mask,
    scale: float,
    tap: Scope | None,
    name: str,
    softcap: float | None,
    sinks: Float[Tensor, "h"] | None,
) -> Float[Tensor, "b h q e"]:
    """The same with scores and pattern as sites; the softmax runs in float32 at least."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores_bhqk = (q * scale) @ k.mT
    if softcap is not None:
        scores_bhqk = softcap * (scores_bhqk / softcap).tanh()
    if mask.bias is not None:
        scores_bhqk = scores_bhqk + mask.bias
    allowed = mask.matrix(q.shape[2], k.shape[2], q.device)
    if allowed is not None:
        scores_bhqk = scores_bhqk.masked_fill_(~allowed, -torch.inf)  # a tensor of our own
    scores_bhqk = at(tap, f"{name}.hook_attn_scores", scores_bhqk)
    if mask.blind is not None:
        scores_bhqk = scores_bhqk.masked_fill(mask.blind, 0.0)
    pattern_bhqk = _softmax(scores_bhqk, sinks).to(v.dtype)
    if mask.blind is not None:
        pattern_bhqk = pattern_bhqk.masked_fill(mask.blind, 0.0)
    pattern_bhqk = at(tap, f"{name}.hook_pattern", pattern_bhqk)
    return pattern_bhqk @ v


def _softmax(
    scores_bhqk: Float[Tensor, "b h q k"], sinks: Float[Tensor, "h"] | None
) -> Float[Tensor, "b h q k"]:
    wide = torch.promote_types(scores_bhqk.dtype, torch.float32)
    if sinks is None:
        return scores_bhqk.softmax(-1, dtype=wide)
    sink = rearrange(sinks, "h -> 1 h 1 1").to(wide).expand(*scores_bhqk.shape[:3], 1)
    return torch.cat((scores_bhqk.to(wide), sink), -1).softmax(-1)[..., :-1]
