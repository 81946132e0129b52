"""The local learning coefficient where it is known: bowls, monomials, reduced-rank regression; and on a model."""

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

from interp.data.batch import Batch
from interp.dynamics import Langevin, learning_coefficient, learning_coefficient_of
from interp.lab.training import mean_loss
from interp.model import MLP, Learned, ModelConfig, Transformer
from interp.passes.question import NotFiniteError
from interp.tasks import RepeatedSequences
from interp.tasks.examples import Examples, Place

COPIES = 200
"""Independent copies of a small loss in one chain: coefficients add, noise averages out."""
ROWS = RepeatedSequences(d_vocab=12, width=7, low=2, high=3).batch(Place(0, 0), 5)


def coefficient(
    loss: object, at: list[float], n: int, step: float, localisation: float, steps: int = 4000
) -> float:
    """The estimate of one copy."""

    def every(point: Mapping[str, Tensor]) -> Tensor:
        total: Tensor = loss(point["w"]).sum()  # type: ignore[operator]
        return total

    start = torch.tensor(at, dtype=torch.float64).expand(COPIES, -1)
    sampler = Langevin(2, steps, steps // 2, step, localisation)
    return float(learning_coefficient_of(every, {"w": start}, n, sampler).value) / COPIES


def test_a_chain_is_the_loop_written_out() -> None:
    h, n, start = (
        torch.tensor([1.0, 3.0], dtype=torch.float64),
        50,
        torch.tensor([0.5, -0.2], dtype=torch.float64),
    )
    sampler = Langevin(chains=2, steps=6, burn_in=3, step=0.01, localisation=2.0, seed=4)
    found = learning_coefficient_of(
        lambda point: (h * (point["w"] - start).square()).sum() / 2, {"w": start}, n, sampler
    )
    beta = 1 / math.log(n)
    for chain in range(2):
        state = int(np.random.SeedSequence([4, chain, 0]).generate_state(1)[0])
        noise, w, losses = torch.Generator().manual_seed(state), start.clone(), []
        for _ in range(9):
            losses.append(float((h * (w - start) ** 2).sum() / 2))
            pull = n * beta * h * (w - start) + 2.0 * (w - start)
            w = w - 0.005 * pull + 0.1 * torch.randn(2, generator=noise, dtype=torch.float64)
        np.testing.assert_allclose(found.loss.values[chain], losses[3:], rtol=1e-12)
        assert float(found.of_chain[chain]) == pytest.approx(n * beta * np.mean(losses[3:]))
    assert float(found.value) == pytest.approx(float(found.of_chain.mean()))
    assert float(found.spread) == pytest.approx(float(found.of_chain.std(ddof=1)))
    assert found.attrs["dimensions"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(("localisation", "largest"), [(0.0, 0.1), (50.0, 0.1), (0.0, 1.0)])
def test_bowl_gives_the_law_of_the_chain_which_is_half_its_dimension(
    localisation: float, largest: float
) -> None:
    """Each direction is a first-order autoregression, whose stationary variance is known."""
    h, n = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64), 1000
    strength = n / math.log(n)
    k = strength * h + localisation
    step = largest / float(k.max())
    variance = step / (1 - (1 - step * k / 2).square())
    law = float((strength * h * variance / 2).sum())
    found = coefficient(lambda w: h * w.square() / 2, [0.0, 0.0, 0.0], n, step, localisation)
    assert found == pytest.approx(law, rel=0.02)
    if localisation == 0.0 and largest == 0.1:
        assert found == pytest.approx(3 / 2, rel=0.03)
    else:
        assert abs(law - 3 / 2) > 0.1


def quadrature(k1: int, k2: int, strength: float, localisation: float) -> float:
    """strength E[L] of the localised, tempered posterior, on a grid of log w1 and log w2."""
    one, two = np.meshgrid(*[np.exp(np.linspace(-40, 3, 1200))] * 2, indexing="ij")
    loss = strength * one ** (2 * k1) * two ** (2 * k2)
    weight = np.exp(-loss - localisation / 2 * (one**2 + two**2)) * one * two
    return float((weight * loss).sum() / weight.sum())


@pytest.mark.slow
@pytest.mark.parametrize(("powers", "least"), [((2, 0), 1 / 4), ((1, 2), 1 / 4), ((1, 1), 1 / 2)])
def test_chains_have_the_mean_of_what_they_sample_from(powers: tuple[int, int], least: float) -> None:
    """Monomials: the mean is below the coefficient, by localisation and, under multiplicity 2, by log n."""
    k1, k2 = powers
    n, localisation = 60, 1.0
    strength = n / math.log(n)
    exact = quadrature(k1, k2, strength, localisation)
    step = 0.03 / strength
    found = coefficient(
        lambda w: w[:, 0] ** (2 * k1) * w[:, 1] ** (2 * k2), [0.0, 0.0], n, step, localisation
    )
    assert found == pytest.approx(exact, rel=0.06)
    assert 0.5 * least < exact < least


@pytest.mark.parametrize("powers", [(2, 0), (1, 2), (1, 1), (3, 1)])
def test_the_mean_tends_to_the_coefficient_of_a_monomial(powers: tuple[int, int]) -> None:
    """The least 1 / (2 k), from below, as n grows: like 1 / log n where both powers are equal."""
    least = min(1 / (2 * k) for k in powers if k)
    gaps = [least - quadrature(*powers, strength, 1.0) for strength in (1e3, 1e6, 1e9, 1e12)]
    assert all(gap > -1e-3 for gap in gaps) and gaps == sorted(gaps, reverse=True)
    if powers == (1, 1):  # multiplicity 2: lambda - 1 / log(strength) to leading order
        assert gaps[-1] * math.log(1e12) == pytest.approx(1.0, rel=0.1)
    else:
        assert gaps[-1] < 0.01


def reduced_rank(outputs: int, inputs: int, hidden: int, rank: int) -> float:
    """Aoyagi and Watanabe 2005, theorem 1: lambda of y = B A x, B [N, H], A [H, M], the truth of rank r."""
    n, m, h, r = outputs, inputs, hidden, rank
    if n + r <= m + h and m + r <= n + h and h + r <= m + n:
        whole = -((h + r) ** 2) - m * m - n * n + 2 * (h + r) * m + 2 * (h + r) * n + 2 * m * n
        return (whole + (m + h + n + r) % 2) / 8
    if m + h < n + r:
        return (h * m - h * r + n * r) / 2
    return (h * n - h * r + m * r) / 2 if n + h < m + r else m * n / 2


@pytest.mark.slow
def test_reduced_rank_regression_has_aoyagi_and_watanabes_coefficient() -> None:
    truth = torch.zeros(2, 3, dtype=torch.float64)
    truth[0, 0] = 1.0

    def loss(w: Tensor) -> Tensor:
        a, b = w[:, :6].unflatten(-1, (2, 3)), w[:, 6:].unflatten(-1, (2, 2))
        return (b @ a - truth).square().sum((-2, -1)) / 2

    wanted = reduced_rank(2, 3, 2, 1)
    assert wanted == 2.5 < 10 / 2
    at = [0.0] * 10
    at[0] = at[6] = 1.0
    n = 1000
    step = 0.1 / (4 * n / math.log(n))
    assert coefficient(loss, at, n, step, 1.0, steps=12_000) == pytest.approx(wanted, rel=0.04)


CONFIG = ModelConfig(1, 6, 2, 7, 12, mlp=MLP(8), position=Learned())


def network() -> Transformer:
    torch.manual_seed(0)
    return Transformer(CONFIG).double()


def test_a_models_loss_is_the_summed_nats_of_a_row() -> None:
    """Two draws: the first at w*, the second after one step, which is written out here."""
    model, sampler = network(), Langevin(chains=1, steps=2, burn_in=0, step=1e-3, localisation=1.0)
    names = ["blocks.0.mlp.out.weight", "embed.weight"]
    for only in (False, True):
        found = learning_coefficient(model, ROWS, sampler, parameters=names, determined_only=only)
        tokens = int(ROWS.predicted(determined_only=only).sum())
        before = mean_loss(model, ROWS, determined_only=only) * tokens / 5
        moving = [model.get_parameter(name) for name in names]
        gradients = torch.autograd.grad(before, moving)
        noise = torch.Generator().manual_seed(int(np.random.SeedSequence([0, 0, 0]).generate_state(1)[0]))
        moved = {}
        for name, value, gradient in zip(names, moving, gradients, strict=True):
            shake = torch.randn(value.shape, generator=noise, dtype=torch.float64)
            moved[name] = value.detach() - 5e-4 * 5 / math.log(5) * gradient + 1e-3**0.5 * shake
        after = mean_loss(model.with_parameters(moved), ROWS, determined_only=only) * tokens / 5
        np.testing.assert_allclose(
            found.loss.values[0], [0.0, (after - before).item()], rtol=1e-9, atol=1e-12
        )
    assert found.attrs["dimensions"] == 8 * 6 + 12 * 6 and found.attrs["rows"] == 5


def test_chains_are_their_own_and_leave_the_model_alone() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sampler = Langevin(chains=1, steps=3, burn_in=1)
    one, two = (learning_coefficient(model, ROWS, replace(sampler, chains=n)) for n in (1, 2))
    assert torch.equal(torch.tensor(one.loss.values[0]), torch.tensor(two.loss.values[0]))
    assert not np.array_equal(two.loss.values[0], two.loss.values[1])
    assert math.isnan(float(one.spread))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("parameters", [None, ["blocks.0.mlp.out.weight"]])
def test_a_model_in_half_precision_is_sampled_as_its_copy_in_float32(parameters: list[str] | None) -> None:
    """Whose steps its own digits would not hold."""
    half = network().bfloat16()
    wide, sampler = copy.deepcopy(half).float(), Langevin(chains=1, steps=4, burn_in=1, step=1e-7)
    found, expected = (learning_coefficient(x, ROWS, sampler, parameters=parameters) for x in (half, wide))
    assert (found.attrs["dtype"], expected.attrs["dtype"]) == ("bfloat16", "float32")
    xr.testing.assert_identical(found.assign_attrs(dtype="float32"), expected)
    assert len(np.unique(found.loss)) == 4
    assert half.dtype == torch.bfloat16


def test_rows_of_a_step_are_compared_with_themselves() -> None:
    """With all rows in another order it is the whole; with some the first difference is 0 all the same."""
    model, sampler = network(), Langevin(chains=2, steps=4, burn_in=0)
    whole, same, some = (learning_coefficient(model, ROWS, sampler, rows_per_step=n) for n in (None, 5, 2))
    np.testing.assert_array_equal(whole.loss.values, same.loss.values)
    assert (some.loss.values[:, 0] == 0).all()
    assert not np.array_equal(some.loss.values[:, 1:], whole.loss.values[:, 1:])


def test_what_has_no_coefficient_is_refused_by_name() -> None:
    at = {"w": torch.zeros(2, dtype=torch.float64)}
    with pytest.raises(NotFiniteError, match="chain 0 ran away"):
        learning_coefficient_of(lambda point: point["w"].square().sum(), at, 100, Langevin(step=10.0))
    with pytest.raises(ValueError, match="2 rows or more, got 1"):
        learning_coefficient_of(lambda point: point["w"].square().sum(), at, 1, Langevin())
    with pytest.raises(ValueError, match="one number"):
        learning_coefficient_of(lambda point: 3, at, 10, Langevin())  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="one parameter"):
        learning_coefficient_of(lambda point: torch.zeros(()), {}, 10, Langevin())
    with pytest.raises(ValueError, match="one number"):
        learning_coefficient_of(lambda point: point["w"], at, 10, Langevin())
    refused = {
        "chains": partial(Langevin, chains=0),
        "burn_in": partial(Langevin, burn_in=-1),
        "step": partial(Langevin, step=0.0),
        "inverse_temperature": partial(Langevin, inverse_temperature=-1.0),
    }
    for field, made in refused.items():
        with pytest.raises(ValueError, match=field):
            made()
    model = network()
    with pytest.raises(ValueError, match="embed"):
        learning_coefficient(model, ROWS, Langevin(), parameters=["embedding.weight"])
    with pytest.raises(ValueError, match="rows_per_step"):
        learning_coefficient(model, ROWS, Langevin(), rows_per_step=6)
    with pytest.raises(ValueError, match="packed"):
        learning_coefficient(model, Examples(Batch.packed([[1, 2, 3], [4, 5]], 5)), Langevin())
