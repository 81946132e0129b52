"""Many small cases as one test: each starts from the same seeds, all are tried, and those that fail are named together.

A case of its own costs pytest several milliseconds, which is more than a pass of a small model. So a test takes its
config from pytest, and sites, sides and sizes from a loop; where even a config takes a few milliseconds, that too:

    @pytest.mark.parametrize("name", CONFIGS)
    @over("site", lambda name: sites.names(CONFIGS[name]))
    def test_the_claim(name: str, site: str) -> None: ...
"""

import functools
import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import pytest
import torch

Values = Iterable[object] | Callable[..., Iterable[object]]
"""What a loop runs over; a function of the arguments that stand outside of the loop, if it depends on them."""


def same_seeds() -> None:
    """What every case starts from."""
    random.seed(0)
    np.random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # which would put the seed of every absent accelerator on a list, with a traceback: 1 ms a case
        torch.default_generator.manual_seed(0)


@contextmanager
def every() -> Iterator[Callable[..., AbstractContextManager[None]]]:
    """`case`: `with case("a", 3): ...` runs one case; the end fails with the names and messages of all that failed."""
    __tracebackhide__ = True
    tried: list[str] = []
    failed: list[tuple[str, BaseException]] = []

    @contextmanager
    def case(*names: object) -> Iterator[None]:
        tried.append(", ".join(map(str, names)))
        same_seeds()
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            failed.append((tried[-1], error))
        except pytest.skip.Exception as skipped:  # would skip the cases that follow, and nobody would see it
            failed.append((tried[-1], RuntimeError(f"a case of a loop cannot be skipped: {skipped}")))

    yield case
    assert tried, "the loop is empty: nothing was tested"
    if failed:
        listed = "\n".join(f"[{name}] {type(e).__name__}: {_short(str(e))}" for name, e in failed)
        raise AssertionError(f"{len(failed)} of {len(tried)} cases fail\n{listed}") from failed[0][1]


def over(names: str, values: Values) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The test as a loop over these values of its arguments `names` ("side", or "side, size" for pairs).

    Stacked, it is a loop in a loop. Fixtures are made once for all cases: keep those that a case changes out of it.
    """
    wanted = [name.strip() for name in names.split(",")]

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        loops = [(wanted, values), *getattr(test, "loops", [])]
        return _looped(test, getattr(test, "body", test), loops)

    return decorated


def _looped(
    decorated: Callable[..., None], body: Callable[..., None], loops: list[tuple[list[str], Values]]
) -> Callable[..., None]:
    """A test whose arguments are those that no loop gives, with the marks that it has already."""
    given = {name for names, _ in loops for name in names}
    signature = inspect.signature(body)

    @functools.wraps(decorated)
    def test(**outside: object) -> None:
        __tracebackhide__ = True
        with every() as case:
            for inside in _combinations(loops, outside):
                with case(*(f"{name}={_short(str(value), 60)}" for name, value in inside.items())):
                    body(**outside, **inside)

    left = [p for name, p in signature.parameters.items() if name not in given]
    test.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
    test.loops, test.body = loops, body  # type: ignore[attr-defined]
    return test


def _combinations(
    loops: list[tuple[list[str], Values]], outside: dict[str, object]
) -> Iterator[dict[str, object]]:
    """The arguments of every case, the last loop fastest."""
    if not loops:
        yield {}
        return
    (names, values), *inner = loops
    if callable(values):
        wanted = inspect.signature(values).parameters
        values = values(**{name: outside[name] for name in wanted})
    for value in values:
        here = dict(zip(names, value if len(names) > 1 else (value,), strict=True))  # type: ignore[arg-type]
        for further in _combinations(inner, outside | here):
            yield here | further


def _short(message: str, width: int = 300) -> str:
    """The message on one line."""
    line = " ".join(message.split())
    return line if len(line) <= width else f"{line[:width]} ..."
