"""Whether a value is of the kind that an annotation says: `typeguard`, and what people mean where Python is wider.

Typeguard takes annotations apart and asks `_checker_of` how each piece is checked: by a rule below, or as it does
itself (mappings, tuples, functions, type variables). The rules hold inside `fits` alone: whoever else in the process
uses typeguard sees nothing of them.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import islice
from types import UnionType
from typing import Any, Literal, Union

import torch
from typeguard import (
    CollectionCheckStrategy,
    TypeCheckConfiguration,
    TypeCheckerCallable,
    TypeCheckError,
    TypeCheckMemo,
    check_type_internal,
    checker_lookup_functions,
)

from interp.core.hints import Required, is_asked_of_objects, options

MOST = 1000
"""Items of one value that are looked at one by one; of longer lists the first."""
_ALL_ITEMS, _FIRST_ITEM = (
    TypeCheckMemo({}, {}, config=TypeCheckConfiguration(collection_check_strategy=each))
    for each in (CollectionCheckStrategy.ALL_ITEMS, CollectionCheckStrategy.FIRST_ITEM)
)
_INSIDE = ContextVar("interp_inside_fits", default=False)


def fits(value: object, hint: object) -> bool:
    """Whether a value is of the kind that an annotation says."""
    if type(value) in options(hint) and not _is_meta(value):  # nearly always, and ten times as quick
        return True
    is_long = isinstance(value, tuple | list | set | Mapping) and len(value) > MOST
    before = _INSIDE.set(True)
    try:
        check_type_internal(value, hint, _FIRST_ITEM if is_long else _ALL_ITEMS)
    except TypeCheckError:
        return False
    finally:
        _INSIDE.reset(before)
    return True


def _checker_of(
    kind: object, args: tuple[object, ...], extras: tuple[object, ...]
) -> TypeCheckerCallable | None:
    """How typeguard checks one piece of an annotation, `Annotated[kind[args], *extras]`; None for its own way."""
    if not _INSIDE.get():
        return None
    if words := next((each for each in extras if isinstance(each, Required)), None):
        return partial(_check, lambda value, *_: words.refused(value) is None)
    if rule := _RULES.get(kind):
        return partial(_check, rule)
    return partial(_check, _is_object) if is_asked_of_objects(kind) and not args else None


def _check(rule: "Rule", value: object, kind: object, args: tuple[object, ...], _: TypeCheckMemo) -> None:
    if _is_meta(value) or not rule(value, kind, args):
        raise TypeCheckError("does not fit")


def _is_meta(value: object) -> bool:
    """Whether a tensor has a shape and no numbers."""
    return isinstance(value, torch.Tensor) and value.is_meta


# --- the rules ----------------------------------------------------------------------------------------------------

Rule = Callable[[object, Any, tuple[object, ...]], bool]
"""Whether a value is a `kind[args]`."""


def _is_object(value: object, kind: type, _: object) -> bool:
    return isinstance(value, kind)


def _is_number(value: object, kind: type, _: object) -> bool:
    """True and False are no numbers; a whole number is a fraction too."""
    return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)


def _is_choice(value: object, _: object, choices: tuple[object, ...]) -> bool:
    """Words of numpy are words."""
    return any((type(value) is type(each) or isinstance(value, str)) and value == each for each in choices)


def _is_any_of(value: object, _: object, members: tuple[object, ...]) -> bool:
    """Protocols come last: Python takes long to ask for them."""
    return any(fits(value, each) for each in sorted(members, key=_is_protocol))


def _is_several(value: object, kind: type, args: tuple[object, ...]) -> bool:
    """A text is no list of letters and bytes no list of numbers; what can be read only once is let in unread."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray):
        return False
    if not isinstance(value, kind) or getattr(value, "ndim", 1) == 0:
        return False
    if isinstance(value, torch.Tensor) and not value.numel():
        value = [value.new_zeros(value.shape[1:])]  # of what kind the entries would be
    if isinstance(value, Iterator | type) or not args:
        return True
    return all(fits(item, args[0]) for item in islice(value, MOST))


def _is_protocol(hint: object) -> bool:
    return isinstance(hint, type) and getattr(hint, "_is_protocol", False)


_RULES: Mapping[object, Rule] = {
    **dict.fromkeys((int, float, complex), _is_number),
    **dict.fromkeys((Union, UnionType), _is_any_of),
    **dict.fromkeys((Sequence, Collection, Iterable), _is_several),
    Literal: _is_choice,
}
checker_lookup_functions.insert(0, _checker_of)
