"""The one widening: sums, softmaxes and spectra never run in half precision."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """The tensor in float32 at least."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
