"""The number of tokens or rows of a pass of interventions: bytes of one, times how many, stay within `room`.

Interventions are many passes; what the one pass of a run may have is measured (`runs/memory.py`).
"""

import torch

from interp.model.config import ModelConfig
from interp.model.transformer import Transformer
from interp.passes.together import smallest_over_processes

HOST_ROOM, DEVICE_ROOM = 32 << 20, 0.25
"""Memory of a pass of interventions: bytes on a CPU (more does not make it faster), and the share of an accelerator's
free memory."""
DEVICE_TILE = 512 << 20
"""Bytes of a tile of scores on an accelerator."""


def room(model: Transformer) -> int:
    """Bytes that one pass of interventions may hold; the least of the processes that share a model."""
    if model.device.type != "cuda":
        return HOST_ROOM
    return smallest_over_processes(model, int(torch.cuda.mem_get_info(model.device)[0] * DEVICE_ROOM))


def that_fit(model: Transformer, each: int, memory: int | None = None) -> int:
    """The most tokens or rows of `each` bytes in one pass of interventions, at least one.

    Args:
        memory: bytes that it may hold; None = `room`.
    """
    return max(1, (memory or room(model)) // each)


def tile_floats(device: torch.device) -> int:
    """The most float32 numbers in a tile of scores."""
    return (HOST_ROOM if device.type == "cpu" else DEVICE_TILE) // 4


def bytes_per_token(config: ModelConfig, columns: int, item: int, *, explicit: bool) -> int:
    """Upper estimate of the bytes that one token of a sweep takes; `explicit`: attention patterns included."""
    widths = [(mixer.query_width(config), mixer.z_width(config)) for mixer in config.mixers]
    wide = max(config.head_width, *(width for pair in widths for width in pair))
    heads = wide * (config.n_heads + 2 * config.kv_heads)
    widest = 5 * config.d_model + max(2 * heads, 3 * config.mlp_width // 2)
    keys_and_values = 4 * config.kv_heads * wide
    patterns = 3 * config.n_heads * columns if explicit else 0
    return item * (widest + keys_and_values + patterns)
