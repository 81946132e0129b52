"""Context managers of the public API, which may be entered again after they were left.

What `contextlib.contextmanager` makes is spent after one `with`: a second one ends in an AttributeError of contextlib.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Generic, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Entering(AbstractContextManager[T], Generic[T]):
    """A context manager that runs a generator function anew for each `with`, one after another."""

    def __init__(self, name: str, begin: Callable[[], AbstractContextManager[T]]) -> None:
        self._name, self._begin = name, begin
        self._open: AbstractContextManager[T] | None = None

    def __enter__(self) -> T:
        if self._open is not None:
            raise ValueError(
                f"what {self._name}(...) returned is entered already: inside of it, call {self._name} again"
            )
        begun = self._begin()
        value = begun.__enter__()
        self._open = begun
        return value

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        begun, self._open = self._open, None
        assert begun is not None
        return begun.__exit__(kind, error, trace)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """The function, of which every call is inside of a `with` of its own."""

        @functools.wraps(function)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            with self._begin():
                return function(*args, **kwargs)

        return inside


def entering(function: Callable[P, Iterator[T]]) -> Callable[P, Entering[T]]:
    """A decorator like `contextlib.contextmanager`, whose managers may be entered again.

    Example:
        >>> @entering
        ... def lent(name: str):
        ...     yield name
        >>> again = lent("a")
        >>> with again as first:
        ...     pass
        >>> with again as second:
        ...     pass
        >>> first, second
        ('a', 'a')
    """
    begin = contextmanager(function)

    @functools.wraps(function)
    def made(*args: P.args, **kwargs: P.kwargs) -> Entering[T]:
        return Entering(function.__name__, functools.partial(begin, *args, **kwargs))

    return made
