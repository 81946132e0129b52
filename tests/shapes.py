"""The shapes of annotated calls, checked by jaxtyping and beartype where a call is of a new kind.

A check costs many times what a small call does, and a suite makes the same calls millions of times. So a function of
ours is checked at its first calls with tensors of these shapes and dtypes, of this module, and runs bare at later ones.
"""

import functools
import itertools
import random
import types
import weakref
from collections import Counter
from collections.abc import Callable, Hashable

import jaxtyping
import torch
from beartype._check.code import codemain
from jaxtyping import _decorator

CHECKED = 2
"""How many calls of one kind are checked."""
Function = Callable[..., object]
always_checked = jaxtyping.jaxtyped
axes_of_its_own = jaxtyping.jaxtyped("context")
"""What keeps the axes that `interp.core.fitting` finds in a bare call from those of the call around it."""
_calls: Counter[Hashable] = Counter()
_numbers: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
_fresh = itertools.count(1)


def install() -> None:
    """Check what is imported of `interp` from here on."""
    # of a long list beartype looks at a random element; `random` belongs to the tests, which seed it
    codemain.getrandbits = random.Random(0).getrandbits  # type: ignore[attr-defined]
    jaxtyping.jaxtyped = _decorator.jaxtyped = checked  # type: ignore[attr-defined, assignment]
    jaxtyping.install_import_hook("interp", "beartype.beartype")


def checked(fn: object = None, *, typechecker: object) -> object:
    """In place of `jaxtyping.jaxtyped`, which stays what decorates classes, properties and class methods.

    As there, an `__init__` that is decorated already is left alone.
    """
    if fn is None:
        return functools.partial(checked, typechecker=typechecker)
    if isinstance(fn, types.FunctionType):
        return _counted(fn, typechecker)
    if isinstance(fn, type) and getattr(fn.__init__, "__globals__", None) is globals():  # type: ignore[misc]
        return fn
    return always_checked(fn, typechecker=typechecker)  # type: ignore[call-overload]


def _counted(fn: types.FunctionType, typechecker: object) -> Function:
    """The function; one inside another, which is made anew at each outer call, is decorated where it is checked."""
    name = fn.__module__, fn.__qualname__, fn.__code__.co_firstlineno
    decorate = functools.partial(always_checked, fn, typechecker=typechecker)  # type: ignore[call-overload]
    whole: Function | None = None if "<locals>" in fn.__qualname__ else decorate()

    @functools.wraps(fn)
    def called(*args: object, **kwargs: object) -> object:
        __tracebackhide__ = True
        kind = (name, *map(_kind, args), *kwargs, *map(_kind, kwargs.values()))
        if _calls[kind] == CHECKED:
            with axes_of_its_own:
                return fn(*args, **kwargs)
        _calls[kind] += 1
        return (whole or decorate())(*args, **kwargs)

    return called


def _kind(value: object, *, inside: bool = True) -> Hashable:
    """What its annotation can tell from that of another argument, roughly; inside: of a list, what is in it too.

    By its type, not by what it says of itself: the shape of a tensor of a class of ours may be a call of ours.
    """
    its = type(value)
    if its in (torch.Tensor, torch.nn.Parameter):
        return value.shape, value.dtype  # type: ignore[attr-defined]
    if value is None or its is bool:
        return value
    if inside and its in (list, tuple):
        return its, *(_kind(each, inside=False) for each in value[:4])  # type: ignore[index]
    if issubclass(its, torch.nn.Module):
        return _numbers.get(value) or _numbers.setdefault(value, next(_fresh))  # type: ignore[call-overload]
    return its
