"""Small models of every mixer, as `tests.configs` has them of every family."""

import functools
import zlib
from dataclasses import replace

import torch

from interp.model import MLP, ModelConfig, Transformer
from interp.model.mixer_variants import Pool, Softmax
from tests.configs import D_VOCAB, N_CTX, perturbed

_BASE = ModelConfig(n_layers=2, d_model=24, n_heads=4, n_ctx=N_CTX, d_vocab=D_VOCAB, mlp=MLP(40))

MIXERS: dict[str, ModelConfig] = {
    "pool": replace(_BASE, mixer=Pool()),
    "pool-softmax": replace(_BASE, mixer=(Pool(), Softmax())),
}
CAUSAL_MIXERS = tuple(name for name, config in MIXERS.items() if config.causal)


@functools.cache
def build_mixed(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    """The perturbed model of one of the `MIXERS`; shared between tests, so never write to it."""
    torch.manual_seed(zlib.crc32(name.encode()))
    return perturbed(MIXERS[name], dtype, zlib.crc32(name.encode()))
