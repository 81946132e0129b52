"""The shape checks of `make test-strict`: whatever is new about a call is checked, the same call is checked twice."""

from dataclasses import dataclass

import beartype
import jaxtyping
import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn

from tests.shapes import CHECKED, checked

TOLD = jaxtyping.TypeCheckError


def answering(answers: list[Tensor]):  # type: ignore[no-untyped-def]
    """A function that is made anew at each call, as one inside another is, and says it returns its argument's shape."""

    @checked(typechecker=beartype.beartype)  # type: ignore[operator, misc]
    def answer(
        x: Float[Tensor, "n"], flag: bool = False, module: nn.Module | None = None
    ) -> Float[Tensor, "n"]:
        return answers.pop()

    return answer


def test_the_first_calls_of_a_kind_are_checked_and_later_ones_run_bare() -> None:
    x, wrong = torch.zeros(3), torch.zeros(4)
    for _ in range(CHECKED):
        with pytest.raises(TOLD, match="return value"):
            answering([wrong])(x)
    assert answering([wrong])(x) is wrong
    with pytest.raises(TOLD, match="parameters"):
        answering([x])(torch.zeros(3, 1))


@pytest.mark.parametrize(
    "arguments",
    [(torch.zeros(5),), (torch.zeros(3, dtype=torch.float64),), (torch.zeros(3), True),
     (torch.zeros(3), False, nn.ReLU())],
)  # fmt: skip
def test_another_shape_dtype_flag_or_module_is_another_kind(arguments: tuple[object, ...]) -> None:
    for _ in range(CHECKED + 1):
        answering([torch.zeros(3)])(torch.zeros(3))
    with pytest.raises(TOLD):
        answering([torch.zeros(7)])(*arguments)


def test_a_dataclass_is_checked_as_it_is_made() -> None:
    @checked(typechecker=beartype.beartype)  # type: ignore[operator, misc]
    @dataclass
    class Pair:
        a: Float[Tensor, "n"]
        b: Float[Tensor, "n"]

    Pair(torch.zeros(2), torch.zeros(2))
    with pytest.raises(TOLD):
        Pair(torch.zeros(2), torch.zeros(3))


def test_axes_seen_in_a_bare_call_are_not_those_of_the_call_around_it() -> None:
    @checked(typechecker=beartype.beartype)  # type: ignore[operator, misc]
    def inner(y: object) -> bool:
        return isinstance(y, Float[Tensor, "n"])

    @checked(typechecker=beartype.beartype)  # type: ignore[operator, misc]
    def outer(x: Float[Tensor, "n"]) -> bool:
        return bool(inner(torch.zeros(9)))

    assert all(outer(torch.zeros(n)) for n in range(1, CHECKED + 3))
