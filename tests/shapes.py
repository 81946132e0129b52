"""The shapes of annotated calls, checked by jaxtyping and beartype where a call is of a new kind.

A check costs many times what a small call does, and a suite makes the same calls millions of times. So a function of
ours is checked at its first calls with tensors of these shapes and dtypes, of this module, and runs bare at later ones.
"""

import functools
import itertools
import types
import weakref
from collections import Counter
from collections.abc import Callable, Hashable

import jaxtyping
import torch
from jaxtyping import _decorator

CHECKED = 2
"""How many calls of one kind are checked."""
Function = Callable[..., object]
always_checked = jaxtyping.jaxtyped
axes_of_its_own = jaxtyping.jaxtyped("context")
"""What keeps the axes that `interp.core.boundary` finds in a bare call from those of the call around it."""


_numbers: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
_fresh = itertools.count(1)


def install() -> None:
    """Check what is imported of `interp` from here on."""
    jaxtyping.jaxtyped = _decorator.jaxtyped = checked  # type: ignore[attr-defined, assignment]
    jaxtyping.install_import_hook("interp", "beartype.beartype")


def checked(fn: object = None, *, typechecker: object) -> object:
    """In place of `jaxtyping.jaxtyped`, which stays what decorates classes, properties and class methods."""
    if fn is None:
        return functools.partial(checked, typechecker=typechecker)
    if isinstance(fn, types.FunctionType):
        return _counted(fn, typechecker)
    return always_checked(fn, typechecker=typechecker)  # type: ignore[call-overload]


def _counted(fn: types.FunctionType, typechecker: object) -> Function:
    """The function, decorated when a call is first checked: one inside another is made anew at each outer call."""
    calls = _calls(fn.__module__, fn.__qualname__, fn.__code__.co_firstlineno)

    @functools.cache
    def decorated() -> Function:
        return always_checked(fn, typechecker=typechecker)  # type: ignore[call-overload, no-any-return]

    @functools.wraps(fn)
    def called(*args: object, **kwargs: object) -> object:
        __tracebackhide__ = True
        kind = (*map(_kind, args), *kwargs, *map(_kind, kwargs.values()))
        if calls[kind] == CHECKED:
            with axes_of_its_own:
                return fn(*args, **kwargs)
        calls[kind] += 1
        return decorated()(*args, **kwargs)

    return called


@functools.cache
def _calls(*function: object) -> Counter[Hashable]:
    return Counter()


def _kind(value: object) -> Hashable:
    """What its annotation can tell from that of another argument, roughly."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, (list, tuple)):
        return type(value), *map(_kind, value[:4])
    if isinstance(value, torch.nn.Module):
        return _numbers.get(value) or _numbers.setdefault(value, next(_fresh))
    return type(value)
