"""Logits that are computed where somebody looks: a metric of the last token pays for the last token.

TransformerLens' metrics are opaque functions of `[batch, pos, vocab]`. Nearly all of them index one position first, and
the unembedding of the others is most of what a patched run costs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

ReadOut = Callable[[Tensor], Tensor]
Column = Callable[[int], Tensor]
_METADATA = frozenset(
    {
        getattr(Tensor, name).__get__
        for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda")
    }
    | {Tensor.size, Tensor.dim, Tensor.numel, Tensor.__len__, Tensor.is_floating_point}
)


class LazyLogits(Tensor):
    """A tensor `[b p v]` equal to `read_out(stream)`, of which `logits[:, i]` computes position i alone.

    Anything but indexing by integers or slices makes it whole first; so does writing into it, which lasts.
    """

    _stream: Tensor
    _read_out: ReadOut
    _column: Column | None
    _whole: Tensor | None
    _at: dict[int, Tensor]

    @staticmethod
    def __new__(
        cls, stream: Float[Tensor, "b p d"], read_out: ReadOut, d_vocab: int, column: Column | None = None
    ) -> "LazyLogits":
        """The logits of a final stream. column: another way to those of one position, `[b 1 v]`, not used elsewhere."""
        lazy: LazyLogits = Tensor._make_wrapper_subclass(
            cls, (*stream.shape[:2], d_vocab), dtype=stream.dtype, device=stream.device
        )
        lazy._stream, lazy._read_out, lazy._whole, lazy._at = stream, read_out, None, {}
        lazy._column = column
        return lazy

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Metadata as it is; indices by position; all else on the whole tensor."""
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and isinstance(args[0], cls):
            return args[0]._part(args[1])
        return func(*_whole(tuple(args)), **_whole(dict(kwargs or {})))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The same for calls that come from below Python."""
        return func(*_whole(tuple(args)), **_whole(dict(kwargs or {})))

    def whole(self) -> Float[Tensor, "b p v"]:
        """All logits, as a plain tensor; what was written into single positions included."""
        if self._whole is None:
            self._whole = self._read_out(self._stream)
            for at, column in self._at.items():
                self._whole[:, at] = column[:, 0]
        return self._whole

    def _part(self, index: Any) -> Tensor:
        keys = _by_axis(index)
        if self._whole is not None or keys is None:
            return self.whole()[_whole(index)]
        at, columns = keys[1], self._stream.shape[1]
        if isinstance(at, int) and -columns <= at < columns:
            at %= columns
            if at not in self._at:
                column = self._column
                rows = self._read_out(self._stream[:, at : at + 1]) if column is None else column(at)
                self._at[at] = rows
            return self._at[at][(keys[0], 0, *keys[2:])]
        if isinstance(at, slice) and at != slice(None):
            return self._read_out(self._stream[:, at])[(keys[0], slice(None), *keys[2:])]
        if isinstance(at, Tensor) and not (at < -columns).any() and not (at >= columns).any():
            some, place = (at.to(self._stream.device) % columns).unique(return_inverse=True)
            return self._read_out(self._stream[:, some])[(keys[0], place, *keys[2:])]
        return self.whole()[_whole(index)]


def _by_axis(index: Any) -> tuple[Any, ...] | None:
    """One key per axis, as far as the index goes; None where it adds axes, masks, or says nothing about positions."""
    keys = list(index) if isinstance(index, tuple) else [index]
    if any(key is None or isinstance(key, bool) for key in keys):
        return None
    keys = [torch.as_tensor(key) if isinstance(key, list | range | np.ndarray) else key for key in keys]
    if any(isinstance(key, Tensor) and key.dtype in (torch.bool, torch.uint8) for key in keys):
        return None
    dots = [i for i, key in enumerate(keys) if key is Ellipsis]
    if len(dots) == 1:
        keys[dots[0] : dots[0] + 1] = [slice(None)] * (4 - len(keys))
    return tuple(keys) if 2 <= len(keys) <= 3 and len(dots) <= 1 else None


def _whole(value: Any) -> Any:
    """The same with every `LazyLogits` in it whole."""
    if isinstance(value, LazyLogits):
        return value.whole()
    if type(value) in (tuple, list):
        return type(value)(_whole(each) for each in value)
    return {key: _whole(each) for key, each in value.items()} if type(value) is dict else value
