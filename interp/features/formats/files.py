"""What is stored under a path, as the readers of layouts see it: names of files, their JSON, and tensors by name.

Nothing is read before it is asked for, and no code in a file is run: `.pt` and `.pth` are read as tensors and plain
values alone, `.npz` without objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from interp.core.files import is_folder, json_object, regular
from interp.features.activations import DictionaryKind
from interp.features.cross_layer import Crosscoder, CrossLayerTranscoder
from interp.features.dictionary import Normalisation
from interp.model.config import Json

Index = tuple[slice | int | list[int], ...]
"""Which part of a tensor is read: of its first axes one entry, some, or a slice."""
MOST_FILES = 10_000
"""Most files of a folder that are looked at."""


class Facts(NamedTuple):
    """What the user says about files that do not say it themselves."""

    layer: int | None = None
    k: int | None = None
    norm_scaling_factor: float | None = None


class Stored(NamedTuple):
    """A dictionary as its files say it is, every constant of theirs folded into the weights; see `Dictionary`."""

    kind: DictionaryKind
    weights: Mapping[str, Tensor]
    reads: str | None = None
    writes: str | None = None
    before_gain: bool = False
    apply_b_dec_to_input: bool | None = None
    normalize_activations: Normalisation = "none"
    metadata: Json | None = None
    dtype: torch.dtype | None = None
    """The dtype that the files ask for; None: that of the weights."""


@dataclass(frozen=True)
class Layout:
    """A layout of files on disk: how it is recognised, and how it is read."""

    name: str
    """The project whose layout it is, as users call it."""
    fits: Callable[[Files], bool]
    """Whether files are of this layout, told by names, configs and names of tensors alone."""
    read: Callable[[Files, Facts], Stored | CrossLayerTranscoder | Crosscoder]
    """The dictionary in the files. ValueError, in words, for what is missing, unknown or damaged."""


@dataclass(frozen=True)
class Files:
    """The files under a path: one file, or a folder and all that is in it."""

    path: Path

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The files by their path within the folder, in order; of a single file its name."""
        if not is_folder(self.path):
            return (regular(self.path).name,)
        found = [*islice((each for each in self.path.rglob("*") if each.is_file()), MOST_FILES + 1)]
        if len(found) > MOST_FILES:
            raise ValueError(
                f"{self.path} holds more than {MOST_FILES} files: name the folder of one dictionary"
            )
        return tuple(str(each.relative_to(self.path)) for each in sorted(found))

    def place(self, name: str) -> Path:
        """The path of one of the files."""
        return self.path / name if self.path.is_dir() else self.path

    def has(self, *names: str) -> bool:
        """Whether all of these files are there."""
        return set(names) <= set(self.names)

    def json(self, name: str) -> Json:
        """The object in a JSON file; {} where there is no such file. ValueError for what is no JSON object."""
        return json_object(self.place(name)) if name in self.names else {}

    def tensors(self, name: str) -> Tensors:
        """The tensors of a file, which is read once."""
        return self._opened.setdefault(name, Tensors(self.place(name)))

    @cached_property
    def _opened(self) -> dict[str, Tensors]:
        return {}


@dataclass(frozen=True)
class Tensors:
    """The tensors of one file of safetensors, NumPy arrays or a torch state dict, by name."""

    path: Path
    inside: str | None = None
    """Of a torch file, the entry that holds the tensors; None: they are its entries."""

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor; of safetensors from the file's header alone."""
        if self.path.suffix != ".safetensors":
            return {
                name: tuple(value.shape) for name, value in self._all.items() if isinstance(value, Tensor)
            }
        with _readable(self.path), self._opened() as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in [*file.keys()]}

    @property
    def plain(self) -> Mapping[str, object]:
        """What a torch file holds beside tensors, such as names and numbers."""
        if self.path.suffix == ".safetensors":
            return {}
        return {name: value for name, value in self._all.items() if not isinstance(value, Tensor)}

    def __contains__(self, name: object) -> bool:
        return name in self.shapes

    def get(self, name: str, index: Index = ()) -> Tensor:
        """A tensor, or a part of it, of which no more is read from safetensors.

        Raises:
            ValueError: no tensor of this name.
        """
        if name not in self.shapes:
            raise ValueError(
                f"{self.path.name} must hold the tensor {name!r}, got {', '.join(sorted(self.shapes))}"
            )
        if self.path.suffix != ".safetensors":
            value = self._all[name]
            assert isinstance(value, Tensor)
            return value[index]
        with _readable(self.path), self._opened() as file:
            part: Tensor = file.get_slice(name)[index or ...]
            return part

    def every(self) -> dict[str, Tensor]:
        """All tensors by name."""
        return {name: self.get(name) for name in self.shapes}

    def _opened(self) -> Any:
        from safetensors import safe_open

        return safe_open(regular(self.path), "pt")

    @cached_property
    def _all(self) -> dict[str, object]:
        with _readable(self.path):
            if self.path.suffix == ".npz":
                with np.load(regular(self.path), allow_pickle=False) as arrays:
                    return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
            found = torch.load(regular(self.path), map_location="cpu", weights_only=True)
        if self.inside is not None and isinstance(found, dict):
            found = found.get(self.inside)
        if not isinstance(found, dict):
            raise ValueError(f"{self.path.name} must hold tensors by name, got {type(found).__name__}")
        return {str(name): value for name, value in found.items()}


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """A ValueError that names the file for whatever goes wrong while it is read."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as cause:  # of many kinds: the file may be damaged anywhere
        raise ValueError(f"{path.name} is not readable: {cause}") from cause
