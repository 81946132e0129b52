"""Which linear maps of the normed stream give a wrapped network's queries, keys and values.

No layout is assumed: in one pass every linear map inside a block is compared with the values that attention was given,
column by column, and the rows of its matrix that give them are the map, however the network packs its heads. Queries
and keys are compared at the first position, where rotary positions turn nothing, and hold everywhere if their products
of one position are those of the rotated ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor, nn

from interp.model.norm import NoNorm, Norm, Normalize
from interp.wrapped.seams import LinearView, NormOf
from interp.wrapped.search import COMPUTED, Call, close, norm_of

APART = 1e-3
"""Columns at unit length that are two lie further apart."""


@dataclass(frozen=True)
class HeadMap:
    """Rows of a linear map of the normed stream, by head; paths are relative to the block."""

    path: str
    transposed: bool
    rows: Int[Tensor, "h e"]
    factor: float = 1.0
    """Factor on the output (OPT makes its queries small before they are used)."""

    def of(self, block: nn.Module) -> tuple[Float[Tensor, "h e d"], Float[Tensor, "h e"] | None]:
        """The map's matrix and bias."""
        view = LinearView(block.get_submodule(self.path), self.transposed)
        weight, bias = view.weight[self.rows], None if view.bias is None else view.bias[self.rows]
        if self.factor == 1:
            return weight, bias
        return weight * self.factor, None if bias is None else bias * self.factor

    def applied(self, block: nn.Module, x: Float[Tensor, "b p d"]) -> Float[Tensor, "b p h e"]:
        """The map's output for the normed stream."""
        weight, bias = self.of(block)
        made = einsum(x, weight, "b p d, h e d -> b p h e")
        return made if bias is None else made + bias


@dataclass(frozen=True)
class StreamReading:
    """Maps by which a block's heads read the stream: the norm before (None: none), and maps by `q`, `k` and `v`."""

    norm: str | None
    kind: Norm
    maps: Mapping[str, HeadMap]
    scale: float = 1.0
    """Factor on q . k."""

    def before(self, block: nn.Module, width: int) -> Normalize:
        """The norm before the maps, as a norm of this package."""
        if self.norm is None:
            return Normalize(NoNorm(), width, "ln1")
        source = block.get_submodule(self.norm)
        if next(source.parameters(recurse=False), None) is None:
            return Normalize(self.kind, width, "ln1").requires_grad_(False)
        return NormOf(source, self.kind, "ln1").module()


def reading(
    block: nn.Module, inner: Mapping[str, Call], stream: Float[Tensor, "b p d"], seen: Mapping[str, Tensor]
) -> StreamReading | None:
    """The linear maps by which a block makes `q`, `k` and `v` `[b p h e]` of the stream, found from `seen`.

    None if they are not linear maps of one norm of it. Maps that were not found are left out.
    """
    for norm, kind, normed in _normed(block, inner, stream):
        linear = list(_linear(block, inner, normed))
        maps = {}
        for name, values in seen.items():
            for path, transposed, gave in linear:
                found = matched(gave.flatten(0, 1), values.flatten(0, 1).flatten(1))
                if found is not None:
                    rows, factor = found
                    maps[name] = HeadMap(path, transposed, rows.unflatten(0, values.shape[2:]), factor)
                    break
        if maps:
            return StreamReading(norm, kind, maps)
    return None


def _normed(
    block: nn.Module, inner: Mapping[str, Call], stream: Float[Tensor, "b p d"]
) -> Iterator[tuple[str | None, Norm, Float[Tensor, "b p d"]]]:
    """The norms of the stream in a block, and the stream itself: what its linear maps may read."""
    for path, call in inner.items():
        if call.given is None or call.gave is None or call.given.shape != stream.shape:
            continue
        if torch.equal(call.given, stream) and call.gave.shape == stream.shape:
            kind = norm_of(block.get_submodule(path), call.given, call.gave)
            if kind is not None:
                yield path, kind, call.gave
    yield None, NoNorm(), stream


def _linear(
    block: nn.Module, inner: Mapping[str, Call], given: Float[Tensor, "b p d"]
) -> Iterator[tuple[str, bool, Float[Tensor, "b p o"]]]:
    """The linear maps that read this, whether they are stored `[in, out]`, and what they gave."""
    for path, call in inner.items():
        module = block.get_submodule(path)
        weight = getattr(module, "weight", None)
        if (
            call.given is None
            or call.gave is None
            or not isinstance(weight, nn.Parameter)
            or weight.ndim != 2
        ):
            continue
        if call.given.shape != given.shape or not torch.equal(call.given, given):
            continue
        for transposed in (False, True):
            view = LinearView(module, transposed)
            if view.weight.shape != (call.gave.shape[-1], given.shape[-1]):
                continue
            made = given @ view.weight.T
            if close(made if view.bias is None else made + view.bias, call.gave, COMPUTED):
                yield path, transposed, call.gave
                break


def matched(
    gave: Float[Tensor, "n o"], wanted: Float[Tensor, "n c"]
) -> tuple[Int[Tensor, "c"], float] | None:
    """Which column of one, times one factor, is each column of the other; None if one is no column, or any of two."""
    if gave.shape[1] < wanted.shape[1]:
        return None
    sizes = [x.double().norm(dim=0).clamp_min(torch.finfo(torch.float32).tiny) for x in (gave, wanted)]
    gave_scaled, wanted_scaled = (x.double() / size for x, size in zip((gave, wanted), sizes, strict=True))
    near, which = torch.cdist(wanted_scaled.T, gave_scaled.T).topk(min(2, gave.shape[1]), largest=False)
    factors = sizes[1] / sizes[0][which[:, 0]]
    factor = float(factors.median())
    same = near[:, 0] <= 5 * COMPUTED
    alone = near[:, 1:] > APART
    steady = (factors / factor - 1).abs() <= 5 * COMPUTED
    if not bool(same.all() and alone.all() and steady.all()):
        return None
    return which[:, 0], 1.0 if abs(factor - 1) <= 5 * COMPUTED else factor


def agree(made: tuple[Tensor, Tensor], rotated: tuple[Tensor, Tensor]) -> bool:
    """Whether queries and keys `[b p h e]` of one position have the products of the rotated ones, and their lengths."""
    group = made[0].shape[2] // made[1].shape[2]
    ours, theirs = (
        einsum(q, k.repeat_interleave(group, 2), "b p h e, b p h e -> b p h") for q, k in (made, rotated)
    )
    lengths = [(mine.norm(dim=-1), other.norm(dim=-1)) for mine, other in zip(made, rotated, strict=True)]
    return all(close(mine, other, 5 * COMPUTED) for mine, other in ((ours, theirs), *lengths))
