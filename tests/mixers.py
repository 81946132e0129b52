"""Small models of every mixer, as `tests.configs` has them of every family."""

import functools
import zlib
from dataclasses import replace

import torch

from interp.lab import (
    AdaptiveTemperature,
    BigBird,
    ConvMLP,
    Differential,
    Dilated,
    DualChunk,
    FixedBlocks,
    Lightning,
    Linear,
    Linformer,
    LogN,
    Longformer,
    LongTermMemory,
    Performer,
    Polar,
    Pool,
    Reformer,
    Segments,
    SpatialGating,
    Strided,
    Synthesizer,
    TokenMixing,
)
from interp.model import (
    MLP,
    Alibi,
    Chunks,
    GatedDelta,
    Latent,
    LogSteps,
    Mamba2,
    ModelConfig,
    MoE,
    NoNorm,
    NoPosition,
    RMSNorm,
    Rotary,
    Router,
    ShortConv,
    Softmax,
    Transformer,
)
from tests.configs import D_VOCAB, N_CTX, perturbed

_BASE = ModelConfig(n_layers=2, d_model=24, n_heads=4, n_ctx=N_CTX, d_vocab=D_VOCAB, mlp=MLP(40))
_ROTARY = replace(_BASE, d_head=10, n_kv_heads=2, position=Rotary(dim=8), norm=RMSNorm(), qkv_bias=False)

_LINEAR_FAMILY = {
    "linear": replace(_BASE, mixer=Linear(chunk=4)),
    "linear-relu": replace(_ROTARY, mixer=Linear("relu", chunk=3), qk_norm="head", mlp=None),
    "linear-softmax": replace(_ROTARY, mixer=(Linear(chunk=2), Softmax()), attn_scale=0.4),
    "lightning": replace(_BASE, mixer=Lightning(chunk=4), d_head=10, n_kv_heads=2),
    "lightning-gated": replace(
        _BASE, mixer=Lightning(gate=True, chunk=2), norm=RMSNorm(), position=NoPosition()
    ),
    "lightning-no-decay": replace(_BASE, mixer=Lightning(decay=False), norm=NoNorm(), mlp=None),
    "minimax": replace(
        _ROTARY,
        n_layers=8,
        mixer=(*[Lightning(gate=True, chunk=4)] * 7, Softmax()),
        position=Rotary(dim=4),
        embed_scale=8.0,  # else bfloat16 weights alone, in exact arithmetic, move its logits by 0.3
    ),
    "performer": replace(_BASE, mixer=Performer(9, chunk=4), d_head=10, n_kv_heads=2),
    "performer-rotary": replace(_ROTARY, mixer=(Performer(16, chunk=3), Softmax()), attn_scale=0.2),
    "performer-bidirectional": replace(_BASE, mixer=Performer(4), causal=False),
    "polar": replace(_BASE, mixer=Polar(chunk=4), d_head=10),
    "polar-rotary": replace(_ROTARY, mixer=(Polar(), Softmax())),
    "sana": replace(_ROTARY, mixer=Linear("relu", chunk=4), mlp=ConvMLP(16)),
    "linear-bidirectional": replace(_ROTARY, mixer=(Linear(chunk=2), Softmax()), causal=False),
    "lightning-bidirectional": replace(
        _BASE, mixer=Lightning(chunk=4), d_head=10, n_kv_heads=2, causal=False
    ),
    "lightning-gated-bidirectional": replace(
        _BASE, mixer=Lightning(gate=True, decay=False), causal=False, mlp=None
    ),
    "polar-bidirectional": replace(_BASE, mixer=Polar(), d_head=10, causal=False),
    "sana-bidirectional": replace(
        _ROTARY, mixer=Linear("relu"), mlp=ConvMLP(16, kernel=5, centred=True), causal=False
    ),
    "gated-delta": replace(
        _ROTARY, d_head=12, mixer=(GatedDelta(2, 4, 5, 12, chunk=4), Softmax(gate=True)), qk_norm="head"
    ),
    "gated-delta-pairs": replace(
        _BASE, d_head=12, mixer=(Softmax(), GatedDelta(4, 8, 8, 6, kernel=2, chunk=3)), norm=RMSNorm()
    ),
    "short-conv": replace(
        _ROTARY, d_head=6, position=Rotary(), mixer=(ShortConv(3, bias=True), Softmax()), qk_norm="head"
    ),
    "mamba2": replace(_BASE, mixer=Mamba2(2, 4, 5, 6, bias=True, chunk=4), norm=RMSNorm(), mlp=None),
    "mamba2-softmax": replace(
        _ROTARY,
        mixer=(
            Mamba2(1, 8, 5, 7, kernel=2, conv_bias=False, step_min=0.05, step_max=1.2, chunk=3),
            Softmax(),
        ),
    ),
    "mamba2-delta": replace(
        _BASE,
        d_head=12,
        mixer=(GatedDelta(2, 4, 5, 12, chunk=4), Mamba2(2, 4, 3, 5, chunk=4)),
        norm=RMSNorm(),
        embed_scale=8.0,  # else bfloat16 weights alone, in exact arithmetic, move its logits by 0.7
    ),
    "gated-softmax": replace(_BASE, mixer=Softmax(gate=True), d_head=10, n_kv_heads=2),
    "conv-softmax": replace(_BASE, mlp=ConvMLP(16, kernel=4), parallel=True),
}

_SCORES = {
    "differential": replace(_BASE, mixer=Differential(), d_head=10),
    "differential-rotary": replace(
        _ROTARY, mixer=(Differential(), Softmax()), d_head=8, position=Rotary(dim=4)
    ),
    "differential-plain": replace(
        _ROTARY,
        mixer=Differential(1e-3),
        d_head=16,
        position=Rotary(interleaved=True),
        norm=NoNorm(),
        mlp=None,
    ),
    "differential-bidirectional": replace(
        _ROTARY, mixer=Differential(), position=Rotary(dim=2), causal=False
    ),
    "clipped": replace(_ROTARY, mixer=Softmax(clip=0.8), qk_norm="head"),
    "cosine": replace(_ROTARY, mixer=Softmax("cosine")),
    "cosine-adaptive": replace(
        _BASE, mixer=(Softmax("cosine", temperature=AdaptiveTemperature()), Softmax()), norm=NoNorm()
    ),
    "additive": replace(_ROTARY, mixer=Softmax("additive"), attn_softcap=3.0, window=4),
    "additive-log-n": replace(
        _BASE, mixer=Softmax("additive", temperature=LogN(4)), position=Alibi(), mlp=None
    ),
    "log-n": replace(_ROTARY, mixer=Softmax(temperature=LogN(3))),
    "log-n-sparse": replace(
        _BASE,
        mixer=(Softmax(temperature=LogN(4, 0.8), sparsity=Strided(3)), Softmax()),
        window=4,
        norm=RMSNorm(),
    ),
    "chunks": replace(
        _ROTARY,
        mixer=(
            Softmax(sparsity=Chunks(4), head_norm=1e-5),
            Softmax(rotated=False, temperature=LogSteps(2, 0.7)),
        ),
    ),
    "log-steps": replace(
        _BASE, mixer=Softmax(sparsity=Chunks(5), temperature=LogSteps(2, 0.7)), position=NoPosition()
    ),
    "log-n-bidirectional": replace(_BASE, mixer=Softmax(temperature=LogN(4)), causal=False),
    "adaptive": replace(_ROTARY, mixer=Softmax(temperature=AdaptiveTemperature()), attn_scale=0.2),
    "refined-simple": replace(_BASE, mixer=Softmax(refinement="simple")),
    "refined-value": replace(_ROTARY, mixer=(Softmax(refinement="value"), Softmax())),
    "refined-additive": replace(
        _ROTARY,
        mixer=Softmax("cosine", Dilated(2, 3), LogN(4), smeared_keys=True, refinement="additive"),
        mlp=None,
    ),
    "refined-stochastic": replace(_ROTARY, mixer=(Softmax(refinement="stochastic"), Softmax())),
    "refined-alibi": replace(_BASE, mixer=Softmax(refinement="value"), position=Alibi()),
    "synthesizer": replace(_BASE, mixer=Synthesizer(), d_head=10),
    "synthesizer-alibi": replace(_BASE, mixer=(Synthesizer(), Softmax()), position=Alibi(), norm=RMSNorm()),
    "synthesizer-random": replace(_BASE, mixer=Synthesizer("random"), norm=NoNorm(), qkv_bias=False),
    "synthesizer-random-bidirectional": replace(_BASE, mixer=Synthesizer("random"), causal=False, mlp=None),
}

_MEMORIES = {
    "memory-gate": replace(_BASE, mixer=LongTermMemory("gate", 4, 2, chunk=2)),
    "memory-gate-deep": replace(
        _BASE, mixer=LongTermMemory("gate", 3, 0, depth=2, chunk=1), norm=NoNorm(), mlp=None
    ),
    "memory-layer": replace(
        _ROTARY, mixer=LongTermMemory("layer", 4, 1, depth=2, chunk=4), n_kv_heads=None, qk_norm="head"
    ),
    "memory-context": replace(_BASE, mixer=LongTermMemory("context", 4, 2, chunk=2), d_head=10),
    "memory-context-deep": replace(
        _ROTARY, mixer=(LongTermMemory("context", 3, 1, depth=3, chunk=1), Softmax()), n_kv_heads=None
    ),
}

_MEMORIES |= {
    "memory-gate-bidirectional": replace(_MEMORIES["memory-gate"], causal=False),
    "memory-layer-bidirectional": replace(_MEMORIES["memory-layer"], causal=False),
    "memory-context-bidirectional": replace(_MEMORIES["memory-context"], causal=False, mlp=None),
}

_GATED = MLP(20, act="silu", gated=True, bias=False)
_LATENTS = {
    "latent": replace(
        _ROTARY, mixer=Latent(8, 5, 6), n_kv_heads=None, position=Rotary(dim=4, interleaved=True), qkv_bias=True,
        mlp=MoE(
            6, 2, 10, router=Router("sigmoid", correction=True, groups=3, top_groups=2, best=2, factor=1.7),
            shared=14, dense=_GATED, dense_layers=(0,),
        ),
    ),
    "latent-one-query-matrix": replace(
        _BASE, mixer=(Latent(7, 3), Softmax()), position=NoPosition(), d_head=10, mlp=None
    ),
}  # fmt: skip

MIXERS: dict[str, ModelConfig] = (
    {
        "spatial-gating": replace(_BASE, mixer=SpatialGating(), d_head=10),
        "spatial-gating-softmax": replace(_ROTARY, mixer=(SpatialGating(), Softmax()), n_kv_heads=None),
        "spatial-gating-bidirectional": replace(
            _BASE, mixer=SpatialGating(), norm=NoNorm(), causal=False, mlp=None
        ),
        "token-mixing": replace(_BASE, mixer=TokenMixing(7), causal=False),
        "token-mixing-softmax": replace(
            _BASE, mixer=(TokenMixing(5), Softmax()), norm=RMSNorm(), position=Rotary(), causal=False
        ),
        "pool": replace(_BASE, mixer=Pool()),
        "pool-softmax": replace(_BASE, mixer=(Pool(), Softmax())),
        "dilated": replace(_ROTARY, mixer=Softmax(sparsity=Dilated(2, 3))),
        "strided": replace(_BASE, mixer=Softmax(sparsity=Strided(3)), position=Alibi()),
        "fixed-blocks": replace(_ROTARY, mixer=(Softmax(sparsity=FixedBlocks(3)), Softmax()), window=4),
        "longformer": replace(_BASE, mixer=Softmax(sparsity=Longformer(2, 2, 1)), norm=NoNorm()),
        "longformer-bidirectional": replace(_BASE, mixer=Softmax(sparsity=Longformer(2)), causal=False),
        "bigbird": replace(_ROTARY, mixer=Softmax(sparsity=BigBird(2, 1, 1, 1)), sinks=True),
        "bigbird-bidirectional": replace(_BASE, mixer=Softmax(sparsity=BigBird(2)), causal=False, d_head=10),
        "segments": replace(_ROTARY, mixer=Softmax(sparsity=Segments(3, 2))),
        "segments-bidirectional": replace(_BASE, mixer=Softmax(sparsity=Segments(4, 3)), causal=False),
        "shared-blocks": replace(_ROTARY, shared_blocks=True, n_layers=3, norm_place="sandwich"),
        "shared-blocks-bidirectional": replace(
            _BASE, mixer=Linear(chunk=4), shared_blocks=True, causal=False
        ),
        "linformer": replace(_BASE, mixer=Linformer(5), causal=False),
        "linformer-rotary": replace(_ROTARY, mixer=(Linformer(4), Softmax()), causal=False),
        "reformer": replace(  # embed_scale: else bfloat16 weights alone change a token's bucket
            _BASE, mixer=Reformer(2, 2), d_head=8, embed_scale=8.0
        ),
        "reformer-softmax": replace(
            _ROTARY, mixer=(Reformer(4), Softmax()), n_kv_heads=None, qkv_bias=True, position=Alibi()
        ),
        "reformer-bidirectional": replace(_ROTARY, mixer=Reformer(2, 4), n_kv_heads=None, causal=False),
        "dual-chunk": replace(_ROTARY, mixer=DualChunk(5, 3)),
        "dual-chunk-softmax": replace(_BASE, mixer=(DualChunk(5, 4), Softmax()), position=Rotary(), d_head=8),
        "smeared": replace(_BASE, mixer=Softmax(smeared_keys=True), mlp=None),
        "smeared-rotary": replace(
            _ROTARY, mixer=(Softmax(), Softmax(smeared_keys=True, sparsity=Strided(2))), qk_norm="head"
        ),
    }
    | _LINEAR_FAMILY
    | _SCORES
    | _MEMORIES
    | _LATENTS
)
CAUSAL_MIXERS = tuple(name for name, config in MIXERS.items() if config.causal)


@functools.cache
def build_mixed(name: str, dtype: torch.dtype = torch.float64) -> Transformer:
    """The perturbed model of one of the `MIXERS`; shared between tests, so never write to it."""
    torch.manual_seed(zlib.crc32(name.encode()))
    return perturbed(MIXERS[name], dtype, zlib.crc32(name.encode()))
