"""`HookPoint` in anybody's modules: what hooks see, replace and leave behind. All of it holds for theirs too."""

from functools import partial

import pytest
import torch
from torch import Tensor

from interp.compat.transformer_lens.hook_points import HookPoint, LensHandle

X = torch.arange(6.0).reshape(2, 3)


def double(tensor: Tensor, hook: HookPoint) -> Tensor:
    return tensor * 2


def add_one(tensor: Tensor, hook: HookPoint) -> Tensor:
    return tensor + 1


def test_a_point_is_the_identity() -> None:
    assert HookPoint()(X) is X


def test_hooks_replace_the_value_in_order_with_prepended_ones_first() -> None:
    point = HookPoint()
    point.add_hook(double)
    point.add_hook(add_one)
    assert torch.equal(point(X), X * 2 + 1)
    point.remove_hooks()
    point.add_hook(double)
    point.add_hook(add_one, prepend=True)
    assert torch.equal(point(X), (X + 1) * 2)
    assert [handle.user_hook for handle in point.fwd_hooks] == [add_one, double]


def test_a_hook_that_returns_nothing_keeps_what_it_wrote_in_place() -> None:
    def write(tensor: Tensor, hook: HookPoint) -> None:
        tensor[0] = 7.0

    point, value = HookPoint(), X.clone()
    point.add_hook(write)
    assert torch.equal(point(value)[0], torch.full((3,), 7.0))


def test_a_hook_is_told_where_it_is() -> None:
    point, seen = HookPoint(), []
    point.name = "blocks.3.attn.hook_q"
    point.add_hook(lambda tensor, hook: seen.append((hook.name, hook.layer(), hook is point)))
    point(X)
    assert seen == [("blocks.3.attn.hook_q", 3, True)]


def test_layers_outside_blocks_are_refused() -> None:
    point = HookPoint()
    with pytest.raises(ValueError, match="Name cannot be None"):
        point.layer()
    point.name = "hook_embed"
    with pytest.raises(IndexError):
        point.layer()


def test_gradients_are_seen_and_replaced() -> None:
    point, seen = HookPoint(), []
    x = X.clone().requires_grad_()
    point.add_hook(lambda grad, hook: seen.append(grad.clone()), dir="bwd")
    (point(x) * 3).sum().backward()
    assert torch.equal(seen[0], torch.full_like(X, 3.0)) and x.grad is not None
    assert torch.equal(x.grad, seen[0])
    for wrap in (lambda grad: grad * 0, lambda grad: (grad * 0,)):
        point.remove_hooks("bwd")
        point.add_hook(lambda grad, hook, wrap=wrap: wrap(grad), dir="bwd")
        x.grad = None
        point(x).sum().backward()
        assert torch.equal(x.grad, torch.zeros_like(X))


def test_removal_respects_direction_level_and_permanence() -> None:
    point = HookPoint()
    point.add_perma_hook(double)
    point.add_hook(double, level=1)
    point.add_hook(double, level=2)
    point.add_hook(add_one, dir="bwd")
    point.remove_hooks("fwd", level=2)
    assert [handle.context_level for handle in point.fwd_hooks] == [None, 1]
    assert point.has_hooks("bwd") and point.has_hooks(level=1) and not point.has_hooks(level=2)
    point.remove_hooks("both")
    assert [handle.is_permanent for handle in point.fwd_hooks] == [True] and not point.bwd_hooks
    assert point.has_hooks() and not point.has_hooks(including_permanent=False)
    point.remove_hooks("fwd", including_permanent=True)
    assert not point.has_hooks() and torch.equal(point(X), X) and not point._forward_hooks


@pytest.mark.parametrize("call", ["add_hook", "remove_hooks", "has_hooks"])
def test_another_direction_is_refused(call: str) -> None:
    point = HookPoint()
    args = (double,) if call == "add_hook" else ()
    with pytest.raises(ValueError, match="Invalid direction sideways"):
        getattr(point, call)(*args, dir="sideways")


def test_handles_say_what_was_added() -> None:
    point = HookPoint()
    point.add_hook(double, is_permanent=True, level=4)
    (handle,) = point.fwd_hooks
    assert isinstance(handle, LensHandle) and handle.user_hook is double
    assert (handle.is_permanent, handle.context_level) == (True, 4)


def test_repr_counts_hooks() -> None:
    point = HookPoint()
    assert repr(point) == "HookPoint()"
    point.name = "hook_embed"
    point.add_hook(double)
    point.add_hook(double)
    point.add_hook(add_one, dir="bwd")
    assert repr(point) == "HookPoint(name='hook_embed', 2 fwd, 1 bwd)"


def test_a_partials_tensors_are_not_printed() -> None:
    point = HookPoint()
    point.add_hook(partial(double))
    (hook,) = point._forward_hooks.values()
    assert hook.__name__.startswith("partial(<function double")


def test_context_is_the_points_own_until_cleared() -> None:
    point = HookPoint()
    point.add_hook(lambda tensor, hook: hook.ctx.update(total=tensor.sum()))
    point(X)
    assert point.ctx["total"] == 15
    point.clear_context()
    assert point.ctx == {}


def test_aliases_call_the_hook_once_each_under_their_names() -> None:
    point, names = HookPoint(), []

    def count(tensor: Tensor, hook: HookPoint) -> Tensor:
        names.append(hook.name)
        return tensor + 1

    point.add_hook(count, alias_names=["a.0", "b.1"])
    assert torch.equal(point(X), X + 2)
    assert names == ["a.0", "b.1"]


def test_a_conversion_stands_between_hook_and_value() -> None:
    class Turned:
        def convert(self, value: Tensor) -> Tensor:
            return value.T

        def revert(self, value: Tensor) -> Tensor:
            return value.T

    point, shapes = HookPoint(), []
    point.enable_reshape(Turned())
    point.add_hook(lambda tensor, hook: shapes.append(tensor.shape))
    point.add_hook(double)
    assert torch.equal(point(X), X * 2) and shapes == [(3, 2)]
