"""The command line: one frozen dataclass per command, and the only place that prints.

What a user got wrong is one line on stderr and exit code 2; `--debug` shows where it was raised. Everything slow is
imported inside the command that needs it.
"""

import dataclasses
import sys
from collections.abc import Sequence

import tyro

from interp.cli.causal import Circuit, Patch, Trace
from interp.cli.commands import BackwardLens, Heads, Models, Report, Run, Verify

Command = Report | Models | Heads | BackwardLens | Patch | Trace | Circuit | Verify | Run


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, 2 for what a user can put right."""
    command = parsed(sys.argv[1:] if argv is None else list(argv))
    if isinstance(command, Run) and command.file.is_file():
        command.run()
        return 0
    try:
        return command.run() or 0
    except (ValueError, KeyError, OSError, ArithmeticError) as cause:
        if command.debug:
            raise
        message = cause.args[0] if isinstance(cause, KeyError) and cause.args else cause
        print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
        return 2


def parsed(argv: list[str]) -> Command:
    """The command that the arguments describe; what follows the file of `run` belongs to that file."""
    rest: list[str] = []
    if argv[:1] == ["run"] and len(argv) > 2 and not argv[1].startswith("-"):
        argv, rest = argv[:2], argv[2:]
    command: Command = tyro.cli(Command, args=argv, prog="interp", description="Take a Transformer apart.")
    return dataclasses.replace(command, args=tuple(rest)) if isinstance(command, Run) else command
