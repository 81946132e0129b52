"""Continuing prompts: greedy is an argmax loop, rows end with a stop token, padding changes nothing."""

import pytest
import torch

from interp.data.batch import Batch
from interp.model import Transformer
from interp.passes.generate import generate
from tests.configs import D_VOCAB, N_CTX, build, some_tokens

CACHED = pytest.mark.parametrize("use_cache", [True, False])
RAGGED = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]


def argmax_loop(model: Transformer, row: list[int], n: int) -> list[int]:
    """One row, one token at a time, everything recomputed."""
    row = list(row)
    for _ in range(n):
        row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    return row


@pytest.mark.parametrize(
    "name", ["gpt2", "llama-gqa", "attention-only-rotary", "parallel", "window", "scale-by-layer"]
)
def test_greedy_is_the_argmax_loop_with_and_without_the_cache(name: str) -> None:
    model, tokens = build(name), some_tokens(rows=2, n=5)
    expected = [argmax_loop(model, row.tolist(), 5) for row in tokens]
    for use_cache in (True, False):
        got = generate(model, Batch(tokens), 5, use_cache=use_cache)
        assert got.keep is None
        assert got.tokens.tolist() == expected


@pytest.mark.parametrize(("name", "side"), [("gpt2", "left"), ("llama-gqa", "right"), ("window", "left")])
@CACHED
def test_a_padded_batch_gives_what_each_row_gives_alone(name: str, side: str, use_cache: bool) -> None:
    model = build(name)
    batch = generate(model, Batch.of(RAGGED, side=side), 4, use_cache=use_cache)
    assert batch.keep is not None
    for row, keep, prompt in zip(batch.tokens, batch.keep, RAGGED, strict=True):
        assert row[keep].tolist() == argmax_loop(model, prompt, 4)


# --- where it ends ------------------------------------------------------------------------------------------------


@CACHED
def test_a_row_ends_with_the_stop_token_and_is_padding_from_there(use_cache: bool) -> None:
    model, tokens = build("gpt2"), some_tokens(rows=4, n=5)
    free = generate(model, Batch(tokens), 10)
    stop = int(free.tokens[0, 7])
    batch = generate(model, Batch(tokens), 10, stop_tokens=[stop], use_cache=use_cache)
    keep = torch.ones_like(batch.tokens).bool() if batch.keep is None else batch.keep
    for i, row in enumerate(free.tokens.tolist()):
        new = row[5:]
        new = new[: new.index(stop) + 1] if stop in new else new
        assert batch.tokens[i][keep[i]].tolist() == row[:5] + new
        assert set(batch.tokens[i][~keep[i]].tolist()) <= {stop}
    assert not keep[0].all()


@CACHED
def test_each_row_ends_with_whichever_of_several_stop_tokens_it_meets_first(use_cache: bool) -> None:
    model, tokens = build("gpt2"), some_tokens(rows=4, n=5)
    free = generate(model, Batch(tokens), 10).tokens
    stops = {int(free[0, 7]), int(free[1, 6]), int(free[2, 9])}
    batch = generate(model, Batch(tokens), 10, stop_tokens=stops, use_cache=use_cache)
    assert batch.keep is not None
    ended = set()
    for got, keep, row in zip(batch.tokens, batch.keep, free.tolist(), strict=True):
        end = next((i for i in range(5, 15) if row[i] in stops), 14)
        assert got[keep].tolist() == row[: end + 1]
        assert set(got[~keep].tolist()) <= {row[end]}, "padded with the stop token that ended it"
        ended.add(row[end])
    assert len(ended) > 1, "rows end differently"


def test_generation_ends_when_every_row_has() -> None:
    model, tokens = build("gpt2"), some_tokens(rows=1, n=5)
    stop = int(generate(model, Batch(tokens), 3).tokens[0, -1])
    batch = generate(model, Batch(tokens), 15, stop_tokens=[stop])
    assert batch.tokens.shape[1] <= 8
    assert int(batch.tokens[0, -1]) == stop
    assert batch.keep is None


def test_a_stop_token_in_the_prompt_ends_nothing() -> None:
    tokens = some_tokens(rows=1, n=5)
    batch = generate(build("gpt2"), Batch(tokens), 3, stop_tokens=[int(tokens[0, 2])])
    assert batch.tokens.shape[1] > 5


def test_no_new_tokens_give_the_prompt() -> None:
    assert torch.equal(generate(build("gpt2"), Batch(some_tokens()), 0).tokens, some_tokens())


@pytest.mark.parametrize("n", [N_CTX - 8, N_CTX])
def test_what_does_not_fit_the_context_is_refused_before_anything_is_computed(n: int) -> None:
    with pytest.raises(
        ValueError, match=f"9 prompt tokens and {n} new ones do not fit the context of {N_CTX}"
    ):
        generate(build("gpt2"), Batch(some_tokens()), n)
    assert generate(build("gpt2"), Batch(some_tokens()), N_CTX - 9).tokens.shape == (3, N_CTX)


@pytest.mark.parametrize("stop", [-1, D_VOCAB])
def test_a_stop_token_outside_the_vocabulary_is_refused(stop: int) -> None:
    with pytest.raises(ValueError, match=rf"stop tokens must be in \[0, {D_VOCAB - 1}\], got {stop}"):
        generate(build("gpt2"), Batch(some_tokens()), 3, stop_tokens=[1, stop])


def test_a_negative_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="max_new_tokens >= 0 is required, got -3"):
        generate(build("gpt2"), Batch(some_tokens()), -3)
