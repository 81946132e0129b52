"""Hooks of the front door: what they see and change, how they nest, and that none stays behind."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interp import HookedTransformer, HookPoint
from interp.model import sites
from tests.tiny import CORPUS, hooked
from tests.tolerances import assert_close

PATTERN, POST = "blocks.0.attn.hook_pattern", "blocks.0.hook_resid_post"
LINE = CORPUS[2]


def shift(value: Tensor, hook: HookPoint) -> Tensor:
    return value + 0.5 * torch.linspace(-1, 1, value.shape[-1], dtype=value.dtype)


# --- forward hooks ------------------------------------------------------------------------------------------------


def test_a_hook_that_returns_a_tensor_replaces_the_value() -> None:
    model = hooked()
    logits = model.run_with_hooks(LINE, [(POST, shift)])
    with model.hooks([(POST, shift)]):
        _, cache = model.run_with_cache(LINE, [POST, "blocks.1.hook_resid_pre"])
    _, plain = model.run_with_cache(LINE, POST)
    assert_close(cache[POST], shift(plain[POST], HookPoint(POST)))
    assert_close(logits, model.transformer(cache[POST], start=1))


def test_a_hook_that_writes_in_place_and_returns_none_changes_the_value() -> None:
    def write(value: Tensor, hook: HookPoint) -> None:
        value += 0.5 * torch.linspace(-1, 1, value.shape[-1], dtype=value.dtype)

    model = hooked()
    assert_close(model.run_with_hooks(LINE, [(POST, write)]), model.run_with_hooks(LINE, [(POST, shift)]))
    assert not torch.allclose(model.run_with_hooks(LINE, [(POST, write)]), model(LINE))


def test_a_hook_that_only_looks_changes_nothing() -> None:
    seen: list[tuple[str, int, torch.Size]] = []

    def look(value: Tensor, hook: HookPoint) -> None:
        seen.append((hook.name, hook.layer(), value.shape))

    model = hooked()
    assert_close(model.run_with_hooks(LINE, [("blocks.*.attn.hook_pattern", look)]), model(LINE))
    n = len(model.to_str_tokens(LINE))
    assert seen == [(f"blocks.{i}.attn.hook_pattern", i, torch.Size([1, 4, n, n])) for i in (0, 1)]


def test_an_in_place_hook_does_not_reach_a_cache_taken_before_nor_the_weights() -> None:
    model = hooked()
    _, cache = model.run_with_cache(LINE)
    kept = {name: value.clone() for name, value in cache.items()}
    state = {name: value.clone() for name, value in model.transformer.state_dict().items()}

    def zero(value: Tensor, hook: HookPoint) -> None:
        value.zero_()

    for name in sites.names(model.cfg, on_demand=True):
        with model.hooks([(name, zero)]):
            model(LINE)
    assert all(torch.equal(cache[name], value) for name, value in kept.items())
    assert all(torch.equal(model.transformer.state_dict()[name], value) for name, value in state.items())


def test_an_in_place_hook_does_not_reach_what_the_same_pass_has_recorded() -> None:
    """The stream leaving block 0 is the very tensor that enters block 1."""
    model = hooked()
    _, plain = model.run_with_cache(LINE, POST)

    def zero(value: Tensor, hook: HookPoint) -> None:
        value.zero_()

    with model.hooks([("blocks.1.hook_resid_pre", zero)]):
        _, cache = model.run_with_cache(LINE, [POST, "blocks.1.hook_resid_pre"])
    assert_close(cache[POST], plain[POST])
    assert not cache["blocks.1.hook_resid_pre"].any()


def test_a_hook_has_a_memory_of_its_own_for_one_pass() -> None:
    counts: list[int] = []

    def count(value: Tensor, hook: HookPoint) -> None:
        hook.ctx["n"] = int(hook.ctx.get("n", 0)) + 1  # type: ignore[call-overload]
        counts.append(hook.ctx["n"])

    model = hooked()
    with model.hooks([("blocks.*.hook_resid_post", count)]):
        model(LINE)
        model(LINE)
    assert counts == [1, 1, 1, 1]
    with pytest.raises(ValueError, match="'hook_embed' is not inside a block"):
        HookPoint("hook_embed").layer()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda value, hook: value[:, 1:], r"must return shape \[1, \d+, 24\], cells of \[batch row, position, "),
        (lambda value, hook: "text", r"got str|Type-check"),
    ],
)  # fmt: skip
def test_a_hook_that_returns_something_else_is_refused(function: Callable[..., object], message: str) -> None:
    with pytest.raises(Exception, match=message):
        hooked().run_with_hooks(LINE, [(POST, function)])


def test_hooks_nest_and_each_leaves_only_its_own() -> None:
    model = hooked()
    plain, once = model(LINE), model.run_with_hooks(LINE, [(POST, shift)])
    with model.hooks([(POST, shift)]):
        with model.hooks([(POST, shift)]):
            assert_close(model(LINE), model.run_with_hooks(LINE, []))
            twice = model(LINE)
        assert_close(model(LINE), once)
        model.run_with_cache(LINE, POST)  # removes its own reads only
        assert_close(model(LINE), once)
    assert_close(model(LINE), plain)
    assert not torch.allclose(once, plain)
    assert not torch.allclose(twice, once)
    assert_close(twice, model.run_with_hooks(LINE, [(POST, shift), (POST, shift)]))


def test_hooks_vanish_after_an_exception_and_outer_ones_stay() -> None:
    model, plain = hooked(), hooked()(LINE)

    def fail(value: Tensor, hook: HookPoint) -> Tensor:
        raise ZeroDivisionError("mine")

    once = model.run_with_hooks(LINE, [(POST, shift)])
    with model.hooks([(POST, shift)]):
        with pytest.raises(RuntimeError, match=f"the edit of {POST} failed.*mine") as caught:
            model.run_with_hooks(LINE, [(PATTERN, shift), (POST, fail)])
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert_close(model(LINE), once)
    with pytest.raises(KeyboardInterrupt), model.hooks([(POST, shift)]):
        raise KeyboardInterrupt
    assert_close(model(LINE), plain)


def test_no_hook_is_installed_if_one_name_is_wrong() -> None:
    model, plain = hooked(), hooked()(LINE)
    with pytest.raises(KeyError, match=r"unknown site 'blocks\.0\.hook_nothing'"):
        model.run_with_hooks(LINE, [(POST, shift), ("blocks.0.hook_nothing", shift)])
    assert_close(model(LINE), plain)


def test_hooks_apply_while_generating() -> None:
    """A hook that silently does nothing is the worst kind: every step must go through it."""
    model = hooked()

    def always_7(value: Tensor, hook: HookPoint) -> None:
        value[..., 7] = 1e6

    for cached in (True, False):
        with model.hooks([("unembed.hook_out", always_7)]):
            forced = model.generate("The cat", 4, stop_at_eos=False, use_past_kv_cache=cached)
        assert forced.tokens[0, -4:].tolist() == [7] * 4
        free = model.generate("The cat", 4, stop_at_eos=False, use_past_kv_cache=cached)
        assert free.tokens[0, -4:].tolist() != [7] * 4


# --- backward hooks -----------------------------------------------------------------------------------------------


def test_backward_hooks_get_autograds_gradients() -> None:
    model, grads = hooked(), {}

    def keep(grad: Tensor, hook: HookPoint) -> None:
        grads[hook.name] = grad.clone()

    names = [POST, PATTERN, "blocks.1.attn.hook_z"]
    model.run_with_hooks(LINE, bwd_hooks=[(names, keep)], return_type="loss").backward()
    resid = model.run_with_cache(LINE, POST)[1][POST].requires_grad_()
    tokens = model.to_tokens(LINE)
    logits = model.transformer(resid, start=1)
    loss = torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:])
    assert_close(grads[POST], torch.autograd.grad(loss, resid)[0])
    assert grads.keys() == set(names)
    assert grads[PATTERN].shape == model.run_with_cache(LINE, PATTERN)[1][PATTERN].shape
    assert all(p.grad is None for p in model.transformer.parameters())


def test_a_backward_hook_may_replace_the_gradient() -> None:
    model, seen = hooked(), []

    def double(grad: Tensor, hook: HookPoint) -> Tensor:
        return 2 * grad

    def keep(grad: Tensor, hook: HookPoint) -> None:
        seen.append(grad.clone())

    pre = "blocks.0.hook_resid_pre"
    for hooks in ([(pre, keep)], [(pre, keep), (POST, double)]):
        model.run_with_hooks(LINE, bwd_hooks=hooks, return_type="loss").backward()
    assert_close(seen[1], 2 * seen[0])


def test_forward_and_backward_hooks_of_one_site_both_act() -> None:
    model, seen = hooked(), []

    def keep(grad: Tensor, hook: HookPoint) -> None:
        seen.append(grad.clone())

    loss = model.run_with_hooks(LINE, [(POST, shift)], [(POST, keep)], return_type="loss")
    assert_close(loss, model.run_with_hooks(LINE, [(POST, shift)], return_type="loss"))
    loss.backward()
    assert seen[0].abs().max() > 0


@pytest.mark.parametrize(
    "run",
    [
        torch.no_grad()(lambda model: model(LINE)),
        lambda model: model.run_with_cache(LINE),
        lambda model: model.generate(LINE, 1),
    ],
    ids=["no_grad", "cache", "generate"],
)
def test_backward_hooks_that_could_never_run_are_refused(run: Callable[[HookedTransformer], object]) -> None:
    with (
        hooked().hooks(bwd_hooks=[(POST, shift)]) as model,
        pytest.raises(ValueError, match="backward hooks require a pass that keeps gradients"),
    ):
        run(model)
