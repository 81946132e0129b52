"""Random frames are orthonormal and uniform."""

import functools

import torch
from torch import Tensor

from interp.core.haar import haar_frames
from tests.tolerances import assert_close

DRAWS = 40_000
ERRORS = 5
"""Standard errors that a simulated mean may stand from its expectation."""


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@functools.cache
def haar(d: int, columns: int) -> Tensor:
    """Columns of Haar orthogonal matrices."""
    return haar_frames(DRAWS, d, columns, torch.Generator().manual_seed(d))


def test_frames_are_orthonormal_and_have_no_preferred_sign() -> None:
    """Every entry has mean 0, and so has the overlap of two frames."""
    q = haar(6, 4)
    assert_close(q.mT @ q, torch.eye(4).double().expand(DRAWS, 4, 4))
    bound = ERRORS / (6 * DRAWS) ** 0.5  # entries have variance 1/6
    assert float(q.mean(0).abs().max()) < bound
    overlap = torch.einsum("ndk, ndk -> n", q[::2], q[1::2])  # of variance 4/6
    assert abs(float(overlap.mean())) < ERRORS * (4 / 6 / len(overlap)) ** 0.5
    assert bool((torch.linalg.qr(gaussian(100, 6, 4))[0][:, 0, 0] < 0).all()), "the signs are needed"
