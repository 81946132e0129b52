"""Small functions of tensors: what TransformerLens keeps in `utilities.tensors`."""

import sys
from collections.abc import Mapping, Sequence
from typing import TypeVar, Union

import einops
import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

Value = TypeVar("Value")
Cornered = TypeVar("Cornered")
Scalar = Union[int, float, bool, str]  # noqa: UP007


def to_numpy(tensor: Tensor | np.ndarray | Sequence[object] | Scalar) -> np.ndarray:
    """The array of a tensor (bfloat16 as float32), list, tuple, array or scalar; ValueError for anything else."""
    if isinstance(tensor, np.ndarray):
        return tensor
    if isinstance(tensor, Tensor):
        tensor = tensor.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    if isinstance(tensor, list | tuple | int | float | bool | str):
        return np.array(tensor)
    raise ValueError(f"Input to to_numpy has invalid type: {type(tensor)}")


def get_corner(tensor: Cornered, n: int = 3) -> Cornered:
    """The first `n` along every axis of a tensor, or of what has `ndim` and slices like one."""
    corner: Cornered = tensor[(slice(n),) * tensor.ndim]  # type: ignore[index, attr-defined]
    return corner


def remove_batch_dim(tensor: Shaped[Tensor, "b ..."]) -> Shaped[Tensor, "..."]:
    """The tensor without its first axis if that has length 1, else the tensor itself."""
    return tensor.squeeze(0) if tensor.shape[0] == 1 else tensor


def transpose(tensor: Shaped[Tensor, "*lead a b"]) -> Shaped[Tensor, "*lead b a"]:
    """The last two axes exchanged."""
    return tensor.mT


def is_square(x: Shaped[Tensor, "..."]) -> bool:
    """Whether it is a matrix with as many rows as columns."""
    return x.ndim == 2 and x.shape[0] == x.shape[1]


def is_lower_triangular(x: Shaped[Tensor, "..."]) -> bool:
    """Whether it is a square matrix with nothing above the diagonal."""
    return is_square(x) and x.equal(x.tril())


def check_structure(
    t1: Shaped[Tensor, "row col"], t2: Shaped[Tensor, "row col"], *, verbose: bool = False
) -> None:
    """Write to stdout whether neighbouring rows and columns of two matrices compare alike (`>=`) everywhere.

    "PASSED", or the rows that do not, or else the columns; `verbose` shows the comparisons.
    """
    assert t1.ndim == 2
    assert t1.shape == t2.shape
    rows = _mismatches(t1, t2, "row", verbose=verbose)
    columns = _mismatches(t1.mT, t2.mT, "column", verbose=verbose)
    if rows:
        sys.stdout.write(f"row mismatch: {rows}\n")
    elif columns:
        sys.stdout.write(f"column mismatch: {columns}\n")
    else:
        sys.stdout.write("PASSED\n")


def _mismatches(
    t1: Shaped[Tensor, "row col"], t2: Shaped[Tensor, "row col"], name: str, *, verbose: bool
) -> list[int]:
    one, other = t1[:-1] >= t1[1:], t2[:-1] >= t2[1:]
    found: list[int] = (one != other).any(1).nonzero()[:, 0].tolist()
    if verbose:  # upstream says "rows" of columns too
        lines = [f"Checking {name}s"]
        for i in found:
            lines += [f"\trows {i}:{i + 1}", f"\tt1: {one[i].tolist()}", f"\tt2: {other[i].tolist()}"]
        sys.stdout.write("\n".join(lines) + "\n")
    return found


def get_offset_position_ids(
    past_kv_pos_offset: int, attention_mask: Int[Tensor, "b offset_pos"]
) -> Int[Tensor, "b pos"]:
    """The position of every column from `past_kv_pos_offset` on, counting attended ones; 0 at padding before them."""
    return (attention_mask.cumsum(1) - 1).clamp(min=0)[:, past_kv_pos_offset:]


def get_cumsum_along_dim(
    tensor: Shaped[Tensor, "..."], dim: int, reverse: bool = False
) -> Shaped[Tensor, "..."]:
    """The cumulative sum along an axis, from its end if `reverse`."""
    return tensor.flip(dim).cumsum(dim).flip(dim) if reverse else tensor.cumsum(dim)


def repeat_along_head_dimension(
    tensor: Float[Tensor, "b p d"], n_heads: int, clone_tensor: bool = True
) -> Float[Tensor, "b p {n_heads} d"]:
    """The stream once per head; a view if `clone_tensor` is off."""
    repeated = einops.repeat(tensor, "b p d -> b p h d", h=n_heads)
    return repeated.clone() if clone_tensor else repeated


def filter_dict_by_prefix(dictionary: Mapping[str, Value], prefix: str) -> dict[str, Value]:
    """The entries under `prefix` with it (and its dot) cut off.

    Example:
        >>> filter_dict_by_prefix({"a.w": 1, "ab.w": 2}, "a")
        {'w': 1}
    """
    start = prefix if prefix.endswith(".") else f"{prefix}."
    return {key[len(start) :]: value for key, value in dictionary.items() if key.startswith(start)}
