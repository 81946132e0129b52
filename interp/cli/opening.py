"""The options that say which model a command is about, the same in every command. No torch until it is opened."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from interp.opening import OfModel as Opened


@dataclass(frozen=True, kw_only=True)
class Common:
    """Options of every command."""

    debug: bool = False
    """Show where an error was raised."""
    strict: bool = False
    """Whether to exit with 1 where a note (on stderr) says that an answer differs from the request."""

    def require_some(self, *names: str) -> None:
        """Raise ValueError for an option among `names`, a number of things to print, that is less than 1."""
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be 1 or more, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class ModelCommand(Opened, Common):
    """Options of every command about a model."""

    model: Annotated[str, tyro.conf.arg(aliases=["-m"])] = "demo-4l"
    """Demo name (see `interp models`), local folder, file of weights or hub name."""
