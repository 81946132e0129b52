"""Blocks as integrals: Euler's step is the model, flows of linear fields are exponentials, adjoints are gradients."""

import copy
import math
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from interp import Batch, Edit
from interp.edits import Scale
from interp.lab.depth import Solver, integrated
from interp.lab.depth.refinement import _through, runge_kutta
from interp.model import Transformer, mean_next_token_loss
from interp.passes.question import NotFiniteError
from tests.configs import CONFIGS, build, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

TOKENS = some_tokens(2, 6)
TIGHT = Solver("dopri8", rtol=1e-10, atol=1e-12)
ADDING = [
    name
    for name, config in CONFIGS.items()
    if not config.norms_sum and config.causal and not config.cross_attention and config.unembed
]


def linear(seed: int = 0) -> tuple[Tensor, Callable[[Tensor], Tensor], Tensor]:
    matrix, x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return matrix / 2, lambda y: y @ (matrix / 2), x


@over("name", ADDING)
def test_one_step_of_euler_is_the_model(name: str) -> None:
    model = build(name)
    found = integrated(model, TOKENS, Solver("euler"))
    assert_close(found.logits, model(TOKENS))
    assert found.evaluations == (1,) * model.config.n_layers


@over("name", ["parallel", "attention-only"])
@over("steps", [2, 5])
def test_steps_of_euler_are_the_refined_stack(name: str, steps: int) -> None:
    """Where a block is one sum of its sublayers, no splitting of it."""
    model = build(name)
    cut = _through(model, Batch(TOKENS), model(TOKENS, stop=0), steps)
    found = integrated(model, TOKENS, Solver("euler", steps))
    assert_close(found.logits, model.read_out(cut))
    assert found.evaluations == (steps,) * model.config.n_layers


@over("method", ["bosh3", "dopri5", "dopri8"])
def test_the_flow_of_a_linear_field_is_a_matrix_exponential(method: str) -> None:
    matrix, field, x = linear()
    found = Solver(method, rtol=1e-8, atol=1e-9).flow(field, x)  # type: ignore[arg-type]
    torch.testing.assert_close(found, x @ torch.matrix_exp(matrix), rtol=1e-6, atol=1e-7)


@over("steps", [1, 3])
def test_runge_kutta_of_a_linear_field_is_ours(steps: int) -> None:
    """Any scheme of order 4 with four evaluations has the same polynomial there."""
    _, field, x = linear()
    assert_close(Solver("rk4", steps).flow(field, x), runge_kutta(field, x, 1.0, steps))


@over("method_and_order", [("euler", 1), ("midpoint", 2), ("heun3", 3), ("rk4", 4)])
def test_schemes_have_their_order(method_and_order: tuple[str, int]) -> None:
    """Twice the steps: 2^order times as near to the flow, but for terms of higher order."""
    method, order = method_and_order
    matrix, _, start = linear()

    def field(x: Tensor) -> Tensor:
        return (x @ matrix).sin()

    exact = runge_kutta(field, start, 1.0, 2000)
    errors = [(Solver(method, steps).flow(field, start) - exact).norm() for steps in (16, 32)]  # type: ignore[arg-type]
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.25)


def test_an_adaptive_pass_is_the_limit_of_fine_steps() -> None:
    model = build("gpt2")
    fine = integrated(model, TOKENS, Solver("rk4", 64)).logits
    found = integrated(model, TOKENS, TIGHT)
    torch.testing.assert_close(found.logits, fine, rtol=1e-4, atol=1e-5)
    assert min(found.evaluations) > 4
    assert not torch.allclose(found.logits, model(TOKENS), atol=1e-2)


def gradients(model: Transformer, solver: Solver) -> dict[str, Tensor]:
    model.zero_grad()
    mean_next_token_loss(integrated(model, TOKENS, solver).logits, TOKENS).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return float(max((one[name] - other[name]).abs().max() for name in one))


@pytest.mark.slow
def test_adjoint_gradients_come_to_those_of_the_solver() -> None:
    """The adjoint method differentiates the flow, autograd the scheme: they differ by its error, of order 4 here."""
    model = copy.deepcopy(build("gpt2")).requires_grad_(True)
    differ = {}
    for steps in (8, 16):
        by_steps, by_adjoint = (gradients(model, Solver("rk4", steps, adjoint=a)) for a in (False, True))
        assert len(by_steps) == len(dict(model.named_parameters()))
        differ[steps] = apart(by_steps, by_adjoint)
    assert differ[16] < differ[8] / 8
    loose, tight = (
        [gradients(model, Solver("dopri5", rtol=r, atol=r, adjoint=a)) for a in (False, True)]
        for r in (1e-3, 1e-7)
    )
    assert apart(*tight) < min(1e-5, apart(*loose) / 10)


def test_gradients_of_one_step_are_those_of_the_model() -> None:
    model = copy.deepcopy(build("llama-gqa")).requires_grad_(True)
    found = gradients(model, Solver("euler"))
    model.zero_grad()
    mean_next_token_loss(model(TOKENS), TOKENS).backward()
    assert apart(found, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}) < 1e-9


def test_blocks_that_are_not_named_stay_steps() -> None:
    model = build("gpt2")
    none = integrated(model, TOKENS, layers=())
    assert_close(none.logits, model(TOKENS))
    assert none.evaluations == ()
    one = integrated(model, TOKENS, Solver("euler", 3), layers=(1,))
    stream = model(TOKENS, stop=1)
    for _ in range(3):
        stream = stream + (model(stream, start=1, stop=2) - stream) / 3
    assert_close(one.logits, model.read_out(model(stream, start=2, stop=model.config.n_layers)))


def test_padding_changes_nothing() -> None:
    model, solver = build("gpt2"), Solver("rk4", 2)
    padded = torch.cat((torch.zeros(2, 2, dtype=torch.int64), TOKENS), 1)
    keep = (torch.arange(8)[None] >= 2).expand(2, -1)
    found = integrated(model, padded, solver, keep=keep).logits[:, 2:]
    assert_close(found, integrated(model, TOKENS, solver).logits)


def test_a_model_learns_as_a_flow() -> None:
    model = copy.deepcopy(build("attention-only", torch.float32)).requires_grad_(True)
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = mean_next_token_loss(integrated(model, TOKENS, Solver("rk4", 2, adjoint=True)).logits, TOKENS)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.1


def test_what_cannot_be_integrated_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    post = next(name for name, config in CONFIGS.items() if config.norms_sum and config.causal)
    with pytest.raises(ValueError, match="integrated requires blocks that add to the stream"):
        integrated(build(post), TOKENS)
    with pytest.raises(IndexError, match="got 7"):
        integrated(build("gpt2"), TOKENS, layers=[7])
    broken = copy.deepcopy(build("gpt2"))
    broken.embed.weight.fill_(torch.nan)
    with pytest.raises(NotFiniteError, match="a finite stream is required"):
        integrated(broken, TOKENS)
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(ImportError, match=r"pip install 'interp\[ode\]'"):
        integrated(build("gpt2"), TOKENS)


def test_an_edit_where_the_stream_enters_the_first_block_is_refused() -> None:
    model = build("gpt2")
    with pytest.raises(
        ValueError, match=r"an edit of blocks\.0\.hook_resid_pre has no place there: edit hook_embed"
    ):
        integrated(model.edited([Edit("L0.resid", Scale(1.3))]), TOKENS, Solver("euler"))
    for where in ("hook_embed", "L1.resid", "blocks.0.hook_resid_mid", "blocks.1.hook_resid_post"):
        edited = model.edited([Edit(where, Scale(1.3))])
        assert_close(integrated(edited, TOKENS, Solver("euler")).logits, edited(TOKENS))
