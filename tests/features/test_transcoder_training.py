"""Transcoders are trained on pairs: a planted sparse map is found, and the units of both sides do not matter."""

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
    reconstruction_quality,
    train_dictionary,
    training,
)
from interp.features.objectives import TrainedKind
from interp.features.training_state import DictionaryState
from tests.features.test_dictionary_training import noise, sparse_data
from tests.tolerances import assert_close

SITES = {"reads": "blocks.1.ln2.hook_normalized", "writes": "blocks.1.hook_mlp_out"}
KINDS: dict[str, tuple[TrainedKind, float | None]] = {
    "ReLU": (ReLU(), 2.0),
    "TopK": (TopK(2), None),
    "JumpReLU": (JumpReLU(1.0), 1.5),
    "BatchTopK": (BatchTopK(2), None),
    "Matryoshka": (Matryoshka(2, (32, 48)), None),
}
EVERY = pytest.mark.parametrize(("kind", "sparsity"), KINDS.values(), ids=KINDS)


def written() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Directions [t o] in which features are written, how strong each is [n t], vectors read [n d], written [n o]."""
    _, strength, x = sparse_data()
    directions = torch.randn(32, 24, generator=torch.Generator().manual_seed(7))
    directions = directions / directions.norm(dim=1, keepdim=True)
    return directions, strength, x, strength @ directions


def small_pair() -> tuple[Tensor, Tensor]:
    x = noise()
    return x, (x @ torch.randn(8, 6, generator=torch.Generator().manual_seed(4), dtype=torch.float64)).relu()


def quick(pair: object, kind: TrainedKind, sparsity: float | None, **more: object) -> Dictionary:
    settings = {"steps": 12, "batch_size": 100, "dtype": torch.float64, "dead_after": 3, **SITES}
    return train_dictionary(pair, kind, 48, sparsity=sparsity, **(settings | more))[0]  # type: ignore[arg-type]


@pytest.mark.slow
@EVERY
def test_it_finds_the_sparse_map_that_the_pairs_were_made_of(
    kind: TrainedKind, sparsity: float | None
) -> None:
    truth, strength, x, y = written()
    coder, _ = train_dictionary(
        (x, y), kind, 48, sparsity=sparsity, steps=500, lr=1e-2, batch_size=512, dead_after=30,
        reads=SITES["reads"], writes=SITES["writes"],
    )  # fmt: skip
    match = dictionary_match(coder.W_dec, truth)
    assert float(match.cosine.mean()) > 0.9
    matched = coder.encode(x)[:, match.feature.values]
    found, true = (values - values.mean(0) for values in (matched, strength))
    assert float(torch.nn.functional.cosine_similarity(found, true, dim=0).mean()) > 0.8
    assert (coder.reads, coder.writes) == (SITES["reads"], SITES["writes"]) and not coder.apply_b_dec_to_input


@EVERY
def test_the_units_of_what_is_read_and_written_do_not_matter(
    kind: TrainedKind, sparsity: float | None
) -> None:
    """f W_dec + b_dec + x W_skip for (8 x, 4 y) is 4 times that for (x, y): powers of 2, so bit for bit."""
    x, y = small_pair()
    one = quick((x, y), kind, sparsity, skip=True)
    other = quick((8 * x, 4 * y), kind, sparsity, skip=True)
    assert torch.equal(one.W_dec, other.W_dec)
    assert torch.equal(one.W_enc, 2 * other.W_enc) and torch.equal(one.W_skip, 2 * other.W_skip)
    for name in ("b_enc", "b_dec"):
        assert torch.equal(4 * one.get_parameter(name), other.get_parameter(name))
    assert torch.equal(4 * one.thresholds, other.thresholds)
    assert torch.equal(4 * one.encode(x), other.encode(8 * x)) and torch.equal(4 * one(x), other(8 * x))


@EVERY
def test_the_result_is_what_was_trained_in_the_unit_of_the_pairs(
    kind: TrainedKind, sparsity: float | None
) -> None:
    """Against the trained weights before the factors are divided out, applied to scaled vectors."""
    x, y = small_pair()
    states: list[DictionaryState] = []
    fresh = training._fresh
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "_fresh", lambda *given: states.append(fresh(*given)) or states[0])
        coder = quick((x, y), kind, sparsity, skip=True)
    # 12 batches of 100 vectors are two epochs of all 600, from which the factors come
    scale_read, scale_written = ((each.shape[1] / each.square().sum(1).mean()) ** 0.5 for each in (x, y))
    inside = states[0].dictionary.requires_grad_(False)
    z = inside.before(scale_read * x)
    assert_close(coder.before(x), z / scale_written)
    features = coder.encode(x) * scale_written
    if kind in (ReLU(), TopK(2), JumpReLU(1.0)):
        assert_close(features, inside.activate(z))
    assert_close(scale_written * coder(x), inside.decode(features, scale_read * x))


@pytest.mark.slow
def test_a_skip_takes_over_what_is_linear_in_the_input() -> None:
    _, _, x, y = written()
    linear = 2 * torch.randn(24, 24, generator=torch.Generator().manual_seed(8)) / 24**0.5
    pair = x, y + x @ linear
    explained = []
    for skip in (False, True):
        coder, _ = train_dictionary(
            pair, TopK(2), 48, steps=500, lr=1e-2, batch_size=512, dead_after=30, skip=skip,
            reads=SITES["reads"], writes=SITES["writes"],
        )  # fmt: skip
        explained.append(float(reconstruction_quality(coder, pair).value.sel(score="explained_variance")))
    assert explained[1] > explained[0]


def test_pairs_in_chunks_train_as_a_stream_of_them() -> None:
    x, y = small_pair()
    chunks = list(zip(x.split(170), y.split(170), strict=True))
    one, other = (quick(each, TopK(2), None) for each in (chunks, iter(chunks * 2)))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_both_sides_of_a_pair_are_shuffled_alike() -> None:
    rows = torch.arange(60.0)[:, None]
    for source in ((rows, -rows), list(zip(rows.split(13), (-rows).split(13), strict=True))):
        batches = training._batches(source, 20, 0, pairs=True)
        for _ in range(6):
            x, y = next(batches)
            assert torch.equal(x, -y)


def test_a_dead_feature_restarts_at_what_is_read_and_writes_what_is_missed() -> None:
    x, y = small_pair()
    coder = quick((x, y), ReLU(), 0.5).requires_grad_(True)
    x, y = x.clone(), coder(x).detach()
    y[7] += 100 * torch.eye(6).double()[2]
    optimiser = torch.optim.Adam(coder.parameters(), 0.0)
    coder(x).sum().backward()
    optimiser.step()
    idle = torch.zeros(48, dtype=torch.long)
    idle[3] = 9
    state = DictionaryState(coder, optimiser, torch.Generator().manual_seed(0), idle)
    training._resample(state, (x, y), 5)
    read = x[7] - x.mean(0)
    assert_close(coder.W_enc[:, 3].detach() / coder.W_enc[:, 3].detach().norm(), read / read.norm())
    assert_close(coder.W_dec[3].detach(), torch.eye(6).double()[2])
    assert float(coder.before(x.mean(0, keepdim=True))[0, 3].detach()) == pytest.approx(0, abs=1e-9)


def test_what_is_no_transcoder_is_refused() -> None:
    x, y = small_pair()
    with pytest.raises(ValueError, match="a tuple is a pair of what a transcoder reads and writes"):
        quick((x, y), TopK(2), None, reads=None, writes=None)
    with pytest.raises(ValueError, match=r"reads at one site and writes at another: reads=\.\.\. beside"):
        quick((x, y), TopK(2), None, reads=None)
    with pytest.raises(ValueError, match="a skip belongs to a transcoder"):
        quick(x, TopK(2), None, writes=None, skip=True)
    with pytest.raises(ValueError, match=r"a transcoder is trained on pairs, .*; got 1 for a chunk"):
        quick(x, TopK(2), None)
    with pytest.raises(ValueError, match="pairs of as many vectors are required, got 600 and 599"):
        quick((x, y[1:]), TopK(2), None)
    with pytest.raises(ValueError, match="activations of finite numbers, not all 0, are required"):
        quick((x, 0 * y), TopK(2), None)
    with pytest.raises(KeyError, match="hook_mlp_outs"):
        quick((x, y), TopK(2), None, writes="blocks.1.hook_mlp_outs")
