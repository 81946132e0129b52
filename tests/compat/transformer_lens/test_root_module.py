"""`HookedRootModule` around a small network of nobody's: names, hooks that come and go, caches."""

import pytest
import torch
from torch import Tensor, nn

from interp.compat.transformer_lens.hook_points import HookPoint
from interp.compat.transformer_lens.root_module import HookedRootModule

X = torch.tensor([[5.0, 1.0]])


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hook_square = HookPoint()

    def forward(self, x: Tensor) -> Tensor:
        return self.hook_square(x * x)


class Net(HookedRootModule):
    """x -> 2 (x^2 + 1)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.hook_mid = HookPoint()
        self.weight = nn.Parameter(torch.tensor(2.0))
        self.setup()

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.hook_mid(self.inner(x) + 1)


def zero(tensor: Tensor, hook: HookPoint) -> Tensor:
    return torch.zeros_like(tensor)


def test_setup_names_every_module() -> None:
    net = Net()
    assert list(net.mod_dict) == ["inner", "inner.hook_square", "hook_mid"]
    assert list(net.hook_dict) == ["inner.hook_square", "hook_mid"]
    assert net.inner.hook_square.name == "inner.hook_square"
    assert list(net.hook_points()) == list(net.hook_dict.values())


def test_hooks_stay_until_reset_and_permanent_ones_longer() -> None:
    net = Net()
    net.add_hook("hook_mid", zero)
    net.add_perma_hook("inner.hook_square", zero)
    assert not net(X).any()
    net.reset_hooks()
    assert torch.equal(net(X), torch.full((1, 2), 2.0))
    net.reset_hooks(including_permanent=True)
    assert torch.equal(net(X), 2 * (X * X + 1))


def test_a_predicate_adds_to_every_point_it_accepts() -> None:
    net = Net()
    net.add_hook(lambda name: "hook" in name, zero)
    assert {name: len(handles) for name, handles in net.list_hooks().items()} == dict.fromkeys(
        net.hook_dict, 1
    )


def test_unknown_names_and_other_modules_are_refused() -> None:
    net = Net()
    with pytest.raises(KeyError):
        net.add_hook("hook_mad", zero)
    with pytest.raises(AssertionError):
        net.add_hook("inner", zero)
    with pytest.raises(KeyError):
        net.run_with_hooks(X, fwd_hooks=[("hook_mad", zero)])
    with pytest.raises(TypeError, match="add_hook"):
        net.run_with_hooks(X, fwd_hooks=[("inner", zero)])
    assert net.context_level == 0 and not net.list_hooks()


def test_check_hooks_to_add_may_refuse() -> None:
    class Picky(Net):
        def check_hooks_to_add(
            self, hook_point: HookPoint, hook_point_name: str, *args: object, **kw: object
        ) -> None:
            assert hook_point_name != "hook_mid", "not there"

    net = Picky()
    net.add_hook("inner.hook_square", zero)
    with pytest.raises(AssertionError, match="not there"):
        net.add_hook("hook_mid", zero)


def test_contexts_nest_and_each_removes_its_own_also_after_an_error() -> None:
    net = Net()
    net.add_hook("hook_mid", zero, is_permanent=True)
    with net.hooks(fwd_hooks=[("inner.hook_square", zero)]):
        assert net.context_level == 1
        with pytest.raises(RuntimeError, match="size"), net.hooks(fwd_hooks=[(lambda name: True, zero)]):
            net(X + torch.ones(3))
        assert len(net.hook_dict["inner.hook_square"].fwd_hooks) == 1
    assert net.context_level == 0
    assert {name: len(h) for name, h in net.list_hooks().items()} == {"hook_mid": 1}


def test_hooks_may_be_told_to_stay() -> None:
    net = Net()
    net.run_with_hooks(X, fwd_hooks=[("hook_mid", zero)], reset_hooks_end=False)
    assert not net(X).any()


def test_contexts_are_kept_unless_told_otherwise() -> None:
    net = Net()

    def note(tensor: Tensor, hook: HookPoint) -> None:
        hook.ctx["seen"] = True

    net.run_with_hooks(X, fwd_hooks=[("hook_mid", note)])
    assert net.hook_dict["hook_mid"].ctx == {"seen": True}
    net.run_with_hooks(X, fwd_hooks=[("hook_mid", note)], clear_contexts=True)
    assert net.hook_dict["hook_mid"].ctx == {}


def test_backward_hooks_reach_the_backward_pass_inside_a_context() -> None:
    net, seen = Net(), []
    x = X.clone().requires_grad_()
    with net.hooks(bwd_hooks=[("hook_mid", lambda grad, hook: seen.append(grad.clone()))]):
        net(x).sum().backward()
    assert torch.equal(seen[0], torch.full_like(X, 2.0)) and not net.list_hooks()


def test_backward_hooks_that_vanish_too_early_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    net = Net()
    net.run_with_hooks(X, bwd_hooks=[("hook_mid", zero)])
    assert "backward" in caplog.text


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (None, ["inner.hook_square", "hook_mid"]),
        ("hook_mid", ["hook_mid"]),
        (["hook_mid", "no_such_point"], ["hook_mid"]),
        (lambda name: "square" in name, ["inner.hook_square"]),
    ],
)
def test_caches_hold_what_the_filter_selects(names: object, found: list[str]) -> None:
    net = Net()
    out, cache = net.run_with_cache(X, names_filter=names)
    assert list(cache) == found and torch.equal(out, 2 * (X * X + 1))
    assert not net.list_hooks()


def test_other_filters_are_refused() -> None:
    with pytest.raises((ValueError, TypeError), match="names_filter"):
        Net().get_caching_hooks(names_filter=3)  # type: ignore[arg-type]


def test_caches_hold_gradients_if_wanted() -> None:
    net = Net()
    x = X.clone().requires_grad_()

    class Summed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sum()

    _, cache = Summed().run_with_cache(x, incl_bwd=True)
    assert set(cache) == {name + end for name in net.hook_dict for end in ("", "_grad")}
    assert torch.equal(cache["inner.hook_square_grad"], torch.full_like(X, 2.0))


def test_a_cache_may_drop_the_batch_axis_and_keep_some_positions() -> None:
    net = Net()
    x = torch.arange(24.0).reshape(1, 3, 8)
    _, cache = net.run_with_cache(x, remove_batch_dim=True, pos_slice=(1, 3))
    assert torch.equal(cache["hook_mid"], (x * x + 1)[0, 1:3])
    _, cache = net.run_with_cache(x, pos_slice=-1)
    assert torch.equal(cache["hook_mid"], (x * x + 1)[:, -1:])


def test_hooks_of_the_user_stay_when_a_cache_is_taken() -> None:
    net = Net()
    net.add_hook("inner.hook_square", zero)
    _, cache = net.run_with_cache(X)
    assert not cache["inner.hook_square"].any() and list(net.list_hooks()) == ["inner.hook_square"]


def test_caching_hooks_fill_their_dict_at_every_pass_until_reset() -> None:
    net = Net()
    cache = net.add_caching_hooks(names_filter="hook_mid")
    assert net.is_caching
    net(X)
    net(2 * X)
    assert torch.equal(cache["hook_mid"], 4 * X * X + 1)
    net.reset_hooks()
    assert not net.is_caching and not net.list_hooks()


def test_cache_some_and_cache_all_fill_a_given_dict() -> None:
    net, some, every = Net(), {}, {}
    net.cache_some(some, lambda name: name == "hook_mid")
    net.cache_all(every)
    net(X)
    assert list(some) == ["hook_mid"] and set(every) == set(net.hook_dict)


def test_list_hooks_filters_by_name_direction_and_permanence() -> None:
    net = Net()
    net.add_hook("hook_mid", zero)
    net.add_hook("hook_mid", zero, dir="bwd")
    net.add_perma_hook("inner.hook_square", zero)
    assert set(net.list_hooks()) == {"hook_mid", "inner.hook_square"}
    assert set(net.list_hooks(including_permanent=False)) == {"hook_mid"}
    assert len(net.list_hooks("hook_mid", dir="bwd")["hook_mid"]) == 1
    assert set(net.list_hooks(["inner.hook_square"])) == {"inner.hook_square"}
    assert net.list_hooks(lambda name: "square" in name, dir="bwd") == {}
