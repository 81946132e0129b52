"""Continuing prompts: greedy is an argmax loop, sampling draws from what it states, padding changes nothing."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from interp.engine.batch import Batch
from interp.engine.generate import Sampling, generate
from interp.model import Transformer
from tests.configs import N_CTX, build, some_tokens
from tests.tolerances import assert_close

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
    batch = generate(model, Batch(tokens), 10, stop_token=stop, use_cache=use_cache)
    keep = torch.ones_like(batch.tokens).bool() if batch.keep is None else batch.keep
    for i, row in enumerate(free.tokens.tolist()):
        new = row[5:]
        new = new[: new.index(stop) + 1] if stop in new else new
        assert batch.tokens[i][keep[i]].tolist() == row[:5] + new
        assert set(batch.tokens[i][~keep[i]].tolist()) <= {stop}
    assert not keep[0].all()


def test_generation_ends_when_every_row_has(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = build("gpt2"), some_tokens(rows=1, n=5)
    stop = int(generate(model, Batch(tokens), 3).tokens[0, -1])
    batch = generate(model, Batch(tokens), 15, stop_token=stop)
    assert batch.tokens.shape[1] <= 8
    assert int(batch.tokens[0, -1]) == stop
    assert batch.keep is None


def test_a_stop_token_in_the_prompt_ends_nothing() -> None:
    tokens = some_tokens(rows=1, n=5)
    batch = generate(build("gpt2"), Batch(tokens), 3, stop_token=int(tokens[0, 2]))
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


def test_a_negative_number_of_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="max_new_tokens >= 0 is required, got -3"):
        generate(build("gpt2"), Batch(some_tokens()), -3)


# --- sampling -----------------------------------------------------------------------------------------------------


def slow_probabilities(logits: list[float], sampling: Sampling) -> list[float]:
    """The rule of the docstring, one token at a time."""
    scaled = [x / sampling.temperature for x in logits]
    ranked = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    kept = ranked[: sampling.top_k or len(ranked)]
    total = sum(math.exp(scaled[i]) for i in kept)
    probs = {i: math.exp(scaled[i]) / total for i in kept}
    if sampling.top_p is not None:
        nucleus, mass = {}, 0.0
        for i in kept:
            if mass >= sampling.top_p:
                break
            nucleus[i], mass = probs[i], mass + probs[i]
        probs = {i: p / mass for i, p in nucleus.items()}
    return [probs.get(i, 0.0) for i in range(len(logits))]


@given(
    st.lists(st.integers(-40, 40), min_size=1, max_size=12, unique=True),
    st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    st.sampled_from([None, 1, 2, 5, 100]),
    st.sampled_from([None, 0.01, 0.5, 0.9, 1.0]),
)
def test_probabilities_equal_a_slow_loop(
    tenths: list[int], temperature: float, top_k: int | None, top_p: float | None
) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    logits = [t / 10 for t in tenths]
    got = sampling.probabilities(torch.tensor([logits], dtype=torch.float64))[0]
    assert_close(got, torch.tensor(slow_probabilities(logits, sampling), dtype=torch.float64))
    assert float(got.sum()) == pytest.approx(1)


def test_rows_do_not_touch_each_other() -> None:
    logits = torch.randn(5, 31, dtype=torch.float64)
    sampling = Sampling(0.8, top_k=9, top_p=0.7)
    alone = torch.cat([sampling.probabilities(row[None]) for row in logits])
    assert_close(sampling.probabilities(logits), alone)


@pytest.mark.parametrize(
    "sampling",
    [Sampling(seed=1), Sampling(0.5, seed=1), Sampling(top_k=3, seed=1), Sampling(2.0, top_p=0.6, seed=1)],
)
def test_tokens_are_drawn_with_their_probabilities(sampling: Sampling) -> None:
    """4 000 draws: a frequency is within four standard errors of its probability, and 0 where that is 0."""
    model, n = build("gpt2", torch.float32), 4000
    tokens = some_tokens(rows=1, n=4).expand(n, -1)
    drawn = generate(model, Batch(tokens), 1, sampling=sampling).tokens[:, -1]
    expected = sampling.probabilities(model(tokens[:1])[:, -1])[0]
    frequency = torch.bincount(drawn, minlength=len(expected)) / n
    assert not frequency[expected == 0].any()
    assert bool(((frequency - expected).abs() <= 4 * (expected * (1 - expected) / n).sqrt() + 1e-9).all())


def test_the_same_seed_gives_the_same_text_and_another_seed_another() -> None:
    model, batch = build("gpt2"), Batch(some_tokens())

    def text(seed: int) -> Tensor:
        return generate(model, batch, 6, sampling=Sampling(seed=seed)).tokens

    assert torch.equal(text(0), text(0))
    assert not torch.equal(text(0), text(1))


def test_without_a_seed_torchs_global_generator_decides() -> None:
    model, batch = build("gpt2"), Batch(some_tokens())
    texts = []
    for _ in range(2):
        torch.manual_seed(7)
        texts.append([generate(model, batch, 6, sampling=Sampling()).tokens for _ in range(2)])
    assert torch.equal(texts[0][0], texts[1][0])
    assert torch.equal(texts[0][1], texts[1][1])
    assert not torch.equal(texts[0][0], texts[0][1]), "two draws differ"


@CACHED
def test_keeping_one_token_is_greedy(use_cache: bool) -> None:
    model, batch = build("llama-gqa"), Batch(some_tokens())
    greedy = generate(model, batch, 3)
    for sampling in (Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(temperature=1e-4)):
        assert torch.equal(
            generate(model, batch, 3, sampling=sampling, use_cache=use_cache).tokens, greedy.tokens
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sampling(temperature=0.0), r"temperature > 0 is required \(greedy: no sampling\), got 0"),
        (lambda: Sampling(top_k=0), "top_k >= 1 is required, got 0"),
        (lambda: Sampling(top_p=0.0), r"top_p in \(0, 1\] is required, got 0"),
        (lambda: Sampling(top_p=1.5), "got 1.5"),
    ],
)
def test_settings_without_a_distribution_are_refused(make: Callable[[], Sampling], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
