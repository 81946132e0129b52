"""What a stranger may get wrong at a public function, said where he called it: the kind of every argument, by its name.

Annotations are the one statement of what an argument may be; `typeguard` checks values against them, item by item, and
the message says what was required, what arrived and the nearest valid thing.
"""

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Literal, ParamSpec, TypeVar, get_args, get_origin

from interp.core.shapes import nearest, shape_text

P = ParamSpec("P")
R = TypeVar("R")
NOTHING: Mapping[str, str] = {}


def public(
    *, renamed: Mapping[str, str] = NOTHING, unchecked: tuple[str, ...] = ()
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator of public functions: arguments of the wrong kind are refused by name, before anything runs.

    renamed: what arguments were once called, so that the old word is answered with the new one. unchecked: arguments
    that the function itself looks at more closely.
    Errors of the decorated function: ValueError for a value that its annotation does not allow; TypeError for an
    argument that it does not have.

    Example:
        >>> @public(renamed={"k": "top"})
        ... def shown(words: list[str], *, top: int = 3) -> list[str]:
        ...     return words[:top]
        >>> shown(["a", "b"], k=1)
        Traceback (most recent call last):
        TypeError: shown() has no argument 'k': it is called top
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            _known_keywords(function.__name__, kwargs, signature, renamed)
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # which says what is missing
            hints = hints_of(function)
            for name, value in bound.arguments.items():
                if name in hints and name not in unchecked:
                    check(f"{function.__name__}: {name}", value, hints[name])
            return function(*args, **kwargs)

        return checked

    return decorated


def check_fields(record: object) -> None:
    """ValueError, by the field's name, for a field of a record whose value its annotation does not allow."""
    assert dataclasses.is_dataclass(record)
    hints = hints_of(record.__class__)
    for field in dataclasses.fields(record):
        if field.init and field.name in hints:
            check(f"{type(record).__name__}: {field.name}", getattr(record, field.name), hints[field.name])


def check(what: str, value: object, hint: object) -> None:
    """ValueError naming `what`, unless the value is of the kind that an annotation says."""
    import typeguard

    if isinstance(value, bool) and not _allows_bool(hint):
        raise ValueError(f"{what} must be {said(hint)}, got {value}")
    try:
        typeguard.check_type(
            value, hint, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS
        )
    except typeguard.TypeCheckError as cause:
        raise ValueError(f"{what} must be {said(hint)}, got {shown(value)}{_hint(value, hint)}") from cause


@functools.cache
def hints_of(owner: object) -> Mapping[str, object]:
    """The annotations of a function or class, but for those that only type checkers can resolve."""
    found: dict[str, object] = {}
    for source in reversed(owner.__mro__) if isinstance(owner, type) else [owner]:
        space = dict(vars(inspect.getmodule(source) or typing))
        for name, hint in getattr(source, "__annotations__", {}).items():
            try:
                found[name] = eval(hint, space) if isinstance(hint, str) else hint  # our own source
            except NameError:
                found.pop(name, None)
    return found


def said(hint: object) -> str:
    """An annotation as people write it, without the modules of its names."""
    if hint is type(None) or hint is None:
        return "None"
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if options := _options(hint):
        return " or ".join(dict.fromkeys(map(said, options)))
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return re.sub(
        r"\b(?:[a-z_]\w*\.)+(?=[A-Z])", "", text.replace("collections.abc.", "").replace("typing.", "")
    )


def shown(value: object) -> str:
    """A value in a few words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    if inspect.ismodule(value):
        return f"the module {value.__name__}"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} of {value.dtype} and shape {shape_text(value.shape)}"
    text = repr(value)
    short = text if len(text) <= 60 else f"{text[:57]}..."
    return f"{short} ({type(value).__name__})" if type(value).__name__ not in short else short


def _known_keywords(
    name: str, given: Mapping[str, object], signature: inspect.Signature, renamed: Mapping[str, str]
) -> None:
    parameters = signature.parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return
    for word in given:
        if word in parameters:
            continue
        if word in renamed:
            raise TypeError(f"{name}() has no argument {word!r}: it is called {renamed[word]}")
        raise TypeError(f"{name}() has no argument {word!r}; {nearest(word, parameters)}")


def _options(hint: object) -> tuple[object, ...]:
    import types

    return get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else ()


def _allows_bool(hint: object) -> bool:
    """Whether True and False are meant to be allowed, and not only as the numbers that Python takes them for."""
    if hint in (bool, object) or hint is typing.Any:
        return True
    if get_origin(hint) is Literal:
        return any(isinstance(each, bool) for each in get_args(hint))
    return any(map(_allows_bool, _options(hint)))


def _hint(value: object, hint: object) -> str:
    """The nearest valid words, where words are asked for; or how to write what was meant."""
    words = [
        each
        for option in (_options(hint) or (hint,))
        if get_origin(option) is Literal
        for each in get_args(option)
        if isinstance(each, str)
    ]
    if isinstance(value, str) and words:
        return f"; {nearest(value, words)}"
    if isinstance(value, type) and _fits_when_called(value, hint):
        return f": write {value.__name__}(...)"
    if isinstance(value, str) and "Sequence[str]" in said(hint):
        return f": write [{value!r}]"
    return ""


def _fits_when_called(kind: type, hint: object) -> bool:
    return any(
        isinstance(option, type) and issubclass(kind, option) for option in (_options(hint) or (hint,))
    )
