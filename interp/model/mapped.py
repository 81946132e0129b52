"""Files of which a model's parameters are views: overwriting one in place changes the weights, unseen.

Large parameters that lie in a file exactly as they are needed are not copied (`families/fill.py`). A file that is
deleted or replaced by another does them no harm; one that is written to or cut where it is would, so it is looked at
before every pass. Processes of one host share the memory of what they map.
"""

import mmap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class FileState:
    """Identity of a file, its size and the time of its last write."""

    inode: int
    size: int
    written: int
    """Time of the last write, in nanoseconds."""

    @classmethod
    def of(cls, path: Path) -> "FileState":
        """The state of a file now. OSError if it is not there."""
        stat = path.stat()
        return cls(stat.st_ino, stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True)
class MappedFile:
    """A file as it was when it was mapped, and the parameters that are views of it."""

    path: Path
    state: FileState
    address: int
    """Where in memory the file begins."""
    places: Mapping[str, int]
    """Address at which each parameter begins; a parameter that was moved or copied since is no view of the file any
    more.
    """

    def check(self, model: nn.Module) -> None:
        """ValueError if the file was written to in place while parameters of this model are views of it."""
        try:
            now = FileState.of(self.path)
        except OSError:  # deleted: what is mapped stays
            return
        if now == self.state or now.inode != self.state.inode:
            return
        if changed := self.views_in(model):
            raise ValueError(
                f"{self.path} was overwritten in place after the model was loaded, and {next(iter(changed))} is a view "
                "of it: load the model again (a file that is replaced by a rename does it no harm)"
            )

    def views_in(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The parameters of this model that are views of the file still, by name; their numbers may have changed."""
        parameters = dict(model.named_parameters())
        return {
            name: parameters[name]
            for name, place in self.places.items()
            if name in parameters and parameters[name].data_ptr() == place
        }


class FileMap:
    """A file mapped into memory, privately: writing to a view of it changes neither the file nor another mapping.

    Raises:
        OSError: if the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        with self.path.open("rb") as file:
            self.state = FileState.of(self.path)
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._address = self.view(torch.uint8, 0, 1).data_ptr()

    def view(self, dtype: torch.dtype, start: int, count: int) -> Tensor:
        """A flat view of `count` numbers from a byte on; its storage is these numbers alone, not the whole file."""
        return torch.frombuffer(self._bytes, dtype=dtype, count=count, offset=start)

    def file_of(self, parameters: Iterable[tuple[str, Tensor]]) -> MappedFile | None:
        """The file as it was when it was mapped, with those of the parameters that are views; None without any."""
        inside = range(self._address, self._address + len(self._bytes))
        places = {name: value.data_ptr() for name, value in parameters if value.data_ptr() in inside}
        return MappedFile(self.path, self.state, self._address, places) if places else None
