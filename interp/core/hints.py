"""Annotations: read off a function or class, taken apart, and said as people write them."""

import ast
import functools
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Literal, get_args, get_origin

import torch


@dataclass(frozen=True)
class Required:
    """The meaning of an annotation in words, for error messages.

    `Annotated[Subject | Transformer, Required("a model", refused)]`.
    """

    words: str
    """Words for the value that is required."""
    refused: Callable[[object], str | None]
    """None for a value that fits; else how to write what was meant, or "" where nothing is close."""


@functools.cache
def hints_of(owner: object, *, imported: bool = True) -> Mapping[str, object]:
    """The annotations of a function's parameters or of a class, without those that name undefined things.

    Args:
        imported: with those of packages that a module imports for type checkers alone, which are then loaded.
    """
    found: dict[str, object] = {}
    for source in reversed(owner.__mro__) if isinstance(owner, type) else [owner]:
        module = inspect.getmodule(source)
        for name, hint in getattr(source, "__annotations__", {}).items():
            if name == "return" or str(hint).removeprefix("typing.").startswith("ClassVar"):
                continue
            found.pop(name, None)
            with suppress(NameError):
                found[name] = _evaluated(hint, module, imported)
    return found


def options(hint: object) -> tuple[object, ...]:
    """The annotations of which a value must fit one: the members of a union, or the annotation itself."""
    return get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def required(hint: object) -> Required | None:
    """The words and the closer look that an annotation comes with, if any."""
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((each for each in extras if isinstance(each, Required)), None)


def words(hint: object) -> tuple[str, ...]:
    """The words that an annotation allows to choose from."""
    choices = [get_args(each) for each in options(hint) if get_origin(each) is Literal]
    return tuple(word for each in choices for word in each if isinstance(word, str))


def is_asked_of_objects(hint: object) -> typing.TypeGuard[type]:
    """Whether `isinstance` tells all: of classes, and of protocols that Python itself can ask for."""
    if not isinstance(hint, type) or get_args(hint):
        return False
    return not getattr(hint, "_is_protocol", False) or getattr(hint, "_is_runtime_protocol", False)


def annotation_text(hint: object) -> str:
    """An annotation as people write it, without the modules of its names."""
    if hint is None or hint is type(None):
        return "None"
    if hint is ...:
        return "..."
    if hint is torch.dtype:
        return "a torch dtype"
    if isinstance(hint, list):  # of what a function takes
        return f"[{', '.join(map(annotation_text, hint))}]"
    if kind := required(hint):
        return kind.words
    if get_origin(hint) is Literal:
        choice = [repr(each) for each in get_args(hint)]
        return " or ".join(choice) if len(choice) < 3 else f"one of {', '.join(choice)}"
    if len(several := options(hint)) > 1:
        in_words = any(map(required, several))  # which then say what interfaces there are
        told = [each for each in several if not (in_words and getattr(each, "_is_protocol", False))]
        return " or ".join(dict.fromkeys(map(annotation_text, told)))
    name = getattr(get_origin(hint) or hint, "__name__", str(hint))
    inner = ", ".join(map(annotation_text, get_args(hint)))
    return f"{name}[{inner}]" if inner else name


def _evaluated(hint: object, module: types.ModuleType | None, imported: bool) -> object:
    """An annotation with its names resolved. NameError for an undefined name."""
    holder = types.SimpleNamespace(__annotations__={"it": hint})
    try:
        return typing.get_type_hints(holder, vars(module or typing), include_extras=True)["it"]
    except NameError:
        if not imported:
            raise
        return typing.get_type_hints(holder, _for_type_checkers(module), include_extras=True)["it"]


@functools.cache
def _for_type_checkers(module: types.ModuleType | None) -> dict[str, object]:
    """The names of a module with those imported for type checkers only: packages that are slow to load."""
    if module is None or not getattr(module, "__file__", None):
        return {}
    space = dict(vars(module))
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(node.body, []), str(module.__file__), "exec"), space)
    return space
