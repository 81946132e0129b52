"""The one way in which a number of a checkpoint gets to its place.

A parameter is allocated once, in its dtype and on its device, and its parts are copied into slices of it a few
mebibytes at a time: no second copy of the model exists, and none of a tensor except where a layout cannot be a view.

A large parameter that lies in a safetensors file exactly as we need it is not copied at all: it is a private view of
the mapped file (gain: `experiments/bench/load.py`). Editing it does not reach the file, and deleting or replacing the
file does not reach it; a program that overwrites or cuts the very file in place would, so that is looked for before
every pass (`model/mapped.py`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.stats import narrowed
from interp.families.spec import Product, TensorLayout, TensorRule, same
from interp.families.stored import Tensors, row_slices
from interp.model.config import ModelConfig

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Dtypes in which a parameter may be stored."""
MAPPED_FROM = 2**20
"""Bytes from which on a parameter may stay a view of its file; smaller ones are copied, which costs next to
nothing.
"""


@dataclass(frozen=True)
class ParameterPlan:
    """One parameter to be made: from which tensors, and as what."""

    ours: str
    parts: tuple[str, ...]
    layout: TensorLayout
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    config: ModelConfig
    product: Product | None = None


def plan(
    rule: TensorRule,
    shape: torch.Size,
    parts: tuple[str, ...],
    tensors: Tensors,
    config: ModelConfig,
    dtype: torch.dtype | None,
    device: torch.device,
    sizes: tuple[int, ...] | None = None,
) -> ParameterPlan:
    """The plan of one rule, shapes and dtypes checked without reading a number; dtype None keeps the checkpoint's.

    Args:
        sizes: how many numbers each part of a joined parameter has; None where that does not follow from the config.
    """
    outlines = [_floating(tensors, name) for name in parts]
    laid = [rule.layout(outline, config).shape for outline in outlines]
    if sizes is not None and rule.product is None:
        _check_parts(rule, parts, laid, sizes)
    if rule.product is not None:
        laid = [_outline_of_product(rule, rule.product, outlines).shape]
    too_deep = rule.layout is same and any(len(part) > len(shape) for part in laid)
    if too_deep or not _fits(laid, shape):
        given = " + ".join(shape_text(part) for part in laid) if len(laid) <= 3 else f"{len(laid)} parts"
        joined = _joined(laid, len(shape))
        raise ValueError(
            f"{rule.ours} requires shape {shape_text(shape)}, {' + '.join(rule.theirs)} gives "
            f"{given if joined is None else shape_text(joined)}"
        )
    stored = outlines[0].dtype
    for outline in outlines[1:]:
        stored = torch.promote_types(stored, outline.dtype)
    check_dtype(dtype or stored, device)
    return ParameterPlan(rule.ours, parts, rule.layout, shape, dtype or stored, device, config, rule.product)


def _check_parts(
    rule: TensorRule, parts: tuple[str, ...], laid: list[torch.Size], sizes: tuple[int, ...]
) -> None:
    """ValueError naming the first part of a joined parameter that has another shape than its own."""
    for name, part, size in zip(parts, laid, sizes, strict=True):
        if prod(part) != size:
            required = (size // max(1, prod(part[1:])), *part[1:])
            raise ValueError(
                f"{rule.ours} is made of {len(parts)} tensors, and {name} requires shape {shape_text(required)}, "
                f"got {shape_text(part)}"
            )


def fill(made: ParameterPlan, tensors: Tensors) -> Tensor:
    """The parameter of a plan; ValueError naming a tensor with NaN or infinite values."""
    size = made.shape.numel() * made.dtype.itemsize
    if made.product is not None:
        return _computed(made, made.product, tensors)
    if made.layout is same and made.device.type == "cpu" and size >= MAPPED_FROM:
        view = tensors.mapped(made.parts)
        if view is not None and view.dtype == made.dtype:
            _require_finite_parts(made.parts, view, tensors)
            return view.view(made.shape)
    if made.layout is same and len(made.parts) == 1:
        stored = tensors.taken(made.parts[0])
        if stored is not None and (stored.dtype, stored.device, stored.shape) == (
            made.dtype,
            made.device,
            made.shape,
        ):
            require_finite(made.parts[0], (stored[rows] for rows in row_slices(stored)))
            return stored
    return _copied(made, tensors)


def _outline_of_product(rule: TensorRule, product: Product, outlines: list[Tensor]) -> Tensor:
    """A rule's product on "meta"; ValueError for tensors that do not go together."""
    try:
        return product(*(outline.float() for outline in outlines))
    except RuntimeError as cause:
        shapes = " and ".join(shape_text(outline.shape) for outline in outlines)
        raise ValueError(
            f"{rule.ours} is computed from {' and '.join(rule.theirs)}, whose shapes {shapes} do not fit"
        ) from cause


def _computed(made: ParameterPlan, product: Product, tensors: Tensors) -> Tensor:
    """The parameter that a product computes, in float32 at least, rounded once."""
    for name in made.parts:
        require_finite(name, _chunks(tensors, name))
    wide = torch.promote_types(made.dtype, torch.float32)
    found = product(*(tensors[name].detach().to(made.device, wide) for name in made.parts))
    return narrowed(found, made.dtype, " and ".join(made.parts)).contiguous()


def _copied(made: ParameterPlan, tensors: Tensors) -> Tensor:
    whole = torch.empty(made.shape, dtype=made.dtype, device=made.device)
    start = 0
    for name in made.parts:
        if made.layout is same:
            part = tensors[name]
            place = _place(whole, start, part.shape)
            for rows in row_slices(part):
                chunk = tensors[name].detach()[rows]
                require_finite(name, [chunk])
                place[rows].copy_(narrowed(chunk, made.dtype, name))
                tensors.release(chunk.numel() * chunk.element_size())
        else:
            require_finite(name, _chunks(tensors, name))
            part = made.layout(tensors[name].detach(), made.config)
            _place(whole, start, part.shape).copy_(narrowed(part, made.dtype, name))
            tensors.release(part.numel() * part.element_size())
        start += part.numel()
    return whole


def require_finite(name: str, chunks: Iterable[Tensor]) -> None:
    """ValueError naming the tensor if a number is NaN or infinite: one pass, and no copy of what is tested.

    A sum is finite only if every term is; it may also overflow, so only then the exact test follows.
    """
    for chunk in chunks:
        if not bool(chunk.sum().isfinite()) and not bool(chunk.isfinite().all()):
            raise ValueError(f"{name}: the checkpoint holds NaN or infinite values")


def _require_finite_parts(names: tuple[str, ...], view: Tensor, tensors: Tensors) -> None:
    start = 0
    for name in names:
        part = view[start : start + tensors[name].numel()]
        require_finite(name, (part[rows] for rows in row_slices(part)))
        start += len(part)


def check_dtype(dtype: torch.dtype, device: torch.device) -> None:
    """ValueError naming both if parameters of this dtype cannot be on this device."""
    if dtype not in DTYPES:
        raise ValueError(
            f"parameters require one of {', '.join(map(_short, DTYPES))}, got {_short(dtype)} for {device}"
        )
    try:
        torch.empty(0, dtype=dtype, device=device)
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as cause:
        raise ValueError(f"{_short(dtype)} on {device} is not possible here: {cause}") from cause


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _floating(tensors: Tensors, name: str) -> Tensor:
    outline = tensors.outline(name)
    if outline.dtype not in DTYPES:
        raise ValueError(
            f"{name}: a floating point tensor is required, got {outline.dtype}; quantised weights are read where the "
            "config says how they are stored (quantization_config)"
        )
    return outline


def _joined(parts: list[torch.Size], ndim: int) -> tuple[int, ...] | None:
    """The shape of the parts joined along the first axis, extra leading axes flattened; None if they do not join."""
    flat = [
        (prod(p[: len(p) - ndim + 1]), *p[len(p) - ndim + 1 :]) if len(p) > ndim else tuple(p) for p in parts
    ]
    if len({part[1:] for part in flat}) > 1 or len({len(part) for part in flat}) > 1 or not flat[0]:
        return None
    return (sum(part[0] for part in flat), *flat[0][1:])


def _fits(parts: list[torch.Size], shape: torch.Size) -> bool:
    """Whether the joined parts have the parameter's shape, or that with its leading axes flattened."""
    joined = _joined(parts, len(shape))
    if joined is None:
        return False
    if len(joined) < len(shape) and len(parts) == 1 != shape[0]:
        return False
    lead = len(shape) - len(joined) + 1
    return joined == (prod(shape[:lead]), *shape[lead:])


def _place(whole: Tensor, start: int, shape: torch.Size) -> Tensor:
    """The elements of a contiguous parameter from `start` on, as a view of this shape."""
    return whole.view(-1)[start : start + prod(shape)].view(shape)


def _chunks(tensors: Tensors, name: str) -> Iterator[Tensor]:
    for rows in row_slices(tensors[name]):
        yield tensors[name].detach()[rows]
