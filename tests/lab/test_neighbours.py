"""kNN-LM against its formula by loops, and against closed forms of stores that are known."""

import math

import pytest
import torch
from torch import Tensor

from interp.lab import Datastore
from interp.model import Transformer
from tests.configs import build, some_tokens
from tests.loops import over
from tests.tolerances import assert_close

MODEL = build("gpt2")
TOKENS = some_tokens(3, 8)
STORE = Datastore.of(MODEL, TOKENS)
ASKED = some_tokens(2, 5) % 7


def final(model: Transformer, tokens: Tensor) -> Tensor:
    return model(tokens, stop=model.config.n_layers)


def test_every_token_that_another_follows_is_a_key() -> None:
    assert len(STORE) == 3 * 7
    assert repr(STORE) == "Datastore(21 contexts, 24 wide)"
    one = final(MODEL, TOKENS[1:2, :4])[0, -1]
    place = 7 + 3
    assert_close(STORE.keys[place], one)
    assert STORE.following[place] == TOKENS[1, 4]


def test_padding_is_no_context_and_follows_nothing() -> None:
    keep = torch.arange(8)[None] < torch.tensor([[8], [5], [1]])
    store = Datastore.of(MODEL, TOKENS, keep=keep)
    assert store.following.tolist() == TOKENS[0, 1:].tolist() + TOKENS[1, 1:5].tolist()


@over("k", [1, 3, 21, 50])
@over("temperature", [0.5, 20.0])
def test_neighbours_are_the_formula_by_loops(k: int, temperature: float) -> None:
    """Equation 2 for one context, one neighbour and one token at a time."""
    states = final(MODEL, ASKED)
    found = STORE.log_probs(states, 31, k=k, temperature=temperature).exp()
    for b in range(2):
        for i in range(5):
            distances = [float((states[b, i] - key).square().sum()) for key in STORE.keys]
            nearest = sorted(range(21), key=distances.__getitem__)[:k]
            weights = [math.exp(-(distances[j] - min(distances)) / temperature) for j in nearest]
            expected = torch.zeros(31, dtype=torch.float64)
            for j, weight in zip(nearest, weights, strict=True):
                expected[STORE.following[j]] += weight / sum(weights)
            assert_close(found[b, i], expected)


@over("share", [0.0, 0.3, 1.0])
def test_the_mixture_is_the_sum_of_both_probabilities(share: float) -> None:
    mixed = STORE.interpolated(MODEL, ASKED, share=share, k=4)
    near = STORE.log_probs(final(MODEL, ASKED), 31, k=4).exp()
    own = MODEL(ASKED).softmax(-1)
    assert_close(mixed.exp(), share * near + (1 - share) * own)
    assert_close(mixed.exp().sum(-1), torch.ones(2, 5, dtype=torch.float64))


def test_a_context_that_is_stored_is_its_own_nearest() -> None:
    """At distance 0 with one neighbour what follows is certain, if no other context has that state."""
    found = STORE.log_probs(final(MODEL, TOKENS), 31, k=1)[:, :-1]
    assert torch.equal(found.argmax(-1), TOKENS[:, 1:])
    assert (found.amax(-1) == 0).all()


def test_a_high_temperature_counts_what_follows() -> None:
    """All contexts weigh the same: the frequencies of the tokens in the store."""
    found = STORE.log_probs(final(MODEL, ASKED), 31, k=1000, temperature=1e12).exp()
    frequencies = torch.bincount(STORE.following, minlength=31).double() / 21
    assert_close(found, frequencies.expand(2, 5, 31))


def test_gradients_pass_the_weights() -> None:
    """By central differences of one coordinate, where no neighbour changes."""
    states = final(MODEL, ASKED).requires_grad_()
    token = int(STORE.log_probs(states, 31, k=6, temperature=9.0)[0, 0].argmax())

    def value(x: Tensor) -> Tensor:
        return STORE.log_probs(x, 31, k=6, temperature=9.0)[0, 0, token]

    (gradient,) = torch.autograd.grad(value(states), states)
    step = torch.zeros_like(states)
    step[0, 0, 2] = 1e-5
    slope = (value(states + step) - value(states - step)) / 2e-5
    torch.testing.assert_close(gradient[0, 0, 2], slope, rtol=1e-6, atol=1e-9)
    assert gradient[0, 0, 2] != 0


def test_a_search_in_parts_is_the_search_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    states = final(MODEL, ASKED)
    whole = STORE.log_probs(states, 31, k=3)
    monkeypatch.setattr("interp.lab.neighbours.AT_ONCE", 50)
    assert torch.equal(STORE.log_probs(states, 31, k=3), whole)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="the token after each, got 0 keys and 0 tokens"):
        Datastore.of(MODEL, TOKENS[:, :1])
    with pytest.raises(ValueError, match="the token after each, got 2 keys and 3 tokens"):
        Datastore(torch.zeros(2, 4), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="states 24 wide are required, got 3"):
        STORE.log_probs(torch.zeros(1, 1, 3, dtype=torch.float64), 31)
    with pytest.raises(ValueError, match="stored tokens below d_vocab = 5 are required"):
        STORE.log_probs(final(MODEL, ASKED), 5)
    with pytest.raises(ValueError, match="requires finite keys and tokens of 0 or more"):
        Datastore(torch.full((1, 4), torch.nan), torch.tensor([1]))
    with pytest.raises(ValueError, match="requires finite keys and tokens of 0 or more"):
        Datastore(torch.zeros(1, 4), torch.tensor([-1]))


def test_the_nearest_are_found_where_all_states_have_a_large_part_in_common() -> None:
    """Squares of 3000 cancel in a product of float32; differences do not."""
    generator = torch.Generator().manual_seed(0)
    keys, asked = (torch.randn(n, 24, generator=generator) for n in (120, 60))
    moved = torch.tensor([3000.0])
    store = Datastore(keys + moved, torch.arange(120))
    found = store.log_probs((asked + moved)[None], 120, k=1)[0].argmax(-1)
    direct = ((asked + moved)[:, None] - (keys + moved)).square().sum(-1).argmin(1)
    assert torch.equal(found, direct)


def test_a_store_of_another_dtype_is_asked_in_its_own() -> None:
    narrow = Datastore.of(build("gpt2", torch.float32), TOKENS)
    found, wide = narrow.interpolated(MODEL, ASKED), STORE.interpolated(MODEL, ASKED)
    torch.testing.assert_close(found, wide, atol=1e-4, rtol=1e-4)
