"""What arrives at a public function is looked at before anything runs, and refused in words that name the way out."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from interp.core.boundary import check_fields, public
from interp.core.hints import annotation_text


@dataclass(frozen=True)
class Red:
    """A record."""

    depth: int = 1


@public(renamed={"k": "top", "how": "kind, 'plain' or 'bold'"}, unchecked=("free",))
def painted(
    words: Sequence[str],
    red: Red | None = None,
    *,
    top: int = 3,
    share: float = 0.5,
    kind: Literal["plain", "bold"] = "plain",
    weights: Float[Tensor, "n"] | None = None,
    by: Mapping[str, int] | None = None,
    then: Callable[[int], int] | None = None,
    free: int = 0,
    hidden: "Nowhere | None" = None,  # type: ignore[name-defined]
) -> int:
    """A function whose body must not run for the wrong kinds."""
    return len(words)


GOOD: list[dict[str, object]] = [
    {}, {"top": 2, "share": 1, "kind": "bold"}, {"weights": torch.zeros(3)}, {"by": {"a": 1}}, {"then": abs},
    {"then": lambda x: x}, {"free": "anything"}, {"hidden": object()}, {"red": Red()}, {"share": math.inf},
]  # fmt: skip


def test_the_kinds_that_annotations_allow_pass() -> None:
    for given in GOOD:
        assert painted(["a"], **given) == 1  # type: ignore[arg-type]


def test_an_argument_that_is_not_there_is_answered_with_the_one_that_is() -> None:
    with pytest.raises(TypeError, match=r"painted\(\) has no argument 'k': it is called top"):
        painted(["a"], k=2)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="it is called kind, 'plain' or 'bold'"):
        painted(["a"], how="bold")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="no argument 'wieghts'; nearest: weights"):
        painted(["a"], wieghts=None)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'words'"):
        painted()  # type: ignore[call-arg]


def test_a_network_is_named_by_its_kind() -> None:
    with pytest.raises(ValueError, match=r"words must be .*, got Sequential$"):
        painted(torch.nn.Sequential(torch.nn.Linear(2, 2)))  # type: ignore[arg-type]


def test_fields_of_records_are_looked_at_too() -> None:
    check_fields(Red(2))
    with pytest.raises(ValueError, match="Red: depth must be int, got 'deep'"):
        check_fields(Red("deep"))  # type: ignore[arg-type]


def test_annotations_are_said_as_people_write_them() -> None:
    assert annotation_text(int | None) == "int or None"
    assert annotation_text(Sequence[int] | Literal["all"]) == "Sequence[int] or 'all'"
    assert annotation_text(Red) == "Red"
