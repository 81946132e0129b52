"""Random frames: orthonormal columns, uniform among all such."""

import torch
from jaxtyping import Float
from torch import Tensor


def haar_frames(
    n: int, d: int, e: int, generator: torch.Generator, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "n d e"]:
    """n frames of e orthonormal columns in d dimensions, each uniform among all such frames; on the host.

    A frame is the Q factor of a Gaussian matrix, with signs that make the diagonal of R positive (Mezzadri 2007, "How
    to generate random matrices from the classical compact groups"). Without these signs it would not be uniform: LAPACK
    makes the first entry of the first column always negative, and so the overlap of two frames positive on average.

    Example:
        >>> q = haar_frames(1, 6, 2, torch.Generator().manual_seed(0))[0]
        >>> bool(torch.allclose(q.mT @ q, torch.eye(2).double()))
        True
    """
    noise = torch.randn(n, d, e, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(noise.to(dtype))
    return q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]
