"""`Slice`: one value that says which positions (or layers, or rows) to keep, and whether the axis stays."""

from typing import Literal, Union

import numpy as np
from jaxtyping import Shaped
from torch import Tensor

from interp.compat.transformer_lens.tensors import to_numpy

SliceInput = Union[  # noqa: UP007 - upstream's users take it apart with typing.get_args
    int, slice, tuple[int | None, ...], list[int], list[bool], Tensor, np.ndarray, None
]
"""What a `Slice` is made of, see there."""
Mode = Literal["int", "slice", "array", "identity"]


class Slice:
    """A selection along one axis.

    Modes, by what it is made of: an int drops the axis ("int"); a tuple or a `slice` is `[start:stop:step]`, `(k,)` is
    `[:k]` ("slice"); a list, tensor or array of indices or booleans picks those ("array"); None keeps everything
    ("identity"; it never adds an axis).
    Errors: ValueError for anything else.

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
        """Which indices of an axis of length `max_ctx` are selected, as an array (of one for an int).

        Errors: ValueError without `max_ctx`, unless the mode is "int".
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
        """The same as a `Slice`; an int becomes a list of one, so that the axis stays."""
        if isinstance(slice_input, Slice):
            return slice_input
        return cls([slice_input] if isinstance(slice_input, int) else slice_input)
