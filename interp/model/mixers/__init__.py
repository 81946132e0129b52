"""The mixers: one file for each mechanism, one line in the table here.

A mixer is an `Attention` with its own `_mix` (queries, keys and values to z), its own matrices (`_build`) or its own
`_project`; sites, taps, write-out and cache come from there.
"""

from interp.model.attention import Attention
from interp.model.config import ModelConfig
from interp.model.mixer_variants import Pool, Softmax
from interp.model.mixers.pool import PoolMixer

_KINDS: dict[type, type[Attention]] = {Pool: PoolMixer}


def build_mixer(config: ModelConfig, layer: int) -> Attention:
    """The module that mixes the positions of `layer`."""
    kind = config.mixers[layer]
    if isinstance(kind, Softmax) and kind.plain:
        return Attention(config, layer)
    return _KINDS[type(kind)](config, layer)
