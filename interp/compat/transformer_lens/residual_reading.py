"""How parts of the residual stream are read: centred, projected and scaled, before heads and neurons are expanded.

Centring, a projection and a cached scale are linear, so they are applied to `W_O`, `W_out` and the small `z` and
`post` instead of to one vector per head or neuron: with a projection onto o outputs nothing `[... d_mlp, d_model]`
is ever formed.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Reading:
    """The linear map `x -> (x - mean x) @ projection / scale`; each of the three steps may be absent."""

    centre: bool = False
    """Whether the mean over d_model is taken off."""
    scale: Float[Tensor, "*#batch 1"] | None = None
    """What to divide by, per row and position."""
    projection: Float[Tensor, "d o"] | None = None
    """Directions to read; None keeps the whole vector."""

    @cached_property
    def directions(self) -> Float[Tensor, "d o"] | None:
        """The projection, centred if vectors are to be: `(x - mean x) @ p = x @ (p - mean p)`."""
        if self.projection is None or not self.centre:
            return self.projection
        return self.projection - self.projection.mean(0)

    def unscaled(self, vectors: Float[Tensor, "... d"]) -> Float[Tensor, "... o"]:
        """Everything but the division: what a writing weight (its rows are vectors) becomes."""
        vectors = self._widened(vectors)
        if self.directions is not None:
            return vectors @ self.directions.to(vectors.dtype)
        return vectors - vectors.mean(-1, keepdim=True) if self.centre else vectors

    def __call__(self, vectors: Float[Tensor, "*stack d"]) -> Float[Tensor, "*out o"]:
        """The vectors as read; leading dimensions beyond the scale's are components."""
        read = self.unscaled(vectors)
        return read if self.scale is None else read / self.scale

    def heads(
        self, z: Float[Tensor, "*batch h e"], w_out: Float[Tensor, "h e d"]
    ) -> Float[Tensor, "h *batch o"]:
        """What each head writes, as read: one einsum."""
        scaled = z if self.scale is None else z / self.scale[..., None]
        writes = self.unscaled(w_out)
        return torch.einsum("...he,heo->h...o", scaled.to(writes.dtype), writes)

    def neurons(
        self, post: Float[Tensor, "*batch m"], w_out: Float[Tensor, "m d"]
    ) -> Float[Tensor, "m *batch o"]:
        """What each neuron writes, as read."""
        scaled = post if self.scale is None else post / self.scale
        writes = self.unscaled(w_out)
        return scaled.movedim(-1, 0)[..., None] * writes.reshape(
            len(writes), *(1,) * (post.ndim - 1), writes.shape[-1]
        )

    def dots(
        self, stack: Float[Tensor, "*stack d"], directions: Float[Tensor, "... d"]
    ) -> Float[Tensor, "*out"]:
        """The products of vectors as read (without a projection) with directions."""
        dots = torch.einsum("...d,...d->...", self._widened(stack), self.unscaled(directions))
        return dots if self.scale is None else dots / self.scale[..., 0]

    def _widened(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """In the widest dtype of those concerned: the scale of a 16-bit model is float32, and so is what it divides."""
        for other in (self.scale, self.projection):
            x = x if other is None else x.to(torch.promote_types(x.dtype, other.dtype))
        return x


def joined(parts: Iterator[Float[Tensor, "_ ..."]], n: int) -> Float[Tensor, "n ..."]:
    """A copy of the parts in one tensor of n rows; without gradients at most one part is alive beside it."""
    first = next(parts)
    if first.requires_grad:
        return torch.cat([first, *parts])
    whole, start = first.new_empty((n, *first.shape[1:])), len(first)
    whole[:start] = first
    for part in parts:
        whole[start : start + len(part)] = part
        start += len(part)
    return whole


def with_remainder(
    rows: Iterator[Float[Tensor, "_ ..."]], rest: Float[Tensor, "..."]
) -> Iterator[Float[Tensor, "_ ..."]]:
    """The rows, then what is left of `rest` without them."""
    for part in rows:
        rest = rest - part.sum(0)
        yield part
    yield rest[None]
