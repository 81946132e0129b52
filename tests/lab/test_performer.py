"""Positive random features: against the loop, and against softmax attention by the variance that they must have."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Tensor

from interp.lab import Performer
from interp.lab.performer import PerformerMixer, orthogonal_directions
from interp.model import ModelConfig, Read, Softmax, Tap, Transformer
from tests.configs import perturbed, some_tokens
from tests.loops import over
from tests.mixers import MIXERS, build_mixed
from tests.tolerances import assert_close

CONFIG: ModelConfig = replace(MIXERS["performer"], n_layers=1)
SITES = {name: Read(f"blocks.0.attn.hook_{name}") for name in ("q", "k", "v", "pattern", "z")}
DRAWS = 400
LONGEST = 0.8
"""Length of the scaled queries and keys whose estimates are compared: a variance of a weight of a few squares."""


def seen(model: Transformer, tokens: Tensor, *names: str) -> dict[str, Tensor]:
    tap = Tap([SITES[name] for name in names])
    model(tokens, tap)
    return {name: tap.values[SITES[name]] for name in names}


def mixer_of(config: ModelConfig, drawn: int | None = None) -> PerformerMixer:
    """The mixer of layer 0 in double precision, its directions drawn by a seed."""
    if drawn is not None:
        torch.manual_seed(drawn)
    mixer = Transformer(config).double().block(0).attn
    assert isinstance(mixer, PerformerMixer)
    return mixer


def short_vectors(n: int, width: int) -> Tensor:
    x = torch.randn(1, n, 1, width, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    return x * LONGEST * width**0.25 / x.norm(dim=-1, keepdim=True)


def kernel(mixer: PerformerMixer, q: Tensor, k: Tensor) -> Tensor:
    """phi(q) . phi(k) of every query and key `[q k]`, without the factors that cancel in the weights."""
    left, right = (mixer._feature(x.transpose(1, 2))[0, 0] for x in (q, k))
    return left @ right.mT / len(mixer.directions)


# --- the formula --------------------------------------------------------------------------------------------------


@over("causal", [True, False])
@over("n", [1, 2, 4, 5, 13])
@pytest.mark.parametrize("observed", [False, True])
def test_the_mixer_is_the_loop_over_queries_keys_and_features(n: int, causal: bool, observed: bool) -> None:
    """Equations 4 and 7 for one query, key and feature at a time; a query's largest feature is a factor of eps."""
    config = replace(CONFIG, causal=causal, mixer=Performer(7, eps=0.1, chunk=4))
    model, tokens = perturbed(config), some_tokens(2, n)
    found = seen(model, tokens, "q", "k", "v", "z", *["pattern"] * observed)
    scale, directions = config.score_scale(0), model.block(0).attn.directions

    def feature(x: Tensor, r: int) -> float:
        x = x * math.sqrt(scale)
        return math.exp(directions[r] @ x - x @ x / 2)

    for b, i, h in product(range(2), range(n), range(4)):
        query, shift = found["q"][b, i, h], max(feature(found["q"][b, i, h], r) for r in range(7))
        total, summed, weights = 0.1, torch.zeros(10, dtype=torch.float64), []
        for j in range(i + 1 if causal else n):
            key = found["k"][b, j, h // 2]
            weights.append(sum(feature(query, r) / shift * feature(key, r) for r in range(7)))
            total += weights[-1]
            summed += weights[-1] * found["v"][b, j, h // 2]
        assert_close(found["z"][b, i, h], summed / total)
        if observed:
            given = torch.tensor(weights, dtype=torch.float64) / total
            assert_close(found["pattern"][b, h, i, : len(weights)], given)


def test_a_scale_of_the_scores_scales_queries_and_keys() -> None:
    """Four times the scale is twice as long queries and keys."""
    mixer = mixer_of(CONFIG, 0)
    longer = mixer_of(replace(CONFIG, attn_scale=4 * CONFIG.score_scale(0)), 0)
    x = short_vectors(5, 10).transpose(1, 2)
    assert_close(longer._feature(x), mixer._feature(2 * x))


# --- softmax attention --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_mean_kernel_of_many_draws_is_that_of_softmax_attention() -> None:
    """Lemma 2 bounds the variance of a draw, theorem 2 says that orthogonal directions have at most that."""
    q, k = short_vectors(4, 10), short_vectors(6, 10)
    draws = torch.stack([kernel(mixer_of(CONFIG, seed), q, k) for seed in range(DRAWS)])
    scale, m = CONFIG.score_scale(0), 9
    true = (scale * q[0, :, 0] @ k[0, :, 0].mT).exp()
    both = scale * (q[0, :, None, 0] + k[0, None, :, 0]).square().sum(-1)
    deviation = true * ((both.exp() - 1) / (m * DRAWS)).sqrt()
    error = (draws.mean(0) - true).abs()
    assert (error < 5 * deviation).all()
    assert (draws.std(0) > 0).all() and (draws.var(0) < 2 * DRAWS * deviation.square()).all()


@over("seed", [0, 1, 2])
def test_z_comes_to_softmax_attention_at_the_rate_of_its_variance(seed: int) -> None:
    """The delta method: z - z' is the mean over features of sum_j phi(q) phi(k_j) (v_j - z') / sum of weights.

    The variance of a term has a closed form, as exp(w . x) has the mean exp(|x|^2 / 2). Directions of a block may make
    each other's errors larger, at most by the root of the width; the mean square over 13 queries and 10 channels has
    to lie under that bound, and 64 times the features have to be eight times as good, but for chance: a factor of 2.
    """
    errors = {}
    for m in (128, 8192):
        config = replace(CONFIG, n_heads=1, n_kv_heads=1, causal=False, mixer=Performer(m))
        mixer = mixer_of(config, seed)
        q, k = short_vectors(13, 10), short_vectors(9, 10)
        v = torch.randn(1, 9, 1, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        left, right = mixer._query_feature(q.transpose(1, 2)), mixer._feature(k.transpose(1, 2))
        shares = (left @ right.mT)[0, 0]
        z = shares / shares.sum(-1, keepdim=True) @ v[0, :, 0]
        x, y = (config.score_scale(0) ** 0.5 * part[0, :, 0] for part in (q, k))
        weights = (x @ y.mT).exp()
        true = weights / weights.sum(-1, keepdim=True) @ v[0, :, 0]
        a = (v[0, None, :, 0] - true[:, None]) / weights.sum(-1)[:, None, None]  # [q k e]
        summed = 2 * x[:, None, None] + y[None, :, None] + y[None, None, :]  # [q k k e]
        norms = x.square().sum(-1)[:, None, None] + (y.square().sum(-1)[:, None] + y.square().sum(-1)) / 2
        second = (summed.square().sum(-1) / 2 - norms).exp()
        variance = torch.einsum("qke,qkl,qle->qe", a, second, a) / m
        errors[m] = float((z - true).square().mean().sqrt())
        assert errors[m] < (10 * variance.mean()).sqrt()
    assert 4 < errors[128] / errors[8192] < 16


def test_a_model_of_many_features_is_nearly_that_of_softmax_attention() -> None:
    """The whole model: the weights of a Performer but its directions, read as those of softmax attention."""
    config = replace(CONFIG, mixer=Performer(20_000))
    model, plain = Transformer(config).double().eval(), Transformer(replace(config, mixer=Softmax()))
    plain = plain.double().eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if "directions" not in k})
    tokens = some_tokens(2, 9)
    ours, theirs = (seen(each, tokens, "pattern")["pattern"] for each in (model, plain))
    few = Transformer(replace(config, mixer=Performer(20))).double().eval()
    few.load_state_dict(model.state_dict() | {k: v for k, v in few.state_dict().items() if "directions" in k})
    assert (ours - theirs).abs().max() < 0.02
    rough = (seen(few, tokens, "pattern")["pattern"] - theirs).abs()
    assert (ours - theirs).square().mean() * 100 < rough.square().mean()  # a thousandth, but for chance


# --- directions ---------------------------------------------------------------------------------------------------


@over("n", [1, 3, 5, 12])
def test_directions_of_a_block_are_orthogonal(n: int) -> None:
    drawn = orthogonal_directions(n, 5).double()
    assert drawn.shape == (n, 5)
    for block in drawn.split(5):
        products = block @ block.mT
        assert_close(products, torch.diag(products.diagonal()), dtype=torch.float32)


def test_every_direction_is_a_gaussian_vector() -> None:
    """Mean, square and fourth power of a coordinate: 0, 1 and 3, each within 5 standard errors."""
    torch.manual_seed(0)
    drawn = torch.stack([orthogonal_directions(4, 4) for _ in range(4000)])  # [draw direction width]
    for power, mean, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (4, 3.0, 96.0)):
        error = (drawn.pow(power).mean(0) - mean).abs()
        assert (error < 5 * (variance / 4000) ** 0.5).all(), power


def test_directions_are_stored_and_not_trained() -> None:
    model = Transformer(CONFIG)
    assert "blocks.0.attn.directions" in model.state_dict()
    assert not model.block(0).attn.directions.requires_grad


# --- numbers ------------------------------------------------------------------------------------------------------


def test_queries_of_any_length_have_finite_weights_that_sum_to_one() -> None:
    mixer = mixer_of(replace(CONFIG, mixer=Performer(64)), 0).float()
    q, k = short_vectors(3, 10).float() * 100, short_vectors(4, 10).float()
    shares = mixer._query_feature(q.transpose(1, 2)) @ mixer._feature(k.transpose(1, 2)).mT
    shares = shares / (shares.sum(-1, keepdim=True) + 1e-12)
    assert_close(shares.sum(-1), torch.ones_like(shares[..., 0]))


def test_padding_changes_nothing() -> None:
    model, tokens = build_mixed("performer"), some_tokens(1, 6)
    padded = torch.cat((torch.zeros(1, 3, dtype=torch.int64), tokens), 1)
    keep = torch.arange(9)[None] >= 3
    assert_close(model(padded, keep=keep)[:, 3:], model(tokens))


def test_a_performer_without_features_is_refused() -> None:
    with pytest.raises(ValueError, match="Performer requires n_features >= 1, got 0"):
        Performer(0)
