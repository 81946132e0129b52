"""The mixers: one file for each mechanism, one line in the table here.

A mixer is an `Attention` with its own `_mix` (queries, keys and values to z), its own matrices (`_build`) or its own
`_project`; sites, taps, write-out and cache come from there.
"""

from interp.model.attention import Attention
from interp.model.config import ModelConfig
from interp.model.mixer_variants import (
    Differential,
    DualChunk,
    Lightning,
    Linear,
    Linformer,
    LongTermMemory,
    Polar,
    Pool,
    Reformer,
    Softmax,
    Synthesizer,
)
from interp.model.mixers.differential import DifferentialAttention
from interp.model.mixers.dual_chunk import DualChunkAttention
from interp.model.mixers.lightning import LightningMixer
from interp.model.mixers.linear import LinearMixer
from interp.model.mixers.linformer import LinformerAttention
from interp.model.mixers.memory import MemoryMixer
from interp.model.mixers.polar import PolarMixer
from interp.model.mixers.pool import PoolMixer
from interp.model.mixers.reformer import ReformerAttention
from interp.model.mixers.softmax import SoftmaxAttention
from interp.model.mixers.synthesizer import SynthesizerAttention

_KINDS: dict[type, type[Attention]] = {
    Linear: LinearMixer,
    Lightning: LightningMixer,
    Polar: PolarMixer,
    Pool: PoolMixer,
    DualChunk: DualChunkAttention,
    Linformer: LinformerAttention,
    Reformer: ReformerAttention,
    Softmax: SoftmaxAttention,
    Differential: DifferentialAttention,
    Synthesizer: SynthesizerAttention,
    LongTermMemory: MemoryMixer,
}


def build_mixer(config: ModelConfig, layer: int) -> Attention:
    """The module that mixes the positions of `layer`."""
    kind = config.mixers[layer]
    if isinstance(kind, Softmax) and kind.plain:
        return Attention(config, layer)
    return _KINDS[type(kind)](config, layer)
