"""Rotations, their layouts and scaling rules; sinusoids; what positions add to the scores."""

import math

import pytest
import torch
from torch import Tensor

from interp.model import (
    Buckets,
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongScaling,
    Rotary,
    Sinusoidal,
    YarnScaling,
)
from interp.model.position import Rotation, alibi_slopes, buckets, inverse_frequencies, sinusoids
from tests.loops import over
from tests.model.slow_position import slow_bucket, slow_frequency, slow_sinusoid, slow_slopes
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_its_gradient_are_bit_equal_to_turning_each_pair(
    interleaved: bool, dim: int | None, dtype: torch.dtype
) -> None:
    """The operators may change, and no bit of any model's numbers with them."""
    rotary, positions = Rotary(dim=dim, interleaved=interleaved), torch.tensor([[0, 1, 2, 5, 9, 200]])
    turn = Rotation.at(rotary, DIM, positions, dtype)
    x, weights = heads(6).to(dtype).requires_grad_(), heads(6).to(dtype)
    half = (dim or DIM) // 2
    expected = x.clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        cos, sin = turn.cos[..., i], turn.sin[..., i]
        expected[..., a] = x[..., a] * cos - x[..., b] * sin
        expected[..., b] = x[..., b] * cos + x[..., a] * sin
    actual = turn.apply(x)
    assert torch.equal(actual, expected)
    grads = (torch.autograd.grad((each * weights).sum(), x)[0] for each in (actual, expected))
    assert torch.equal(*grads)


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
def test_partial_rotation_turns_the_first_dimensions_alone(interleaved: bool) -> None:
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


@over(
    "rotary",
    [
        Rotary(),
        Rotary(base=500_000.0),
        Rotary(scaling=LinearScaling(4.0)),
        Rotary(base=500_000.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)),
        Rotary(base=500_000.0, scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192)),
        Rotary(base=100.0, scaling=Llama3Scaling(8.0, 2.0, 3.0, 64)),
        Rotary(base=10_000.0, scaling=YarnScaling(16.0, 2048, 1.0)),
        Rotary(base=150_000.0, scaling=YarnScaling(32.0, 4096, 1.3, truncate=False)),
        Rotary(base=100.0, scaling=YarnScaling(4.0, 16, 1.14, beta_fast=4.0, beta_slow=0.5)),
    ],
)
@over("dim", [2, 64, 128])
def test_frequencies_equal_an_explicit_loop(rotary: Rotary, dim: int) -> None:
    expected = torch.tensor([slow_frequency(rotary, i, dim) for i in range(dim // 2)])
    actual = inverse_frequencies(rotary, dim, CPU)[0]
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)


def test_llama3_keeps_the_fast_divides_the_slow_and_mixes_between() -> None:
    """Otherwise the comparison above could be a comparison of one branch."""
    plain = inverse_frequencies(Rotary(base=500_000.0), 128, CPU)[0]
    scaled = inverse_frequencies(Rotary(500_000.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192)), 128, CPU)[0]
    ratio = plain / scaled
    assert ratio[0] == 1
    assert ratio[-1] == pytest.approx(8)
    assert ((ratio > 1.01) & (ratio < 7.99)).any()


@pytest.mark.parametrize("dim", [4, 64])
@pytest.mark.parametrize("kind", ["dynamic", "long"])
def test_frequencies_depending_on_the_length_equal_a_loop_over_rows(kind: str, dim: int) -> None:
    short, long = ([1.0 + k * i for i in range(dim // 2)] for k in (0.1, 3.0))
    scaling = {"dynamic": DynamicScaling(4.0, 100), "long": LongScaling(tuple(short), tuple(long), 100, 1.2)}
    rotary, lengths = Rotary(5000.0, scaling=scaling[kind]), [1, 99, 100, 101, 350]
    found = inverse_frequencies(rotary, dim, CPU, torch.tensor(lengths))
    expected = [[slow_frequency(rotary, i, dim, n) for i in range(dim // 2)] for n in lengths]
    torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=0)
    torch.testing.assert_close(inverse_frequencies(rotary, dim, CPU), found[:1], rtol=0, atol=0)
    assert torch.equal(found[2], found[0]), "the original context itself is unchanged"
    assert (found[3:, -1] < found[2, -1]).all() and found[3, -1] != found[2, -1]


def test_yarn_keeps_the_fast_divides_the_slow_and_mixes_between() -> None:
    """Peng et al. 2023, section 3.2, base 10 000 and 128 dimensions: beta 32 and 1 end the ramp at pairs 20 and 46."""
    rotary = Rotary(scaling=YarnScaling(16.0, 4096, 1.0))
    ratio = (inverse_frequencies(Rotary(), 128, CPU) / inverse_frequencies(rotary, 128, CPU))[0]
    assert_close(ratio[:21], torch.ones(21))
    assert_close(ratio[46:], torch.full((18,), 16.0))
    assert (ratio[21:46].diff() > 0).all() and ratio[21] > 1 and ratio[45] < 16


@pytest.mark.parametrize(
    "scaling",
    [YarnScaling(4.0, 16, 1.5), LongScaling((1.0,) * 4, (2.0,) * 4, 16, 1.5)],
    ids=["yarn", "long"],
)
def test_the_attention_factor_multiplies_what_is_rotated(scaling: YarnScaling | LongScaling) -> None:
    x = heads(3)
    turned = rotation(Rotary(scaling=scaling), [0, 1, 2]).apply(x)
    assert_close(turned.norm(dim=-1), 1.5 * x.norm(dim=-1), torch.float32)


# --- vectors and score biases -------------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [True, False])
def test_sinusoids_equal_a_loop_over_positions_and_pairs(interleaved: bool) -> None:
    kind, positions = Sinusoidal(interleaved), [0, 1, 7, 500]
    found = sinusoids(kind, torch.tensor([positions]), 12, torch.float64)
    assert_close(found[0], torch.tensor([slow_sinusoid(kind, i, 12) for i in positions], dtype=torch.float64))


@pytest.mark.parametrize("n_heads", [1, 2, 4, 8, 12, 16, 20, 112])
def test_alibi_slopes_equal_the_recursion_of_the_release(n_heads: int) -> None:
    torch.testing.assert_close(alibi_slopes(n_heads), torch.tensor(slow_slopes(n_heads)), rtol=1e-6, atol=0)


def test_alibi_slopes_are_those_of_the_paper() -> None:
    """Press et al. 2022, section 3: 8 heads have 1/2, 1/4, ... 1/256; 12 heads those and every second of 16 heads'."""
    eight = [1 / 2**h for h in range(1, 9)]
    assert alibi_slopes(8).tolist() == eight
    assert alibi_slopes(12).tolist() == pytest.approx([*eight, 0.7071, 0.3536, 0.1768, 0.0884], abs=5e-5)


ONE_SIDED = {0: 0, -1: 1, -15: 15, -16: 16, -20: 17, -32: 21, -64: 26, -112: 30, -113: 31, -5000: 31}
TWO_SIDED = {0: 0, 1: 17, 8: 24, 20: 26, 128: 31, -1: 1, -7: 7, -8: 8, -20: 10, -128: 15, 5000: 31}


@pytest.mark.parametrize(("two_sided", "known"), [(False, ONE_SIDED), (True, TWO_SIDED)])
def test_buckets_are_t5s(two_sided: bool, known: dict[int, int]) -> None:
    """Raffel et al. 2020, section 2.1: 32 buckets, distances up to 128; the numbers of their release."""
    found = buckets(torch.tensor(list(known)), Buckets(), two_sided=two_sided)
    assert dict(zip(known, found.tolist(), strict=True)) == known
    later = buckets(torch.tensor([1, 2, 100]), Buckets(), two_sided=False)
    assert later.tolist() == [0, 0, 0]


@pytest.mark.parametrize("two_sided", [False, True])
@pytest.mark.parametrize("kind", [Buckets(), Buckets(8, 16), Buckets(16, 100)], ids=str)
def test_buckets_equal_a_loop_over_offsets(kind: Buckets, two_sided: bool) -> None:
    offsets = range(-150, 151)
    expected = [slow_bucket(kind, offset, two_sided=two_sided) for offset in offsets]
    assert buckets(torch.tensor(list(offsets)), kind, two_sided=two_sided).tolist() == expected


# --- precision ----------------------------------------------------------------------------------------------------


def test_angles_of_half_precision_models_are_computed_in_float32() -> None:
    """Position 1001 does not exist in bfloat16."""
    far = Rotation.at(Rotary(), DIM, torch.tensor([[1001]]), torch.bfloat16)
    exact = Rotation.at(Rotary(), DIM, torch.tensor([[1001]]), torch.float64)
    assert far.cos.dtype == torch.bfloat16
    assert_close(far.cos.double(), exact.cos, torch.bfloat16)
