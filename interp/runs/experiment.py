"""An experiment file: one question, a frozen dataclass of parameters, and `main(job, record)`.

    @dataclass(frozen=True)
    class WhereItLooks:
        model: str = "demo-4l"

    def main(job: WhereItLooks, record: Record) -> None:
        model = interp.HookedTransformer.from_pretrained(job.model)
        record.model(model)
        table = record.step("heads", lambda: interp.heads(model))

`loaded` imports such a file under its own name, with its folder importable as for a script, for as long as it is used:
worker processes that import the module by name find it too.
"""

import ast
import dataclasses
import importlib.util
import inspect
import re
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import docstring_parser
from docstring_parser import DocstringStyle

from interp.core.files import regular
from interp.core.hints import hints_of
from interp.runs.provenance import question_of
from interp.runs.record import Record

SEQUENCES = (tuple, list, set, frozenset, Sequence, Collection, Iterable)
"""What a parameter of several entries is declared as."""


class BrokenExperimentError(Exception):
    """An experiment file raised while it was imported; `__cause__` is what it raised."""


@dataclass(frozen=True)
class Experiment:
    """A loaded experiment file."""

    file: Path
    question: str
    """The docstring of the file."""
    kind: type
    """The dataclass of its parameters."""
    main: Callable[..., object]


@dataclass(frozen=True)
class Parameter:
    """One parameter of an experiment; a field of a parameter that is a record has a dotted name, such as `task.n`."""

    name: str
    type: str
    default: str | None
    """The default as Python code; None for a parameter that must be given."""
    doc: str
    sequence: object | None
    """The type of a sequence of any length, to which every `-p name=value` adds an entry; None: it is no such."""


@contextmanager
def loaded(file: Path) -> Iterator[Experiment]:
    """The experiment in a file, importable while the context lasts.

    Raises:
        FileNotFoundError, BrokenExperimentError: from what the file raises on import.
        ValueError: a file that has no `main(job, record)`, saying what it has, or whose name is that of a module in
            use.
    """
    try:
        regular(file)
    except FileNotFoundError as cause:
        raise FileNotFoundError(f"{file} does not exist: the path of a Python file is required") from cause
    name, folder = file.stem, str(file.resolve().parent)
    if name in sys.modules:
        raise ValueError(
            f"an experiment requires a file name of its own, {name!r} is a Python module in use: rename {file}"
        )
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    if spec is None or spec.loader is None:
        raise ValueError(f"the path of a Python file (.py) is required, got {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, folder)
    try:
        try:
            spec.loader.exec_module(module)
        except (Exception, SystemExit) as cause:
            raise BrokenExperimentError(
                f"{file} cannot be imported: {type(cause).__name__}: {cause}"
            ) from cause
        yield Experiment(file, question_of(file), _parameter_class(file, module), module.main)
    finally:
        sys.path.remove(folder)
        sys.modules.pop(name, None)


def parameters(kind: type) -> list[Parameter]:
    """The parameters of a dataclass in order; for a field that is a record, the parameters of that record.

    Example:
        >>> from interp.tasks import RepeatedTokens
        >>> parameters(RepeatedTokens)[-1].name
        'seed'
    """
    hints, docs = hints_of(kind), field_docs(kind)
    listed: list[Parameter] = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            listed += [
                dataclasses.replace(inner, name=f"{field.name}.{inner.name}") for inner in parameters(hint)
            ]
            continue
        default = None if field.default is dataclasses.MISSING else repr(field.default)
        if field.default_factory is not dataclasses.MISSING:
            default = repr(field.default_factory())
        doc = docs.get(field.name, "")
        listed.append(Parameter(field.name, _type_text(hint), default, doc, _sequence_in(hint)))
    return listed


def _sequence_in(hint: object) -> object | None:
    """A type that is a sequence of any length, or that or None, without the None; None for others."""
    united = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = [kind for kind in (typing.get_args(hint) if united else (hint,)) if kind is not types.NoneType]
    origin, args = typing.get_origin(kinds[0]), typing.get_args(kinds[0])
    fixed = origin is tuple and args[-1:] != (...,)
    return kinds[0] if len(kinds) == 1 and origin in SEQUENCES and not fixed else None


def _parameter_class(file: Path, module: ModuleType) -> type:
    """The parameter dataclass that `main` takes, by its annotation; ValueError if `main` is not `main(job, record)`."""
    main = getattr(module, "main", None)
    form = "main(job: Parameters, record: Record), Parameters being a dataclass"
    if not inspect.isfunction(main):
        raise ValueError(f"an experiment requires {form}; {file} has no function main")
    signature = inspect.signature(main)
    hints = typing.get_type_hints(main)
    types = [hints.get(name) for name in signature.parameters]
    fits = len(types) == 2 and types[1] is Record
    if not fits or not (isinstance(types[0], type) and dataclasses.is_dataclass(types[0])):
        raise ValueError(f"an experiment requires {form}; {file} has main{signature}")
    return types[0]


def field_docs(kind: type) -> dict[str, str]:
    """One sentence about each field of a dataclass: the string below it, or the first sentence of its "Args" entry.

    Example:
        >>> from interp.causal import Patch
        >>> field_docs(Patch)["each"]
        'False keeps no values of single prompts, which data of any size requires.'
    """
    classes = [cls for cls in reversed(kind.__mro__) if dataclasses.is_dataclass(cls)]
    docs: dict[str, str] = {}
    for cls in classes:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
        docs |= _field_strings(typing.cast("ast.ClassDef", tree.body[0]))
        for entry in docstring_parser.parse(inspect.getdoc(cls) or "", DocstringStyle.GOOGLE).params:
            sentence = re.split(r"(?<=\.) ", " ".join((entry.description or "").split()), maxsplit=1)[0]
            docs |= dict.fromkeys(entry.arg_name.split(", "), sentence[:1].upper() + sentence[1:])
    return docs


def _field_strings(tree: ast.ClassDef) -> dict[str, str]:
    """The string below each annotated field of a class, by the field's name."""
    return {
        field.target.id: " ".join(str(below.value.value).split())
        for field, below in pairwise(tree.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def _type_text(hint: object) -> str:
    return (
        hint.__name__
        if isinstance(hint, type) and not typing.get_args(hint)
        else str(hint).replace("typing.", "")
    )
