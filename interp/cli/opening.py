"""The options that say which model a command is about, the same in every command. No torch until it is opened."""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
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
class Printing(Common):
    """Options of every command that prints what it found."""

    json: bool = False
    """Print one JSON value in place of lines: whole tables, every digit, null for NaN; notes are on stderr."""

    def tell(self, lines: Iterable[str], value: Callable[[], object]) -> None:
        """Print the lines, or with `--json` the value."""
        if self.json:
            from interp.cli.as_json import text_of

            print(text_of(value()))
            return
        for line in lines:
            print(line, flush=True)

    def wrote(self, file: Path) -> None:
        """Print the name of a file that was written: on stdout, with `--json` on stderr."""
        print(file, file=sys.stderr if self.json else sys.stdout)


@dataclass(frozen=True, kw_only=True)
class ModelCommand(Opened, Common):
    """Options of every command about a model."""

    model: Annotated[str, tyro.conf.arg(aliases=["-m"])] = "demo-4l"
    """Demo name (see `interp models`), local folder, file of weights or hub name."""
