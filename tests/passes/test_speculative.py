"""Speculative decoding has the large model's distribution: every way that its draws can fall is enumerated."""

import functools
import itertools
from collections import defaultdict
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch import Tensor

from interp import HookedTransformer
from interp.data.batch import Batch
from interp.lab import Linear
from interp.model import MLP, ModelConfig, Rotary, Transformer
from interp.passes.generate import generate
from interp.passes.sampling import Sampling
from interp.passes.speculative import continued_row, speculate
from tests.configs import build, perturbed, some_tokens
from tests.loops import over

V = 3
LARGE = ModelConfig(2, 12, 3, 16, V, position=Rotary(), mlp=MLP(16), logit_scale=0.8)
SMALL = ModelConfig(1, 8, 2, 16, V, position=Rotary(), logit_scale=0.5)
PROMPT = torch.tensor([1, 0, 2, 2])
SAMPLINGS = {
    "as it is": Sampling(), "warm": Sampling(temperature=1.7), "top-k": Sampling(top_k=2), "top-p": Sampling(top_p=0.7)
}  # fmt: skip


@functools.cache
def models() -> tuple[Transformer, Transformer]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return perturbed(LARGE, seed=1), perturbed(SMALL, seed=2)


@dataclass
class Scripted:
    """Draws that fall as a script says, then as the first thing that can happen; what else could is remembered."""

    script: list[int]
    probability: float = 1.0
    taken: list[int] = field(default_factory=list)
    others: list[list[int]] = field(default_factory=list)

    def choose(self, probabilities: list[float]) -> int:
        possible = [i for i, p in enumerate(probabilities) if p > 0]
        place = len(self.taken)
        if place < len(self.script):
            found = self.script[place]
        else:
            found, *rest = possible
            self.others += [[*self.taken, other] for other in rest]
        self.taken.append(found)
        self.probability *= probabilities[found]
        return found

    def token(self, probabilities: Tensor) -> int:
        return self.choose(probabilities.tolist())

    def accepts(self, probability: float) -> bool:
        return self.choose([1 - probability, probability]) == 1


def enumerated(
    large: Transformer, small: Transformer, n: int, lookahead: int, sampling: Sampling, stops: set[int]
) -> tuple[dict[tuple[int, ...], float], float, float]:
    """The exact distribution of what is added; the expected numbers of guesses taken, and of guesses."""
    found: dict[tuple[int, ...], float] = defaultdict(float)
    taken = guessed = 0.0
    todo: list[list[int]] = [[]]
    while todo:
        draws = Scripted(todo.pop())
        tokens, (drafted, accepted, _) = continued_row(
            large, small, PROMPT, n, lookahead, sampling, stops, draws
        )
        found[tuple(tokens[len(PROMPT) :])] += draws.probability
        taken, guessed = taken + draws.probability * accepted, guessed + draws.probability * drafted
        todo += draws.others
    return dict(found), taken, guessed


def ancestral(
    model: Transformer, n: int, sampling: Sampling, stops: set[int]
) -> dict[tuple[int, ...], float]:
    """The distribution of the large model alone, by one full pass for every beginning."""
    done, open_ = {}, {(): 1.0}
    for _ in range(n):
        grown: dict[tuple[int, ...], float] = {}
        for new, p in open_.items():
            row = torch.tensor([[*PROMPT.tolist(), *new]])
            each = sampling.probabilities(model(row)[:, -1])[0].tolist()
            grown |= {(*new, token): p * q for token, q in enumerate(each) if q > 0}
        done |= {new: p for new, p in grown.items() if new[-1] in stops}
        open_ = {new: p for new, p in grown.items() if new[-1] not in stops}
    return done | open_


def variation(one: dict[tuple[int, ...], float], other: dict[tuple[int, ...], float]) -> float:
    """Total variation distance."""
    return 0.5 * sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other})


@pytest.mark.slow
@over("stops", [set(), {0}])
@over("lookahead", [1, 2, 3])
@over("name", SAMPLINGS)
def test_what_comes_out_has_exactly_the_large_models_distribution(
    name: str, lookahead: int, stops: set[int]
) -> None:
    large, small = models()
    found, _, _ = enumerated(large, small, 3, lookahead, SAMPLINGS[name], stops)
    wanted = ancestral(large, 3, SAMPLINGS[name], stops)
    assert sum(found.values()) == pytest.approx(1.0, abs=1e-12)
    assert variation(found, wanted) < 1e-12
    assert variation(wanted, ancestral(small, 3, SAMPLINGS[name], stops)) > 0.05, "the models differ"


def test_a_rule_that_takes_every_guess_has_another_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail: by as much as the models differ, if guesses are not judged."""
    large, small = models()
    monkeypatch.setattr(Scripted, "accepts", lambda self, probability: True)
    found, _, _ = enumerated(large, small, 3, 2, Sampling(), set())
    assert variation(found, ancestral(large, 3, Sampling(), set())) > 0.02


def test_the_share_of_guesses_taken_is_the_overlap_of_the_distributions() -> None:
    large, small = models()
    p, q = (Sampling().probabilities(each(PROMPT[None])[:, -1])[0] for each in (large, small))
    _, taken, guessed = enumerated(large, small, 2, 1, Sampling(), set())
    assert guessed == pytest.approx(1.0)
    assert taken == pytest.approx(float(torch.minimum(p, q).sum()))


@pytest.mark.slow
def test_random_draws_have_the_distribution_too() -> None:
    """Pearson's chi-square over the nine pairs of tokens, 1500 texts: 26.1 is exceeded once in 1000 (8 degrees)."""
    large, small = models()
    n, wanted = 1500, ancestral(large, 2, Sampling(), set())
    rows = PROMPT.expand(n, -1)
    found = speculate(
        HookedTransformer(large), HookedTransformer(small), rows, 2, lookahead=2, sampling=Sampling(seed=5)
    )
    new = found.batch.tokens[:, -2:].tolist()
    chi = sum((new.count(list(key)) - n * p) ** 2 / (n * p) for key, p in wanted.items())
    assert len(wanted) == 9 and chi < 26.12


@over("lookahead", [1, 3, 5])
def test_without_sampling_it_is_greedy_decoding(lookahead: int) -> None:
    large, small = build("gpt2"), build("llama-gqa")
    rows = Batch.of([[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8]])
    found = speculate(HookedTransformer(large), HookedTransformer(small), rows, 8, lookahead=lookahead)
    wanted = generate(large, rows, 8)
    for i in range(3):
        assert (
            found.batch.tokens[i][found.batch.real[i]].tolist() == wanted.tokens[i][wanted.real[i]].tolist()
        )
    stop = int(wanted.tokens[0, -3])
    stopped = speculate(
        HookedTransformer(large), HookedTransformer(small), rows, 8, lookahead=lookahead, stop_tokens=[stop]
    )
    ended = generate(large, rows, 8, stop_tokens=[stop])
    for i in range(3):
        assert (
            stopped.batch.tokens[i][stopped.batch.real[i]].tolist() == ended.tokens[i][ended.real[i]].tolist()
        )


def test_a_model_takes_all_of_its_own_guesses_and_saves_passes() -> None:
    model, rows = HookedTransformer(build("gpt2")), some_tokens(2, 5)
    found = speculate(model, model, rows, 8, lookahead=3, sampling=Sampling(seed=1))
    assert torch.equal(found.drafted, found.accepted)
    assert found.passes.tolist() == [2, 2], "8 tokens, 4 in each pass"


def test_a_seed_decides_the_tokens() -> None:
    large, small = (HookedTransformer(each) for each in models())
    one, two, three = (
        speculate(large, small, PROMPT[None], 8, sampling=Sampling(seed=seed)).batch.tokens
        for seed in (1, 1, 2)
    )
    assert torch.equal(one, two) and not torch.equal(one, three)


def test_what_cannot_be_taken_back_or_compared_is_refused() -> None:
    large, small = (HookedTransformer(each) for each in models())
    linear = HookedTransformer(perturbed(replace(SMALL, mixer=Linear())))
    other = HookedTransformer(perturbed(replace(SMALL, d_vocab=V + 1)))
    for draft, options, message in (
        (linear, {}, "models without a state of the past"),
        (other, {}, "two models of one vocabulary are required, got 3 and 4 tokens"),
        (small, {"lookahead": 0}, "lookahead >= 1 is required, got 0"),
        (small, {"max_new_tokens": 13}, "do not fit the context of 16"),
    ):
        with pytest.raises(ValueError, match=message):
            speculate(large, draft, PROMPT[None], **options)  # type: ignore[arg-type]


def test_every_pair_of_two_tokens_is_reached() -> None:
    large, small = models()
    found, _, _ = enumerated(large, small, 2, 2, Sampling(), set())
    assert set(found) == set(itertools.product(range(V), repeat=2))
