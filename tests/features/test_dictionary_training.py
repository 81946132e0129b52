"""Training finds a planted dictionary with every kind, minimises what it says, and is repeatable to the bit."""

from collections.abc import Iterator

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from interp.features import (
    BatchTopK,
    Dictionary,
    JumpReLU,
    Matryoshka,
    ReLU,
    TopK,
    dictionary_match,
    reconstruction_quality,
    train_dictionary,
    training,
)
from interp.features.objectives import TrainedKind, dead_error, objective
from interp.features.training import geometric_median
from interp.features.training_state import DictionaryState
from tests.features.dictionary_cases import KINDS, random_sae
from tests.tolerances import assert_close

EVERY = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)


def sparse_data(n: int = 20_000, features: int = 32, d: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Directions [t d], how strong each is on every vector [n t] (p = 0.05, else 0), and the vectors [n d]."""
    generator = torch.Generator().manual_seed(0)
    directions = torch.randn(features, d, generator=generator)
    directions = directions / directions.norm(dim=1, keepdim=True)
    strength = (torch.rand(n, features, generator=generator) < 0.05) * (
        0.5 + torch.rand(n, features, generator=generator)
    )
    return directions, strength, strength @ directions


def noise(n: int = 600, d: int = 8) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + 1


def quick(
    activations: Tensor | list[Tensor] | Iterator[Tensor], kind: TrainedKind = KINDS[0], **more: object
) -> Dictionary:
    settings = {"steps": 12, "batch_size": 100, "dtype": torch.float64, "dead_after": 3}
    settings |= {"sparsity": 0.5} if isinstance(kind, ReLU | JumpReLU) else {}
    return train_dictionary(activations, kind, 12, **(settings | more))[0]  # type: ignore[arg-type]


def same(one: Dictionary, other: Dictionary) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    ("kind", "sparsity"),
    [
        (ReLU(), 3.5),
        (TopK(2), None),
        (JumpReLU(1.0), 1.5),
        (BatchTopK(2), None),
        (Matryoshka(2, (40, 48)), None),
    ],
    ids=["ReLU", "TopK", "JumpReLU", "BatchTopK", "Matryoshka"],
)
@pytest.mark.slow
def test_it_finds_the_dictionary_that_the_data_were_made_of(
    kind: TrainedKind, sparsity: float | None
) -> None:
    truth, strength, x = sparse_data()
    sae, history = train_dictionary(
        x, kind, 48, sparsity=sparsity, steps=500, lr=1e-2, batch_size=512, dead_after=30
    )
    match = dictionary_match(sae.W_dec, truth)
    assert float(match.cosine.mean()) > 0.95 and float((match.cosine > 0.9).mean()) > 0.9
    true_l0 = float((strength > 0).sum(1).double().mean())
    assert float(reconstruction_quality(sae, x).value.sel(score="l0")) == pytest.approx(true_l0, rel=0.5)
    # A feature rises and falls with the one it stands for.
    matched = sae.encode(x)[:, match.feature.values]
    found, true = (values - values.mean(0) for values in (matched, strength))
    assert float(torch.nn.functional.cosine_similarity(found, true, dim=0).mean()) > 0.8
    assert float(history.error[-100:].mean()) < 0.5 * float(history.error[:10].mean())


@EVERY
def test_the_same_seed_gives_the_same_bits_and_another_one_does_not(kind: TrainedKind) -> None:
    one, again, other = (quick(noise(), kind, seed=seed) for seed in (3, 3, 4))
    assert same(one, again) and not same(one, other)


@EVERY
def test_the_unit_of_the_activations_does_not_matter(kind: TrainedKind) -> None:
    one, large = quick(noise(), kind), quick(8 * noise(), kind)
    assert torch.equal(one.W_dec, large.W_dec) and torch.equal(one.W_enc, large.W_enc)
    assert torch.equal(8 * one(noise()), large(8 * noise()))
    assert torch.equal(8 * one.encode(noise()), large.encode(8 * noise()))


@EVERY
def test_directions_have_norm_one_and_thresholds_are_not_negative(kind: TrainedKind) -> None:
    sae = quick(noise(), kind)
    assert_close(sae.W_dec.norm(dim=1), torch.ones(12).double())
    assert float(sae.thresholds.min()) >= 0
    assert not any(p.requires_grad for p in sae.parameters())


def test_chunks_are_gone_through_again_and_a_stream_must_last() -> None:
    chunks = list(noise().split(170))
    assert not same(quick(chunks), quick(noise()))
    assert same(quick(chunks), quick(iter(chunks * 2)))
    with pytest.raises(ValueError, match="ended after 6 of 12 steps"):
        quick(iter(chunks))


def test_activations_with_a_gradient_train_as_those_without() -> None:
    assert same(quick(noise().requires_grad_()), quick(noise()))


def test_few_rows_that_come_round_for_a_large_batch_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[int] = []
    cat = torch.cat
    monkeypatch.setattr(torch, "cat", lambda parts: joined.append(len(parts)) or cat(parts))
    (batch,) = next(training._batches(torch.arange(10.0)[:, None], 1000, 0))
    assert joined == [100] and torch.equal(batch.flatten().long().bincount(), torch.full((10,), 100))


def test_every_vector_of_an_epoch_comes_once_in_batches_of_one_size() -> None:
    rows = torch.arange(60.0)[:, None]
    for source in (rows, list(rows.split(13))):
        batches = training._batches(source, 20, 0)
        epochs = [torch.cat([next(batches)[0] for _ in range(3)]).flatten() for _ in range(2)]
        for epoch in epochs:
            assert torch.equal(epoch.sort().values, rows.flatten())
        assert not torch.equal(*epochs)


def test_the_geometric_median_is_where_the_pulls_balance() -> None:
    x = noise(51, 3)
    x[0] += 1000
    found = geometric_median(x, rounds=500)
    pull = (x - found) / (x - found).norm(dim=1, keepdim=True)
    assert_close(pull.sum(0), torch.zeros(3).double())
    assert float(geometric_median(torch.tensor([[1.0], [2.0], [4.0], [8.0], [99.0]]))) == pytest.approx(
        4, abs=1e-4
    )


@EVERY
def test_a_batch_costs_what_the_formula_says(kind: TrainedKind) -> None:
    sae, x = random_sae(kind, 8, 12), noise(5)
    dead = torch.arange(12) >= 9
    features = sae.encode(x)
    error = sum(float((row - sae(row)).square().sum()) for row in x) / 5
    terms = objective(kind, sae, x, x, 0.7, dead)
    match kind:
        case ReLU():
            penalty, weight = float(features.sum()) / 5, 0.7
        case JumpReLU():
            penalty, weight = int((features > 0).sum()) / 5, 0.7
        case TopK():
            penalty, weight = slow_dead_error(sae, x, dead), 1 / 32
    assert float(terms.error) == pytest.approx(error, rel=1e-9)
    assert float(terms.penalty) == pytest.approx(penalty, rel=1e-9)
    assert float(terms.loss) == pytest.approx(error + weight * penalty, rel=1e-9)


def slow_dead_error(sae: Dictionary, x: Tensor, dead: Tensor) -> float:
    """Gao et al.: the largest d/2 dead features rebuild what the living ones missed."""
    total = 0.0
    for vector in x:
        z = (vector - sae.b_dec) @ sae.W_enc + sae.b_enc
        chosen = sorted(dead.nonzero()[:, 0].tolist(), key=lambda j: -float(z[j]))[: len(vector) // 2]
        guess = sum((float(z[j]) * sae.W_dec[j] for j in chosen), torch.zeros_like(vector))
        total += float((vector - sae(vector) - guess).square().sum())
    return total / len(x)


@pytest.mark.parametrize("count", [0, 4, 12])
@pytest.mark.parametrize("k", [1, 3, 12])
def test_gradients_through_k_rows_are_those_through_all(k: int, count: int) -> None:
    """Oracle: autograd of the dense features, and of the dense pass of the dead ones."""
    sae, x = random_sae(TopK(k), 8, 12).requires_grad_(True), noise(7)
    dead = torch.arange(12) >= 12 - count
    z = sae.before(x)
    features = sae.activate(z)
    residual = x - sae.decode(features)
    error = residual.square().sum(1).mean()
    best = z.masked_fill(~dead, -torch.inf).topk(4)
    values = best.values.masked_fill(best.values.isneginf(), 0.0)
    guess = torch.zeros_like(z).scatter(1, best.indices, values) @ sae.W_dec
    missed = (residual.detach() - guess).square().sum(1).mean() * dead.any()
    parameters = list(sae.parameters())
    expected = torch.autograd.grad(error + missed / 32, parameters)
    terms = objective(sae.kind, sae, x, x, 0.0, dead)
    for one, other in zip(torch.autograd.grad(terms.loss, parameters), expected, strict=True):
        assert_close(one, other)
    assert torch.equal(terms.fired, (features > 0).any(0))
    assert float(terms.l0) == pytest.approx(float((features > 0).sum(1).double().mean()))


def test_a_step_of_topk_multiplies_densely_only_to_choose() -> None:
    """2 n d s FLOPs for z of every feature; the dense step takes six times as many, and three more for dead ones."""
    sae, x = random_sae(TopK(3), 8, 12).requires_grad_(True), noise(7)
    with FlopCounterMode(display=False) as flops:
        objective(TopK(3), sae, x, x, 0.0, torch.zeros(12, dtype=torch.bool)).loss.backward()
    assert flops.get_total_flops() == 2 * 7 * 8 * 12


@pytest.mark.parametrize("count", [0, 1, 3, 12])
def test_the_error_of_dead_features_holds_for_any_number_of_them(count: int) -> None:
    sae, x = random_sae(TopK(3), 8, 12), noise(5)
    dead = torch.arange(12) < count
    found = dead_error(sae, x, x - sae(x), dead)
    assert float(found) == pytest.approx(slow_dead_error(sae, x, dead) if count else 0.0, rel=1e-9)


def test_dead_features_of_topk_alone_receive_a_gradient_from_it() -> None:
    sae, x = random_sae(TopK(3), 8, 12).requires_grad_(True), noise(5)
    dead = torch.arange(12) < 2
    (grad,) = torch.autograd.grad(dead_error(sae, x, (x - sae(x)).detach(), dead), sae.W_dec)
    assert bool((grad[:2] != 0).any(1).all()) and bool((grad[2:] == 0).all())


def test_the_gradient_along_a_direction_is_removed() -> None:
    sae = random_sae(ReLU(), 8, 12).requires_grad_(True)
    sae.W_dec.data /= sae.W_dec.data.norm(dim=1, keepdim=True)
    sae(noise(5)).square().sum().backward()
    assert sae.W_dec.grad is not None
    radial = (sae.W_dec.grad * sae.W_dec).sum(1)
    expected = sae.W_dec.grad - radial[:, None] * sae.W_dec
    assert float(radial.detach().abs().max()) > 0.1
    training._drop_radial_gradient(sae)
    assert_close(sae.W_dec.grad, expected.detach())


def test_dead_features_restart_at_inputs_that_are_badly_explained() -> None:
    sae, x = random_sae(ReLU(), 8, 12), noise(50)
    x[:] = sae.b_dec
    x[7] += 100 * torch.eye(8).double()[2]
    sae.requires_grad_(True)
    optimiser = torch.optim.Adam(sae.parameters(), 0.1)
    sae(noise()).sum().backward()
    optimiser.step()
    before = {name: weight.detach().clone() for name, weight in sae.named_parameters()}
    x += (sae.b_dec - before["b_dec"]).detach()
    x[torch.arange(50) != 7] = sae.b_dec.detach() + 1e-9
    idle = torch.tensor([9, 0, 0, 5] + [0] * 8)
    state = DictionaryState(sae, optimiser, torch.Generator().manual_seed(0), idle)
    training._resample(state, (x,), 5)
    assert state.idle.tolist() == [0] * 12
    direction = x[7] - sae.b_dec.detach()
    direction = direction / direction.norm()
    living = [1, 2, *range(4, 12)]
    norm = before["W_enc"][:, living].norm(dim=0).mean()
    for j in (0, 3):
        assert_close(sae.W_dec[j].detach(), direction)
        assert_close(sae.W_enc[:, j].detach(), 0.2 * norm * direction)
        assert sae.b_enc[j].item() == 0
        assert not bool(optimiser.state[sae.W_dec]["exp_avg"][j].any())
        assert not bool(optimiser.state[sae.W_enc]["exp_avg_sq"][:, j].any())
    assert torch.equal(sae.W_dec[living].detach(), before["W_dec"][living])
    assert bool(optimiser.state[sae.W_dec]["exp_avg"][living].any())


def test_a_feature_that_never_fires_comes_back_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    start = training._initial

    def silenced(*arguments: object) -> Dictionary:
        sae = start(*arguments)  # type: ignore[arg-type]
        sae.b_enc.data[:6] = -1e3
        return sae

    monkeypatch.setattr(training, "_initial", silenced)
    for revived in (True, False):
        sae, history = train_dictionary(
            noise(), ReLU(), 12, sparsity=0.1, steps=60, batch_size=100, dead_after=10 if revived else 61
        )  # fmt: skip
        active = (sae.encode(noise().float()) > 0).any(0)
        assert bool(active[:6].all()) is revived
        assert (float(history.dead.max()) >= 0.5) is revived


def test_the_history_says_what_happened() -> None:
    _, history = train_dictionary(noise(), TopK(3), 12, steps=6, batch_size=100)
    assert dict(history.sizes) == {"step": 6}
    assert float(history.l0.max()) <= 3 and float(history.dead.max()) == 0
    rms = float(noise().square().sum(1).mean())
    assert history.attrs["scale"] == pytest.approx((8 / rms) ** 0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (ReLU(), {}, "ReLU requires a sparsity of at least 0, got None"),
        (JumpReLU(), {"sparsity": -1.0}, r"JumpReLU requires a sparsity of at least 0, got -1\.0"),
        (TopK(2), {"sparsity": 1.0}, r"its k; got sparsity=1\.0"),
        (TopK(2), {"steps": 0}, "got d_sae=12, steps=0"),
        (TopK(20), {}, "at most d_sae = 12"),
        (ReLU(), {"sparsity": 1e300}, "NaN or infinite from step"),
        (
            TopK(2),
            {"batch_size": 10**15},
            "batch_size must be a whole number from 1 to 10000000, got 1000000000000000",
        ),
        (TopK(2), {"dead_after": 0}, "dead_after must be a whole number from 1 to 10000000, got 0"),
        (TopK(2), {"dead_after": -200}, "dead_after must be a whole number from 1 to 10000000, got -200"),
        (TopK(2), {"device": "meta"}, "device must be one that holds numbers, got meta"),
        (
            TopK(2),
            {"device": "xla"},
            "device must be one of this machine, float32 on xla is not possible here",
        ),
        (TopK(2), {"lr": 1e30}, r"lr must be above 0 and at most 1e6, got 1e\+30"),
    ],
)
def test_what_makes_no_sense_is_refused(kind: TrainedKind, more: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train_dictionary(noise(), kind, 12, **({"steps": 5, "batch_size": 100} | more))  # type: ignore[arg-type]


def test_activations_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"required, got torch.float64 \[600, 8, 1\] on cpu"):
        quick([noise()[..., None]])
    with pytest.raises(ValueError, match=r"\[n, d\] are required, got layout sparse_coo"):
        quick([noise().to_sparse()])
    with pytest.raises(ValueError, match="chunks of one width are required, got 7 after 8"):
        quick([noise(), noise()[:, :7]])
    with pytest.raises(ValueError, match="at least one vector"):
        quick(noise()[:0])
    with pytest.raises((ValueError, TypeCheckError), match=r"got chunks of str|parameters of"):
        quick(["The cat sat"])  # type: ignore[list-item]
    with pytest.raises(
        (ValueError, TypeCheckError), match=r"such as `store.batches\(site, size\)`, got int|parameters of"
    ):
        quick(3)  # type: ignore[arg-type]


def test_a_dtype_or_a_width_that_no_training_has_is_refused() -> None:
    with pytest.raises(ValueError, match=r"train_dictionary: dtype must be .*got torch.int32"):
        train_dictionary(torch.randn(32, 4), TopK(2), 8, steps=1, dtype=torch.int32)
    with pytest.raises(ValueError, match="JumpReLU: bandwidth must be a number above 0, up to"):
        JumpReLU(1e300)
