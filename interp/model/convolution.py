"""A depthwise convolution over the tokens of a text, with padding, packed texts and a cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.model.attention import PassState, picked


def convolved(
    x: Float[Tensor, "b p f"],
    kernel: Float[Tensor, "t f"],
    shared: PassState,
    key: tuple[int, str],
    bias: Float[Tensor, "f"] | None = None,
    *,
    ahead: int = 0,
) -> Float[Tensor, "b p f"]:
    """sum_t kernel_t x_(i - T + 1 + ahead + t) + bias over the kept tokens of each text.

    The own token's weights are last, but for those of the `ahead` tokens after it, which a model without cache may see.
    Padded columns are skipped. key: under which the cache keeps the last columns for the next pass.
    """
    n, back, cache = x.shape[1], len(kernel) - 1 - ahead, shared.cache
    keep, documents = shared.layout.keep, shared.layout.documents
    order: Int[Tensor, "b p"] | None = None
    if keep is not None:
        keep = keep[:, -n:]
        order = (~keep).int().argsort(dim=1, stable=True)  # real columns first
        x = picked(x, order)
        x = x.masked_fill(~picked(keep, order)[..., None], 0) if ahead else x
        documents = None if documents is None else picked(documents, order)
    before = () if cache is None else cache.states.get(key, ())
    past = torch.cat((before[0] if before else x.new_zeros(len(x), back, x.shape[2]), x), 1)
    if cache is not None:
        shared.left[key] = (_last_kept_columns(past, back, keep, n),)
    total = kernel[back] * x if bias is None else bias + kernel[back] * x
    for t in range(1, back + 1):
        earlier = past[:, back - t : back - t + n]
        if documents is not None:
            earlier = earlier.masked_fill(_other_text(documents, t)[..., None], 0)
        total = total + kernel[back - t] * earlier
    for t in range(1, ahead + 1):
        later = F.pad(x[:, t:], (0, 0, 0, min(t, n)))
        if documents is not None:
            later = later.masked_fill(_other_text(documents.flip(1), t).flip(1)[..., None], 0)
        total = total + kernel[back + t] * later
    return total if order is None else picked(total, order.argsort(1))


def _last_kept_columns(
    past: Float[Tensor, "b k f"], back: int, keep: Bool[Tensor, "b p"] | None, n: int
) -> Float[Tensor, "b t f"]:
    """The last `back` real columns of each row of `past`, whose padded columns are at the end."""
    if keep is None:
        return past[:, n:]
    return picked(past, keep.sum(1, keepdim=True) + torch.arange(back, device=past.device))


def _other_text(documents: Int[Tensor, "b p"], t: int) -> Bool[Tensor, "b p"]:
    """True where the column `t` places before belongs to another text, or does not exist."""
    differs = torch.ones_like(documents, dtype=torch.bool)
    differs[:, t:] = documents[:, t:] != documents[:, :-t]
    return differs
