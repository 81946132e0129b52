"""The factors by which edits multiplied a head's output, which a split of the head by source has to contain."""

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from interp.model.transformer import Transformer
from interp.passes.edited import layer_of
from interp.residual.decomposition import bound, in_half


def head_shares(
    model: Transformer,
    layer: int,
    pattern: Float[Tensor, "b h q k"],
    value: Float[Tensor, "b k h e"],
    z: Float[Tensor, "b q h e"],
) -> Float[Tensor, "b h q 1"]:
    """Factor of every head's output in an edited pass, at every query: 1 where no edit touched it, 0 if zeroed.

    Raises:
        ValueError: an edited output that is no multiple of the pattern-weighted values.
    """
    moved, size = (
        einsum(p, v, "b h q k, b k h e -> b q h e")
        for p, v in ((pattern, value), (pattern.abs(), value.abs()))
    )
    factors = multiple(model, layer, z, moved, size, pattern.shape[-1])
    return rearrange(factors, "b q h 1 -> b h q 1")


def multiple(
    model: Transformer,
    layer: int,
    edited: Float[Tensor, "*b d"],
    original: Float[Tensor, "*b d"],
    size: Float[Tensor, "*b d"],
    n: int,
) -> Float[Tensor, "*b 1"]:
    """The factor c of `edited = c * original` for every vector (the last axis).

    Args:
        size: sum of the absolute values of the terms of `original`.
        n: number of these terms.

    Raises:
        ValueError: edited vectors that are no multiples of the original; the message names the edits of the layer.
    """
    tiny = torch.finfo(original.dtype).tiny
    most = torch.maximum(size, edited.abs()).amax(-1, keepdim=True)
    allowed = bound(n, most, most.dtype) + in_half(model) * most
    factor = (edited * original).sum(-1, keepdim=True) / original.square().sum(-1, keepdim=True).clamp_min(
        tiny
    )
    factor = torch.where(original.abs().amax(-1, keepdim=True) <= allowed, torch.ones_like(factor), factor)
    factor = torch.where((edited == 0).all(-1, keepdim=True), torch.zeros_like(factor), factor)
    if not bool(((edited - factor * original).abs() <= allowed).all()):
        names = [edit.name for edit in model.edits if layer_of(edit, model) == layer]
        raise ValueError(
            f"splitting attention of layer {layer} by source requires edits that multiply what it moved (Zero, "
            f"Scale), or that come before its patterns and values; what the edits of {', '.join(names)} write comes "
            "from no source"
        )
    return factor
