"""Gradients at the embeddings equal autograd by another way, and integrated gradients sum to the logit's change."""

import math
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from interp import HookedTransformer
from interp.core.stats import ACCEPTED_MISS
from interp.data.batch import Batch
from interp.model import Edit, Read, Tap
from interp.model.edits import Scale
from interp.model.transformer import Transformer
from interp.passes import checkpointed
from interp.passes.checkpointed import runs_of_blocks
from interp.passes.needs import Steps
from interp.passes.observe import observe
from interp.passes.rules import Rules
from interp.passes.schedule import run_steps
from interp.tokens import IntegratedGradients, token_attribution
from interp.tokens.input_gradients import (
    Integral,
    _adaptive_weights,
    _Line,
    answer_logits,
    baseline_embedding,
    gradient_x_input as gradient_steps,
    integrated_gradients as integral_steps,
    nodes,
)
from tests.configs import CONFIGS, build, perturbed, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

ANSWER, WRONG = torch.tensor([3, 14, 7]), torch.tensor([5, 1, 30])
SMOOTH = ("gpt2", "llama-gqa", "parallel", "gemma2", "post-norm", "masked-lm", "olmo2")
BATCH = Batch(some_tokens()).with_answers(ANSWER, WRONG)
LAST = BATCH.last()


def gradient_x_input(
    model: Transformer, batch: Batch, at: Tensor, *, rules: Rules = (), batch_size: int = 32
) -> dict[str, Tensor]:
    return run_steps(model, gradient_steps(model, batch, at, rules=rules, batch_size=batch_size))


def integrated_gradients(
    model: Transformer, batch: Batch, at: Tensor, how: IntegratedGradients, *, batch_size: int = 32
) -> Integral:
    return run_steps(model, integral_steps(model, batch, at, how, batch_size=batch_size))


def logit_difference(name: str, embed: Tensor) -> Tensor:
    """Of the model's own logits, their soft cap undone, with these embeddings in place of its own."""
    cap, tap = CONFIGS[name].logit_softcap, Tap(edits=[Edit("hook_embed", lambda _: embed)])
    last = build(name)(some_tokens(), tap)[:, -1]
    last = last if cap is None else cap * (last / cap).atanh()
    return last.gather(1, ANSWER[:, None])[:, 0] - last.gather(1, WRONG[:, None])[:, 0]


def embedded(name: str) -> Tensor:
    return observe(build(name), BATCH, [Read("hook_embed")], answers_only=True).trace["hook_embed"]


@pytest.mark.parametrize("name", SMOOTH)
def test_gradient_x_input_is_the_change_per_relative_length_of_embeddings(name: str) -> None:
    """d logit / d s where token j's embedding is s_j times its own, at s = 1."""
    length = torch.ones(3, 9, dtype=torch.float64, requires_grad=True)
    value = logit_difference(name, embedded(name) * length[..., None]).sum()
    (expected,) = torch.autograd.grad(value, length)
    assert_close(gradient_x_input(build(name), BATCH, LAST)["value"], expected)
    assert_close(gradient_x_input(build(name), BATCH, LAST, batch_size=2)["value"], expected)


def test_behind_a_norm_of_the_embeddings_their_length_counts_for_nothing() -> None:
    """Up to the norm's epsilon, which is not relative."""
    bloom, post = (gradient_x_input(build(n), BATCH, LAST)["value"].abs().max() for n in ("bloom", "gpt2"))
    assert bloom < 1e-3 * post


@over("baseline", ["mean", "zero", 4])
@pytest.mark.parametrize("name", SMOOTH)
def test_the_total_is_the_logits_change_from_the_baseline(name: str, baseline: str | int) -> None:
    how = IntegratedGradients(steps=1, baseline=baseline, rule="gauss")  # type: ignore[arg-type]
    base = baseline_embedding(build(name), how.baseline).expand_as(embedded(name))
    expected = logit_difference(name, embedded(name)) - logit_difference(name, base)
    assert_close(integrated_gradients(build(name), BATCH, LAST, how).total, expected)


def errors(name: str, rule: str, steps: tuple[int, ...]) -> list[float]:
    """The largest completeness error for each number of steps."""
    found = []
    for n in steps:
        how = IntegratedGradients(steps=n, rule=rule)  # type: ignore[arg-type]
        integral = integrated_gradients(build(name), BATCH, LAST, how, batch_size=128)
        missed = (integral.score.sum(1) - integral.total).abs()
        assert_close(integral.error, missed / integral.total.abs())
        found.append(float(integral.error.max()))
    return found


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "post-norm"])
def test_scores_sum_to_the_change_and_the_error_falls_with_the_steps(name: str) -> None:
    one, few, some, many = errors(name, "gauss", (1, 4, 16, 256))
    assert one > few > some > many and many < 1e-11


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "post-norm"])
def test_the_error_of_midpoints_falls_with_the_square_of_their_number(name: str) -> None:
    coarse, fine = errors(name, "midpoint", (64, 256))
    assert coarse / fine == pytest.approx(16, rel=0.05)


def test_nodes_integrate_polynomials_up_to_the_degree_of_their_rule() -> None:
    for steps in (1, 3, 6):
        for rule, degree in (("gauss", 2 * steps - 1), ("midpoint", 1)):
            node, weight = nodes(rule, steps)  # type: ignore[arg-type]
            for power in range(degree + 1):
                assert_close((weight * node**power).sum(), torch.tensor(1 / (power + 1), dtype=torch.float64))
            missed = (weight * node ** (degree + 1)).sum() - 1 / (degree + 2)
            assert missed.abs() > 1e-9, "and not beyond"


def test_integrated_gradients_are_the_weighted_mean_on_the_line() -> None:
    how, base = IntegratedGradients(steps=3, rule="midpoint", baseline=2), build("gpt2").embed.weight[2]
    change = embedded("gpt2") - base
    expected = torch.zeros(3, 9, dtype=torch.float64)
    for share in (1 / 6, 3 / 6, 5 / 6):
        here = (base + share * change).requires_grad_()
        (gradient,) = torch.autograd.grad(logit_difference("gpt2", here).sum(), here)
        expected += (gradient * change).sum(-1) / 3
    assert_close(integrated_gradients(build("gpt2"), BATCH, LAST, how).score, expected)
    assert_close(integrated_gradients(build("gpt2"), BATCH, LAST, how, batch_size=4).score, expected)


# --- lines along which the logit bends where nobody knows beforehand -----------------------------------------------


class Bend(_Line):
    """A line in closed form in place of a model: two positions, their logit's parts by point."""

    def __init__(self, centre: float, width: float) -> None:
        self.centre, self.width = centre, width
        self.products, self.slope, self.logit = {}, {}, {}

    def part(self, s: float) -> float:
        return 3.0 * math.atan((s - self.centre) / self.width)

    def look(self, points: Iterable[float]) -> Steps[None]:
        yield from ()
        for s in set(points) - self.products.keys():
            steep = 3.0 * self.width / (self.width**2 + (s - self.centre) ** 2)
            self.products[s] = torch.tensor([steep, math.cos(5 * s)], dtype=torch.float64)
            self.slope[s] = steep + math.cos(5 * s)
            self.logit[s] = self.part(s) + math.sin(5 * s) / 5

    @property
    def scale(self) -> float:
        return abs(self.total)


@pytest.mark.parametrize("width", [0.3, 0.01, 1e-4])
@pytest.mark.parametrize("centre", [0.186, 0.5, 0.003])
def test_a_step_in_the_logit_is_found_wherever_it_is(centre: float, width: float) -> None:
    """The arctangent has its integral in closed form; the error that is told bounds the one there is."""
    line = Bend(centre, width)
    weights, error = run_steps(build("gpt2"), _adaptive_weights(line, 256))
    found = line.summed(weights)
    exact = torch.tensor([line.part(1.0) - line.part(0.0), math.sin(5.0) / 5])
    off = float((found - exact).abs().max()) / abs(line.total)
    assert error <= ACCEPTED_MISS and off <= ACCEPTED_MISS and len(line.products) <= 256
    assert float((found.sum() - line.total).abs()) / abs(line.total) <= error + 1e-12
    fixed, weight = nodes("gauss", 128)
    by_nodes = abs(
        sum(w * (3 * width / (width**2 + (s - centre) ** 2)) for s, w in zip(fixed, weight, strict=True))
    )
    if width < 1e-3:
        assert abs(float(by_nodes) - float(exact[0])) > ACCEPTED_MISS * abs(line.total), (
            "a fixed rule does not"
        )


def test_smooth_line_costs_few_gradients_and_others_no_more_than_allowed() -> None:
    line = Bend(0.4, 2.0)
    _, error = run_steps(build("gpt2"), _adaptive_weights(line, 256))
    assert len(line.products) == 17 and error < 1e-3
    for steps in (3, 4, 17, 18, 40):
        line = Bend(1 / 3, 1e-9)
        _, error = run_steps(build("gpt2"), _adaptive_weights(line, steps))
        assert steps - 1 <= len(line.products) <= steps and error > ACCEPTED_MISS


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "post-norm", "llama-gqa", "olmo2"])
def test_scores_are_those_of_a_loop_a_hundred_times_finer(name: str) -> None:
    """LayerNorm and RMSNorm models, each prompt within the error that is told of it, relative to the change."""
    found = integrated_gradients(build(name), BATCH, LAST, IntegratedGradients())
    fine = integrated_gradients(
        build(name), BATCH, LAST, IntegratedGradients(1700, rule="midpoint"), batch_size=512
    )
    assert_close(found.total, fine.total)
    assert bool((found.error <= ACCEPTED_MISS).all()) and bool((fine.error < 1e-2).all())
    off = (found.score - fine.score).abs().amax(1) / found.total.abs()
    assert bool((off <= ACCEPTED_MISS).all())


@pytest.mark.parametrize("name", SMOOTH)
def test_gradients_byruns_of_blocks_are_those_of_one_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, how = build(name), IntegratedGradients(5)
    whole, slope = (
        integrated_gradients(model, BATCH, LAST, how),
        gradient_x_input(model, BATCH, LAST)["value"],
    )
    monkeypatch.setattr(checkpointed, "ROOM", 1)
    assert [len(run) for run in runs_of_blocks(model, BATCH)] == [1] * model.config.n_layers
    assert_close(integrated_gradients(model, BATCH, LAST, how).score, whole.score)
    assert_close(gradient_x_input(model, BATCH, LAST)["value"], slope)
    edited = model.edited([Edit("L1H0", Scale(0.5))])
    by_runs = gradient_x_input(edited, BATCH, LAST)["value"]
    monkeypatch.undo()
    assert_close(by_runs, gradient_x_input(edited, BATCH, LAST)["value"])
    assert not torch.allclose(by_runs, slope)


def test_a_prompt_has_the_same_bits_alone_and_in_a_batch() -> None:
    ragged = Batch.of([[1, 2, 3, 4, 5], [4, 5], [6, 2, 9]]).with_answers(ANSWER, WRONG)
    found = integrated_gradients(build("gpt2"), ragged, ragged.last(), IntegratedGradients())
    for i, ids in enumerate([[1, 2, 3, 4, 5], [4, 5], [6, 2, 9]]):
        alone = Batch.of([ids]).with_answers(ANSWER[i : i + 1], WRONG[i : i + 1])
        one = integrated_gradients(build("gpt2"), alone, alone.last(), IntegratedGradients())
        assert torch.equal(found.score[i, : len(ids)], one.score[0]) and torch.equal(
            found.error[i], one.error[0]
        )
        assert bool((found.score[i, len(ids) :] == 0).all())


def test_an_integral_that_did_not_converge_says_so() -> None:
    model = HookedTransformer(build("gpt2"))
    found = token_attribution(model, some_tokens(), 3, 5, method=IntegratedGradients(1, rule="midpoint"))
    off = int((found.error > ACCEPTED_MISS).sum())
    assert off, "one step is too few"
    (said,) = found.attrs["notes"]
    assert said.startswith(f"integrated gradients did not converge on {off} of 3 prompts: after 1 gradients")
    assert f"{float(found.error.max()):.2g} of it" in said
    assert "notes" not in token_attribution(model, some_tokens(), 3, 5, method="integrated_gradients").attrs


def test_a_prompt_of_baseline_tokens_has_nothing_to_attribute() -> None:
    batch = Batch(torch.full((2, 6), 11)).with_answers(ANSWER[:2], None)
    found = integrated_gradients(build("gpt2"), batch, batch.last(), IntegratedGradients(5, baseline=11))
    assert bool((found.score == 0).all())
    for each in (found.total, found.error):  # the two ends are passes of other batches, in float32
        assert_close(each, torch.zeros_like(each), torch.float32)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "granite-moe"])
def test_baselines_are_embeddings_as_the_model_uses_them(name: str) -> None:
    every = torch.arange(24)[None]
    rows = observe(build(name), Batch(every), [Read("hook_embed")], answers_only=True).trace["hook_embed"][0]
    for token in (0, 23):
        assert_close(baseline_embedding(build(name), token), rows[token])
    scaled = build(name).embed.weight * CONFIGS[name].embed_scale
    assert_close(baseline_embedding(build(name), "mean"), scaled.mean(0))
    assert_close(baseline_embedding(build(name), "zero"), torch.zeros(24, dtype=torch.float64))


def test_no_gradient_is_left_behind() -> None:
    model = build("gpt2")
    gradient_x_input(model, BATCH, LAST)
    integrated_gradients(model, BATCH, LAST, IntegratedGradients(3))
    assert all(p.grad is None and not p.requires_grad for p in model.parameters())


def test_rows_are_picked_with_all_that_belongs_to_them() -> None:
    batch = Batch.of([[1, 2, 3], [4, 5], [6]]).with_answers(ANSWER, WRONG)
    found = batch.rows(torch.tensor([2, 0, 2]))
    assert found.tokens.tolist() == [[6, 0, 0], [1, 2, 3], [6, 0, 0]]
    assert found.answer.tolist() == [7, 3, 7] and found.wrong.tolist() == [30, 5, 30]  # type: ignore[union-attr]
    assert found.lengths.tolist() == [1, 3, 1]


def test_what_cannot_be_integrated_is_refused_by_name() -> None:
    model = HookedTransformer(build("gpt2"))
    with pytest.raises(ValueError, match="at least one step"):
        IntegratedGradients(steps=0, rule="gauss")
    with pytest.raises(ValueError, match="or three of the rule adaptive"):
        IntegratedGradients(steps=2)
    with pytest.raises(ValueError, match="the nodes of an adaptive rule depend on the function"):
        nodes("adaptive", 3)
    with pytest.raises((ValueError, TypeCheckError), match="baseline"):
        baseline_embedding(build("gpt2"), "average")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a token in \[0, 30\], got 31"):
        token_attribution(model, some_tokens(), 3, method=IntegratedGradients(baseline=31))
    with pytest.raises(ValueError, match="require batches with answers"):
        gradient_x_input(build("gpt2"), Batch(some_tokens()), LAST)
    bare = perturbed(replace(CONFIGS["gpt2"], unembed=False))
    with pytest.raises(ValueError, match="a model with logits"):
        answer_logits(bare, torch.zeros(3, 9, 24).double(), BATCH, LAST)
