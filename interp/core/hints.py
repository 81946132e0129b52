"""Annotations of a function or class: their members, their requirements, and their text in error messages."""

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
    """The meaning of an annotation in words, for error messages, and a check of values.

    `Annotated[Subject | Transformer, Required("a model", refused)]`.
    """

    words: str
    """Words for the value that is required."""
    refused: Callable[[object], str | None]
    """Function from a value to None if it fits; else to a hint how to write it, "" if there is none."""


@functools.cache
def hints_of(owner: object, *, imported: bool = True) -> Mapping[str, object]:
    """The annotations of a function's parameters or of a class, by name, without those that cannot be resolved.

    Args:
        imported: whether to resolve names that a module imports under TYPE_CHECKING only, which imports them.
    """
    hints: dict[str, object] = {}
    for source in reversed(owner.__mro__) if isinstance(owner, type) else [owner]:
        module = inspect.getmodule(source)
        for name, hint in getattr(source, "__annotations__", {}).items():
            if name == "return" or str(hint).removeprefix("typing.").startswith("ClassVar"):
                continue
            hints.pop(name, None)
            with suppress(NameError):
                hints[name] = _resolved_hint(hint, module, imported)
    return hints


def options(hint: object) -> tuple[object, ...]:
    """The annotations of which a value must fit one: the members of a union, or the annotation itself."""
    return get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def required(hint: object) -> Required | None:
    """The `Required` of an annotation; None if it has none."""
    extras = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    return next((extra for extra in extras if isinstance(extra, Required)), None)


def words(hint: object) -> tuple[str, ...]:
    """The strings in the Literals of an annotation."""
    choices = [get_args(option) for option in options(hint) if get_origin(option) is Literal]
    return tuple(word for choice in choices for word in choice if isinstance(word, str))


def is_asked_of_objects(hint: object) -> typing.TypeGuard[type]:
    """Whether `isinstance` can check an annotation: for classes and runtime-checkable protocols."""
    if not isinstance(hint, type) or get_args(hint):
        return False
    return not getattr(hint, "_is_protocol", False) or getattr(hint, "_is_runtime_protocol", False)


def annotation_text(hint: object) -> str:
    """The text of an annotation for error messages, without the modules of its names."""
    if hint is None or hint is type(None):
        return "None"
    if hint is ...:
        return "..."
    if hint is torch.dtype:
        return "a torch dtype"
    if isinstance(hint, list):  # the parameters of a Callable
        return f"[{', '.join(map(annotation_text, hint))}]"
    if kind := required(hint):
        return kind.words
    if get_origin(hint) is Literal:
        choice = [repr(option) for option in get_args(hint)]
        return " or ".join(choice) if len(choice) < 3 else f"one of {', '.join(choice)}"
    if len(several := options(hint)) > 1:
        in_words = any(map(required, several))  # their words then describe the protocols as well
        shown = [option for option in several if not (in_words and getattr(option, "_is_protocol", False))]
        return " or ".join(dict.fromkeys(map(annotation_text, shown)))
    name = getattr(get_origin(hint) or hint, "__name__", str(hint))
    inner = ", ".join(map(annotation_text, get_args(hint)))
    return f"{name}[{inner}]" if inner else name


def _resolved_hint(hint: object, module: types.ModuleType | None, imported: bool) -> object:
    """An annotation with its names resolved. NameError for an undefined name."""
    holder = types.SimpleNamespace(__annotations__={"it": hint})
    try:
        return typing.get_type_hints(holder, vars(module or typing), include_extras=True)["it"]
    except NameError:
        if not imported:
            raise
        return typing.get_type_hints(holder, _type_checking_names(module), include_extras=True)["it"]


@functools.cache
def _type_checking_names(module: types.ModuleType | None) -> dict[str, object]:
    """The names of a module with those imported for type checkers only: packages that are slow to load."""
    if module is None or not getattr(module, "__file__", None):
        return {}
    space = dict(vars(module))
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(node.body, []), str(module.__file__), "exec"), space)
    return space
