"""Files of which a model's parameters are views: whoever overwrites one in place changes the weights, unseen.

Large parameters that lie in a file exactly as they are needed are not copied (`families/fill.py`). A file that is
deleted or replaced by another does them no harm; one that is written to or cut where it is would, so it is looked at
before every pass.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import nn


@dataclass(frozen=True)
class FileState:
    """Which file it is, and when and how long it was last written."""

    inode: int
    size: int
    written: int
    """In nanoseconds."""

    @classmethod
    def of(cls, path: Path) -> "FileState":
        """The state of a file now. Errors: OSError if it is not there."""
        found = path.stat()
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True)
class MappedFile:
    """A file as it was when it was mapped, and the parameters that are views of it."""

    path: Path
    state: FileState
    places: Mapping[str, int]
    """Where in memory each parameter begins; one that was moved or copied since is none of the file's any more."""

    def check(self, model: nn.Module) -> None:
        """ValueError if the file was written to in place while parameters of this model are views of it."""
        try:
            now = FileState.of(self.path)
        except OSError:  # deleted: what is mapped stays
            return
        if now == self.state or now.inode != self.state.inode:
            return
        held = {name: value.data_ptr() for name, value in model.named_parameters()}
        if changed := [name for name, place in self.places.items() if held.get(name) == place]:
            raise ValueError(
                f"{self.path} was overwritten in place after the model was loaded, and {changed[0]} is a view of it: "
                "load the model again (a file that is replaced by a rename does it no harm)"
            )
