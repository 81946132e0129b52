"""Draws that belong to a row: the bits of SplitMix64, the laws they should have, nothing that depends on the split."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, strategies as st
from scipy import stats
from torch import Tensor

from interp.core.stats import poisson_weights, signs, uniforms

DRAWS = [uniforms, poisson_weights, signs]
Draw = Callable[..., Tensor]


def splitmix64(seed: int, count: int) -> list[int]:
    """Vigna's splitmix64.c, statement by statement, in big integers."""
    state, outputs = seed % 2**64, []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        outputs.append(z ^ (z >> 31))
    return outputs


def test_the_oracle_gives_the_published_outputs() -> None:
    """Of seed 1234567, as listed by Rosetta Code, "Pseudo-random numbers/Splitmix64"."""
    assert splitmix64(1234567, 5) == [
        6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431,
        16408922859458223821,
    ]  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, 1234567, 2**63, 2**64 - 1, -5, 2**70 + 3])
def test_a_draw_is_an_output_of_the_generator_seeded_by_an_output(seed: int) -> None:
    """Compared bit for bit: 53 random bits fit a float64 exactly."""
    keys = splitmix64(seed, 7)
    expected = [[(splitmix64(key, 4)[j] >> 11) / 2**53 for key in keys] for j in range(4)]
    assert uniforms(torch.arange(7), 4, seed).tolist() == expected


@given(st.integers(0, 2**62), st.integers(0, 2**62))
def test_any_row_number_and_seed_are_allowed(row: int, seed: int) -> None:
    key = splitmix64(seed + row * 0x9E3779B97F4A7C15, 1)[0]
    expected = (splitmix64(key, 1)[0] >> 11) / 2**53
    assert uniforms(torch.tensor([row]), 1, seed).item() == expected


@pytest.mark.parametrize("draw", DRAWS)
@given(order=st.permutations(range(9)), cut=st.integers(0, 9), start=st.integers(0, 5))
def test_draws_do_not_depend_on_order_split_or_chunk(
    draw: Draw, order: list[int], cut: int, start: int
) -> None:
    rows = torch.arange(9)
    whole, index = draw(rows, 8, 3), torch.tensor(order)
    assert torch.equal(draw(rows[index], 8, 3), whole[:, index])
    assert torch.equal(torch.cat([draw(part, 8, 3) for part in (rows[:cut], rows[cut:])], 1), whole)
    assert torch.equal(draw(rows, 8 - start, 3, start=start), whole[start:])


@pytest.mark.parametrize("draw", DRAWS)
def test_the_type_of_the_row_numbers_does_not_matter(draw: Draw) -> None:
    assert torch.equal(draw(torch.arange(9, dtype=torch.int32), 5, 0), draw(torch.arange(9), 5, 0))


def test_uniforms_are_uniform() -> None:
    u = uniforms(torch.arange(500), 400, seed=1)
    assert u.dtype == torch.float64 and u.min() >= 0 and u.max() < 1
    assert stats.kstest(u.flatten().numpy(), "uniform").pvalue > 0.01
    assert float(u.mean()) == pytest.approx(1 / 2, abs=4 * math.sqrt(1 / 12 / u.numel()))
    assert float(u.var()) == pytest.approx(1 / 12, abs=4 * math.sqrt(1 / 180 / u.numel()))


@pytest.mark.parametrize("along", [0, 1])
def test_every_row_and_every_draw_is_uniform_by_itself(along: int) -> None:
    """One p-value per row or draw; they must be uniform in their turn."""
    samples = uniforms(torch.arange(10_000, 10_200), 200, seed=2).movedim(along, 0)
    pvalues = [stats.kstest(sample.numpy(), "uniform").pvalue for sample in samples]
    assert stats.kstest(pvalues, "uniform").pvalue > 0.01


def test_pairs_of_neighbours_fill_the_square() -> None:
    """Chi-square over an 8 x 8 grid, for neighbouring rows, replicates and seeds."""
    u, other = (uniforms(torch.arange(301), 301, seed) for seed in (0, 1))
    pairs = {"rows": (u[:, :-1], u[:, 1:]), "draws": (u[:-1], u[1:]), "seeds": (u, other)}
    for name, (a, b) in pairs.items():
        cells = ((8 * a).floor() * 8 + (8 * b).floor()).long().flatten()
        assert stats.chisquare(cells.bincount(minlength=64).numpy()).pvalue > 0.01, name


def test_neighbouring_rows_replicates_and_seeds_do_not_correlate() -> None:
    w, other = (poisson_weights(torch.arange(301), 301, seed) for seed in (5, 6))
    for a, b in ((w[:, :-1], w[:, 1:]), (w[:-1], w[1:]), (w, other), (w[:-1, :-1], w[1:, 1:])):
        r = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(float(r)) < 4 / math.sqrt(a.numel())


def test_weights_are_poisson() -> None:
    weights = poisson_weights(torch.arange(1000), 300, seed=0).long()
    expected = torch.tensor([stats.poisson.pmf(k, 1) for k in range(6)])
    expected = torch.cat([expected, 1 - expected.sum()[None]])
    observed = weights.clamp(max=6).flatten().bincount(minlength=7)
    assert stats.chisquare(observed.numpy(), weights.numel() * expected.numpy()).pvalue > 0.01


def test_a_weight_is_the_quantile_of_its_uniform() -> None:
    rows = torch.arange(3000)
    expected = stats.poisson.ppf(uniforms(rows, 20, seed=4).numpy(), 1)
    assert torch.equal(poisson_weights(rows, 20, seed=4), torch.from_numpy(expected))


def test_the_bootstrap_error_of_a_mean_is_its_standard_error() -> None:
    values = torch.randn(400, dtype=torch.float64)
    weights = poisson_weights(torch.arange(400), 2000, seed=0)
    replicates = weights @ values / weights.sum(1)
    assert float(replicates.std()) == pytest.approx(float(values.std()) / 20, rel=0.06)


def test_signs_are_fair_and_say_on_which_side_of_a_half_the_uniform_fell() -> None:
    rows = torch.arange(1000)
    coins = signs(rows, 100, seed=0)
    assert torch.equal(coins, torch.where(uniforms(rows, 100, seed=0) < 0.5, 1.0, -1.0).double())
    assert stats.binomtest(int((coins > 0).sum()), coins.numel()).pvalue > 0.01


@pytest.mark.parametrize("draw", DRAWS)
def test_no_rows_and_no_draws_give_empty_tensors(draw: Draw) -> None:
    assert draw(torch.arange(0), 3, 0).shape == (3, 0)
    assert draw(torch.arange(4), 0, 0).shape == (0, 4)


@pytest.mark.parametrize("draw", DRAWS)
def test_a_negative_number_of_draws_is_refused(draw: Draw) -> None:
    with pytest.raises(ValueError, match=r"draws >= 0 from a start >= 0 is required, got -1 from 0"):
        draw(torch.arange(4), -1, 0)
