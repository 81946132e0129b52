"""Whether a value is of the kind that an annotation says: what people mean where Python is wider or narrower."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Literal, Protocol, runtime_checkable

import numpy as np
import pytest
import torch
import typeguard
from jaxtyping import Float
from torch import Tensor

from interp.core.fitting import MOST, fits
from interp.core.hints import Required
from tests.loops import over


@runtime_checkable
class Named(Protocol):
    """What has a name."""

    name: str


class Letter:
    """Has one."""

    name = "a"


Even = Annotated[int, Required("an even number", lambda given: None if given in (0, 2) else "")]
META = torch.ones(2, 3, device="meta")
SPARSE = torch.ones(2, 3).to_sparse()
QUANTISED = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.quint8)
YES: dict[str, tuple[object, object]] = {
    "a whole number for a fraction": (3, float),
    "a number of 64 bits": (2**64 - 1, int),
    "a truth among truths": ([True], Sequence[bool]),
    "a word of numpy": (np.str_("b"), Literal["a", "b"]),
    "a text beside several": ("ab", str | Sequence[str]),
    "a set": ({"a"}, Collection[str]),
    "a generator, unread": (iter([1]), Iterable[str]),
    "rows of a tensor": (torch.ones(2, 3), Iterable[Float[Tensor, "n"]]),
    "no rows": (torch.ones(0, 3), Iterable[Float[Tensor, "n"]]),
    "an attribute of a protocol": (Letter(), Named | None),
    "a closer look": (2, Even | None),
    "closer looks, one by one": ([0, 2], Sequence[Even]),
    "closer looks in a mapping": ({"a": 2}, Mapping[str, Even]),
    "long lists, as far as they are read": ([0] * MOST + ["a"], Sequence[int]),
    "long tuples": ((0,) * MOST + ("a",), tuple[int, ...]),
    "anything": (3, object),
    "a function": (len, Callable[[object], int]),
}
NO: dict[str, tuple[object, object]] = {
    "a truth for a number": (True, int),
    "a truth for a fraction": (True, float),
    "a truth in a mapping": ({"a": True}, Mapping[str, int]),
    "a truth in a tuple": ((True,), tuple[int, ...]),
    "the last of a mapping": ({"a": 1, "b": "c"}, Mapping[str, int]),
    "the last of a tuple": ((1, "c"), tuple[int, ...]),
    "a fraction for a whole number": (1.0, int),
    "a whole number of numpy": (np.int64(3), int),
    "letters": ("ab", Sequence[str]),
    "letters in a list": (["ab"], Sequence[Sequence[str]]),
    "letters in a mapping": ({"a": "ab"}, Mapping[str, Sequence[str]]),
    "no letters": ("", Sequence[int] | Mapping[str, int]),
    "bytes": (b"ab", Sequence[int]),
    "a class for its object": (int, int),
    "an iterator for a list": (iter([1]), Sequence[int]),
    "an array without axes": (np.array(3), Iterable[int]),
    "a tensor without axes": (torch.tensor(3), Collection[Tensor]),
    "rows of no axes": (torch.ones(0), Iterable[Float[Tensor, "n"]]),
    "no numbers": (META, Tensor | None),
    "no numbers, for anything": (META, object),
    "no numbers in a list": ([META], Sequence[Tensor]),
    "no numbers in a mapping": ({"a": META}, Mapping[str, Tensor]),
    "sparse numbers": (SPARSE, Tensor | None),
    "sparse numbers, row by row": (SPARSE.to_sparse_csr(), object),
    "sparse numbers in a list": ([SPARSE], Sequence[Tensor]),
    "quantised numbers": (QUANTISED, Tensor),
    "a number of 65 bits": (2**64, int),
    "a negative number of 65 bits": (-(2**63) - 1, Sequence[int] | int),
    "a number of 65 bits among others": ([0, 2**64], Sequence[int]),
    "a closer look": (3, Even | None),
    "closer looks in a list": ([0, 1], Sequence[Even]),
    "closer looks in a mapping": ({"a": 1}, Mapping[str, Even]),
    "a number for its word": (1, Literal["1"]),
    "an object without the attribute": (3, Named | None),
    "a function of too many": (lambda a, b: a, Callable[[int], int]),
}


@over("case", YES)
def test_what_people_mean_fits(case: str) -> None:
    assert fits(*YES[case])


@over("case", NO)
def test_what_only_python_means_does_not_fit(case: str) -> None:
    assert not fits(*NO[case])


def test_what_can_be_read_once_is_not_read() -> None:
    def letters() -> Iterator[str]:
        yield from "ab"

    given = letters()
    assert fits(given, Iterable[str]) and list(given) == ["a", "b"]


def test_others_who_use_typeguard_see_nothing_of_the_rules() -> None:
    """Before, between and after our checks, also on another thread while one of ours is running."""
    seen: list[object] = []

    def other() -> None:
        typeguard.check_type("ab", Sequence[str])
        typeguard.check_type(True, int)
        seen.append(typeguard.check_type(META, Tensor))
        with pytest.raises(typeguard.TypeCheckError):
            typeguard.check_type(np.str_("b"), Literal["a", "b"])

    def look(_: object) -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    other()
    assert fits(3, Annotated[int, Required("a number", look)])
    other()
    assert len(seen) == 3
    assert not fits("ab", Sequence[str])


def test_a_user_who_suppresses_typeguard_keeps_our_checks() -> None:
    with typeguard.suppress_type_checks():
        assert not fits({"a": "b"}, Mapping[str, int])


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_a_dtype_without_real_numbers_to_compute_with_fits_nowhere(dtype: torch.dtype) -> None:
    assert fits(torch.float16, torch.dtype) and fits(torch.bfloat16, torch.dtype | None)
    assert not fits(dtype, torch.dtype) and not fits(dtype, torch.dtype | None)
