"""What public functions give for a `with` may be entered again, and not twice at once."""

from collections.abc import Iterator

import pytest
import torch

import interp
from interp.core.entering import entering
from tests.tiny import hooked


@entering
def noted(list_of: list[str]) -> Iterator[int]:
    list_of.append("in")
    try:
        yield len(list_of)
    finally:
        list_of.append("out")


def test_a_manager_is_entered_again_after_it_was_left_also_by_an_error() -> None:
    seen: list[str] = []
    manager = noted(seen)
    with manager as first:
        pass
    with pytest.raises(KeyError), manager as second:
        raise KeyError
    assert (first, second) == (1, 3) and seen == ["in", "out"] * 2


def test_a_manager_that_is_entered_is_refused_inside_of_itself() -> None:
    seen: list[str] = []
    manager = noted(seen)
    with (
        manager,
        pytest.raises(ValueError, match=r"noted\(...\) returned is entered already: .*call noted again"),
    ):
        manager.__enter__()
    assert seen == ["in", "out"]


def test_a_decorated_function_may_call_itself() -> None:
    seen: list[str] = []

    @noted(seen)
    def down(n: int) -> int:
        return n if n == 0 else down(n - 1)

    assert down(2) == 0 and seen == ["in"] * 3 + ["out"] * 3


def test_hooks_and_changes_of_weights_hold_in_every_with_of_one_manager() -> None:
    model, tokens = hooked("gpt2"), torch.tensor([[5, 6, 7]])
    plain = model(tokens)
    change = interp.editing.WeightEdit(
        "blocks.0.mlp.W_out", torch.ones_like(model.transformer.block(0).mlp.out.weight.T)
    )
    for manager in (model.hooks(edits=[interp.Edit("L0H1", interp.edits.Zero())]), change.applied(model)):
        with manager:
            first = model(tokens)
        between = model(tokens)
        with manager:
            again = model(tokens)
        assert torch.equal(first, again) and torch.equal(between, plain) and not torch.equal(first, plain)
