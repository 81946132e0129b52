"""A run's work as it is sent to other processes, once: tensors are places in files, or memory that all of them share.

A parameter that is a view of a file is sent as its place there, if its numbers are still the file's: every process of
a host maps the file, and all have one copy together. Everything else of some size is handed on as memory, never as part
of a pickle: shared memory for processes of this host, arrays for Ray's object store.
"""

import io
import pickle
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Shaped, UInt8
from torch import Tensor, nn

from interp.data.stream import DataSource
from interp.model.mapped import FileMap, FileState, MappedFile
from interp.model.transformer import Transformer
from interp.passes.question import Questions

Work = tuple[Questions, Transformer, DataSource]
"""All that a worker needs: the questions, the model, the data."""
Bytes = Tensor | UInt8[np.ndarray, "n"]
"""The numbers of a tensor: a tensor in shared memory, or an array of bytes."""
SMALL = 4096
"""Bytes below which a tensor is pickled with everything else."""
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as a dtype: equal ones are equal bit for bit, NaN and signed zeros among them."""


@dataclass(frozen=True)
class FilePlace:
    """The file and the byte offset at which a tensor's numbers begin, with the state of the file."""

    path: Path
    state: FileState
    start: int

    @property
    def here(self) -> bool:
        """Whether this host has the file, unchanged."""
        try:
            return FileState.of(self.path) == self.state
        except OSError:
            return False


@dataclass(frozen=True, eq=False)
class TensorPiece:
    """A tensor sent beside the pickle: its numbers or their place in a file, its dtype and its shape."""

    numbers: FilePlace | Bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    trained: bool | None
    """Whether a parameter requires gradients; None for a tensor that is no parameter."""

    def made(self, maps: dict[Path, FileMap]) -> Tensor:
        """The tensor itself; `maps` holds the files that are memory-mapped already, and gets new ones."""
        flat = self._flat(maps)
        tensor = flat.view(self.shape)
        return tensor if self.trained is None else nn.Parameter(tensor, requires_grad=self.trained)

    def _flat(self, maps: dict[Path, FileMap]) -> Shaped[Tensor, "n"]:
        """The tensor's numbers as a vector: in shared memory, in an array, or mapped from their file."""
        numbers = self.numbers
        if isinstance(numbers, Tensor):
            return numbers.reshape(-1)
        if isinstance(numbers, np.ndarray):
            with warnings.catch_warnings():  # Ray's arrays are read-only, and nothing writes here
                warnings.simplefilter("ignore", UserWarning)
                return torch.from_numpy(numbers).view(self.dtype)
        if numbers.path not in maps:
            if not numbers.here:
                raise ValueError(
                    f"{numbers.path}, of which the model's parameters are views, is not here, or not as it was when "
                    "the model was sent"
                )
            maps[numbers.path] = FileMap(numbers.path)
        return maps[numbers.path].view(self.dtype, numbers.start, int(np.prod(self.shape)))


@dataclass(frozen=True, eq=False)
class Parcel:
    """A run's work, packed for workers: a pickle, and the tensors that are sent beside it."""

    pickled: bytes
    pieces: tuple[TensorPiece, ...]

    @property
    def is_here(self) -> bool:
        """Whether this host has all files that hold tensors, unchanged."""
        places = {p.numbers.path: p.numbers for p in self.pieces if isinstance(p.numbers, FilePlace)}
        return all(place.here for place in places.values())

    def opened(self) -> Work:
        """The work that was packed: questions, model and data.

        Raises:
            ValueError: a file that is not here, and whatever unpickling raises.
        """
        maps: dict[Path, FileMap] = {}
        tensors: dict[int, Tensor] = {}

        def tensor(index: int) -> Tensor:
            if index not in tensors:
                tensors[index] = self.pieces[index].made(maps)
            return tensors[index]

        unpickler = pickle.Unpickler(io.BytesIO(self.pickled))
        unpickler.persistent_load = tensor  # type: ignore[method-assign]
        questions, model, source = unpickler.load()
        files = [file_map.file_of(model.named_parameters()) for file_map in maps.values()]
        model.files = tuple(file for file in files if file is not None)
        return questions, model, source


@runtime_checkable
class Pickler(Protocol):
    """The class of an object that pickles, such as `pickle.Pickler`."""

    def __call__(self, file: io.BytesIO, protocol: int) -> pickle.Pickler:
        """A pickler that writes to this file."""


def packed(
    work: Work,
    handed_over: Callable[[Tensor], Bytes],
    *,
    pickler: Pickler = pickle.Pickler,
    by_path: bool = True,
) -> Parcel:
    """The work of a run as a parcel that any number of workers can open.

    Args:
        handed_over: how numbers that are in no file are handed over, `in_shared_memory` or `as_bytes`.
        by_path: whether to send what is in files as places there.

    Raises:
        ValueError: as pickling: PicklingError.
        AttributeError, TypeError: a function without a name of its own.
    """
    _, model, _ = work
    model_tensors = [*model.parameters(), *model.buffers()]
    places = _places(model) if by_path else {}
    pieces: list[TensorPiece] = []
    known: dict[int, int] = {}

    def index(value: object) -> int | None:
        if not isinstance(value, Tensor) or (
            id(value) not in places and not _is_sent_apart(value, model_tensors)
        ):
            return None
        if id(value) not in known:
            trained = value.requires_grad if isinstance(value, nn.Parameter) else None
            place = places.get(id(value))
            numbers = handed_over(value.detach()) if place is None else place
            pieces.append(TensorPiece(numbers, value.dtype, tuple(value.shape), trained))
            known[id(value)] = len(pieces) - 1
        return known[id(value)]

    content = io.BytesIO()
    writer = pickler(content, 5)
    writer.persistent_id = index  # type: ignore[method-assign]
    writer.dump(work)
    return Parcel(content.getvalue(), tuple(pieces))


def in_shared_memory(tensor: Tensor) -> Tensor:
    """The tensor in the host's shared memory: the tensor itself, moved, or a copy if it is a part of its storage."""
    if tensor.device.type != "cpu":
        return tensor.cpu().share_memory_()
    fills_storage = tensor.untyped_storage().nbytes() == tensor.nbytes
    return (tensor if fills_storage else tensor.clone()).share_memory_()


def as_bytes(tensor: Tensor) -> UInt8[np.ndarray, "n"]:
    """The bytes of a tensor, which share its memory if it is on the host."""
    data: UInt8[np.ndarray, "n"] = tensor.cpu().reshape(-1).view(torch.uint8).numpy()
    return data


def _is_sent_apart(tensor: Tensor, model_tensors: Iterable[Tensor]) -> bool:
    """Whether a tensor is sent beside the pickle: a plain one of some size, on a GPU only one of the model."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.is_meta or not tensor.is_contiguous() or vars(tensor):
        return False
    if tensor.requires_grad and not tensor.is_leaf:
        return False
    if tensor.device.type != "cpu":
        return any(tensor is model_tensor for model_tensor in model_tensors)
    return tensor.nbytes >= SMALL or tensor.untyped_storage().nbytes() > tensor.nbytes


def _places(model: Transformer) -> dict[int, FilePlace]:
    """The place in a file, by `id`, of every parameter that is a view of a file and still has the file's numbers."""
    return {id(value): place for file in model.files for value, place in _unchanged_views(file, model)}


def _unchanged_views(file: MappedFile, model: Transformer) -> Iterable[tuple[nn.Parameter, FilePlace]]:
    """The parameters that are views of a file, still bit for bit equal to it, each with its place there."""
    try:
        mapped = FileMap(file.path)
    except OSError:  # deleted since
        return
    if mapped.state != file.state:
        return
    for value in file.views_in(model).values():
        start, word = value.data_ptr() - file.address, WORDS[value.dtype.itemsize]
        ours = value.detach().reshape(-1).view(word)
        if torch.equal(ours, mapped.view(word, start, len(ours))):
            yield value, FilePlace(mapped.path, mapped.state, start)
