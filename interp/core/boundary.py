"""Checks of the arguments of public functions against their annotations, with errors that name the argument.

The annotation alone defines what an argument may be (`hints`), and `fitting` checks values against it. The message says
what is required, what was given, and the nearest valid value. An annotation with its own words or a stricter check is
`Annotated` with a `Required`.
"""

import collections
import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import ParamSpec, Protocol, TypeVar, cast, get_origin, overload, runtime_checkable

import torch

from interp.core.damaged import check_whole
from interp.core.fitting import fits
from interp.core.hints import annotation_text, hints_of, is_asked_of_objects, options, required, words
from interp.core.kinds import Precision
from interp.core.torch_state import undisturbed
from interp.core.wording import nearest, value_text

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
NOTHING: Mapping[str, str] = {}
EARLIER: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(("prompts", "prompt"), ("data",)),
    **dict.fromkeys(("target", "targets", "answers"), ("answer",)),
    **dict.fromkeys(("block", "blocks"), ("layer", "layers")),
    "positions": ("pos",),
    "names": ("names_filter",),
    "k": ("top", "count", "sizes"),
    "by_pos": ("by",),
    "what": ("parts",),
    "protocol": ("change",),
    "analyses": ("questions",),
    "analysis": ("question",),
}
"""Names of arguments in the first edition, with the new names; it holds for every function with a new name."""
SETTINGS: Mapping[str, str] = {
    "edits": "edits are made to the model, model.edited(edits), or hold for a block, with model.hooks(edits=edits)",
    "prepend_bos": "it is the model's, from_pretrained(..., default_prepend_bos=...), or of one batch, "
    "model.to_batch(prompts, prepend_bos=...)",
    "batch_size": "data may come in batches, such as model.to_batch(prompts).split(8), or as interp.Stream(...)",
}
"""Settings of a run that analysis functions do not take, and where to give them instead."""


@runtime_checkable
class _Public(Protocol):
    """Type of the decorator `public`: a class stays a class, a function keeps its parameters."""

    @overload
    def __call__(self, function: type[T], /) -> type[T]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]: ...


def public(
    *, renamed: Mapping[str, str] = NOTHING, unchecked: tuple[str, ...] = (), plain_pass: bool = False
) -> _Public:
    """A decorator of public functions: an argument of the wrong type raises an error with its name, before the call.

    The decorated function raises a ValueError for a value that its annotation does not allow, and a TypeError for an
    argument that it does not have. A dtype may be given by its name, "bfloat16". Of a class, `__init__` is decorated.

    Args:
        renamed: old names of arguments, with the new names that the error message gives (`EARLIER` always holds).
        unchecked: arguments that the function checks itself.
        plain_pass: whether the function runs under the user's settings of torch, such as autocast; others run under
            torch's default settings (`torch_state`).

    Example:
        >>> @public(renamed={"k": "top"})
        ... def shown(words: list[str], *, top: int = 3) -> list[str]:
        ...     return words[:top]
        >>> shown(["a", "b"], k=1)
        Traceback (most recent call last):
        TypeError: shown() has no argument 'k': it is called top
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        if isinstance(function, type):
            function.__init__ = decorated(function.__init__)  # type: ignore[misc]
            return function
        signature, name = inspect.signature(function), _called_name(function)
        looked_at = set(signature.parameters) - {"self", "cls", *unchecked}
        bind = _argument_binder(signature)
        guarded = nullcontext if plain_pass else undisturbed

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            _check_keywords(name, kwargs, signature, renamed)
            bound, plain = bind(args, kwargs), True
            if bound is None:
                return function(*args, **kwargs)  # raises the TypeError that names the missing argument
            hints = hints_of(function)
            for argument, value in bound.arguments.items():
                if argument not in hints or argument not in looked_at:
                    continue
                if (meant := _named_dtype(value, hints[argument])) is not value:
                    bound.arguments[argument] = value = meant
                    plain = False
                for item in _argument_values(value, signature.parameters[argument]):
                    check(f"{name}: {argument}", item, hints[argument])
            try:
                with guarded():
                    return function(*args, **kwargs) if plain else function(*bound.args, **bound.kwargs)
            except Exception as error:  # pandas has some that are of no other kind
                check_whole(name, error, bound.arguments)
                raise

        checked.__dict__["public"] = True
        return checked

    return cast("_Public", decorated)


def _argument_binder(
    signature: inspect.Signature,
) -> Callable[[Sequence[object], Mapping[str, object]], inspect.BoundArguments | None]:
    """A function that maps a call's arguments to parameter names; it returns None if they do not fit the signature.

    Without *args and **kwargs the names are assigned here, since `Signature.bind` takes six times as long.
    """
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    by_place = [
        n
        for n, parameter in signature.parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    needed = {n for n, parameter in signature.parameters.items() if parameter.default is parameter.empty}

    def bound(args: Sequence[object], kwargs: Mapping[str, object]) -> inspect.BoundArguments | None:
        try:
            return signature.bind(*args, **kwargs)
        except TypeError:
            return None

    def named(args: Sequence[object], kwargs: Mapping[str, object]) -> inspect.BoundArguments | None:
        arguments = {**dict(zip(by_place, args, strict=False)), **kwargs}
        if len(arguments) < len(args) + len(kwargs) or not needed <= arguments.keys():
            return None
        return inspect.BoundArguments(signature, collections.OrderedDict(arguments))

    usual = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    return named if kinds <= usual else bound


def _named_dtype(value: object, hint: object) -> object:
    """The torch dtype, for the name of one where the annotation is a dtype; any other value unchanged."""
    if not isinstance(value, str) or torch.dtype not in options(hint):
        return value
    return getattr(torch, value) if value in words(Precision) and value not in words(hint) else value


def check_fields(record: object) -> None:
    """Checks every field of a dataclass object against its annotation; the ValueError names the field."""
    assert dataclasses.is_dataclass(record)
    hints = hints_of(record.__class__)
    for field in dataclasses.fields(record):
        if field.init and field.name in hints:
            check(f"{type(record).__name__}: {field.name}", getattr(record, field.name), hints[field.name])


def check(what: str, value: object, hint: object) -> None:
    """Raises a ValueError that names `what`, unless the value fits the annotation `hint`."""
    if not fits(value, hint):
        raise ValueError(
            f"{what} must be {annotation_text(hint)}, got {value_text(value)}{_suggestion(what, value, hint)}"
        )


# --- arguments -------------------------------------------------------------------------------------------------


def _called_name(function: Callable[..., object]) -> str:
    """The name by which users call a function."""
    owner, _, name = function.__qualname__.rpartition(".")
    return owner.rpartition(".")[2] if name in ("__init__", "__call__") else name


def _argument_values(value: object, parameter: inspect.Parameter) -> Sequence[object]:
    """The values to check for a parameter: several for `*args` and `**kwargs`, else one."""
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        assert isinstance(value, tuple)
        return value
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        assert isinstance(value, dict)
        return list(value.values())
    return (value,)


def _check_keywords(
    name: str, keywords: Mapping[str, object], signature: inspect.Signature, renamed: Mapping[str, str]
) -> None:
    """Raises a TypeError for a keyword that the function does not have, with its new name or the nearest one."""
    parameters = signature.parameters
    if keywords.keys() <= parameters.keys():
        return
    open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for word in keywords:
        if word in parameters:
            continue
        earlier = [new for new in EARLIER.get(word, ()) if new in parameters]
        if word in renamed or earlier:
            raise TypeError(
                f"{name}() has no argument {word!r}: it is called {renamed.get(word) or earlier[0]}"
            )
        if word in SETTINGS and parameters.keys() & {"data", "clean", "positive"}:
            raise TypeError(f"{name}() has no argument {word!r}: {SETTINGS[word]}")
        if not open_ended:
            raise TypeError(f"{name}() has no argument {word!r}; {nearest(word, parameters)}")


# --- the nearest valid thing --------------------------------------------------------------------------------------


_SEVERAL = (Sequence, Collection, Iterable, tuple)


def _suggestion(what: str, value: object, hint: object) -> str:
    """End of an error message: the nearest valid words, or how to write what was probably meant; "" if neither."""
    kinds = [kind for option in options(hint) if (kind := required(option))]
    if instead := next((text for kind in kinds if (text := kind.refused(value))), ""):
        return instead
    classes = {option.__name__: option for option in options(hint) if is_asked_of_objects(option)}
    if isinstance(value, str):
        if choice := words(hint):
            return f"; {nearest(value, choice)}"
        if named := [name for name in classes if name.lower() == value.lower().removesuffix("()")]:
            return f": write {_made(classes[named[0]])}"
    if isinstance(value, type) and any(_is_subclass(value, option) for option in classes.values()):
        return f": write {value.__name__}(...)"
    if inspect.isfunction(value) and value.__annotations__.get("return") in classes.values():
        return f": call it, {value.__name__}(...)"
    if hasattr(value, "__index__") and not isinstance(value, int) and int in options(hint):
        return ": write int(...)"
    if any(get_origin(option) in _SEVERAL and fits((value,), option) for option in options(hint)):
        return f": write {what.rpartition(' ')[2]}=({repr(value) if isinstance(value, str) else '...'},)"
    return ""


def _made(kind: type) -> str:
    """How a record is written, with what it has no default for: `interp.features.TopK(k=...)`."""
    needed = [
        f"{name}=..."
        for name, parameter in inspect.signature(kind).parameters.items()
        if parameter.default is parameter.empty
    ]
    return f"{place_of(kind)}({', '.join(needed)})"


def _is_subclass(kind: type, option: type) -> bool:
    """Whether a class is a subclass of another one; False for protocols, which Python checks for objects only."""
    return not getattr(option, "_is_protocol", False) and issubclass(kind, option)


def place_of(kind: type) -> str:
    """The path from which a user imports a class: a package that exports it, rather than the module that defines it."""
    parts = kind.__module__.split(".")
    faces = [f"{parts[0]}.{parts[-1]}", *(".".join(parts[:n]) for n in range(2, len(parts)))]
    importable = (face for face in faces if getattr(sys.modules.get(face), kind.__name__, None) is kind)
    return f"{next(importable, kind.__module__)}.{kind.__name__}"
