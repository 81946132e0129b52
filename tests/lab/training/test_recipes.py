"""Distillation against its formula, pruning of heads against differences of losses, and what both do to a circuit."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import interp
from interp.data.batch import Batch
from interp.lab.training import Distillation, Training, head_importance, mean_loss, prune_heads, train
from interp.model import MLP, Edit, ModelConfig, Transformer, next_token_loss
from interp.tasks import RepeatedSequences
from interp.tasks.examples import Examples, Place
from tests.configs import build, perturbed, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

TEACHER = build("gpt2")
STUDENT = build("llama-gqa")
ROWS = Batch(some_tokens(3, 7))


# --- distillation -------------------------------------------------------------------------------------------------


@over("temperature", [1.0, 2.5])
@over("share", [0.0, 0.3, 1.0])
def test_the_loss_is_the_formula_token_by_token(share: float, temperature: float) -> None:
    keep = torch.arange(7)[None] < torch.tensor([[7], [4], [6]])
    batch = Batch(ROWS.tokens, keep)
    student, teacher = (each(batch.tokens, keep=keep) for each in (STUDENT, TEACHER))
    losses = []
    for b in range(3):
        for i in range(int(keep[b].sum()) - 1):
            p, q = ((x[b, i] / temperature).softmax(-1) for x in (teacher, student))
            soft = sum(float(p[v]) * (math.log(p[v]) - math.log(q[v])) for v in range(31))
            hard = -float(student[b, i].log_softmax(-1)[batch.tokens[b, i + 1]])
            losses.append((1 - share) * hard + share * temperature**2 * soft)
    found = mean_loss(STUDENT, Examples(batch), distillation=Distillation(TEACHER, temperature, share))
    assert float(found) == pytest.approx(sum(losses) / len(losses))


def test_a_teacher_of_itself_teaches_nothing() -> None:
    alone = Distillation(STUDENT, 3.0, 1.0)
    assert float(mean_loss(STUDENT, Examples(ROWS), distillation=alone)) == pytest.approx(0.0, abs=1e-12)


def test_at_a_high_temperature_the_gradient_is_that_of_centred_logits() -> None:
    """Hinton et al. 2015, equation 4: T^2 dKL/dz goes to (z - v) / N for logits without a mean, of one token each."""
    generator = torch.Generator().manual_seed(0)
    found, given = torch.randn(2, 1, 2, 5, dtype=torch.float64, generator=generator)
    found, given = (x - x.mean(-1, keepdim=True) for x in (found, given))

    class Fixed(Transformer):
        def forward(self, *args: object, **kwargs: object) -> Tensor:  # type: ignore[override]
            return given

    fixed = Fixed(ModelConfig(0, 4, 1, 4, 5)).double()
    found = found.requires_grad_()
    losses = Distillation(fixed, 1e4, 1.0).mixed(
        torch.zeros(1, 1), found, Examples(Batch(torch.tensor([[1, 2]])))
    )
    (gradient,) = torch.autograd.grad(losses.sum(), found)
    torch.testing.assert_close(gradient[:, 0], (found - given)[:, 0].detach() / 5, rtol=1e-3, atol=1e-4)
    assert not gradient[:, 1].any()


DATA = RepeatedSequences(d_vocab=20, width=12, low=4, high=5)
SMALL = ModelConfig(1, 16, 2, 12, 20, mlp=MLP(16))
PLAN = Training(steps=30, rows=16, learning_rate=1e-2, warm_up=3, log_every=30, keep_seconds=0.0)


def test_a_student_comes_nearer_to_its_teacher(tmp_path: Path) -> None:
    teacher = train(replace(SMALL, d_model=32), DATA, PLAN).model
    held = DATA.batch(Place(0, None), 64)
    taught = train(SMALL, DATA, PLAN, out=tmp_path, distillation=Distillation(teacher, 1.0, 1.0))
    untaught = train(SMALL, DATA, replace(PLAN, steps=1)).model
    apart = [
        float(mean_loss(each, held, distillation=Distillation(teacher, 1.0, 1.0)).detach())
        for each in (untaught, taught.model)
    ]
    assert apart[1] < apart[0] / 2
    again = train(SMALL, DATA, PLAN, out=tmp_path, resume=True, distillation=Distillation(teacher, 1.0, 1.0))
    assert torch.equal(again.model.state_dict()["embed.weight"], taught.model.state_dict()["embed.weight"])
    with pytest.raises(ValueError, match="distillation"):
        train(SMALL, DATA, PLAN, out=tmp_path, resume=True, distillation=Distillation(untaught, 1.0, 1.0))


def test_a_teacher_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(
        ValueError, match="a teacher of the same vocabulary is required, it has 40 tokens for 31"
    ):
        mean_loss(STUDENT, Examples(ROWS), distillation=Distillation(perturbed(ModelConfig(1, 8, 2, 9, 40))))


# --- pruning ------------------------------------------------------------------------------------------------------


@over("name", ["gpt2", "llama-gqa"])
def test_importance_is_the_slope_of_the_loss_of_each_row(name: str) -> None:
    """Central differences of the loss in the factor on one head, a row at a time."""
    model = build(name)
    found = head_importance(model, Examples(ROWS))
    for layer, head in ((0, 0), (1, 2)):
        slopes = []
        for row in ROWS.tokens:
            each = []
            for step in (1e-5, -1e-5):
                factor = torch.ones(4, dtype=torch.float64)
                factor[head] += step
                edited = model.edited(
                    Edit(f"blocks.{layer}.attn.hook_z", lambda z, factor=factor: z * factor[:, None])
                )
                each.append(float(next_token_loss(edited(row[None]), row[None]).sum()))
            slopes.append(abs(each[0] - each[1]) / 2e-5)
        torch.testing.assert_close(float(found[layer, head]), sum(slopes) / 3, rtol=1e-5, atol=1e-7)


def test_the_least_important_heads_go_first() -> None:
    model = build("gpt2")
    importance = head_importance(model, Examples(ROWS)).flatten()
    order = [f"L{place // 4}H{place % 4}" for place in importance.argsort().tolist()]
    assert prune_heads(model, Examples(ROWS), 3, at_once=3).heads == tuple(order[:3])
    assert prune_heads(model, Examples(ROWS), 1).heads == (order[0],)


def test_the_pruned_model_is_the_model_without_these_heads_matrices() -> None:
    model = build("llama-gqa")
    pruned = prune_heads(model, Examples(ROWS), 3)
    own = model.with_parameters({})
    own.load_state_dict(model.state_dict())
    changed = {}
    for name in pruned.heads:
        layer, head = int(name[1]), int(name[3:])
        key = f"blocks.{layer}.attn.out.weight"
        weight = changed.setdefault(key, model.get_parameter(key).clone())
        width = model.block(layer).attn.d_head
        weight[:, head * width : (head + 1) * width] = 0
    assert len(set(pruned.heads)) == 3
    assert_close(pruned.model(ROWS.tokens), model.with_parameters(changed)(ROWS.tokens))


def test_measuring_again_counts_what_is_left() -> None:
    """After each head the next is the least important of the pruned model, never one that is gone."""
    model = build("gpt2")
    pruned = prune_heads(model, Examples(ROWS), 4)
    for n in range(1, 4):
        before = prune_heads(model, Examples(ROWS), n)
        assert before.heads == pruned.heads[:n]
        importance = head_importance(before.model, Examples(ROWS))
        gone = [(int(name[1]), int(name[3:])) for name in before.heads]
        assert all(importance[place] == 0 for place in gone)
        left = {
            f"L{layer}H{head}": float(importance[layer, head])
            for layer in range(model.config.n_layers)
            for head in range(4)
            if (layer, head) not in gone
        }
        assert min(left, key=left.__getitem__) == pruned.heads[n]


def test_all_heads_are_not_pruned() -> None:
    total = build("gpt2").config.n_layers * 4
    with pytest.raises(ValueError, match=f"fewer heads than the model's {total} are required"):
        prune_heads(build("gpt2"), Examples(ROWS), total)


# --- circuits before and after ------------------------------------------------------------------------------------


def test_analyses_see_the_pruned_model_as_it_is() -> None:
    """A head that is gone has no effect when it is ablated, and adds nothing to the logits; the others do."""
    model = build("gpt2")
    pruned = prune_heads(model, Examples(ROWS), 3)
    effect = interp.ablate(
        interp.HookedTransformer(pruned.model),
        ROWS.tokens,
        "head",
        change=interp.edits.Zero(),
        metric=interp.metrics.logit_difference([3, 14, 7], [5, 1, 30]),
    )
    values = effect.value
    for layer in range(model.config.n_layers):
        for head in range(4):
            found = float(values.sel(layer=layer, head=head))
            assert (abs(found) < 1e-12) == (f"L{layer}H{head}" in pruned.heads)
