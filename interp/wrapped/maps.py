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
"""Two columns of unit length further apart than this are different columns."""


@dataclass(frozen=True)
class HeadMap:
    """Rows of a linear map of the normed stream, by head; paths are relative to the block."""

    path: str
    transposed: bool
    rows: Int[Tensor, "h e"]
    factor: float = 1.0
    """Factor on the output (OPT makes its queries small before they are used)."""

    def of(self, block: nn.Module) -> tuple[Float[Tensor, "h e d"], Float[Tensor, "h e"] | None]:
        """The map's matrix and bias, by head; both include `factor`."""
        view = LinearView(block.get_submodule(self.path), self.transposed)
        weight, bias = view.weight[self.rows], None if view.bias is None else view.bias[self.rows]
        if self.factor == 1:
            return weight, bias
        return weight * self.factor, None if bias is None else bias * self.factor

    def applied(self, block: nn.Module, x: Float[Tensor, "b p d"]) -> Float[Tensor, "b p h e"]:
        """The map's output by head for the normed stream `x`."""
        weight, bias = self.of(block)
        output = einsum(x, weight, "b p d, h e d -> b p h e")
        return output if bias is None else output + bias


@dataclass(frozen=True)
class StreamReading:
    """How a block's heads read the stream: the path of the norm (None: no norm), and the maps named `q`, `k`, `v`."""

    norm: str | None
    kind: Norm
    maps: Mapping[str, HeadMap]
    scale: float = 1.0
    """Factor on q . k."""

    def before(self, block: nn.Module, width: int) -> Normalize:
        """The norm between the stream and the maps, as a `Normalize` of this package."""
        if self.norm is None:
            return Normalize(NoNorm(), width, "ln1")
        source = block.get_submodule(self.norm)
        if next(source.parameters(recurse=False), None) is None:
            return Normalize(self.kind, width, "ln1").requires_grad_(False)
        return NormOf(source, self.kind, "ln1").module()


def reading(
    block: nn.Module, inner: Mapping[str, Call], stream: Float[Tensor, "b p d"], seen: Mapping[str, Tensor]
) -> StreamReading | None:
    """The linear maps from the normed stream to the `q`, `k` and `v` `[b p h e]` that `seen` holds by name.

    None if no norm of the stream is followed by such a map. A name whose map was not found is left out.
    """
    for norm, kind, normed in _norm_candidates(block, inner, stream):
        linear = list(_linear_maps_of(block, inner, normed))
        maps = {}
        for name, values in seen.items():
            for path, transposed, gave in linear:
                match = matched(gave.flatten(0, 1), values.flatten(0, 1).flatten(1))  # [b p h e] -> [b*p h*e]
                if match is not None:
                    rows, factor = match
                    maps[name] = HeadMap(path, transposed, rows.unflatten(0, values.shape[2:]), factor)
                    break
        if maps:
            return StreamReading(norm, kind, maps)
    return None


def _norm_candidates(
    block: nn.Module, inner: Mapping[str, Call], stream: Float[Tensor, "b p d"]
) -> Iterator[tuple[str | None, Norm, Float[Tensor, "b p d"]]]:
    """Candidates for the input of q, k and v: the output of each norm of the stream, and last the stream itself."""
    for path, call in inner.items():
        if call.given is None or call.gave is None or call.given.shape != stream.shape:
            continue
        if torch.equal(call.given, stream) and call.gave.shape == stream.shape:
            kind = norm_of(block.get_submodule(path), call.given, call.gave)
            if kind is not None:
                yield path, kind, call.gave
    yield None, NoNorm(), stream


def _linear_maps_of(
    block: nn.Module, inner: Mapping[str, Call], normed: Float[Tensor, "b p d"]
) -> Iterator[tuple[str, bool, Float[Tensor, "b p o"]]]:
    """Path of each linear map that was given `normed`, whether its matrix is stored `[in, out]`, and its output."""
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
        if call.given.shape != normed.shape or not torch.equal(call.given, normed):
            continue
        for transposed in (False, True):
            view = LinearView(module, transposed)
            if view.weight.shape != (call.gave.shape[-1], normed.shape[-1]):
                continue
            output = normed @ view.weight.T
            if close(output if view.bias is None else output + view.bias, call.gave, COMPUTED):
                yield path, transposed, call.gave
                break


def matched(
    outputs: Float[Tensor, "n o"], targets: Float[Tensor, "n c"]
) -> tuple[Int[Tensor, "c"], float] | None:
    """Index into the columns of `outputs` for each column of `targets`, and the factor: target = factor * output.

    None if some target column is no column of `outputs`, or could be two of them.
    """
    if outputs.shape[1] < targets.shape[1]:
        return None
    sizes = [x.double().norm(dim=0).clamp_min(torch.finfo(torch.float32).tiny) for x in (outputs, targets)]
    outputs_scaled, targets_scaled = (
        x.double() / size for x, size in zip((outputs, targets), sizes, strict=True)
    )
    near, which = torch.cdist(targets_scaled.T, outputs_scaled.T).topk(
        min(2, outputs.shape[1]), largest=False
    )
    factors = sizes[1] / sizes[0][which[:, 0]]
    factor = float(factors.median())
    same = near[:, 0] <= 5 * COMPUTED
    alone = near[:, 1:] > APART
    steady = (factors / factor - 1).abs() <= 5 * COMPUTED
    if not bool(same.all() and alone.all() and steady.all()):
        return None
    return which[:, 0], 1.0 if abs(factor - 1) <= 5 * COMPUTED else factor


def agree(unrotated: tuple[Tensor, Tensor], rotated: tuple[Tensor, Tensor]) -> bool:
    """Whether q . k at equal positions, and the norms of q and k `[b p h e]`, are equal before and after rotation."""
    group = unrotated[0].shape[2] // unrotated[1].shape[2]
    ours, theirs = (
        einsum(q, k.repeat_interleave(group, 2), "b p h e, b p h e -> b p h") for q, k in (unrotated, rotated)
    )
    lengths = [(a.norm(dim=-1), b.norm(dim=-1)) for a, b in zip(unrotated, rotated, strict=True)]
    return all(close(a, b, 5 * COMPUTED) for a, b in ((ours, theirs), *lengths))
