"""What a stranger may get wrong at a public function, said where he called it: the kind of every argument, by its name.

Annotations are the one statement of what an argument may be; `typeguard` checks values against them, item by item, and
the message says what was required, what arrived and the nearest valid thing. Where an annotation needs words of its
own, or a closer look, it is `Annotated` with a `Required`.
"""

import ast
import collections
import dataclasses
import functools
import inspect
import re
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import (
    Annotated,
    Literal,
    ParamSpec,
    Protocol,
    TypeGuard,
    TypeVar,
    cast,
    get_args,
    get_origin,
    overload,
    runtime_checkable,
)

import torch

from interp.core.torch_state import undisturbed

AXES: dict[str, str] = {
    "b": "batch row",
    "p": "position",
    "q": "query position",
    "k": "key position",
    "h": "query head",
    "g": "key/value head",
    "d": "residual stream",
    "e": "per-head width",
    "r": "width of a query or key, where it is another",
    "w": "latent width",
    "m": "MLP neuron",
    "v": "vocabulary",
    "l": "layer",
    "c": "component",
    "s": "source position",
    "x": "expert",
    "n": "memory",
    "j": "query/key head of memories",
    "f": "width of a value",
    "u": "channel",
    "1": "kept for broadcasting",
}


def describe(axes: str) -> str:
    """Words for an axis string: `"b q h"` -> `"[batch row, query position, query head]"`."""
    return "[" + ", ".join(AXES[a] for a in axes.split()) + "]"


def shape_text(shape: Sequence[int]) -> str:
    """A shape as people write it, `[2, 7, 64]`, whatever sequence type it arrived in."""
    return "[" + ", ".join(str(int(n)) for n in shape) + "]"


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """A readable hint, `"nearest: a, b"`, of the known names closest to `name`; empty if none is close."""
    import difflib

    close = difflib.get_close_matches(name, list(known), n=count, cutoff=0.4)
    return f"nearest: {', '.join(close)}" if close else "no name is close"


P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60
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
"""Settings of a run that functions of questions do not take, and where they are said instead."""
_COLLECTIONS = (Sequence, Collection, Iterable)
MOST_COUNT = 10_000_000
"""The most steps, draws, samples or permutations that are taken: more would never end."""
MOST = 1000
"""Items of one value that are looked at one by one; of longer lists the first."""


@dataclasses.dataclass(frozen=True)
class Required:
    """What an annotation means in people's words: `Annotated[Subject | Transformer, Required("a model", refused)]`."""

    words: str
    """What is required."""
    refused: Callable[[object], str | None]
    """None for a value that fits; else how to write what was meant, or "" where nothing is close."""


@runtime_checkable
class _Public(Protocol):
    """What `public` makes: a class stays a class, a function keeps its parameters."""

    @overload
    def __call__(self, function: type[T], /) -> type[T]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Callable[P, R]: ...


def public(
    *, renamed: Mapping[str, str] = NOTHING, unchecked: tuple[str, ...] = (), plain_pass: bool = False
) -> _Public:
    """A decorator of public functions: arguments of the wrong kind are refused by name, before anything runs.

    renamed: what arguments were once called, so that the old word is answered with the new one (`EARLIER` is known
    everywhere). unchecked: arguments that the function itself looks at more closely. Of a class, what makes its objects
    is looked at. plain_pass: whether the function runs under the user's own settings of torch, such as autocast; others
    run under those that torch begins with (`torch_state`).
    A dtype may be given by its name, "bfloat16", wherever one is asked for.
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
            if not looked_at:
                with guarded():
                    return function(*args, **kwargs)
            bound, plain = bind(args, kwargs), True
            if bound is None:
                return function(*args, **kwargs)  # which says what is missing
            hints, of_one_kind = hints_of(function), _kinds_of(function)
            for argument, value in bound.arguments.items():
                if argument not in hints or argument not in looked_at:
                    continue
                if type(value) in of_one_kind[argument]:
                    continue
                if isinstance(value, str) and (meant := _dtype(value, hints[argument])) is not value:
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
    """From the arguments of a call to those by name; None where they do not fit.

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
    """The dtype that a text names where the annotation asks for one; everything else as it is."""
    allowed = _allowed(hint)
    meant = torch.dtype in allowed.types and value not in allowed.words
    return _DTYPES.get(str(value), value) if meant else value


_NAMED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_DTYPES = {str(each).removeprefix("torch."): each for each in _NAMED}


def check_fields(record: object) -> None:
    """ValueError, by the field's name, for a field of a record whose value its annotation does not allow."""
    assert dataclasses.is_dataclass(record)
    hints = hints_of(record.__class__)
    for field in dataclasses.fields(record):
        if field.init and field.name in hints:
            check(f"{type(record).__name__}: {field.name}", getattr(record, field.name), hints[field.name])


def check(what: str, value: object, hint: object) -> None:
    """ValueError naming `what`, unless the value is of the kind that an annotation says."""
    if not fits(value, hint):
        raise ValueError(f"{what} must be {said(hint)}, got {shown(value)}{_hint(what, value, hint)}")


def listed(top: int | None, usual: int, most: int, what: str = "") -> int:
    """How many of `most` things are listed: `top`; for None the usual number, or all where there are fewer.

    Errors: ValueError for a `top` that is none of 1 to `most`; `what` says of what.
    """
    if top is None:
        return min(usual, most)
    if not 1 <= top <= most:
        raise ValueError(f"top must be in [1, {most}]{what}, got {top!r}")
    return top


def fits(value: object, hint: object) -> bool:
    """Whether a value is of the kind that an annotation says."""
    allowed = _allowed(hint)
    if isinstance(value, torch.Tensor) and value.is_meta:  # it has a shape and no numbers
        return False
    if type(value) in allowed.types or (isinstance(value, str) and value in allowed.words):
        return True
    if any(kind.refused(value) is None for kind in allowed.kinds):
        return True
    if isinstance(value, list | tuple) and any(_all_fit(value, item) for item in allowed.lists):
        return True
    if isinstance(value, bytes | bytearray):  # a sequence of numbers to Python, and to nobody else
        return isinstance(value, allowed.classes)
    if (isinstance(value, bool) and not allowed.truth) or (isinstance(value, str) and not allowed.text):
        return False
    if isinstance(value, allowed.classes):
        return True
    if allowed.items and getattr(value, "ndim", 1) == 0:
        return False  # an array of no axes cannot be gone through
    held = value
    if isinstance(value, torch.Tensor) and not value.numel():
        held = [value.new_zeros(value.shape[1:])]  # of what kind the entries would be
    if _can_be_read_again(held) and any(not _all_fit(held, item) for item in allowed.items):
        return False
    return _checked(value, allowed.rest)


def _checked(value: object, hint: object | None) -> bool:
    """Whether typeguard lets a value pass."""
    if hint is None:
        return False
    import typeguard

    strategy = typeguard.CollectionCheckStrategy
    try:
        typeguard.check_type(
            value,
            hint,
            collection_check_strategy=strategy.FIRST_ITEM if _long(value) else strategy.ALL_ITEMS,
        )
    except typeguard.TypeCheckError:
        return False
    return True


@functools.cache
def hints_of(owner: object, *, imported: bool = True) -> Mapping[str, object]:
    """The annotations of a function's parameters or of a class.

    imported: with those of packages that a module imports for type checkers alone, which are then loaded.
    """
    found: dict[str, object] = {}
    for source in reversed(owner.__mro__) if isinstance(owner, type) else [owner]:
        space = dict(vars(inspect.getmodule(source) or typing))
        for name, hint in getattr(source, "__annotations__", {}).items():
            if name == "return" or str(hint).removeprefix("typing.").startswith("ClassVar"):
                continue
            try:
                found[name] = _resolved(hint, space, source) if imported else _evaluated(hint, space)
            except NameError:
                found.pop(name, None)
    return found


@functools.cache
def _kinds_of(function: Callable[..., object]) -> Mapping[str, frozenset[type]]:
    """By parameter, the classes whose every object fits, as far as they are known; most arguments are of one."""
    parameters = inspect.signature(function).parameters
    several = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return {
        name: frozenset(
            each
            for each in _allowed(hint).types
            if parameters[name].kind not in several and not issubclass(each, torch.Tensor | str)
        )
        for name, hint in hints_of(function).items()
    }


def said(hint: object) -> str:
    """An annotation as people write it, without the modules of its names."""
    if hint is type(None) or hint is None:
        return "None"
    if hint is torch.dtype:
        return "a torch dtype"
    if kind := _kind(hint):
        return kind.words
    if get_origin(hint) is Literal:
        words = [repr(each) for each in get_args(hint)]
        return " or ".join(words) if len(words) < 3 else f"one of {', '.join(words)}"
    if options := _options(hint):
        in_words = any(map(_kind, options))  # which then say what interfaces there are
        told = [each for each in options if not (in_words and getattr(each, "_is_protocol", False))]
        return " or ".join(dict.fromkeys(map(said, told)))
    if get_origin(hint) is Sequence:
        return f"Sequence[{said(get_args(hint)[0])}]"
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return re.sub(
        r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", text.replace("collections.abc.", "").replace("typing.", "")
    )


def shown(value: object) -> str:
    """A value in a few words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isroutine(value):
        return f"the function {value.__name__}"
    if inspect.ismodule(value):
        return f"the module {value.__name__}"
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and (shape or hasattr(value, "dim")):
        kind = f"{value.dtype} and " if hasattr(value, "dtype") else ""
        kind = f"no numbers (device meta), {kind}" if getattr(value, "is_meta", False) else kind
        return f"{type(value).__name__} of {kind}shape {shape_text(shape)}"
    short = _SHORT.repr(value).partition("\n")[0].removesuffix("(")  # of a network, whose parts follow
    return f"{short} ({type(value).__name__})" if type(value).__name__ not in short else short


# --- what an annotation allows ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Allowed:
    """What an annotation allows, sorted by how dear the look is."""

    types: frozenset[type]
    """Classes whose own values are allowed, whatever they hold."""
    words: frozenset[str]
    kinds: tuple[Required, ...]
    lists: tuple[object, ...]
    """Of what there may be lists."""
    items: tuple[object, ...]
    """What everything that can be gone through must hold, where nothing else is allowed."""
    classes: tuple[type, ...]
    rest: object | None
    """What is left of the annotation for typeguard; None if nothing is."""
    truth: bool
    """Whether True and False are meant to be allowed, and not only as the numbers that Python takes them for."""
    text: bool
    """Whether a single text is meant to be allowed, and not only as the sequence of its letters."""


@functools.cache
def _allowed(hint: object) -> _Allowed:
    options = _options(hint) or (hint,)
    plain = {type(None) if option is None else option for option in options}
    types_ = {option for option in plain if isinstance(option, type)}
    kinds = tuple(kind for option in options if (kind := _kind(option)))
    others = [option for option in options if _kind(option) is None]
    classes = tuple(option for option in others if _is_class(option))
    rest = tuple(option for option in others if option not in classes and not _words(option))
    return _Allowed(
        frozenset(types_ | ({int} if float in types_ else set())),
        frozenset(word for option in options for word in _words(option)),
        kinds,
        tuple(get_args(option)[0] for option in others if get_origin(option) in _COLLECTIONS),
        tuple(
            get_args(option)[0] for option in rest if len(rest) == 1 and get_origin(option) in _COLLECTIONS
        ),
        classes,
        typing.Union[rest] if rest else None,  # noqa: UP007 - made of what is there
        any(map(_allows_bool, others)),
        any(map(_allows_text, others)),
    )


def _words(option: object) -> tuple[str, ...]:
    """The words of a choice between words."""
    words = get_args(option) if get_origin(option) is Literal else ()
    return words if all(isinstance(word, str) for word in words) else ()


def _is_class(option: object) -> TypeGuard[type]:
    """Whether `isinstance` tells all."""
    if not isinstance(option, type) or get_args(option):
        return False
    return not getattr(option, "_is_protocol", False) or getattr(option, "_is_runtime_protocol", False)


def _is_one(kind: type, option: type) -> bool:
    """Whether a class is of another one; never of a protocol, which Python asks of objects alone."""
    return not getattr(option, "_is_protocol", False) and issubclass(kind, option)


def _all_fit(values: Iterable[object], item: object) -> bool:
    return all(fits(value, item) for value in islice(values, MOST))


def _can_be_read_again(value: object) -> TypeGuard[Iterable[object]]:
    return (
        isinstance(value, Iterable)
        and not isinstance(value, Iterator | type)
        and getattr(value, "ndim", 1) > 0
    )


def _allows_text(option: object) -> bool:
    if get_origin(option) is Literal:
        return False
    if option in (str, object) or option is typing.Any or isinstance(option, TypeVar):
        return True
    if get_origin(option) is Annotated:
        return _allows_text(get_args(option)[0])
    kind = get_origin(option) or option
    if get_args(option) and isinstance(kind, type) and issubclass(str, kind):
        return False  # a sequence of texts
    return isinstance(option, type) and getattr(option, "_is_protocol", False)


def _allows_bool(hint: object) -> bool:
    if hint in (bool, object) or hint is typing.Any:
        return True
    if get_origin(hint) is Literal:
        return any(isinstance(each, bool) for each in get_args(hint))
    return any(map(_allows_bool, _options(hint)))


def _options(hint: object) -> tuple[object, ...]:
    return get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else ()


def _kind(hint: object) -> Required | None:
    if get_origin(hint) is not Annotated:
        return None
    return next((each for each in get_args(hint)[1:] if isinstance(each, Required)), None)


def _long(value: object) -> bool:
    """Whether there is more in a value than is looked at item by item."""
    if not isinstance(value, list | tuple | Mapping):
        return isinstance(value, Sequence) and len(value) > MOST
    inner = value.values() if isinstance(value, Mapping) else value
    return len(value) > MOST or sum(len(each) for each in inner if isinstance(each, list | tuple)) > MOST


# --- arguments and annotations ------------------------------------------------------------------------------------


def _name(function: Callable[..., object]) -> str:
    """What a function is called by those who call it."""
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


def _resolved(hint: object, space: dict[str, object], source: object) -> object:
    """An annotation with the things that its texts name. NameError for a name that nobody has."""
    try:
        return _evaluated(hint, space)
    except NameError:
        space.update(_for_type_checkers(inspect.getmodule(source)))
        return _evaluated(hint, space)


def _evaluated(hint: object, space: dict[str, object]) -> object:
    """A text annotation evaluated in one namespace; the axes of arrays, which are texts as well, stay what they are."""
    whole = eval(hint, space) if isinstance(hint, str) else hint
    if isinstance(whole, type) and not typing.get_args(whole):
        return whole
    held = types.SimpleNamespace(__annotations__={"it": whole})
    return typing.get_type_hints(held, space, include_extras=True)["it"]


@functools.cache
def _for_type_checkers(module: types.ModuleType | None) -> dict[str, object]:
    """What a module imports for type checkers alone: such packages are dear, and here only when they are used."""
    if module is None or not getattr(module, "__file__", None):
        return {}
    space = dict(vars(module))
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(node.body, []), str(module.__file__), "exec"), space)
    return space


# --- the nearest valid thing --------------------------------------------------------------------------------------


def _hint(what: str, value: object, hint: object) -> str:
    """The nearest valid words, where words are asked for; or how to write what was meant."""
    options, allowed = _options(hint) or (hint,), _allowed(hint)
    if instead := next((text for kind in allowed.kinds if (text := kind.refused(value))), ""):
        return instead
    if isinstance(value, str):
        return _instead_of_text(what, value, options, allowed)
    if isinstance(value, type) and any(_is_class(option) and _is_one(value, option) for option in options):
        return f": write {value.__name__}(...)"
    made = getattr(value, "__annotations__", {}).get("return") if inspect.isfunction(value) else None
    if isinstance(made, type) and made in options:
        return f": call it, {value.__name__}(...)"  # type: ignore[attr-defined]
    if hasattr(value, "__index__") and not isinstance(value, int) and int in options:
        return ": write int(...)"
    if any(get_origin(each) is Sequence and fits(value, get_args(each)[0]) for each in options):
        return f": write {what.rpartition(' ')[2]}=(...,)"
    return ""


def _place(kind: type) -> str:
    """Where a user finds a class: at a face of the package rather than in the module that defines it."""
    package, *inner, module = kind.__module__.split(".")
    faces = [*(f"{package}.{name}" for name in (module, *inner)), ".".join((package, *inner))]
    found = (face for face in faces if getattr(sys.modules.get(face), kind.__name__, None) is kind)
    return f"{next(found, kind.__module__)}.{kind.__name__}"


def _instead_of_text(what: str, value: str, options: Sequence[object], allowed: _Allowed) -> str:
    if allowed.words:
        return f"; {nearest(value, allowed.words)}"
    records = {each.__name__: each for each in options if isinstance(each, type)}
    if named := [name for name in records if name.lower() == value.lower().removesuffix("()")]:
        return f": write {_place(records[named[0]])}()"
    if any(get_args(each) and not _allows_text(each) and "str" in said(each) for each in options):
        return f": write {what.rpartition(' ')[2]}=({value!r},)"
    return ""


Precision = torch.dtype | Literal["float64", "float32", "bfloat16", "float16"]
"""A dtype of weights, or its name."""


def as_dtype(given: Precision | None) -> torch.dtype | None:
    """The dtype that is meant; None stays None.

    Example:
        >>> as_dtype("bfloat16")
        torch.bfloat16
    """
    if isinstance(given, str):
        found: torch.dtype = getattr(torch, given)
        return found
    return given


def _no_device(given: object) -> str | None:
    """None for a device or its name."""
    if isinstance(given, torch.device):
        return None
    if not isinstance(given, str):
        return ""
    try:
        torch.device(given)
    except (RuntimeError, ValueError):
        return ""
    return None


def _no_seed(given: object) -> str | None:
    """None for a whole number that is not negative."""
    return None if isinstance(given, int) and not isinstance(given, bool) and given >= 0 else ""


def _no_count(given: object) -> str | None:
    """None for a whole number that a loop can come to the end of; what is too small is for the function to say."""
    return None if isinstance(given, int) and not isinstance(given, bool) and given <= MOST_COUNT else ""


Device = Annotated[torch.device | str, Required("a device such as 'cpu' or 'cuda:1'", _no_device)]
Seed = Annotated[int, Required("a whole number from 0 on", _no_seed)]
Count = Annotated[int, Required(f"a whole number up to {MOST_COUNT}", _no_count)]
