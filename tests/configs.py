"""Small models that between them have every variant of the config (but cross-attention); most tests run on all of them.

Two layers, 24 wide; where the family allows it heads are not d_model / n_heads wide, so that no axis can stand in
for another. `build` perturbs every parameter, norms and biases included: nothing is zero or one by default.
"""

import functools
import zlib
from dataclasses import replace

import torch
from torch import Tensor

from interp.core import torch_state
from interp.features import Dictionary, ReLU
from interp.lab import NGPT, Macaron
from interp.model import (
    MLP,
    Alibi,
    Buckets,
    KVCache,
    LayerNorm,
    Learned,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    MoE,
    NoNorm,
    NoPosition,
    RMSNorm,
    Rotary,
    Router,
    Sinusoidal,
    Softmax,
    Transformer,
    YarnScaling,
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
    "no-final-norm": replace(_GPT2, final_norm=False, position=NoPosition(), norm=LayerNorm(1e-3, trained="nothing")),
    "window": replace(_LLAMA, window=4),
    "bidirectional": replace(_GPT2, d_head=10, causal=False, position=Learned(), unembed_bias=True),
    "tied": replace(_GPT2, tied=True, mlp=MLP(40, act="gelu", gated=True)),
    "scale-by-layer": replace(_GPT2, d_head=10, scale_by_layer=True),
    "gemma2": replace(
        _LLAMA, norm=RMSNorm(unit_offset=True), norm_place="sandwich", embed_scale=24**0.5, tied=True,
        attn_softcap=2.0, logit_softcap=3.0, window=4, local_layers=(0,), attn_scale=0.2,
    ),
    "gemma3": replace(
        _LLAMA, norm=RMSNorm(unit_offset=True), norm_place="sandwich", qk_norm="head", n_kv_heads=1, window=5,
        local_layers=(1,), local_position=Rotary(100.0), position=Rotary(1000.0, scaling=LinearScaling(8.0)),
    ),
    "olmo2": replace(_LLAMA, norm_place="output", qk_norm="width", embed_scale=4.0, logit_scale=2.0),
    "post-norm": replace(
        _GPT2, norm_place="post", final_norm=False, embed_norm=True, position=Sinusoidal(), embed_scale=2.0
    ),
    "output-post": replace(_GPT2, norm_place="output_post", final_norm=False, embed_norm=True),
    "masked-lm": replace(
        _GPT2, d_head=10, causal=False, norm_place="post", final_norm=False, embed_norm=True, n_token_types=2,
        position=Learned(offset=2), tied=True, unembed_bias=True, mlm_head="gelu", attn_scale=0.5,
    ),
    "bloom": replace(_GPT2, position=Alibi(), embed_norm=True, tied=True),
    "t5": replace(
        _GPT2, d_head=10, position=Buckets(8, 16), norm=RMSNorm(), mlp=MLP(40, act="relu", bias=False),
        attn_scale=0.4, qkv_bias=False, out_bias=False, logit_scale=1.5,
    ),
    "gpt-oss": replace(
        _LLAMA, sinks=True, window=4, local_layers=(0,), qkv_bias=True, out_bias=True,
        position=Rotary(100.0, scaling=YarnScaling(4.0, 16, 1.14, truncate=False)),
        mlp=MoE(3, 2, 20, "quick_gelu", bias=True, router_bias=True, clamp=1.0, linear_offset=1.0),
    ),
    "granite-moe": replace(
        _LLAMA, mlp=MoE(4, 1, 20, renormalise=False), residual_scale=0.3, embed_scale=3.0, logit_scale=0.6,
        attn_scale=0.4,
    ),
    "glm4-moe": replace(
        _LLAMA, position=Rotary(dim=4), qkv_bias=True, qk_norm="head",
        mlp=MoE(
            6, 2, 14, shared=10,
            router=Router("sigmoid", correction=True, groups=3, top_groups=2, best=2, factor=1.7, wide=True),
        ),
    ),
    "weighed-inputs": replace(
        _LLAMA, mlp=MoE(4, 1, 14, renormalise=False, shared=10, router=Router("sigmoid", weighs="input")),
    ),
    "gated-shared-expert": replace(
        _LLAMA,
        mlp=MoE(
            4, 2, 14, renormalise=False, shared=10, shared_gate=True,
            router=Router(groups=2, factor=3.0, wide=True),
        ),
    ),
    "cohere2": replace(
        _LLAMA, norm=LayerNorm(trained="gamma"), parallel=True, shared_norm=True, position=Rotary(interleaved=True),
        qk_norm="each", window=4, local_layers=(1,), mixer=(Softmax(rotated=False), Softmax()), logit_scale=0.7,
        attn_scale=0.9,
    ),
    "macaron": replace(
        _GPT2, d_head=10, n_kv_heads=2, block=Macaron(), mlp=MLP(40, act="silu", gated=True), residual_scale=0.7,
    ),
    "ngpt": replace(
        _LLAMA, block=NGPT(0.2), norm_place="output_post", embed_norm=True, final_norm=False, qk_norm="each",
    ),
    "gptj": replace(
        _GPT2, d_head=10, parallel=True, shared_norm=True, position=Rotary(dim=4, interleaved=True),
        qkv_bias=False, out_bias=False, unembed_bias=True,
    ),
}  # fmt: skip
CAUSAL = tuple(name for name, config in CONFIGS.items() if config.causal)


def perturbed(config: ModelConfig, dtype: torch.dtype = torch.float64, seed: int = 0) -> Transformer:
    """A frozen model in eval mode whose every parameter is random, the same numbers in every dtype."""
    with torch_state.reset():  # whoever asks first, and whatever torch is set to there
        model = Transformer(config).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += SPREAD * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model.to(dtype).eval().requires_grad_(False)


SPLIT = "llama-gqa with dictionaries"
"""Name of the model "llama-gqa" with a random dictionary in each block, which `build` makes too."""


@functools.cache
def build(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    """The perturbed model of one of the `CONFIGS`, or `SPLIT`; shared between tests, so never write to it."""
    if name == SPLIT:
        return build("llama-gqa", dtype).with_dictionaries(_dictionaries(dtype))
    torch.manual_seed(zlib.crc32(name.encode()))
    return perturbed(CONFIGS[name], dtype, zlib.crc32(name.encode()))


def _dictionaries(dtype: torch.dtype) -> list[Dictionary]:
    """An SAE of the stream after block 0 and a transcoder of the MLP of block 1, of seven features each."""
    generator, found = torch.Generator().manual_seed(0), []
    for reads, writes in (
        ("blocks.0.hook_resid_post", "blocks.0.hook_resid_post"),
        ("blocks.1.ln2.hook_normalized", "blocks.1.hook_mlp_out"),
    ):
        shapes = {"W_enc": (24, 7), "b_enc": (7,), "W_dec": (7, 24), "b_dec": (24,)}
        weights = {name: 0.5 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        of_type = {name: x.to(dtype) for name, x in weights.items()}
        found.append(Dictionary(ReLU(), of_type, reads=reads, writes=writes, apply_b_dec_to_input=False))
    return found


def some_tokens(rows: int = 3, n: int = 9, seed: int = 0) -> Tensor:
    """Random token ids `[rows, n]`."""
    return torch.randint(0, D_VOCAB, (rows, n), generator=torch.Generator().manual_seed(seed))


def empty_cache(model: Transformer, rows: int, n_max: int = N_CTX) -> KVCache:
    """A KV cache that fits the model."""
    return KVCache(model.config, rows, n_max, device=model.device, dtype=model.dtype)
