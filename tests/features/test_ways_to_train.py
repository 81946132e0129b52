"""BatchTopK and Matryoshka: what they minimise, what they find, and how many features their answers have."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from interp.features import (
    BatchTopK,
    Dictionary,
    JumpReLU,
    Matryoshka,
    ReLU,
    TopK,
    dictionary_match,
    load,
    save,
    train_dictionary,
)
from interp.features.objectives import OfBatch, objective
from tests.features.dictionary_cases import random_sae
from tests.features.test_dictionary_training import noise
from tests.features.test_transcoders import random_transcoder
from tests.tolerances import assert_close

OF_BATCH = pytest.mark.parametrize(
    "kind", [BatchTopK(3), Matryoshka(3, (4, 12))], ids=["BatchTopK", "Matryoshka"]
)
DICTIONARIES = {
    "autoencoder": random_sae(ReLU(), 8, 12),
    "transcoder": random_transcoder(8, 12, skip=False),
    "skip": random_transcoder(8, 12),
}


def slow_features(dictionary: Dictionary, x: Tensor, k: int) -> Tensor:
    """The k n largest pre-activations of the batch, by sorting all of them, and 0 for the others."""
    z = dictionary.before(x).detach()
    ranked = sorted(((float(z[i, j]), i, j) for i in range(len(z)) for j in range(z.shape[1])), reverse=True)
    chosen = torch.zeros_like(z)
    for _, i, j in ranked[: k * len(x)]:
        chosen[i, j] = 1.0
    return dictionary.before(x).relu() * chosen


@pytest.mark.parametrize("which", DICTIONARIES)
@OF_BATCH
def test_a_batch_costs_what_sorting_all_of_its_features_says(kind: OfBatch, which: str) -> None:
    """Oracle: dense features chosen by a sort, one error for each nested dictionary, and autograd through them."""
    dictionary = DICTIONARIES[which].requires_grad_(True)
    x, y = noise(7), noise(14)[7:] if which != "autoencoder" else noise(7)
    features = slow_features(dictionary, x, kind.k)
    sizes = kind.sizes if isinstance(kind, Matryoshka) else (12,)
    errors = [
        (y - dictionary.decode(features * (torch.arange(12) < size), x)).square().sum(1).mean()
        for size in sizes
    ]
    terms = objective(kind, dictionary, x, y, 0.0, torch.zeros(12, dtype=torch.bool))
    assert_close(terms.loss.detach(), sum(errors).detach())  # type: ignore[union-attr]
    assert_close(terms.error.detach(), errors[-1].detach())
    assert float(terms.l0) == int((features > 0).sum()) / 7
    kept = features[features > 0]
    assert_close(terms.smallest, kept.min().detach() if len(kept) == kind.k * 7 else torch.zeros(()).double())
    assert torch.equal(terms.fired, (features > 0).any(0))
    parameters = list(dictionary.parameters())
    expected = torch.autograd.grad(sum(errors), parameters)  # type: ignore[arg-type]
    for one, other in zip(torch.autograd.grad(terms.loss, parameters), expected, strict=True):
        assert_close(one, other)


def test_fewer_positive_features_than_are_kept_leave_no_threshold() -> None:
    dictionary = random_sae(ReLU(), 8, 12)
    dictionary.b_enc.data -= 100.0
    dictionary.b_enc.data[0] += 200.0
    terms = objective(BatchTopK(3), dictionary, noise(7), noise(7), 0.0, torch.zeros(12, dtype=torch.bool))
    assert float(terms.l0) == 1 and float(terms.smallest) == 0


def test_a_matryoshka_of_one_size_is_a_batch_topk() -> None:
    settings = {"steps": 20, "batch_size": 100, "dead_after": 3}
    one, _ = train_dictionary(noise(), BatchTopK(3), 12, **settings)  # type: ignore[arg-type]
    other, _ = train_dictionary(noise(), Matryoshka(3, (12,)), 12, **settings)  # type: ignore[arg-type]
    for name, weight in one.named_parameters():
        assert torch.equal(weight, other.get_parameter(name)), name


@OF_BATCH
def test_the_threshold_is_the_mean_of_the_smallest_kept_features_of_the_last_steps(kind: OfBatch) -> None:
    sae, history = train_dictionary(noise(), kind, 12, steps=40, batch_size=100, dtype=torch.float64)
    assert sae.kind == JumpReLU() and sae.metadata["k"] == 3
    mean = float(history.smallest[-2:].mean()) / history.attrs["scale"]
    assert mean > 0
    assert_close(sae.thresholds, torch.full((12,), mean, dtype=torch.float64))


def test_the_metadata_and_the_threshold_come_back_from_a_file(tmp_path: object) -> None:
    sae, _ = train_dictionary(noise(), Matryoshka(3, (4, 12)), 12, steps=5, batch_size=100)
    save(sae, f"{tmp_path}/sae")
    back = load(f"{tmp_path}/sae")
    said = {"training_architecture": "matryoshka_batchtopk", "k": 3, "sizes": [4, 12]}
    assert sae.metadata == said and said.items() <= back.metadata.items()
    assert torch.equal(back.encode(noise().float()), sae.encode(noise().float()))
    assert sae.prefix(4).d_sae == 4


def hierarchy(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Directions of 8 parents [8 d] and of 24 children [24 d], and vectors [n d].

    A parent is active on 15 % of the vectors, and with it one of its three children, or none.
    """
    fixed = torch.Generator().manual_seed(0)
    directions = torch.randn(32, 32, generator=fixed)
    directions = directions / directions.norm(dim=1, keepdim=True)
    draw = torch.Generator().manual_seed(seed)
    on = torch.rand(n, 8, generator=draw) < 0.15
    child = torch.randint(4, (n, 8, 1), generator=draw) == torch.arange(3)
    active = torch.cat((on, (child & on[..., None]).flatten(1)), 1)
    strength = active * (0.75 + 0.5 * torch.rand(n, 32, generator=draw))
    return directions[:8], directions[8:], strength @ directions


@pytest.mark.slow
def test_the_first_prefix_of_a_matryoshka_holds_the_parents_of_a_planted_hierarchy() -> None:
    """The one direction that says most of a parent's vectors is parent + 1/4 of each child: 1 / sqrt(1 + 3/16) = 0.92.

    The mean of x where the parent is active, for children at right angles to it.
    """
    parents, children, x = hierarchy(20_000, 1)
    settings = {"steps": 500, "lr": 1e-2, "batch_size": 512, "dead_after": 30}
    nested, _ = train_dictionary(x, Matryoshka(2, (12, 36)), 36, **settings)  # type: ignore[arg-type]
    plain, _ = train_dictionary(x, BatchTopK(2), 36, **settings)  # type: ignore[arg-type]
    cosine, of_any = (
        float(dictionary_match(each.prefix(12).W_dec, parents).cosine.mean()) for each in (nested, plain)
    )
    assert cosine == pytest.approx((1 + 3 / 16) ** -0.5, abs=0.05) and of_any < cosine - 0.1
    few, all_of_them = (
        float(dictionary_match(each.W_dec, children).best_cosine.mean())
        for each in (nested.prefix(12), nested)
    )
    assert few < all_of_them - 0.1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fresh_vectors_have_k_features_within_what_sampling_leaves_open(seed: int) -> None:
    """The threshold is a mean over 20 batches of 512, each of which had exactly k features per vector.

    With s the standard deviation of the number of features of a vector, their mean over N fresh vectors varies by
    s / sqrt(N), and the threshold's own error moves it by s / sqrt(20 * 512): 3.3 standard deviations of both.
    """
    sae, _ = train_dictionary(
        hierarchy(20_000, 1)[2],
        BatchTopK(2),
        32,
        steps=400,
        lr=1e-2,
        batch_size=512,
        dead_after=30,
        seed=seed,
    )
    count = (sae.encode(hierarchy(20_000, 2)[2]) > 0).sum(1).double()
    half = 3.3 * float(count.std()) * (1 / len(count) + 1 / (20 * 512)) ** 0.5
    assert abs(float(count.mean()) - 2) < half


@pytest.mark.parametrize("sizes", [(), (0, 12), (4, 4, 12), (6, 4, 12)])
def test_sizes_that_do_not_increase_are_refused(sizes: tuple[int, ...]) -> None:
    assert any(later <= earlier for earlier, later in pairwise((0, *sizes))) or not sizes
    with pytest.raises(ValueError, match=r"Matryoshka: sizes must be|sizes must increase from at least 1"):
        Matryoshka(3, sizes)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (BatchTopK(13), {}, "k must be at most d_sae = 12, got 13"),
        (Matryoshka(3, (4, 11)), {}, r"the last of the sizes must be d_sae = 12, got \(4, 11\)"),
        (BatchTopK(2), {"sparsity": 1.0}, r"the sparsity of BatchTopK is its k; got sparsity=1\.0"),
        (TopK(2, relu=False), {}, r"TopK\(2\) is required, got TopK\(k=2, relu=False\)"),
    ],
)
def test_ways_that_do_not_fit_the_dictionary_are_refused(
    kind: TopK | OfBatch, more: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        train_dictionary(noise(), kind, 12, steps=5, batch_size=100, **more)  # type: ignore[arg-type]
