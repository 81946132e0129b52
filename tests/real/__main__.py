"""`make real`: fetch SmolLM2, open its GGUF file, write the page of one prompt to out/real, and ask a few claims of it.

Says in one line what could not be fetched or written, and why; the exit code is 0 where the page is there.
"""

import shlex
import sys
import traceback
from pathlib import Path

from interp import HookedTransformer
from interp.cli import ended, parsed
from interp.cli.commands import ReportCommand
from interp.cli.findings import FindingsCommand
from tests.real.wheels import fetched

OUT = Path("out/real")
PROMPT, ANSWER, WRONG = "When Mary and John went to the store, John gave a drink to", " Mary", " John"
CORRUPT = PROMPT.replace(", John", ", Mary")
CLAIMS = (
    "previous-token-heads",
    "induction-heads",
    "indirect-objects",
    "suppression-lowers",
    "attention-sinks",
)
"""What is asked of it: five of thirty claims, those that take least."""
OPENED: dict[str, HookedTransformer] = {}
"""The model by what it was opened from, so that it is opened once."""
AROUND = {"cli", "core", "pages", "real", "tests"}
"""Folders of what asks the questions of a page; what is called first outside of them is one."""


class Told(ReportCommand):
    """The command `interp report`, which says what it opened."""

    def opened(self) -> HookedTransformer:
        """The model, printed once it is there."""
        model = OPENED[self.model] = super().opened()
        print(f"\n{model}", flush=True)
        return model


class Asked(FindingsCommand):
    """The command `interp findings`, of a model that is open."""

    def opened(self) -> HookedTransformer:
        """That model."""
        return OPENED[self.model]


def main() -> int:
    """Fetch, open, say what was opened, write the page."""
    try:
        file = fetched("smollm2")
    except (OSError, ValueError) as why:
        print(f"error: {why}", file=sys.stderr)
        return 1
    about = ["--prompt", PROMPT, "--answer", ANSWER, "--wrong", WRONG, "--corrupt", CORRUPT]
    command = ["report", "--model", str(file), *about, "--out", str(OUT)]
    print(f"interp {shlex.join(command)}   # two minutes or three", flush=True)
    try:
        code = ended(Told(**vars(parsed([*command, "--debug"]))))
    except Exception as cause:
        print(not_written(cause), file=sys.stderr)
        return 1
    claims = ["findings", str(file), "--claims", *CLAIMS]
    print(
        f"\ninterp {shlex.join(claims)}   # a minute or two; without --claims all thirty, an hour", flush=True
    )
    return code or ended(Asked(**vars(parsed(claims))))


def not_written(cause: Exception) -> str:
    """One line: which question of the page failed, and why."""
    frames = traceback.extract_tb(cause.__traceback__)
    ours = [frame for frame in frames if {"interp", "tests"} & {*Path(frame.filename).parts}]
    asked = next((f.name for f in ours if Path(f.filename).parent.name not in AROUND), "report")
    why = " ".join(str(cause).split()) or type(cause).__name__
    return f"{OUT}: the page could not be written, since `{asked}` failed: {why}"


if __name__ == "__main__":
    raise SystemExit(main())
