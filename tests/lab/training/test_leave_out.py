"""Leaving rows out: against a loop written by hand, and bit for bit where nothing is left out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from interp.data.batch import Batch
from interp.lab.training import Training, encoder_decoder, leave_out, mean_loss, train
from interp.lab.training.leave_out import FixedRows
from interp.lab.training.losses import logits
from interp.model import MLP, Learned, ModelConfig, Transformer
from interp.tasks import RepeatedSequences, SequencePairs
from interp.tasks.examples import Examples, Place
from tests.tolerances import assert_close

TASK = RepeatedSequences(d_vocab=12, width=10, low=3, high=4)
CONFIG = ModelConfig(1, 16, 2, 10, 12, mlp=MLP(24), position=Learned())
ROWS, QUERIES = (TASK.batch(Place(5, step), 6) for step in (0, 1))
PLAN = Training(steps=6, rows=4, warm_up=2, log_every=2, evaluation_rows=2, seed=3)


class Unweighted(FixedRows):
    """The same rows without a word about weights."""

    def batch(self, place: Place, rows: int) -> Examples:
        return replace(super().batch(place, rows), weight=None)


def by_hand(without: tuple[int, ...]) -> torch.Tensor:
    """Losses of the queries after training without rows, the sum over the others divided by all tokens of the batch."""
    torch.manual_seed(PLAN.seed)
    model = Transformer(CONFIG)
    decay = [{"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": PLAN.weight_decay},
             {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0}]  # fmt: skip
    adam = torch.optim.AdamW(decay, betas=(PLAN.beta1, PLAN.beta2))
    drawn = [order(PLAN.seed, epoch) for epoch in range(4)]
    rows = [row for epoch in drawn for row in epoch]
    for step in range(PLAN.steps):
        batch = rows[step * PLAN.rows : (step + 1) * PLAN.rows]
        kept = [row for row in batch if row not in without]
        loss, tokens = torch.zeros(()), ROWS.batch.tokens
        for row in kept:
            found = model(tokens[row : row + 1])[0, :-1]
            loss = loss + F.cross_entropy(found, tokens[row, 1:], reduction="sum")
        adam.zero_grad()
        (loss / (len(batch) * (tokens.shape[1] - 1))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), PLAN.clip)
        for group in adam.param_groups:
            group["lr"] = PLAN.rate(step)
        adam.step()
    with torch.no_grad():
        asked = QUERIES.batch.tokens
        found = model(asked)[:, :-1].log_softmax(-1).gather(2, asked[:, 1:, None])[..., 0]
    return -found.mean(1)


def order(seed: int, epoch: int) -> list[int]:
    found: list[int] = Place(seed, epoch).generator.permutation(len(ROWS.batch)).tolist()
    return found


def test_the_effects_are_those_of_a_loop_written_by_hand() -> None:
    groups = [[2], [0, 5]]
    found = leave_out(CONFIG, ROWS, QUERIES, groups, PLAN)
    full = by_hand(())
    assert_close(torch.tensor(found.full.values), full.double(), torch.float32)
    for i, group in enumerate(groups):
        wanted = (by_hand(tuple(group)) - full).double()
        assert wanted.abs().max() > 1e-3
        assert_close(torch.tensor(found.value.values[i]), wanted, torch.float32)
    assert found.left_out.values.sum(1).tolist() == [1, 2] and bool(found.left_out[1, 5])


def test_an_empty_group_changes_no_bit_of_the_model_and_no_number() -> None:
    found = leave_out(CONFIG, ROWS, QUERIES, [[], [1]], PLAN)
    assert bool((found.value[0] == 0).all()) and bool((found.value[1] != 0).all())
    data = (Unweighted(ROWS, ROWS), FixedRows(ROWS, ROWS))
    one, other = (train(CONFIG, each, PLAN).model.state_dict() for each in data)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("determined_only", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_weights_of_one_change_no_bit_of_the_loss_and_zeros_drop_rows(
    determined_only: bool, padded: bool
) -> None:
    model = Transformer(CONFIG)
    rows = ROWS
    if padded:
        keep = torch.ones_like(rows.batch.tokens, dtype=torch.bool)
        keep[1, 7:] = False
        assert rows.determined is not None
        rows = replace(rows, batch=replace(rows.batch, keep=keep), determined=rows.determined & keep[:, 1:])
    whole = mean_loss(model, rows, determined_only=determined_only)
    assert torch.equal(
        mean_loss(model, replace(rows, weight=torch.ones(6)), determined_only=determined_only), whole
    )
    weight = torch.tensor([1.0, 0, 1, 1, 0, 1])
    found = mean_loss(model, replace(rows, weight=weight), determined_only=determined_only)
    asked = rows.predicted(determined_only=determined_only)
    each = [
        mean_loss(model, rows.rows(torch.tensor([i])), determined_only=determined_only).item()
        for i in range(6)
    ]
    wanted = sum(each[i] * int(asked[i].sum()) for i in (0, 2, 3, 5)) / int(asked.sum())
    assert found.item() == pytest.approx(wanted, rel=1e-5)


def test_every_row_comes_once_per_epoch_whatever_is_left_out() -> None:
    data, without = FixedRows(ROWS, ROWS), FixedRows(ROWS, ROWS, without=(4,))
    seen = [data.batch(Place(3, step), 4) for step in range(6)]
    tokens = torch.cat([each.batch.tokens for each in seen])
    for epoch in range(4):
        rows = tokens[6 * epoch : 6 * epoch + 6]
        assert sorted(rows.tolist()) == sorted(ROWS.batch.tokens.tolist())
        assert rows.tolist() == ROWS.batch.tokens[order(3, epoch)].tolist()
    for step, whole in enumerate(seen):
        part = without.batch(Place(3, step), 4)
        assert torch.equal(part.batch.tokens, whole.batch.tokens)
        assert part.weight is not None
        assert torch.equal(part.weight == 0, (part.batch.tokens == ROWS.batch.tokens[4]).all(1))


def test_weights_that_rows_bring_are_kept() -> None:
    rows = replace(ROWS, weight=torch.arange(6) / 4)
    found = FixedRows(rows, ROWS, without=(5,)).batch(Place(3, 0), 6).weight
    assert found is not None
    assert found.tolist() == [0.0 if row == 5 else row / 4 for row in order(3, 0)]


def test_one_number_per_query_whatever_it_asks() -> None:
    model = Transformer(CONFIG).double()
    found = logits(model, QUERIES).detach()
    logp, tokens = found.log_softmax(-1), QUERIES.batch.tokens
    assert QUERIES.determined is not None
    for row in range(6):
        each = [-float(logp[row, i, tokens[row, i + 1]]) for i in range(9)]
        asked = [loss for loss, yes in zip(each, QUERIES.determined[row].tolist(), strict=True) if yes]
        assert float(QUERIES.measured(found)[row]) == pytest.approx(sum(each) / 9)
        assert float(QUERIES.measured(found, determined_only=True)[row]) == pytest.approx(
            sum(asked) / len(asked)
        )
    answer, wrong = torch.arange(6), torch.arange(1, 7)
    answered = Examples(QUERIES.batch.with_answers(answer, None))
    assert_close(answered.measured(found), -logp[:, -1].gather(1, answer[:, None])[:, 0])
    both = Examples(QUERIES.batch.with_answers(answer, wrong))
    wanted = found[:, -1].gather(1, answer[:, None]) - found[:, -1].gather(1, wrong[:, None])
    assert_close(both.measured(found), wanted[:, 0])
    assert (answered.unit, both.unit) == ("nats", "logits")


def test_a_study_goes_on_with_the_runs_that_it_has_and_is_refused_another(tmp_path: Path) -> None:
    folder = tmp_path / "study"
    whole = leave_out(CONFIG, ROWS, QUERIES, [[0], [1]], PLAN, out=folder)
    assert {path.name for path in folder.glob("[!.]*")} == {
        "leave_out.json",
        "all-rows.json",
        "0.json",
        "1.json",
    }
    kept = folder / "1.json"
    kept.unlink()
    mark = json.loads((folder / "0.json").read_text())
    mark["measured"][0] += 100.0
    (folder / "0.json").write_text(json.dumps(mark))
    again = leave_out(CONFIG, ROWS, QUERIES, [[0], [1]], PLAN, out=folder)
    assert bool((again.value[1] == whole.value[1]).all())
    assert float(again.value[0, 0] - whole.value[0, 0]) == pytest.approx(100.0)
    with pytest.raises(ValueError, match="groups"):
        leave_out(CONFIG, ROWS, QUERIES, [[0], [2]], PLAN, out=folder)
    for wrong in (float("nan"), 1e308):
        (folder / "0.json").write_text(json.dumps(mark | {"measured": [wrong, *mark["measured"][1:]]}))
        with pytest.raises(ValueError, match=r"0\.json must hold what \d+ queries measured without 0"):
            leave_out(CONFIG, ROWS, QUERIES, [[0], [1]], PLAN, out=folder)
    with pytest.raises(ValueError, match="queries"):
        leave_out(CONFIG, ROWS, ROWS, [[0], [1]], PLAN, out=folder)


@pytest.mark.slow
def test_several_processes_change_no_bit() -> None:
    one, two = (leave_out(CONFIG, ROWS, QUERIES, [[0], [1]], PLAN, processes=n) for n in (1, 2))
    assert one.identical(two)


def test_an_encoder_decoder_is_left_out_of_too() -> None:
    task = SequencePairs()
    rows, queries = (task.batch(Place(0, step), 3) for step in (0, 1))
    config = encoder_decoder(task.d_vocab, task.width, d_model=16, n_heads=2, n_layers=1)
    found = leave_out(config, rows, queries, [[], [0]], Training(steps=2, rows=2, warm_up=1))
    assert bool((found.value[0] == 0).all()) and bool((found.value[1] != 0).all())


def test_what_cannot_be_left_out_is_said() -> None:
    with pytest.raises(ValueError, match="0 to 5, got 6"):
        leave_out(CONFIG, ROWS, QUERIES, [[6]], PLAN)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        leave_out(CONFIG, ROWS, QUERIES, [[0]], PLAN, processes=0)
    packed = Examples(Batch.packed([[1, 2, 3], [4, 5]], 5))
    with pytest.raises(ValueError, match="packed"):
        leave_out(CONFIG, packed, QUERIES, [[0]], PLAN)
    nothing = Examples(QUERIES.batch, torch.zeros(6, 9, dtype=torch.bool))
    with pytest.raises(ValueError, match="token to predict"):
        nothing.measured(torch.zeros(6, 10, 12), determined_only=True)
    with pytest.raises(ValueError, match="one weight per row"):
        Examples(ROWS.batch, weight=torch.ones(2))
