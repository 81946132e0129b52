"""What the papers' functions compute, against slow loops, closed forms and planted answers."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

import interp
from experiments.papers.effort import Effort
from experiments.papers.elhage_2021 import SYMBOLS, bigrams
from experiments.papers.elhage_2022 import best
from experiments.papers.geshkovski_2023 import start
from experiments.papers.geva_2021 import agreement, texts
from experiments.papers.gurnee_2023 import PLANTED, recall
from experiments.papers.katz_2024 import false_facts
from experiments.papers.nanda_2023 import KEYS, PRIME, along_cosines, fourier, sums
from experiments.papers.olsson_2022 import change
from experiments.papers.su_2021 import needle
from experiments.papers.ye_2024 import TASK, _attention
from interp.lab import Differential
from interp.model import ModelConfig, Rotary, Softmax, Transformer
from interp.model.records import Mixer
from interp.model.tap import Read
from interp.passes import observe
from interp.tasks import Place, fact_prompts


@pytest.fixture(scope="module")
def demo() -> interp.HookedTransformer:
    return interp.HookedTransformer.from_pretrained("demo-4l")


def test_bigrams_are_counted_as_in_a_loop() -> None:
    rows, counts = bigrams(0)
    pairs = Counter(pair for row in rows.batch.tokens.tolist() for pair in itertools.pairwise(row))
    assert [[counts[i, j].item() for j in range(SYMBOLS)] for i in range(SYMBOLS)] == [
        [pairs[i, j] for j in range(SYMBOLS)] for i in range(SYMBOLS)
    ]


@pytest.mark.parametrize("n", [16, 100, 5000])
def test_a_needle_has_its_closed_form(n: int) -> None:
    gap = math.log(16)
    assert needle(gap, n, scaled=True) == pytest.approx(n / (2 * n - 1))
    assert needle(gap, n, scaled=False) == pytest.approx(1 / (1 + (n - 1) / 16))


def test_the_closed_form_losses_of_two_features_are_those_of_their_weights() -> None:
    """Both solutions written down, on features drawn here."""
    p, r = 0.4, 0.7
    draw = torch.Generator().manual_seed(0)
    there = torch.rand(2_000_000, 2, generator=draw) < p
    x = torch.rand(2_000_000, 2, generator=draw) * there
    importance = torch.tensor([1.0, r])

    def loss(weights: list[float], bias: list[float]) -> float:
        w, b = torch.tensor([weights]), torch.tensor(bias)
        return float(((x - (x @ w.T @ w + b).relu()).square() * importance).sum(1).mean())

    assert loss([1.0, -1.0], [0.0, 0.0]) == pytest.approx(p**2 * (1 + r) / 6, rel=0.02)
    assert loss([1.0, 0.0], [0.0, p / 2]) == pytest.approx(r * (p / 3 - p**2 / 4), rel=0.02)


def test_dense_features_leave_out_the_less_important_one() -> None:
    weights, loss = best(1, torch.tensor([1.0]), torch.tensor([[1.0, 0.3]]), 400)
    assert float(weights[0, 0, 0].abs()) > 0.8 > 0.5 > float(weights[0, 0, 1].abs())
    assert float(loss) == pytest.approx(0.3 / 12, abs=0.006)


def test_fourier_basis_is_orthonormal_and_explains_cosine_logits_whole() -> None:
    basis = fourier().reshape(-1, PRIME)
    torch.testing.assert_close(basis @ basis.T, torch.eye(PRIME - 1, dtype=torch.float64))
    rows = sums()
    apart = (rows[:, :1] + rows[:, 1:2] - torch.arange(PRIME)).double()
    logits = sum((k + 1) * (2 * math.pi * k * apart / PRIME).cos() for k in range(1, KEYS + 1))
    assert isinstance(logits, torch.Tensor)
    waves = along_cosines(logits, rows)
    torch.testing.assert_close(waves[:KEYS].sum(0), logits)
    assert float(waves[KEYS:].abs().max()) < 1e-9


def test_the_steepest_change_is_found_in_its_own_direction() -> None:
    series = [0.0, 0.1, 0.9, 0.2, 0.3]
    assert (change(series, rises=True), change(series, rises=False)) == (1, 2)


def test_planted_neurons_are_found_by_mean_differences_only_with_a_shift() -> None:
    assert recall(0, 2.0) == 1.0
    assert recall(0, 0.0) <= 2 / PLANTED


def test_agreement_is_that_of_a_loop_over_neurons(demo: interp.HookedTransformer) -> None:
    batch = texts(demo, 12)
    found, chance = agreement(demo, batch, 3)
    read = interp.Read("blocks.3.mlp.hook_post")
    post = interp.observe(demo, batch, [read]).trace[read]
    for neuron in (0, 7, 100, 639):
        best, follows = -math.inf, -1
        for row in range(len(batch)):
            for pos in range(int(batch.lengths[row]) - 1):
                if float(post[row, pos, neuron]) > best:
                    best, follows = float(post[row, pos, neuron]), int(batch.tokens[row, pos + 1])
        says = interp.weights.directions(demo, demo.W_out[3, neuron], top=1).token_id.sel(end="top").item()
        assert bool(found[neuron]) == (says == follows)
    assert 0 <= chance < 1


def test_false_answers_are_of_the_same_kind_and_false(demo: interp.HookedTransformer) -> None:
    prompts, told = false_facts(demo, 20)
    known = {fact.prompt: fact for fact in fact_prompts()}
    of_kind: dict[str, set[int]] = {}
    for fact in known.values():
        of_kind.setdefault(fact.fact.relation, set()).add(demo.text.tokenizer.encode(fact.answer)[0])
    for prompt, answer in zip(prompts, told, strict=True):
        fact = known[prompt]
        assert answer != demo.text.tokenizer.encode(fact.answer)[0]
        assert answer in of_kind[fact.fact.relation]


def test_starts_are_on_the_sphere_and_on_one_side_if_asked() -> None:
    np.testing.assert_allclose(start(0).norm(dim=1), 1.0)
    assert float(start(1, hemisphere=True)[:, 0].min()) > 0


def test_effort_is_a_share_with_a_floor() -> None:
    assert (Effort(1.0).of(7), Effort(0.5).of(100), Effort(0.01).of(100), Effort(0.01).of(2)) == (7, 50, 3, 2)


@pytest.mark.parametrize("mixer", [Differential(), Softmax()])
def test_attention_on_the_answering_pair_is_that_of_a_loop_over_queries(mixer: Mixer) -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(2, 16, 2, TASK.width, TASK.d_vocab, position=Rotary(), mixer=mixer))
    rows = TASK.batch(Place(0, None), 64).batch.tokens
    reads = [Read(f"blocks.{layer}.attn.hook_pattern") for layer in range(2)]
    trace = observe(model, rows, reads).trace
    answer, others = [], []
    for read, head, (row, tokens) in itertools.product(reads, range(2), enumerate(rows.tolist())):
        for query in range(2 * TASK.pairs + 1, TASK.width, 2):
            sizes = trace[read][row, head, query].abs()
            share = (sizes / sizes.sum()).tolist()
            pairs = {tokens[k]: share[k] + share[k + 1] for k in range(1, 2 * TASK.pairs, 2)}
            answer.append(pairs.pop(tokens[query]))
            others.append(sum(pairs.values()))
    assert _attention(model) == pytest.approx((np.mean(answer), np.mean(others)), rel=1e-5)
