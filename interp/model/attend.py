"""The only file that picks an attention kernel: fused unless scores or pattern are observed.

Both give the same `z` (a contract test holds them together). A query that may see nothing, as in left padding, gets 0.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from interp.model.mask import Mask, Piece
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


def attend_pieces(
    q: Float[Tensor, "b q h e"],
    k: Float[Tensor, "b k g e"],
    v: Float[Tensor, "b k g e"],
    pieces: Iterable[Piece],
    scale: float,
) -> Float[Tensor, "b q h e"]:
    """`attend` under a sparse mask: each run of queries against the keys that one of them sees, gathered.

    Time and memory follow the share of (run, key) pairs that are seen (experiments/bench/sparse_attention.py). Not
    torch's flex_attention: on a CPU (torch 2.13, 8 heads of 64, a window of 256 in 8 192 tokens) it takes 0.21 s for
    this function's 0.11 s, 15 to 60 s to compile and 0.8 s to make its mask, whose cost is quadratic, and has no
    backward pass.
    """
    found = []
    for piece in pieces:
        keys, values = (x.index_select(1, piece.keys).transpose(1, 2) for x in (k, v))
        found.append(
            F.scaled_dot_product_attention(
                q[:, piece.queries].transpose(1, 2), keys, values,
                attn_mask=piece.allowed, scale=scale, enable_gqa=q.shape[2] != k.shape[2],
            ).transpose(1, 2)
        )  # fmt: skip
    return torch.cat(found, 1)


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
    return attend_scores((q * scale) @ k.mT, v, mask, tap, name=name, softcap=softcap, sinks=sinks)


def attend_scores(
    scores_bhqk: Float[Tensor, "#b h q k"],
    v: Float[Tensor, "b h k e"],
    mask: Mask,
    tap: Scope | None,
    *,
    name: str = "attn",
    softcap: float | None = None,
    sinks: Float[Tensor, "h"] | None = None,
) -> Float[Tensor, "b h q e"]:
    """softmax(scores + bias + mask) v with scores and pattern as sites, from raw scores however they were made.

    The scores are the caller's own tensor and are written to.
    """
    scores_bhqk = at(tap, f"{name}.hook_attn_scores", hidden_scores(scores_bhqk, mask, softcap))
    pattern_bhqk = at(tap, f"{name}.hook_pattern", row_softmax(scores_bhqk, mask, sinks).to(v.dtype))
    return pattern_bhqk @ v


def hidden_scores(
    scores_bhqk: Float[Tensor, "b h q k"], mask: Mask, softcap: float | None = None
) -> Float[Tensor, "b h q k"]:
    """Capped scores with their bias, -inf where the mask forbids; the caller's own tensor, which is written to."""
    if softcap is not None:
        scores_bhqk = softcap * (scores_bhqk / softcap).tanh()
    if mask.bias is not None:
        scores_bhqk = scores_bhqk + mask.bias
    allowed = mask.matrix(scores_bhqk.shape[2], scores_bhqk.shape[3], scores_bhqk.device)
    return scores_bhqk if allowed is None else scores_bhqk.masked_fill_(~allowed, -torch.inf)


def row_softmax(
    scores_bhqk: Float[Tensor, "b h q k"], mask: Mask, sinks: Float[Tensor, "h"] | None = None
) -> Float[Tensor, "b h q k"]:
    """The softmax of hidden scores, in float32 at least; zeros for a query that may see nothing."""
    if mask.blind is None:
        return _softmax(scores_bhqk, sinks)
    return _softmax(scores_bhqk.masked_fill(mask.blind, 0.0), sinks).masked_fill(mask.blind, 0.0)


def _softmax(
    scores_bhqk: Float[Tensor, "b h q k"], sinks: Float[Tensor, "h"] | None
) -> Float[Tensor, "b h q k"]:
    wide = torch.promote_types(scores_bhqk.dtype, torch.float32)
    if sinks is None:
        return scores_bhqk.softmax(-1, dtype=wide)
    sink = rearrange(sinks, "h -> 1 h 1 1").to(wide).expand(*scores_bhqk.shape[:3], 1)
    return torch.cat((scores_bhqk.to(wide), sink), -1).softmax(-1)[..., :-1]
