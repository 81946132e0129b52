"""How tensors of a checkpoint are copied into parameters, or mapped as parameters.

A parameter is allocated once, in its dtype and on its device, and its parts are copied into slices of it a few
mebibytes at a time: no second copy of the model exists, and none of a tensor except where a layout cannot be a view.

A large parameter that is stored in a safetensors file exactly as needed is not copied: it is a private view of the
mapped file (gain: `experiments/bench/load.py`). Editing it does not change the file, and deleting or replacing the file
does not change it. A program that overwrites or truncates the file in place would change it, which is checked before
every pass (`model/mapped.py`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from interp.core.axes import shape_text
from interp.core.kinds import require_device
from interp.core.stats import narrowed
from interp.families.spec import Product, TensorLayout, TensorRule, same
from interp.families.stored import Tensors, row_slices
from interp.model.config import ModelConfig

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""Dtypes in which a parameter may be stored."""
MAPPED_FROM = 2**20
"""Smallest size in bytes of a parameter that may stay a view of its file; smaller ones are copied, which is cheap."""


@dataclass(frozen=True)
class ParameterPlan:
    """How one parameter is filled: names of the checkpoint's tensors (`parts`), their layout, and the result's form."""

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
    """The plan of one rule, with shapes and dtypes checked without reading values; dtype None keeps the checkpoint's.

    Args:
        sizes: number of entries of each part of a joined parameter; None where it does not follow from the config.
    """
    outlines = [_checked_outline(tensors, name) for name in parts]
    laid = [_laid_shape(rule, name, outline, config) for name, outline in zip(parts, outlines, strict=True)]
    if sizes is not None and rule.product is None:
        _check_parts(rule, parts, laid, sizes)
    if rule.product is not None:
        laid = [_outline_of_product(rule, rule.product, outlines).shape]
    too_deep = any(
        min(len(part), outline.ndim) > len(shape) for part, outline in zip(laid, outlines, strict=False)
    )
    if too_deep or not _fits(laid, shape):
        got = " + ".join(shape_text(part) for part in laid) if len(laid) <= 3 else f"{len(laid)} parts"
        joined = _joined_shape(laid, len(shape))
        raise ValueError(
            f"{rule.ours} requires shape {shape_text(shape)}, {' + '.join(rule.theirs)} gives "
            f"{got if joined is None else shape_text(joined)}"
        )
    stored = outlines[0].dtype
    for outline in outlines[1:]:
        stored = torch.promote_types(stored, outline.dtype)
    check_dtype(dtype or stored, device)
    return ParameterPlan(rule.ours, parts, rule.layout, shape, dtype or stored, device, config, rule.product)


def _laid_shape(rule: TensorRule, name: str, outline: Tensor, config: ModelConfig) -> torch.Size:
    """The shape of a "meta" tensor in a rule's layout; ValueError naming a tensor that has no such layout."""
    try:
        return rule.layout(outline, config).shape
    except RuntimeError as cause:
        raise ValueError(
            f"{rule.ours} cannot be made of {name}, whose shape is {shape_text(outline.shape)}: {cause}"
        ) from cause


def _check_parts(
    rule: TensorRule, parts: tuple[str, ...], laid: list[torch.Size], sizes: tuple[int, ...]
) -> None:
    """ValueError naming the first part of a joined parameter with another number of entries than `sizes` says."""
    for name, part, size in zip(parts, laid, sizes, strict=True):
        if prod(part) != size:
            required = (size // max(1, prod(part[1:])), *part[1:])
            raise ValueError(
                f"{rule.ours} is made of {len(parts)} tensors, and {name} requires shape {shape_text(required)}, "
                f"got {shape_text(part)}"
            )


def fill(target: ParameterPlan, tensors: Tensors) -> Tensor:
    """The parameter of a plan; ValueError naming a tensor with NaN or infinite values."""
    size = target.shape.numel() * target.dtype.itemsize
    if target.product is not None:
        return _computed_parameter(target, target.product, tensors)
    if target.layout is same and target.device.type == "cpu" and size >= MAPPED_FROM:
        view = tensors.mapped(target.parts)
        if view is not None and view.dtype == target.dtype:
            _require_finite_parts(target.parts, view, tensors)
            return view.view(target.shape)
    if target.layout is same and len(target.parts) == 1:
        stored = tensors.taken(target.parts[0])
        if stored is not None and (stored.dtype, stored.device, stored.shape) == (
            target.dtype,
            target.device,
            target.shape,
        ):
            require_finite(target.parts[0], (stored[rows] for rows in row_slices(stored)))
            return stored
    return _copied_parameter(target, tensors)


def _outline_of_product(rule: TensorRule, product: Product, outlines: list[Tensor]) -> Tensor:
    """A rule's product of "meta" tensors; ValueError where their shapes do not fit together."""
    try:
        return product(*(outline.float() for outline in outlines))
    except RuntimeError as cause:
        shapes = " and ".join(shape_text(outline.shape) for outline in outlines)
        raise ValueError(
            f"{rule.ours} is computed from {' and '.join(rule.theirs)}, whose shapes {shapes} do not fit"
        ) from cause


def _computed_parameter(target: ParameterPlan, product: Product, tensors: Tensors) -> Tensor:
    """The parameter that a rule's product computes, in float32 or wider, then rounded once to its dtype."""
    for name in target.parts:
        require_finite(name, _chunks(tensors, name))
    wide = torch.promote_types(target.dtype, torch.float32)
    value = product(*(tensors[name].detach().to(target.device, wide) for name in target.parts))
    return narrowed(value, target.dtype, " and ".join(target.parts)).contiguous()


def _copied_parameter(target: ParameterPlan, tensors: Tensors) -> Tensor:
    parameter = torch.empty(target.shape, dtype=target.dtype, device=target.device)
    start = 0
    for name in target.parts:
        if target.layout is same:
            part = tensors[name]
            place = _slice_view(parameter, start, part.shape)
            for rows in row_slices(part):
                chunk = tensors[name].detach()[rows]
                require_finite(name, [chunk])
                place[rows].copy_(narrowed(chunk, target.dtype, name))
                tensors.release(chunk.numel() * chunk.element_size())
        else:
            require_finite(name, _chunks(tensors, name))
            part = target.layout(tensors[name].detach(), target.config)
            _slice_view(parameter, start, part.shape).copy_(narrowed(part, target.dtype, name))
            tensors.release(part.numel() * part.element_size())
        start += part.numel()
    return parameter


def require_finite(name: str, chunks: Iterable[Tensor]) -> None:
    """ValueError naming the tensor if a value is NaN or infinite: one pass over the chunks, without a copy.

    A sum is finite only if every term is. It may also overflow, so an infinite sum is followed by the exact test.
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
    """ValueError, with both names, if parameters of this dtype cannot be on this device."""
    if dtype not in DTYPES:
        raise ValueError(
            f"parameters require one of {', '.join(map(_dtype_name, DTYPES))}, got {_dtype_name(dtype)} for {device}"
        )
    require_device(device, dtype, numbers=False)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _checked_outline(tensors: Tensors, name: str) -> Tensor:
    outline = tensors.outline(name)
    if outline.dtype not in DTYPES:
        raise ValueError(
            f"{name}: a floating point tensor is required, got {outline.dtype}; quantised weights are read where the "
            "config says how they are stored (quantization_config)"
        )
    return outline


def _joined_shape(parts: list[torch.Size], ndim: int) -> tuple[int, ...] | None:
    """The shape of the parts joined along the first axis, extra leading axes flattened; None if they do not join."""
    flat = [
        (prod(p[: len(p) - ndim + 1]), *p[len(p) - ndim + 1 :]) if len(p) > ndim else tuple(p) for p in parts
    ]
    if len({part[1:] for part in flat}) > 1 or len({len(part) for part in flat}) > 1 or not flat[0]:
        return None
    return (sum(part[0] for part in flat), *flat[0][1:])


def _fits(parts: list[torch.Size], shape: torch.Size) -> bool:
    """Whether the joined parts have the parameter's shape, or that with its leading axes flattened."""
    joined = _joined_shape(parts, len(shape))
    if joined is None:
        return False
    if len(joined) < len(shape) and len(parts) == 1 != shape[0]:
        return False
    lead = len(shape) - len(joined) + 1
    return joined == (prod(shape[:lead]), *shape[lead:])


def _slice_view(parameter: Tensor, start: int, shape: torch.Size) -> Tensor:
    """A view of shape `shape` on the elements of a contiguous parameter from flat index `start` on."""
    return parameter.view(-1)[start : start + prod(shape)].view(shape)


def _chunks(tensors: Tensors, name: str) -> Iterator[Tensor]:
    for rows in row_slices(tensors[name]):
        yield tensors[name].detach()[rows]
