"""Choosing the next token: the rules equal slow loops and transformers' own, and draws follow what they state."""

import math
import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from interp import HookedTransformer
from interp.data.batch import Batch
from interp.passes.generate import generate
from interp.passes.sampling import Choice, Sampling, inverse_draw, penalised, present
from tests.configs import D_VOCAB, build, some_tokens
from tests.families import oracle
from tests.loops import over
from tests.tolerances import assert_close

CACHED = over("use_cache", [True, False])


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


@over("dtype", [torch.float64, torch.float32, torch.bfloat16])
@over("size", [1e-300, 5e-324, 1e-45, 1e-39, 1e-20])
@over("what", ["top_p", "temperature", "both"])
def test_the_smallest_limits_keep_the_most_probable_token(dtype: torch.dtype, size: float, what: str) -> None:
    """The dtype rounds some of these to 0."""
    limits = {name: size for name in ("top_p", "temperature") if what in (name, "both")}
    logits = torch.tensor([[1.0, 30.0, -20.0, 29.0], [-torch.inf, -1e4, -2e4, -torch.inf]], dtype=dtype)
    found = Sampling(**limits).probabilities(logits)  # type: ignore[arg-type]
    assert found.tolist() == [[0, 1, 0, 0], [0, 1, 0, 0]]


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


def test_a_seeded_row_is_drawn_alike_whatever_rows_are_beside_it() -> None:
    model, tokens = build("gpt2"), some_tokens(4, 5)
    batch, sampling = Batch(tokens).numbered(), Sampling(1.5, seed=3)
    together = generate(model, batch, 6, sampling=sampling).tokens
    order = torch.tensor([3, 1])
    assert torch.equal(generate(model, batch.rows(order), 6, sampling=sampling).tokens, together[order])
    for part, expected in zip(batch.split(1), together, strict=True):
        assert torch.equal(generate(model, part, 6, sampling=sampling).tokens[0], expected)
    same = batch.rows(
        torch.tensor([0, 0, 0])
    )  # one prompt three times: three samples, of which the first is its own
    drawn = generate(model, same, 6, sampling=sampling).tokens
    assert torch.equal(drawn[0], together[0]) and len({tuple(row) for row in drawn.tolist()}) == 3


def test_a_number_draws_the_token_at_which_the_sum_passes_it() -> None:
    probabilities = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]] * 5)
    uniform = torch.tensor([0.0, 0.2499, 0.25, 0.9999999, 1.0], dtype=torch.float64)
    assert inverse_draw(probabilities, uniform).tolist() == [1, 1, 3, 3, 3]


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
        (
            lambda: Sampling(temperature=0.0),
            r"temperature must be a number above 0 \(greedy: no sampling\), got 0",
        ),
        (lambda: Sampling(top_k=0), "top_k >= 1 is required, got 0"),
        (lambda: Sampling(top_p=0.0), r"top_p in \(0, 1\] is required, got 0"),
        (lambda: Sampling(top_p=1.5), "got 1.5"),
    ],
)
def test_settings_without_a_distribution_are_refused(make: Callable[[], Sampling], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# --- repetition penalty -------------------------------------------------------------------------------------------


def theirs(sampling: Sampling, penalty: float) -> LogitsProcessorList:
    """The same settings in transformers, in the order in which it applies them."""
    steps: list[LogitsProcessor] = [
        RepetitionPenaltyLogitsProcessor(penalty),
        TemperatureLogitsWarper(sampling.temperature),
    ]
    if sampling.top_k is not None:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        steps.append(TopPLogitsWarper(sampling.top_p))
    return LogitsProcessorList(steps)


@over("penalty", [0.5, 1.0, 1.3, 4.0])
@over(
    "sampling",
    [Sampling(), Sampling(0.6), Sampling(2.0, 7), Sampling(0.9, None, 0.8), Sampling(1.5, 12, 0.6)],
)
def test_penalty_temperature_top_k_and_top_p_equal_transformers(sampling: Sampling, penalty: float) -> None:
    tokens, logits = some_tokens(rows=6, n=11), 3 * torch.randn(6, D_VOCAB, dtype=torch.float64)
    mine = sampling.probabilities(penalised(logits, present(Batch(tokens), D_VOCAB), penalty))
    assert_close(mine, theirs(sampling, penalty)(tokens, logits).softmax(-1))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@over("penalty", [0.7, 1.2, 3.0])
@CACHED
def test_greedy_generation_with_a_penalty_gives_hugging_faces_tokens(
    name: str, penalty: float, use_cache: bool
) -> None:
    hf, tokens = oracle.hf_model(name, torch.float64, "sdpa"), oracle.some_tokens(n=6)
    expected = hf.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False, eos_token_id=None,
        pad_token_id=0, repetition_penalty=penalty,
    )  # fmt: skip
    model = HookedTransformer.from_pretrained(hf).transformer
    got = generate(model, Batch(tokens), 12, repetition_penalty=penalty, use_cache=use_cache)
    assert torch.equal(got.tokens, expected)
    assert not torch.equal(got.tokens, generate(model, Batch(tokens), 12).tokens), (
        "the penalty changes something"
    )


def test_the_model_interface_takes_the_penalty() -> None:
    model, tokens = HookedTransformer(build("gpt2")), some_tokens()
    expected = generate(model.transformer, Batch(tokens), 8, repetition_penalty=2.0).tokens
    assert torch.equal(model.generate(tokens, 8, repetition_penalty=2.0).tokens, expected)


def test_a_prohibitive_penalty_repeats_nothing_until_every_token_is_used() -> None:
    """Shifted so that all logits are positive, a huge penalty puts every token of the row behind all others."""
    choice = Choice(Batch(torch.tensor([[5]])), 9, sampling=None, repetition_penalty=1e3)
    drawn = [int(choice.draw(torch.arange(1.0, 10.0)[None])) for _ in range(8)]
    assert drawn == [8, 7, 6, 4, 3, 2, 1, 0]


def test_padding_is_not_penalised() -> None:
    tokens = torch.tensor([[0, 0, 7, 3], [1, 0, 3, 3]])
    keep = torch.tensor([[False, False, True, True], [True, True, True, True]])
    held = [set(row.nonzero()[:, 0].tolist()) for row in present(Batch(tokens, keep), 9)]
    assert held == [{3, 7}, {0, 1, 3}]
    model, rows = build("gpt2"), [[3, 1, 4], [9], [6, 5, 3, 5, 8]]
    batch = generate(model, Batch.of(rows), 8, repetition_penalty=1.5)
    assert batch.keep is not None
    for row, got, kept in zip(rows, batch.tokens, batch.keep, strict=True):
        alone = generate(model, Batch(torch.tensor([row])), 8, repetition_penalty=1.5)
        assert got[kept].tolist() == alone.tokens[0].tolist()


def test_the_penalty_comes_before_sampling() -> None:
    """With one token kept, sampling is greedy on the penalised logits, whatever the temperature."""
    model, batch = build("llama-gqa"), Batch(some_tokens())
    greedy = generate(model, batch, 6, repetition_penalty=2.0)
    sampled = generate(model, batch, 6, repetition_penalty=2.0, sampling=Sampling(5.0, top_k=1))
    assert torch.equal(greedy.tokens, sampled.tokens)


@pytest.mark.parametrize("penalty", [0.0, -1.2, math.nan, math.inf, 1e-300, 1e300])
def test_a_penalty_that_is_not_positive_or_makes_logits_infinite_is_refused(penalty: float) -> None:
    words = re.escape(f"repetition_penalty in [0.001, 1000] is required (1: none), got {penalty}")
    with pytest.raises(ValueError, match=words):
        generate(build("gpt2"), Batch(some_tokens()), 3, repetition_penalty=penalty)
