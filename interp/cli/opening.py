"""The options that say which model a command is about, the same in every command. No torch until it is opened."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from interp.opening import OfModel as Opened


@dataclass(frozen=True, kw_only=True)
class OfModel(Opened):
    """What every command about a model has."""

    model: Annotated[str, tyro.conf.arg(aliases=["-m"])] = "demo-4l"
    """Demo name (see `interp models`), local folder, file of weights or hub name."""
    debug: bool = False
    """Show where an error was raised."""
