"""Rotary positions: two layouts of one rotation, a score that knows only the offset, and the scaling rules."""

import math

import pytest
import torch
from torch import Tensor

from interp.model import LinearScaling, Llama3Scaling, Rotary
from interp.model.position import Rotation, inverse_frequencies
from tests.model.slow import slow_frequency
from tests.tolerances import assert_close

CPU = torch.device("cpu")
DIM = 8


def rotation(rotary: Rotary, positions: list[int]) -> Rotation:
    return Rotation.at(rotary, rotary.dim or DIM, torch.tensor([positions]), torch.float64)


def heads(n: int, width: int = DIM) -> Tensor:
    return torch.randn(1, n, 2, width, dtype=torch.float64)


def test_interleaved_equals_half_split_after_a_permutation() -> None:
    x, positions = heads(6), [0, 1, 2, 5, 9, 20]
    order = [i for pair in range(DIM // 2) for i in (pair, pair + DIM // 2)]
    half = rotation(Rotary(), positions).apply(x)
    interleaved = rotation(Rotary(interleaved=True), positions).apply(x[..., order])
    assert_close(interleaved, half[..., order])
    assert not torch.allclose(rotation(Rotary(interleaved=True), positions).apply(x), half)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [None, 4])
def test_the_score_depends_on_the_offset_only(interleaved: bool, dim: int | None) -> None:
    rotary, q, k = Rotary(interleaved=interleaved, dim=dim), heads(1), heads(1)

    def score(i: int, j: int) -> Tensor:
        return (rotation(rotary, [i]).apply(q) * rotation(rotary, [j]).apply(k)).sum(-1)

    for offset in (0, 1, 7):
        # Angles are float32 whatever the dtype.
        assert_close(score(30 + offset, 30), score(offset, 0), torch.float32)
    assert not torch.allclose(score(1, 0), score(0, 0), atol=1e-3)
    assert not torch.allclose(score(1, 0), score(0, 1), atol=1e-3)


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_rotation_keeps_every_norm_and_position_zero_is_the_identity(interleaved: bool) -> None:
    x = heads(3)
    turned = rotation(Rotary(interleaved=interleaved), [0, 4, 11]).apply(x)
    assert torch.equal(turned[:, 0], x[:, 0])
    assert_close(turned.norm(dim=-1), x.norm(dim=-1), torch.float32)


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rotation_passes_the_rest_through_and_turns_the_first_dimensions(interleaved: bool) -> None:
    x, positions = heads(4), [0, 1, 2, 3]
    partial = rotation(Rotary(dim=4, interleaved=interleaved), positions).apply(x)
    whole = Rotation.at(Rotary(interleaved=interleaved), 4, torch.tensor([positions]), torch.float64)
    assert torch.equal(partial[..., 4:], x[..., 4:])
    assert torch.equal(partial[..., :4], whole.apply(x[..., :4]))


def test_the_first_pair_turns_by_one_radian_per_position() -> None:
    x = torch.zeros(1, 1, 1, DIM, dtype=torch.float64)
    x[..., 0] = 1
    turned = rotation(Rotary(), [1]).apply(x)[0, 0, 0]
    assert_close(turned[[0, 4]], torch.tensor([math.cos(1), math.sin(1)]).double(), torch.float32)


@pytest.mark.parametrize(
    "rotary",
    [
        Rotary(),
        Rotary(base=500_000.0),
        Rotary(scaling=LinearScaling(4.0)),
        Rotary(base=500_000.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        Rotary(base=500_000.0, scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192)),
        Rotary(base=100.0, scaling=Llama3Scaling(8.0, 2.0, 3.0, 64)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [2, 64, 128])
def test_frequencies_equal_an_explicit_loop(rotary: Rotary, dim: int) -> None:
    expected = torch.tensor([slow_frequency(rotary, 2 * i / dim) for i in range(dim // 2)])
    actual = inverse_frequencies(rotary, dim, CPU)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)


def test_llama3_keeps_the_fast_divides_the_slow_and_mixes_between() -> None:
    """Otherwise the comparison above could be a comparison of one branch."""
    plain = inverse_frequencies(Rotary(base=500_000.0), 128, CPU)
    scaled = inverse_frequencies(Rotary(500_000.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)), 128, CPU)
    ratio = plain / scaled
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(8)
    assert ((ratio > 1.01) & (ratio < 7.99)).any()


def test_angles_of_half_precision_models_are_computed_in_float32() -> None:
    """Position 1001 does not exist in bfloat16."""
    far = Rotation.at(Rotary(), DIM, torch.tensor([[1001]]), torch.bfloat16)
    exact = Rotation.at(Rotary(), DIM, torch.tensor([[1001]]), torch.float64)
    assert far.cos.dtype == torch.bfloat16
    assert_close(far.cos.double(), exact.cos, torch.bfloat16)
