"""The command line: one frozen dataclass per command, and the only place that prints.

Commands that ask a question get their options from the question's record (`asking`). What a user got wrong is one line
on stderr and exit code 2; `--debug` shows where it was raised. A command is made when it is called: what the help says
of the others stands here, and everything slow is imported inside the command that needs it.
"""

import dataclasses
import difflib
import gc
import platform
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import version
from types import MappingProxyType
from typing import Protocol, TextIO, cast, runtime_checkable

from interp.cli.ending import REFUSED, ended_by, is_interrupt
from interp.core.notes import Note
from interp.core.version import VERSION


@runtime_checkable
class Command(Protocol):
    """Protocol of the commands of the command line."""

    @property
    def debug(self) -> bool:
        """Whether to show where an error was raised."""
        ...

    @property
    def strict(self) -> bool:
        """Whether a note makes the exit code 1."""
        ...

    def run(self) -> int | None:
        """Run the command; returns its exit code, None for 0."""
        ...


@dataclass(frozen=True, eq=False)
class CommandEntry:
    """One command: the sentence of its help, and the function that makes its class."""

    says: str
    make: Callable[[], type]


def _entry(says: str, module: str, name: str) -> CommandEntry:
    """The entry of a command whose class is written in a module of `interp.cli`, imported when it is needed."""
    return CommandEntry(says, lambda: cast("type", getattr(import_module(f"interp.cli.{module}"), name)))


def _asks(says: str, wing: str, record: str, **usual: object) -> CommandEntry:
    """The entry of a command that asks a question; `usual` are its defaults where the record has others."""

    def make() -> type:
        from interp.cli.asking import asking

        return asking(getattr(import_module(f"interp.{wing}"), record), says=says, **usual)  # type: ignore[arg-type]

    return CommandEntry(says, make)


ASKED: Mapping[str, CommandEntry] = MappingProxyType(
    {
        "heads": _asks(
            "Print what every head does on repeated tokens, in sentences, and by its weights.", "attention", "Heads",
            scores=("induction", "previous_token", "duplicate_token"),
        ),
        "attention-attribution": _asks(
            "Print why a head attends from one position to another: what each part adds to that score.", "attention",
            "AttentionAttribution",
        ),
        "attribute": _asks(
            "Print how much each part adds to the answer's logit at one token of each prompt.", "residual", "Attribute"
        ),
        "logit-lens": _asks(
            "Print what the model would answer at every depth and position.", "lenses", "LogitLens"
        ),
        "output-lens": _asks("Print what one part of the model says at every position.", "lenses", "OutputLens"),
        "backward-lens": _asks(
            "Print what one training step towards the answer would write, in words.", "lenses", "BackwardLens",
            sort="relative_update",
        ),
        "ablate": _asks("Print how far a metric moves without each part.", "causal", "Ablate",
            change="zero",
        ),
        "patch": _asks("Print what patching each cell of a site does to a metric.", "causal", "Patch"),
        "attribution-patch": _asks(
            "Print the first-order estimate of patching each cell of a site.", "causal", "AttributionPatch"
        ),
        "path-patch": _asks(
            "Print what each sender does to a metric through given receivers alone.", "causal", "PathPatch"
        ),
        "causal-trace": _asks(
            "Print which clean states bring a fact back whose subject is corrupted.", "causal", "CausalTrace"
        ),
        "edge-attribution": _asks(
            "Print the first-order effect of every edge between parts on a metric.", "circuits", "EdgeAttribution"
        ),
        "feature-circuit": _asks(
            "Print the circuit of the features of --dictionaries, and what it keeps of a metric.", "circuits",
            "FeatureCircuit",
        ),
        "linear-relation": _asks(
            "Print how far a relation of pairs is a linear map of the subject's state.", "causal", "LinearRelation"
        ),
        "function-vectors": _asks(
            "Print what the function vector of every task does on pairs that had no part in it.", "causal",
            "FunctionVectors",
        ),
        "steering": _asks(
            "Print how well a direction of every layer tells positive from negative prompts.", "causal", "Steering"
        ),
        "steering-curve": _asks(
            "Print what steering by a direction or a feature does to a metric; --json has random ones beside.",
            "causal", "SteeringCurve",
        ),
        "diff": _asks(
            "Print what each part of a fine-tuned model brings about of the change.", "editing", "Diff"
        ),
        "probe-neurons": _asks(
            "Print how well a few neurons of each layer tell prompts with a label from others; --json names them.",
            "features", "ProbeNeurons",
        ),
        "feature-cards": _asks(
            "Print how often and how strongly features of a dictionary are active; --json has their texts and words.",
            "features", "FeatureCards",
        ),
        "dictionary-quality": _asks(
            "Print how well a dictionary stands in for the activations that it reads.", "features",
            "DictionaryQuality",
        ),
        "patchscope": _asks(
            "Print how probable the answer is where a state is put into another prompt; --json has the words it says.",
            "lenses", "Patchscope",
        ),
        "token-attribution": _asks(
            "Print how much each token has to do with a position, or with its answer.", "tokens", "TokenAttribution"
        ),
        "composition": _asks(
            "Print how strongly every head composes with every head of a later layer.", "weights", "Composition"
        ),
        "copying": _asks("Print how far every head copies the token it attends to.", "weights", "Copying"),
        "head-tokens": _asks(
            "Print what every head writes about given tokens, and which of them it looks for.", "weights", "HeadTokens"
        ),
        "top-pairs": _asks("Print the largest entries of some heads' full circuits.", "weights", "TopPairs"),
    }
)  # fmt: skip
"""The questions that have a command."""
COMMANDS: Mapping[str, CommandEntry] = MappingProxyType(
    {
        "report": _entry(
            "Say what was found for one prompt and write its page: HTML that opens from disk, all tables, run.json.",
            "commands", "ReportCommand",
        ),
        "serve": _entry(
            "Serve the live page of a model on this machine: type, edit by a click, and watch. Ctrl-C ends it.",
            "commands", "Serve",
        ),
        "models": _entry("List the demo models and what they measurably do.", "commands", "Models"),
        "verify": _entry(
            "Measure the numerical contract of a model: every line with its error; exit code 1 if one does not hold.",
            "commands", "Verify",
        ),
        "findings": _entry(
            "Ask a decoder what the field reports of language models, and print each claim's number, null and verdict.",
            "findings", "FindingsCommand",
        ),
        **ASKED,
        "jacobian-lens": _entry(
            "Fit the Jacobian lens on texts, print how precise it is, and read a prompt with it.",
            "fitted", "JacobianLensCommand",
        ),
        "circuit": _entry(
            "Find the edges that carry a generated task, and print how much of the answer they keep on other prompts.",
            "fitted", "CircuitCommand",
        ),
        "graph": _entry(
            "Draw an attribution graph, of Neuronpedia, circuit-tracer or a report of ours, as a page that opens "
            "from disk.",
            "commands", "Graph",
        ),
        "run": _entry(
            "Run an experiment file into a new folder, or go on with a run that was interrupted or failed.",
            "runs", "Run",
        ),
        "list": _entry(
            "List the runs of experiments: when, how they ended, with which parameters, and chosen results.",
            "kept_runs", "List",
        ),
        "show": _entry(
            "Show one run: parameters, where it comes from, what came out, and its files.", "kept_runs", "Show"
        ),
        "compare": _entry(
            "Compare runs: parameters and provenance that differ, and how far results are from those of the first.",
            "kept_runs", "Compare",
        ),
    }
)  # fmt: skip


@cache
def command(name: str) -> type:
    """The class of a command."""
    return COMMANDS[name].make()


@contextmanager
def rarely_collected() -> Iterator[None]:
    """A context in which Python's garbage collector runs after 50 000 new objects instead of 700.

    Imported modules stay, and passes leave no cycles. In a fresh `interp report` the collections then take 0.28 s of a
    processor instead of 0.65 (`experiments/bench/imports.py`).
    """
    before = gc.get_threshold()
    gc.set_threshold(50_000, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@contextmanager
def notes_on_stderr() -> Iterator[list[str]]:
    """Every `interp.Note` becomes a line on stderr, `note: ...`, inside the `with`; yields the list of them."""
    notes: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", Note)
        others = warnings.showwarning

        def show(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            if issubclass(category, Note):
                notes.append(str(message))
                print(f"note: {message}", file=sys.stderr)
            else:
                others(message, category, filename, lineno, file, line)

        warnings.showwarning = show
        yield notes


@rarely_collected()
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the arguments describe; returns its exit code, as `ended` and `ended_by`."""
    return ended_by(lambda: ended(parsed(sys.argv[1:] if argv is None else list(argv))))


def ended(given: Command) -> int:
    """Run one command; returns the exit code, 2 for what a user can put right."""
    try:
        with notes_on_stderr() as notes:
            code = given.run() or 0
        return code or int(given.strict and bool(notes))
    except (ValueError, LookupError, OSError, ArithmeticError) as cause:
        if given.debug or isinstance(cause, BrokenPipeError) or is_interrupt(cause):
            raise
        message = cause.args[0] if isinstance(cause, KeyError) and cause.args else cause
        print(f"error: {' '.join(str(message).split())}", file=sys.stderr)
        return REFUSED


def parsed(argv: list[str]) -> Command:
    """The command that the arguments describe; only its class is made, the other commands get placeholders."""
    called = argv[0] if argv else ""
    if called == "--version":
        print(_versions())
        raise SystemExit(0)
    if called and not called.startswith("-") and called not in COMMANDS:
        close = difflib.get_close_matches(called, COMMANDS)
        print(
            f"error: there is no command {called!r}; nearest: {', '.join(close) or 'none'}; `interp --help` lists all",
            file=sys.stderr,
        )
        raise SystemExit(REFUSED)
    import tyro  # here, since it takes most of the time before a command is known

    kinds: dict[str, Callable[..., object]] = {
        name: command(name) if name == called else _placeholder(name) for name in COMMANDS
    }
    parsed_command = tyro.extras.subcommand_cli_from_dict(
        kinds,
        args=argv,
        prog="interp",
        description="Take a Transformer apart. `interp --version` says which this is.",
    )
    return cast("Command", parsed_command)


def _versions() -> str:
    """The versions that a report of a fault needs, in a line, without importing what they are of."""
    packages = (f"{name} {version(name)}" for name in ("torch", "transformers"))
    return ", ".join((f"interp {VERSION}", *packages, f"Python {platform.python_version()}"))


def _placeholder(name: str) -> type:
    """A placeholder for a command that is not called: a class without options, with the command's description."""
    return dataclasses.make_dataclass(name, [], namespace={"__doc__": COMMANDS[name].says})
