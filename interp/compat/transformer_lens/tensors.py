"""Small functions of tensors, slices of an axis, products of factored matrices, and a list of modules with a type."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, Literal, TypeVar, Union

import einops
import numpy as np
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from interp.compat.transformer_lens.factored_matrix import FactoredMatrix

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


SliceInput = Union[  # noqa: UP007 - upstream's users take it apart with typing.get_args
    int, slice, tuple[int | None, ...], list[int], list[bool], Tensor, np.ndarray, None
]
"""Arguments of a `Slice`, see there."""
Mode = Literal["int", "slice", "array", "identity"]


class Slice:
    """A selection along one axis.

    Modes, by what it is made of: an int drops the axis ("int"); a tuple or a `slice` is `[start:stop:step]`, `(k,)`
    is `[:k]` ("slice"); a list, tensor or array of indices or booleans picks those ("array"); None keeps everything
    ("identity"; it never adds an axis).

    Raises:
        ValueError: anything else.

    Example:
        >>> Slice((1, 5, 2)).apply(torch.arange(6))
        tensor([1, 3])
    """

    slice: int | slice | np.ndarray
    mode: Mode

    def __init__(self, input_slice: SliceInput = None) -> None:
        if input_slice is None:
            self.slice, self.mode = slice(None), "identity"
        elif isinstance(input_slice, int):
            self.slice, self.mode = input_slice, "int"
        elif isinstance(input_slice, tuple | slice):
            self.slice = input_slice if isinstance(input_slice, slice) else slice(*input_slice)
            self.mode = "slice"
        elif isinstance(input_slice, list | Tensor | np.ndarray):
            self.slice, self.mode = to_numpy(input_slice), "array"
        else:
            raise ValueError(f"Invalid input_slice {input_slice}")

    def apply(self, tensor: Shaped[Tensor, "..."], dim: int = 0) -> Shaped[Tensor, "..."]:
        """The selected part of a tensor along `dim`, which may count from the end."""
        index: list[int | slice | np.ndarray] = [slice(None)] * tensor.ndim
        index[dim] = self.slice
        return tensor[tuple(index)]

    def indices(self, max_ctx: int | None = None) -> np.ndarray:
        """The indices that are selected of an axis of length `max_ctx`, as an array (of one for an int).

        Raises:
            ValueError: no `max_ctx`, unless the mode is "int".
        """
        if self.mode == "int":
            return np.array([self.slice], dtype=np.int64)
        if max_ctx is None:
            raise ValueError("max_ctx must be specified if slice is not an integer")
        return np.arange(max_ctx, dtype=np.int64)[self.slice]

    def __repr__(self) -> str:
        return f"Slice: {self.slice} Mode: {self.mode} "

    @classmethod
    def unwrap(cls, slice_input: Union["Slice", SliceInput]) -> "Slice":
        """The argument as a `Slice`; an int becomes a list of one, so that the axis stays."""
        if isinstance(slice_input, Slice):
            return slice_input
        return cls([slice_input] if isinstance(slice_input, int) else slice_input)


def composition_scores(
    left: FactoredMatrix, right: FactoredMatrix, broadcast_dims: bool = True
) -> Float[Tensor, "..."]:
    """|L R| / (|L| |R|) in Frobenius norms (Elhage et al. 2021), `[*left's leading dims, *right's]`.

    Without `broadcast_dims` the leading dims of both are matched instead.

    Raises:
        AssertionError: inner sizes that differ.
    """
    if broadcast_dims:
        leading = left.ndim - 2
        for i in range(leading):
            right = right.unsqueeze(i)
        for i in range(right.ndim - 2 - leading):
            left = left.unsqueeze(i + leading)
    assert left.rdim == right.ldim, (
        f"Composition scores require left.rdim==right.ldim, shapes were left: {left.shape}, right:{right.shape}"
    )
    small_left, small_right = left.collapse_l(), right.collapse_r()
    norms = [matrix.norm(dim=(-2, -1)) for matrix in (small_left @ small_right, small_left, small_right)]
    return norms[0] / norms[1] / norms[2]


def get_matrix_corner(matrix: FactoredMatrix, n: int = 3) -> Float[Tensor, "..."]:
    """The product of the first `n` rows and columns, at the first `n` of every leading dim, cut to three each."""
    corner: Tensor = get_corner(matrix[(slice(n),) * matrix.ndim]).AB
    return corner


M = TypeVar("M", bound=nn.Module)


class TypedModuleList(nn.ModuleList, Generic[M]):
    """torch's `ModuleList`, generic in its elements; a slice is of the same class."""

    def __iter__(self) -> Iterator[M]:
        return super().__iter__()  # type: ignore[return-value]
