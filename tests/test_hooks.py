"""Hooks of a HookedTransformer: what they see and change, how they nest, and that none stays behind."""

import contextlib
import contextvars
import random
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interp import Edit, HookedTransformer, Read, observe
from interp.edits import Add, Scale, Zero
from interp.model import Tap, sites
from interp.passes import HookPoint
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


def test_in_place_hook_reaches_no_earlier_cache_and_no_weights() -> None:
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
        pytest.raises(ValueError, match=r"backward hook at .* requires a pass that keeps gradients"),
    ):
        run(model)


# --- in place for every pass inside, here and nowhere else -----------------------------------------------------------


def scale(factor: float) -> Edit:
    """An edit whose effect multiplies with others'."""
    return Edit("L0.mlp", Scale(factor))


def factor_of(model: HookedTransformer) -> float:
    """By how much all standing edits scale the first MLP's output."""
    read = Read("blocks.0.hook_mlp_out")
    plain = observe(model._transformer, model.to_batch(LINE), [read]).trace[read]
    return float((observe(model, LINE, [read]).trace[read] / plain).median())


@pytest.mark.slow
def test_blocks_left_in_any_order_take_away_what_they_brought() -> None:
    model, generator = hooked(), random.Random(0)
    for _ in range(1000):
        open_, expected = [], 1.0
        for _ in range(12):
            if open_ and generator.random() < 0.5:
                block, factor = open_.pop(generator.randrange(len(open_)))
                if generator.random() < 0.3:
                    with contextlib.suppress(ZeroDivisionError):
                        block.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
                else:
                    block.__exit__(None, None, None)
                expected /= factor
            else:
                factor = generator.choice([2.0, 3.0, 5.0])
                block = model.hooks(edits=[scale(factor)])
                block.__enter__()
                open_.append((block, factor))
                expected *= factor
            assert [edit.change.factor for edit in model.transformer.edits] == [f for _, f in open_]  # type: ignore[union-attr]
        assert factor_of(model) == pytest.approx(expected)
        for block, _ in open_:
            block.__exit__(None, None, None)
        assert model.transformer is model._transformer


def test_a_block_that_another_thread_leaves_holds_nowhere_any_more() -> None:
    model = hooked()
    block = model.hooks(edits=[scale(3.0)])
    block.__enter__()
    began_inside = contextvars.copy_context()  # what a task has that is created now
    thread = threading.Thread(target=lambda: block.__exit__(None, None, None))
    thread.start()
    thread.join()
    assert model.transformer is model._transformer
    assert began_inside.run(lambda: model.transformer) is model._transformer


def test_threads_do_not_see_each_others_hooks() -> None:
    model = hooked()
    start, wrong = threading.Barrier(8), []

    def work(number: int) -> None:
        start.wait()
        for turn in range(20):
            factor = float(number + 2 + turn % 3)
            with model.hooks(edits=[scale(factor)]) if number else contextlib.nullcontext():
                if abs(factor_of(model) - (factor if number else 1.0)) > 1e-9:
                    wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_hooks_edits_and_edited_models_are_the_same_model_to_every_pass() -> None:
    model = hooked()

    def silence(z: Tensor, hook: HookPoint) -> Tensor:
        z[:, :, 1] = 0
        return z

    edit = Edit("L0H1", Zero())
    expected = model.run_with_hooks(LINE, [("blocks.0.attn.hook_z", silence)])
    assert torch.equal(model.edited(edit)(LINE), expected)
    with model.hooks(edits=[edit]):
        assert torch.equal(model(LINE), expected)
        assert_close(model.run_with_cache(LINE)[0], expected)
        inside = model.generate(LINE, 4).tokens
    with model.hooks([("blocks.0.attn.hook_z", silence)]):
        assert torch.equal(model.generate(LINE, 4).tokens, inside)
    assert torch.equal(model.generate(LINE, 4, edits=[edit]).tokens, inside)
    assert torch.equal(model.edited([edit]).generate(LINE, 4, use_past_kv_cache=False).tokens, inside)
    assert torch.equal(model(LINE), hooked()(LINE)) and not torch.equal(model(LINE), expected)


def test_a_vector_added_while_generating_is_one_line() -> None:
    model = hooked()
    vector = 50 * model.W_U[:, 7]
    steered = model.generate(LINE, 3, edits=[Edit("L1.resid", Add(vector))])
    slow = model.to_batch(LINE, padding_side="left").tokens
    for _ in range(3):
        tap = Tap(edits=[Edit("L1.resid", lambda stream: stream + vector)])
        slow = torch.cat((slow, model._transformer(slow, tap)[:, -1:].argmax(-1)), 1)
    assert torch.equal(steered.tokens, slow)
    late = model.generate(LINE, 3, edits=[Edit("L1.resid", Add(vector), {"pos": slow.shape[1] - 2})])
    assert not torch.equal(late.tokens, model.generate(LINE, 3).tokens) or torch.equal(
        steered.tokens, late.tokens
    )


def test_what_a_hook_remembers_lasts_for_one_pass() -> None:
    model, seen = hooked(), []

    def remember(value: Tensor, hook: HookPoint) -> None:
        seen.append(len(hook.ctx))
        hook.ctx["seen"] = True

    with model.hooks([(POST, remember), (POST, remember)]):
        model(LINE)
        model(LINE)
    assert seen == [0, 1, 0, 1]


def test_edits_that_the_model_lacks_are_refused_before_the_block_begins() -> None:
    with pytest.raises(KeyError, match="layers are 0 to"), hooked().hooks(edits=[Edit("L9.mlp", Zero())]):
        raise AssertionError("not reached")
    assert hooked().transformer.edits == ()
