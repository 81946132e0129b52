"""Beam search against the list of all continuations, a slow loop without a cache, and Hugging Face's."""

import functools
import itertools
import math
from dataclasses import replace

import pytest
import torch

from interp.data.batch import Batch
from interp.edits import Zero
from interp.model import ModelConfig, Rotary, Transformer
from interp.model.tap import Edit
from interp.passes.beam import beam_search
from interp.passes.generate import generate
from tests.configs import build, perturbed, some_tokens
from tests.loops import over
from tests.mixers import CAUSAL_MIXERS, build_mixed
from tests.tolerances import assert_close

V, STOP = 5, 0
TINY = ModelConfig(2, 12, 3, 16, V, position=Rotary(), logit_scale=0.7)
PROMPT = [[3, 1, 4]]


@functools.cache
def tiny() -> Transformer:
    return perturbed(TINY)


def penalty(length: int, alpha: float) -> float:
    return ((5 + length) / 6) ** alpha


def probability(model: Transformer, row: list[int], new: tuple[int, ...]) -> float:
    """log p of a continuation, by one full pass."""
    found = model(torch.tensor([[*row, *new]]))[0].log_softmax(-1)
    return sum(float(found[len(row) - 1 + i, token]) for i, token in enumerate(new))


def every(n: int) -> list[tuple[int, ...]]:
    """Every continuation of at most n tokens that ends where it first stops, or is n long."""
    return [
        new
        for length in range(1, n + 1)
        for new in itertools.product(range(V), repeat=length)
        if STOP not in new[:-1] and (new[-1] == STOP or length == n)
    ]


def slow(
    model: Transformer, row: list[int], n: int, k: int, alpha: float, stops: set[int]
) -> list[tuple[float, tuple[int, ...]]]:
    """The search with lists, one full pass for every beam and step, without an early end."""
    alive: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    ended: list[tuple[float, tuple[int, ...]]] = []
    for step in range(1, n + 1):
        grown = []
        for log_p, new in alive:
            found = model(torch.tensor([[*row, *new]]))[0, -1].log_softmax(-1)
            grown += [(log_p + float(each), (*new, token)) for token, each in enumerate(found)]
        grown.sort(key=lambda one: -one[0])
        ended += [(p / penalty(step, alpha), new) for p, new in grown[:k] if new[-1] in stops]
        alive = [(p, new) for p, new in grown if new[-1] not in stops][:k]
    ended += [(p / penalty(n, alpha), new) for p, new in alive]
    return sorted(ended, key=lambda one: -one[0])[:k]


@over("alpha", [0.0, 0.6, 3.0])
def test_a_search_that_is_wide_enough_finds_the_best_of_all_continuations(alpha: float) -> None:
    n = 3
    found = beam_search(
        tiny(), Batch(torch.tensor(PROMPT)), n, beams=V**n, length_penalty=alpha, stop_tokens=[STOP]
    )
    scored = sorted(
        ((probability(tiny(), PROMPT[0], new) / penalty(len(new), alpha), new) for new in every(n)),
        reverse=True,
    )
    assert found.tokens.shape[1] == len(scored)
    for i, (score, new) in enumerate(scored):
        assert tuple(found.tokens[0, i, : found.lengths[0, i]].tolist()) == new
        assert float(found.scores[0, i]) == pytest.approx(score)
        assert float(found.log_probs[0, i]) == pytest.approx(score * penalty(len(new), alpha))


def test_a_longer_continuation_wins_as_the_penalty_grows() -> None:
    batch = Batch(torch.tensor(PROMPT))
    found = [
        beam_search(tiny(), batch, 6, beams=20, length_penalty=alpha, stop_tokens=[0, 1])
        for alpha in (0.0, 0.6, 2.0, 6.0)
    ]
    best = [int(each.lengths[0, 0]) for each in found]
    assert best == sorted(best) and best[0] < best[-1]


@over("use_cache", [True, False])
@over("k", [1, 2, 3, 5])
def test_a_narrow_search_is_the_slow_one_row_by_row_whatever_the_padding(k: int, use_cache: bool) -> None:
    rows = [[3, 1, 4], [2], [4, 4, 1, 2, 3]]
    found = beam_search(tiny(), Batch.of(rows), 7, beams=k, stop_tokens=[0, 2], use_cache=use_cache)
    for i, row in enumerate(rows):
        for rank, (score, new) in enumerate(slow(tiny(), row, 7, k, 0.6, {0, 2})):
            assert tuple(found.tokens[i, rank, : found.lengths[i, rank]].tolist()) == new
            assert float(found.scores[i, rank]) == pytest.approx(score)
    best = found.best
    for i, row in enumerate(rows):
        kept = best.tokens[i] if best.keep is None else best.tokens[i][best.keep[i]]
        assert kept.tolist() == [*row, *slow(tiny(), row, 7, k, 0.6, {0, 2})[0][1]]


def test_one_beam_is_greedy() -> None:
    tokens = some_tokens(3, 5)
    found = beam_search(build("gpt2"), Batch(tokens), 6, beams=1)
    assert torch.equal(found.best.tokens, generate(build("gpt2"), Batch(tokens), 6).tokens)


@pytest.mark.slow
@over("name", CAUSAL_MIXERS)
def test_states_go_with_their_beams_under_every_mixer(name: str) -> None:
    model, batch = build_mixed(name), Batch.of([[3, 1, 4, 1, 5], [9, 2]])
    cached, plain = (beam_search(model, batch, 5, beams=3, use_cache=cache) for cache in (True, False))
    assert torch.equal(cached.tokens, plain.tokens)
    assert_close(cached.log_probs, plain.log_probs)


def test_edits_act_at_every_step() -> None:
    model, edit = build("gpt2"), Edit("blocks.1.attn.hook_z", Zero())
    found = beam_search(model, Batch(some_tokens(2, 5)), 5, beams=3, edits=[edit])
    other = beam_search(model.edited(edit), Batch(some_tokens(2, 5)), 5, beams=3)
    assert torch.equal(found.tokens, other.tokens)
    assert not torch.equal(
        found.log_probs, beam_search(model, Batch(some_tokens(2, 5)), 5, beams=3).log_probs
    )


def test_what_makes_no_sense_is_refused() -> None:
    batch = Batch(torch.tensor(PROMPT))
    for given, message in (
        ({"beams": 0}, "1 to 1048576 beams are required, got 0"),
        ({"beams": 10**18}, "1 to 1048576 beams are required"),
        ({"length_penalty": -1.0}, "a finite length_penalty >= 0 is required, got -1.0"),
        ({"length_penalty": math.inf}, "a finite length_penalty"),
        ({"edits": [Edit("blocks.0.attn.hook_z", Zero(), rows=(0,))]}, "edits of all rows"),
        ({"stop_tokens": [V]}, r"stop_tokens must be in \[0, 4\], got 5"),
    ):
        with pytest.raises(ValueError, match=message):
            beam_search(tiny(), batch, 3, **given)  # type: ignore[arg-type]
    for n, message in ((0, "max_new_tokens >= 1 is required"), (14, "do not fit the context of 16")):
        with pytest.raises(ValueError, match=message):
            beam_search(tiny(), batch, n)
    with pytest.raises(IndexError, match="continuations of ranks 0 to 1 were kept, got 2"):
        beam_search(tiny(), batch, 3, beams=2).ranked(2)
    broken = perturbed(replace(TINY, n_layers=1))
    broken.embed.weight[1] = torch.nan
    with pytest.raises(ValueError, match="a beam search requires finite logits"):
        beam_search(broken, batch, 3)
