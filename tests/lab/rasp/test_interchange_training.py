"""Trained equivalents of compiled models, and the measure of whether a part is the variables it stands for."""

from dataclasses import replace

import pytest
import torch

from experiments.board import TRAINED
from interp.lab.rasp import (
    PROGRAMS,
    Compiled,
    InterchangeTraining,
    compile,
    interchange_accuracy,
    interchange_trained,
    with_noise_heads,
)
from interp.model.edits import Edit, Set
from interp.model.tap import Read, Tap

SMALL = InterchangeTraining(d_model=32, d_head=8, d_mlp=16, steps=2, rows=8, pairs=64)


@pytest.mark.parametrize("name", ["shift", "two_hop", "sort", "addition", "backup", "histogram", "parity"])
def test_every_part_of_a_compiled_model_is_the_variables_that_it_computes(name: str) -> None:
    compiled = compile(PROGRAMS[name]())
    found = interchange_accuracy(compiled, 32)
    assert (found.value == 1).all() and (found.low < 1).all()
    computed = found.computes != ""
    assert set(found.part.values[computed.values]) == {
        w for w in compiled.writers.values() if ".resid" not in w
    }
    assert (found.null[computed] < 1).any() and (found.null[~computed] == 1).all()


def test_a_part_that_is_said_to_be_another_variable_is_found_out() -> None:
    compiled = compile(PROGRAMS["two_hop"]())
    swapped = {**compiled.writers, "once": compiled.writers["twice"], "twice": compiled.writers["once"]}
    found = interchange_accuracy(replace(compiled, writers=swapped), 64)
    assert (found.value.sel(part=[swapped["once"], swapped["twice"]]) < 0.5).all()
    assert found.value.sel(part=compiled.writers["before"]) == 1


def test_it_is_the_share_that_exchanging_row_by_row_gives() -> None:
    compiled = with_noise_heads(compile(PROGRAMS["two_hop"]()), 2, spill=0.4)
    found = interchange_accuracy(compiled, 40, seed=3)
    generator = torch.Generator().manual_seed(3)
    base, source = torch.randint(1, len(compiled.program.tokens.symbols) + 1, (2, 40, 4), generator=generator)
    for part in ("L1H0", "L1H1"):
        layer, head = int(part[1]), int(part[3])
        read, right = Read(f"blocks.{layer}.attn.hook_z"), 0
        for row, other in zip(base, source, strict=True):
            tap = Tap(reads=[read])
            compiled.model(torch.cat((torch.zeros(1, dtype=torch.int64), other))[None], tap)
            edit = Edit(part, Set(tap.values[read][:, :, head]))
            tokens = torch.cat((torch.zeros(1, dtype=torch.int64), row))[None]
            said = compiled.model(tokens, Tap(edits=[edit]))[0, 1:].argmax(-1).tolist()
            symbols = [[compiled.text.symbols[i] for i in each.tolist()] for each in (row, other)]
            given = {"once": compiled.program.trace(symbols[1])["once"]} if head == 0 else {}
            right += [compiled.text.symbols[i] for i in said] == list(
                map(str, compiled.evaluate(symbols[0], given))
            )
        assert float(found.value.sel(part=part)) == pytest.approx(right / 40)
    assert 0 < found.value.sel(part="L1H1") < 1


def answers_right(trained: Compiled) -> float:
    return 1 - trained.check(500).wrong


@pytest.mark.slow
def test_training_finds_the_program_and_every_part_of_it() -> None:
    compiled = compile(PROGRAMS["shift"]("ab", 3))
    before = interchange_trained(compiled, replace(SMALL, steps=1))
    after = interchange_trained(compiled, replace(SMALL, steps=400, rows=32))
    assert answers_right(before) < 0.5 and answers_right(after) == 1
    found = interchange_accuracy(after)
    assert (found.value > 0.98).all() and found.null.sel(part="L0H0") < 0.5
    assert after.edges == compiled.edges and not after.directions and not after.subspaces
    pairs = after.planted(8)
    assert (after.model(pairs.clean)[:, -1].argmax(-1) == pairs.answer).all()


def test_seed_decides_every_weight_and_the_global_random_state_is_left() -> None:
    compiled = compile(PROGRAMS["shift"]("ab", 3))
    state = torch.get_rng_state()
    one, same, other = (interchange_trained(compiled, replace(SMALL, seed=seed)).model for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    for a, b in zip(one.parameters(), same.parameters(), strict=True):
        assert torch.equal(a, b) and not a.requires_grad
    assert not torch.equal(one.embed.weight, other.embed.weight)
    assert one.config.n_heads == compiled.model.config.n_heads + 1 and not one.training


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="steps >= 1 is required, got 0"):
        InterchangeTraining(steps=0)
    with pytest.raises(ValueError, match="learning_rate between 0 and 1"):
        InterchangeTraining(learning_rate=2.0)
    with pytest.raises(ValueError, match="n >= 1"):
        interchange_accuracy(compile(PROGRAMS["shift"]()), 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TRAINED)[:1])
def test_trained_models_of_the_board_compute_their_program_by_its_parts(name: str) -> None:
    made = TRAINED[name](0, 16)
    assert (made.model(made.clean)[:, -1].argmax(-1) == made.answer).all()
    assert (made.model(made.corrupt)[:, -1].argmax(-1) == made.wrong).all()
