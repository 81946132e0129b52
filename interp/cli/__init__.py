"""The command line: one frozen dataclass per command, and the only place that prints.

Commands that ask a question get their options from the question's record (`asking`). What a user got wrong is one line
on stderr and exit code 2; `--debug` shows where it was raised. Everything slow is imported inside the command that
needs it.
"""

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, cast, runtime_checkable

import tyro

from interp.attention import Heads
from interp.causal import Ablate, AttributionPatch, CausalTrace, Patch, PathPatch
from interp.cli.asking import asking
from interp.cli.commands import Circuit, Graph, JacobianLensCommand, Models, Report, Serve, Verify
from interp.cli.runs import Compare, List, Run, Show
from interp.lenses import BackwardLens, LogitLens, OutputLens
from interp.passes.analysis import function_name
from interp.residual import Attribute
from interp.tokens import TokenAttribution
from interp.weights import Composition, Copying, HeadTokens, TopPairs


@runtime_checkable
class Command(Protocol):
    """What the command line starts."""

    @property
    def debug(self) -> bool:
        """Whether to show where an error was raised."""
        ...

    def run(self) -> int | None:
        """Do it; the exit code, None = 0."""
        ...


ASKED = (
    asking(Heads, scores=("induction", "previous_token", "duplicate_token")),
    *(asking(kind) for kind in (Attribute, LogitLens, OutputLens)),
    asking(BackwardLens, sort="relative_update"),
    *(asking(kind) for kind in (Ablate, Patch, AttributionPatch, PathPatch, CausalTrace, TokenAttribution)),
    *(asking(kind) for kind in (Composition, Copying, HeadTokens, TopPairs)),
)
"""The questions that have a command."""
COMMANDS: Mapping[str, type[object]] = MappingProxyType(
    {
        "report": Report, "serve": Serve, "models": Models, "verify": Verify,
        **{function_name(command.question).replace("_", "-"): command for command in ASKED},
        "jacobian-lens": JacobianLensCommand,
        "circuit": Circuit, "graph": Graph, "run": Run, "list": List, "show": Show, "compare": Compare,
    }
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, 2 for what a user can put right."""
    command = parsed(sys.argv[1:] if argv is None else list(argv))
    try:
        return command.run() or 0
    except (ValueError, LookupError, OSError, ArithmeticError) as cause:
        if command.debug:
            raise
        message = cause.args[0] if isinstance(cause, KeyError) and cause.args else cause
        print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
        return 2


def parsed(argv: list[str]) -> Command:
    """The command that the arguments describe."""
    found = tyro.extras.subcommand_cli_from_dict(
        dict(COMMANDS), args=argv, prog="interp", description="Take a Transformer apart."
    )
    return cast("Command", found)
