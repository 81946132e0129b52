"""Checks of arguments at public functions: the kind of every argument, refused by its name at the line of the call.

Annotations are the one statement of what an argument may be (`hints`); values are checked against them (`fitting`), and
the message says what was required, what arrived and the nearest valid thing. Where an annotation needs words of its
own, or a closer look, it is `Annotated` with a `Required`.
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
"""Words of the first edition and what they are called in every function that now has the new word."""
SETTINGS: Mapping[str, str] = {
    "edits": "edits are made to the model, model.edited(edits), or hold for a block, with model.hooks(edits=edits)",
    "prepend_bos": "it is the model's, from_pretrained(..., default_prepend_bos=...), or of one batch, "
    "model.to_batch(prompts, prepend_bos=...)",
    "batch_size": "data may come in batches, such as model.to_batch(prompts).split(8), or as interp.Stream(...)",
}
"""Settings of a run that functions of questions do not take, and where to give them instead."""


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
    """A decorator of public functions: arguments of the wrong kind are refused by name, before anything runs.

    Args:
        renamed: what arguments were once called, so that the old word is answered with the new one (`EARLIER` is
            known everywhere).
        unchecked: arguments that the function itself looks at more closely. Of a class, what makes its objects is
            looked at.
        plain_pass: whether the function runs under the user's own settings of torch, such as autocast; others run
            under those that torch begins with (`torch_state`). A dtype may be given by its name, "bfloat16", wherever
            one is asked for. Errors of the decorated function: ValueError for a value that its annotation does not
            allow; TypeError for an argument that it does not have.

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
        signature, name = inspect.signature(function), _name(function)
        looked_at = set(signature.parameters) - {"self", "cls", *unchecked}
        bind = _binding(signature)
        guarded = nullcontext if plain_pass else undisturbed

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            _known_keywords(name, kwargs, signature, renamed)
            bound, plain = bind(args, kwargs), True
            if bound is None:
                return function(*args, **kwargs)  # which says what is missing
            hints = hints_of(function)
            for argument, value in bound.arguments.items():
                if argument not in hints or argument not in looked_at:
                    continue
                if (meant := _dtype(value, hints[argument])) is not value:
                    bound.arguments[argument] = value = meant
                    plain = False
                for each in _each(value, signature.parameters[argument]):
                    check(f"{name}: {argument}", each, hints[argument])
            with guarded():
                return function(*args, **kwargs) if plain else function(*bound.args, **bound.kwargs)

        checked.__dict__["public"] = True
        return checked

    return cast("_Public", decorated)


def _binding(
    signature: inspect.Signature,
) -> Callable[[Sequence[object], Mapping[str, object]], inspect.BoundArguments | None]:
    """A function from the arguments of a call to those by name; None where they do not fit.

    Where every parameter has a name, names are given here: `Signature.bind` takes six times as long.
    """
    kinds = {each.kind for each in signature.parameters.values()}
    by_place = [n for n, each in signature.parameters.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
    needed = {n for n, each in signature.parameters.items() if each.default is each.empty}

    def bound(args: Sequence[object], kwargs: Mapping[str, object]) -> inspect.BoundArguments | None:
        try:
            return signature.bind(*args, **kwargs)
        except TypeError:
            return None

    def named(args: Sequence[object], kwargs: Mapping[str, object]) -> inspect.BoundArguments | None:
        found = {**dict(zip(by_place, args, strict=False)), **kwargs}
        if len(found) < len(args) + len(kwargs) or not needed <= found.keys():
            return None
        return inspect.BoundArguments(signature, collections.OrderedDict(found))

    usual = {inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY}
    return named if kinds <= usual else bound


def _dtype(value: object, hint: object) -> object:
    """The dtype that a text names where the annotation is a dtype; everything else as it is."""
    named = isinstance(value, str) and value in words(Precision) and value not in words(hint)
    return getattr(torch, str(value)) if named and torch.dtype in options(hint) else value


def check_fields(record: object) -> None:
    """ValueError, by the field's name, for a value of a record that its annotation does not allow."""
    assert dataclasses.is_dataclass(record)
    hints = hints_of(record.__class__)
    for field in dataclasses.fields(record):
        if field.init and field.name in hints:
            check(f"{type(record).__name__}: {field.name}", getattr(record, field.name), hints[field.name])


def check(what: str, value: object, hint: object) -> None:
    """ValueError naming `what`, unless the value is of the kind that an annotation says."""
    if not fits(value, hint):
        raise ValueError(
            f"{what} must be {annotation_text(hint)}, got {value_text(value)}{_hint(what, value, hint)}"
        )


# --- arguments -------------------------------------------------------------------------------------------------


def _name(function: Callable[..., object]) -> str:
    """The name by which users call a function."""
    owner, _, name = function.__qualname__.rpartition(".")
    return owner.rpartition(".")[2] if name in ("__init__", "__call__") else name


def _each(value: object, parameter: inspect.Parameter) -> Sequence[object]:
    """The values that a parameter got: of `*parts` and `**options` several."""
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
        assert isinstance(value, tuple)
        return value
    if parameter.kind is inspect.Parameter.VAR_KEYWORD:
        assert isinstance(value, dict)
        return list(value.values())
    return (value,)


def _known_keywords(
    name: str, given: Mapping[str, object], signature: inspect.Signature, renamed: Mapping[str, str]
) -> None:
    parameters = signature.parameters
    if given.keys() <= parameters.keys():
        return
    open_ended = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for word in given:
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


def _hint(what: str, value: object, hint: object) -> str:
    """The nearest valid words, where the annotation lists words; or how to write what was meant."""
    kinds = [kind for each in options(hint) if (kind := required(each))]
    if instead := next((text for kind in kinds if (text := kind.refused(value))), ""):
        return instead
    classes = {each.__name__: each for each in options(hint) if is_asked_of_objects(each)}
    if isinstance(value, str):
        if choice := words(hint):
            return f"; {nearest(value, choice)}"
        if named := [name for name in classes if name.lower() == value.lower().removesuffix("()")]:
            return f": write {place_of(classes[named[0]])}()"
    if isinstance(value, type) and any(_is_one(value, each) for each in classes.values()):
        return f": write {value.__name__}(...)"
    if inspect.isfunction(value) and value.__annotations__.get("return") in classes.values():
        return f": call it, {value.__name__}(...)"
    if hasattr(value, "__index__") and not isinstance(value, int) and int in options(hint):
        return ": write int(...)"
    if any(get_origin(each) in _SEVERAL and fits((value,), each) for each in options(hint)):
        return f": write {what.rpartition(' ')[2]}=({repr(value) if isinstance(value, str) else '...'},)"
    return ""


def _is_one(kind: type, option: type) -> bool:
    """Whether a class is a subclass of another one; False for protocols, which Python checks for objects only."""
    return not getattr(option, "_is_protocol", False) and issubclass(kind, option)


def place_of(kind: type) -> str:
    """Where a user finds a class: at a face of the package rather than in the module that defines it."""
    parts = kind.__module__.split(".")
    faces = [f"{parts[0]}.{parts[-1]}", *(".".join(parts[:n]) for n in range(2, len(parts)))]
    found = (face for face in faces if getattr(sys.modules.get(face), kind.__name__, None) is kind)
    return f"{next(found, kind.__module__)}.{kind.__name__}"
