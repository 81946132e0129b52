"""The factors by which edits multiplied sums that are split by source."""

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
        ValueError: where it is no multiple of what the head moved.
    """
    moved, size = (
        einsum(p, v, "b h q k, b k h e -> b q h e")
        for p, v in ((pattern, value), (pattern.abs(), value.abs()))
    )
    found = multiple(model, layer, z, moved, size, pattern.shape[-1])
    return rearrange(found, "b q h 1 -> b h q 1")


def multiple(
    model: Transformer,
    layer: int,
    edited: Float[Tensor, "*b d"],
    whole: Float[Tensor, "*b d"],
    size: Float[Tensor, "*b d"],
    n: int,
) -> Float[Tensor, "*b 1"]:
    """The factor c of `edited = c whole` for every vector.

    Args:
        size: sum of the absolute terms of `whole`.
        n: their number.

    Raises:
        ValueError: vectors that are no multiples, naming the edits of the layer.
    """
    tiny = torch.finfo(whole.dtype).tiny
    most = torch.maximum(size, edited.abs()).amax(-1, keepdim=True)
    allowed = bound(n, most, most.dtype) + in_half(model) * most
    found = (edited * whole).sum(-1, keepdim=True) / whole.square().sum(-1, keepdim=True).clamp_min(tiny)
    found = torch.where(whole.abs().amax(-1, keepdim=True) <= allowed, torch.ones_like(found), found)
    found = torch.where((edited == 0).all(-1, keepdim=True), torch.zeros_like(found), found)
    if not bool(((edited - found * whole).abs() <= allowed).all()):
        names = [edit.name for edit in model.edits if layer_of(edit, model) == layer]
        raise ValueError(
            f"splitting attention of layer {layer} by source requires edits that multiply what it moved (Zero, "
            f"Scale), or that come before its patterns and values; what the edits of {', '.join(names)} write comes "
            "from no source"
        )
    return found
