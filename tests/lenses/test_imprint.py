"""One gradient step in closed form: equal to writing the step into the weights and running the layer again."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from interp import Batch, Read
from interp.lenses import GradientFactors
from interp.lenses.factors import factors
from interp.lenses.imprint import imprint, logit_vjp, shift, top_vjp
from interp.model import Transformer
from interp.model.block import FeedForward
from interp.passes.observe import observe
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

ETA = -0.3
LINEAR = [name for name, c in CONFIGS.items() if c.unembed and not c.mlm_head]
PLAIN = ["gpt2", "llama-gqa", "gemma2", "no-norm"]


def asked(name: str, rows: int = 3) -> Batch:
    answers = torch.tensor([3, 14, 7])[:rows]
    return Batch(some_tokens(rows)).with_answers(answers, None)


@cache
def found(name: str) -> GradientFactors:
    return factors(build(name), asked(name, 1), ["W_in", "W_out"])


def stepped(name: str, layer: int, matrix: str, pos: int) -> tuple[FeedForward, FeedForward]:
    """The MLP of a layer, and one whose matrix took the step of one token."""
    before, after = (perturbed_copy(name).block(layer).mlp for _ in range(2))
    assert isinstance(before, FeedForward) and isinstance(after, FeedForward)
    x, delta = found(name)[f"blocks.{layer}.mlp.{matrix}"]
    step = ETA * torch.outer(x[0, pos], delta[0, pos]).T
    with torch.no_grad():
        if matrix == "W_out":
            after.out.weight += step
        else:
            after.into.weight[-len(step) :] += step
    return before, after


def perturbed_copy(name: str) -> Transformer:
    model = Transformer(CONFIGS[name]).double().requires_grad_(False)
    model.load_state_dict(build(name).state_dict())
    return model


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("pos", [0, 8])
def test_imprint_is_the_change_of_the_pre_activations_on_the_same_input(name: str, pos: int) -> None:
    before, after = stepped(name, 0, "W_in", pos)
    x, delta = (side[0, pos] for side in found(name)["blocks.0.mlp.W_in"])
    change = (after.into(x) - before.into(x))[-len(delta) :]
    assert_close(imprint(x, delta, ETA), change)
    assert float(change.abs().max()) > 1e-4


@pytest.mark.parametrize("name", PLAIN)
def test_shift_is_the_change_of_what_each_neuron_writes(name: str) -> None:
    before, after = stepped(name, 0, "W_out", 8)
    x, delta = (side[0, 8] for side in found(name)["blocks.0.mlp.W_out"])
    by_neuron = shift(x, delta, ETA)
    for neuron in (0, 5, len(x) - 1):
        alone = torch.zeros_like(x)
        alone[neuron] = x[neuron]
        assert_close(by_neuron[neuron], after.out(alone) - before.out(alone))
    assert_close(by_neuron.sum(0), after.out(x) - before.out(x))
    assert_close(by_neuron.sum(0), imprint(x, delta, ETA))
    assert bool((by_neuron @ delta <= 0).all())  # against delta, whatever the sign of the activation


def test_step_along_an_unembedding_raises_its_logit_by_both_squared_norms() -> None:
    model, x = build("gpt2"), found("gpt2")["blocks.0.mlp.W_out"][0][0, 8]
    column = model.unembed.weight[5]  # type: ignore[union-attr]
    mlp = perturbed_copy("gpt2").block(0).mlp
    assert isinstance(mlp, FeedForward)
    before = mlp.out(x)
    with torch.no_grad():
        mlp.out.weight += 0.1 * torch.outer(x, column).T
    assert_close((mlp.out(x) - before) @ column, 0.1 * x.square().sum() * column.square().sum())
    assert_close(imprint(x, column, 0.1), mlp.out(x) - before)


def test_logit_gradient_is_autograds_and_negative_at_the_target_only() -> None:
    logits = torch.randn(
        4, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    target = torch.tensor([3, 0, 10, 7])
    (expected,) = torch.autograd.grad(F.cross_entropy(logits, target, reduction="sum"), logits)
    ours = logit_vjp(logits.detach(), target)
    assert_close(ours, expected)
    assert_close(ours.sum(-1), torch.zeros(4, dtype=torch.float64))
    assert [row.lt(0).nonzero().flatten().tolist() for row in ours] == [[3], [0], [10], [7]]


@over("name", [n for n in LINEAR if CONFIGS[n].final_norm and n != "no-norm"])
def test_the_top_vjp_is_the_gradient_at_the_final_norms_output(name: str) -> None:
    model, batch = build(name), asked(name)
    assert batch.answer is not None
    answer = batch.answer
    read = Read("ln_final.hook_normalized", grad=True)

    def loss(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, -1], answer, reduction="sum")

    seen = observe(model, batch, [read], metric=loss)
    assert_close(top_vjp(model, seen.output[:, -1], answer), seen.trace[read][:, -1])


def test_target_is_the_least_probable_token_of_the_top_vjp_if_tied() -> None:
    model = perturbed(CONFIGS["bloom"])
    tokens = torch.arange(31)[:, None]
    top = top_vjp(model, model(tokens)[:, -1], torch.arange(31))
    assert (top @ model.embed.weight.T).argmin(-1).tolist() == list(range(31))


def test_a_read_out_that_is_not_linear_is_refused() -> None:
    with pytest.raises(ValueError, match="this model computes its logits by a non-linear masked-LM head"):
        top_vjp(build("masked-lm"), torch.zeros(1, 31), torch.tensor([1]))


@pytest.mark.kinds
@pytest.mark.parametrize("rule", [imprint, shift])
def test_a_step_of_other_tokens_or_without_numbers_is_refused(rule: Callable[..., Tensor]) -> None:
    x, delta = torch.ones(3, 4), torch.ones(3, 2)
    for given in (delta[:2], delta[0]):
        with pytest.raises(ValueError, match=r"x and delta must be of the same tokens.*got \[3, 4\] and"):
            rule(x, given, 0.1)
    with pytest.raises(ValueError, match="delta must have finite numbers"):
        rule(x, delta * torch.nan, 0.1)
    with pytest.raises(ValueError, match="x must have finite numbers"):
        rule(x * torch.inf, delta, 0.1)
    with pytest.raises(ValueError, match="eta must be a number up to"):
        rule(x, delta, torch.inf)
