"""The command line: one frozen dataclass per command, and the only place that prints.

What a user got wrong is one line on stderr and exit code 2; `--debug` shows where it was raised. Everything slow is
imported inside the command that needs it.
"""

import sys
from collections.abc import Sequence

import tyro

from interp.cli.causal import Circuit, Patch, Trace
from interp.cli.commands import BackwardLens, Graph, Heads, Models, Report, Verify
from interp.cli.live import Serve
from interp.cli.runs import Compare, List, Run, Show

Command = (
    Report
    | Serve
    | Models
    | Heads
    | BackwardLens
    | Patch
    | Trace
    | Circuit
    | Graph
    | Verify
    | Run
    | List
    | Show
    | Compare
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, 2 for what a user can put right."""
    command = parsed(sys.argv[1:] if argv is None else list(argv))
    try:
        return command.run() or 0
    except (ValueError, KeyError, OSError, ArithmeticError) as cause:
        if command.debug:
            raise
        message = cause.args[0] if isinstance(cause, KeyError) and cause.args else cause
        print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
        return 2


def parsed(argv: list[str]) -> Command:
    """The command that the arguments describe."""
    command: Command = tyro.cli(Command, args=argv, prog="interp", description="Take a Transformer apart.")
    return command
