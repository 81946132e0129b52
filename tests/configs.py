"""Small models that between them have every variant of the config; most tests run on all of them.

Two layers, 24 wide; where the family allows it heads are not d_model / n_heads wide, so that no axis can stand in
for another. `build` perturbs every parameter, norms and biases included: nothing is zero or one by default.
"""

import functools
import zlib
from dataclasses import replace

import torch
from torch import Tensor

from interp.model import (
    MLP,
    KVCache,
    LayerNorm,
    Learned,
    Llama3Scaling,
    ModelConfig,
    NoNorm,
    NoPosition,
    RMSNorm,
    Rotary,
    Transformer,
)

N_CTX, D_VOCAB = 24, 31
SPREAD = 0.25
"""Standard deviation of what is added to every parameter: attention is far from uniform, nothing overflows."""

_GPT2 = ModelConfig(2, 24, 4, N_CTX, D_VOCAB, mlp=MLP(40))
_LLAMA = ModelConfig(
    2, 24, 4, N_CTX, D_VOCAB, d_head=10, n_kv_heads=2,
    mlp=MLP(36, act="silu", gated=True, bias=False), position=Rotary(), norm=RMSNorm(),
    qkv_bias=False, out_bias=False,
)  # fmt: skip

CONFIGS: dict[str, ModelConfig] = {
    "gpt2": _GPT2,
    "llama-gqa": _LLAMA,
    "llama3-scaled": replace(_LLAMA, position=Rotary(500.0, scaling=Llama3Scaling(8.0, 1.0, 4.0, 16))),
    "mqa": replace(_GPT2, d_head=10, n_kv_heads=1),
    "attention-only": replace(_GPT2, d_head=8, mlp=None, qkv_bias=False, out_bias=False),
    "attention-only-rotary": replace(
        _GPT2, d_head=10, mlp=None, position=Rotary(dim=4, interleaved=True), unembed_bias=True
    ),
    "parallel": replace(_GPT2, parallel=True, position=Rotary(dim=2), mlp=MLP(40, act="gelu")),
    "rms-plain": replace(_GPT2, d_head=10, norm=RMSNorm(1e-3), mlp=MLP(40, act="gelu", bias=False)),
    "no-norm": replace(_GPT2, norm=NoNorm(), mlp=MLP(40, act="relu"), attn_scale=1.0),
    "no-final-norm": replace(_GPT2, final_norm=False, position=NoPosition(), norm=LayerNorm(1e-3)),
    "window": replace(_LLAMA, window=4),
    "bidirectional": replace(_GPT2, d_head=10, causal=False, position=Learned(), unembed_bias=True),
    "tied": replace(_GPT2, tied=True, mlp=MLP(40, act="gelu", gated=True)),
    "scale-by-layer": replace(_GPT2, d_head=10, scale_by_layer=True),
}
CAUSAL = tuple(name for name, config in CONFIGS.items() if config.causal)


def perturbed(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> Transformer:
    """A frozen model in eval mode whose every parameter is random, the same numbers in every dtype."""
    model = Transformer(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += SPREAD * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.to(dtype).eval().requires_grad_(False)


@functools.cache
def build(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    """The perturbed model of one of the `CONFIGS`; shared between tests, so never write to it."""
    torch.manual_seed(zlib.crc32(name.encode()))
    return perturbed(CONFIGS[name], dtype, zlib.crc32(name.encode()))


def some_tokens(rows: int = 3, n: int = 9, seed: int = 0) -> Tensor:
    """Random token ids `[rows, n]`."""
    return torch.randint(0, D_VOCAB, (rows, n), generator=torch.Generator().manual_seed(seed))


def empty_cache(model: Transformer, rows: int, n_max: int = N_CTX) -> KVCache:
    """A KV cache that fits the model."""
    return KVCache(model.config, rows, n_max, device=model.device, dtype=model.dtype)
