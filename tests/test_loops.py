"""The loop over small cases: none is left out, none hides another, and each starts from the same seeds."""

import inspect

import pytest
import torch

from tests.loops import every, over

TRIED: list[tuple[str, str, int]] = []
DRAWN: list[float] = []


@over("size", [2, 1])
@pytest.mark.parametrize("name", ["ab", "c"])
@over("letter", lambda name: list(name))
def _looped(name: str, letter: str, size: int) -> None:
    TRIED.append((name, letter, size))
    DRAWN.append(torch.rand(()).item())
    assert letter != "b" or size == 2
    if letter == "a":
        pytest.fail("no a")


def test_every_case_runs_and_all_that_fail_are_named() -> None:
    TRIED.clear()
    with pytest.raises(AssertionError) as caught:
        _looped(name="ab")
    assert TRIED == [("ab", "a", 2), ("ab", "b", 2), ("ab", "a", 1), ("ab", "b", 1)]
    first, *named = str(caught.value).splitlines()
    assert first == "3 of 4 cases fail"
    assert [line.partition("]")[0] for line in named] == [
        "[size=2, letter=a",
        "[size=1, letter=a",
        "[size=1, letter=b",
    ]
    assert isinstance(caught.value.__cause__, pytest.fail.Exception)
    _looped(name="c")


def test_every_case_starts_from_the_same_seeds() -> None:
    DRAWN.clear()
    _looped(name="c")
    torch.manual_seed(0)
    assert [torch.rand(()).item()] * 2 == DRAWN


def test_a_loop_over_nothing_and_a_skipped_case_fail() -> None:
    with pytest.raises(AssertionError, match="nothing was tested"):
        _looped(name="")
    with pytest.raises(AssertionError, match="cannot be skipped: no reason"), every() as case, case("one"):
        pytest.skip("no reason")


def test_pytest_sees_the_arguments_that_no_loop_gives() -> None:
    assert list(inspect.signature(_looped).parameters) == ["name"]
    assert [mark.name for mark in _looped.pytestmark] == ["parametrize"]  # type: ignore[attr-defined]
