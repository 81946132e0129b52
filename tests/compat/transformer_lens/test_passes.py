"""What a pass has to see although it does not look at every part: hooks, replaced parts, parameters, gradients."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from interp.compat.transformer_lens.hook_points import HookPoint
from interp.compat.transformer_lens.hooked_transformer import HookedTransformer
from tests.compat.transformer_lens.lens_fixture import oracle


@pytest.fixture
def model() -> HookedTransformer:
    """A model that has made passes which found nothing to do."""
    model = oracle("ln").model()
    for _ in range(2):
        model(oracle("ln")["tokens"])
    return model


def tokens() -> Tensor:
    return oracle("ln")["tokens"]


def doubled(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return 2 * output


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


POINT = "blocks.0.hook_resid_post"
WAYS = {
    "hook": lambda m: m.get_submodule(POINT).register_forward_hook(doubled),
    "pre-hook": lambda m: m.get_submodule(POINT).register_forward_pre_hook(lambda module, args: 2 * args[0]),
    "prepended": lambda m: m.get_submodule(POINT).add_hook(lambda x, hook: 2 * x, prepend=True),
    "by hand": lambda m: m.get_submodule(POINT)._forward_hooks.__setitem__(7, doubled),
    "own forward": lambda m: setattr(m.get_submodule(POINT), "forward", lambda x: 2 * x),
    "replaced": lambda m: setattr(m.blocks[0], "hook_resid_post", Doubling()),
    "replaced by hand": lambda m: m.blocks[0]._modules.__setitem__("hook_resid_post", Doubling()),
    "hook on the block": lambda m: m.blocks[0].register_forward_hook(doubled),
    "forward of the block": lambda m: setattr(m.blocks[0], "forward", _twice(m.blocks[0].forward)),
}


def _twice(forward):  # type: ignore[no-untyped-def]
    return lambda *args, **options: 2 * forward(*args, **options)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_pass_sees_what_was_changed_since_the_last_one(
    way: str, copied: bool, model: HookedTransformer
) -> None:
    def double(x: Tensor, hook: HookPoint) -> Tensor:
        return 2 * x

    want = oracle("ln").model().run_with_hooks(tokens(), fwd_hooks=[(POINT, double)])
    changed = copy.deepcopy(model) if copied else model
    changed(tokens())
    WAYS[way](changed)
    torch.testing.assert_close(changed(tokens()), want)


def test_a_table_of_hooks_that_was_assigned_anew_counts(model: HookedTransformer) -> None:
    before = model(tokens())
    point = model.get_submodule(POINT)
    point._forward_hooks = OrderedDict()
    assert torch.equal(model(tokens()), before)
    handle = point.register_forward_hook(doubled)
    assert not torch.allclose(model(tokens()), before)
    handle.remove()
    assert torch.equal(model(tokens()), before)


def test_an_edit_between_forward_and_backward_raises_as_in_torch(model: HookedTransformer) -> None:
    loss = model(tokens(), return_type="loss")
    with torch.no_grad():
        model.blocks[1].attn.W_K.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    model(tokens(), return_type="loss").backward()


def test_an_edit_of_a_copy_between_forward_and_backward_raises(model: HookedTransformer) -> None:
    other = copy.deepcopy(model).to(torch.float64, print_details=False)
    loss = other(tokens(), return_type="loss")
    with torch.no_grad():
        other.blocks[1].mlp.W_in.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("steps", [3])
def test_repeated_passes_give_the_same_gradients(steps: int, model: HookedTransformer) -> None:
    want = oracle("ln").group("grads")
    for _ in range(steps):
        model.zero_grad()
        model(tokens(), return_type="loss").backward()
        for name, grad in want.items():
            torch.testing.assert_close(model.get_parameter(name).grad, grad)


def test_freezing_and_thawing_between_passes_is_seen(model: HookedTransformer) -> None:
    weight = model.blocks[0].attn.W_Q
    for wanted in (False, True, False, True):
        weight.requires_grad_(wanted)
        model.zero_grad()
        model(tokens(), return_type="loss").backward()
        assert (weight.grad is not None) == wanted
    torch.testing.assert_close(weight.grad, oracle("ln").group("grads")["blocks.0.attn.W_Q"])


def test_a_pass_inside_a_hook_of_another_leaves_its_gradients_whole(model: HookedTransformer) -> None:
    def look(x: Tensor, hook: HookPoint) -> None:
        with model.hooks([]):
            model.get_submodule(POINT)._forward_hooks.clear()
            model(tokens())

    model.get_submodule(POINT).add_hook(look)
    model(tokens(), return_type="loss").backward()
    for name, grad in oracle("ln").group("grads").items():
        torch.testing.assert_close(model.get_parameter(name).grad, grad)


def test_gradients_reach_leaves_by_autograd_grad_and_twice(model: HookedTransformer) -> None:
    weight = model.blocks[1].mlp.W_out
    for _ in range(2):
        (first,) = torch.autograd.grad(model(tokens(), return_type="loss"), weight, create_graph=True)
        torch.testing.assert_close(first, oracle("ln").group("grads")["blocks.1.mlp.W_out"])
        (second,) = torch.autograd.grad(first.square().sum(), model.blocks[0].attn.W_V)
        assert second.any()
    assert weight.grad is None


def test_functional_call_computes_with_other_parameters(model: HookedTransformer) -> None:
    before = model(tokens())
    other = {"unembed.W_U": (2 * model.W_U).detach().requires_grad_(), "unembed.b_U": 2 * model.b_U.detach()}
    for _ in range(2):
        out = torch.func.functional_call(model, other, (tokens(),))
        torch.testing.assert_close(out, 2 * before)
        (grad,) = torch.autograd.grad(out.sum(), other["unembed.W_U"])
        assert grad.any()
    assert torch.equal(model(tokens()), before)


def test_a_square_matrix_that_was_turned_in_place_counts() -> None:
    model = oracle("llama").model()
    tokens = oracle("llama")["tokens"]
    before = model(tokens)
    square = next(p for p in model.parameters() if p.ndim > 1 and p.shape[-1] == p.shape[-2])
    square.data = square.data.mT
    assert not torch.allclose(model(tokens), before)
