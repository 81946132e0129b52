"""Whether a value fits an annotation, by `typeguard` and some stricter rules (such as: True is no number).

Typeguard takes annotations apart and asks `_checker_of` how to check each piece: by a rule below, or by its own check
(mappings, tuples, functions, type variables). The rules apply inside `fits` only, so other users of typeguard in the
same process are not affected.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
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
from interp.core.wording import odd_value

MOST = 1000
"""Length up to which every item of a value is checked; of longer values only the first item is."""
_ALL_ITEMS, _FIRST_ITEM = (
    TypeCheckMemo({}, {}, config=TypeCheckConfiguration(collection_check_strategy=each))
    for each in (CollectionCheckStrategy.ALL_ITEMS, CollectionCheckStrategy.FIRST_ITEM)
)
_INSIDE = ContextVar("interp_inside_fits", default=False)


def fits(value: object, hint: object) -> bool:
    """Whether a value fits an annotation."""
    same, above = _classes(hint)
    if (type(value) in same or isinstance(value, above)) and odd_value(
        value
    ) is None:  # usual, ten times as fast
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


@functools.cache
def _classes(hint: object) -> tuple[frozenset[object], tuple[type, ...]]:
    """Classes of which a value of the annotation may be exactly, and those of which it may be any object.

    The latter are no numbers, of which True would be one, and no protocols, which are slow to ask.
    """
    members = options(hint)
    above = [each for each in members if is_asked_of_objects(each) and each not in _RULES]
    return frozenset(members), tuple(each for each in above if not _is_protocol(each))


def _checker_of(
    kind: object, args: tuple[object, ...], extras: tuple[object, ...]
) -> TypeCheckerCallable | None:
    """Typeguard's checker of one piece of an annotation, `Annotated[kind[args], *extras]`; None for its own checker."""
    if not _INSIDE.get():
        return None
    if words := next((extra for extra in extras if isinstance(extra, Required)), None):
        return functools.partial(_check, lambda value, *_: words.refused(value) is None)
    if rule := _RULES.get(kind):
        return functools.partial(_check, rule)
    return functools.partial(_check, _is_object) if is_asked_of_objects(kind) and not args else None


def _check(rule: "Rule", value: object, kind: object, args: tuple[object, ...], _: TypeCheckMemo) -> None:
    if odd_value(value) is not None or not rule(value, kind, args):
        raise TypeCheckError("does not fit")


# --- the rules ----------------------------------------------------------------------------------------------------

Rule = Callable[[object, Any, tuple[object, ...]], bool]
"""Whether a value is a `kind[args]`."""


def _is_object(value: object, kind: type, _: object) -> bool:
    return isinstance(value, kind)


def _is_number(value: object, kind: type, _: object) -> bool:
    """Whether a value is a number of this kind: bool is none, and an int is also a float."""
    return isinstance(value, (int, float) if kind is float else kind) and not isinstance(value, bool)


def _is_choice(value: object, _: object, choices: tuple[object, ...]) -> bool:
    """Whether a value equals a choice and has its type; strings of numpy count as str."""
    return any(
        (type(value) is type(choice) or isinstance(value, str)) and value == choice for choice in choices
    )


def _is_any_of(value: object, _: object, members: tuple[object, ...]) -> bool:
    """Whether a value fits a member of a union; protocols are tried last, since they are slow to check."""
    return any(fits(value, member) for member in sorted(members, key=_is_protocol))


def _is_several(value: object, kind: type, args: tuple[object, ...]) -> bool:
    """Whether a value is a sequence with fitting items; text and bytes are none, and iterators are not read."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray):
        return False
    if not isinstance(value, kind) or getattr(value, "ndim", 1) == 0:
        return False
    if isinstance(value, torch.Tensor) and not value.numel():
        value = [value.new_zeros(value.shape[1:])]  # an example of the entries that it would have
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
