"""The number of tokens or rows of a pass of interventions: bytes of one, times how many, stay within `room`.

Interventions are many passes; what the one pass of a run may have is measured (`runs/memory.py`).
"""

from collections.abc import Sequence
from math import prod

import torch

from interp.core.memory import MUCH, check_memory
from interp.model import sites
from interp.model.config import ModelConfig
from interp.model.parts import axis_size
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


def check_recorded(
    names: Sequence[str], network: Transformer, rows: int, columns: int, *, logits: bool = True
) -> None:
    """Refuse a pass whose recorded sites do not fit into the free memory; a `Note` for one that records much.

    Axes whose length the config does not say count as one, so that what fits is never refused.

    Args:
        names: the recorded sites.
        logits: whether the pass ends with logits of every token.

    Raises:
        ValueError: as `check_memory`.
    """
    config, item = network.config, network.dtype.itemsize
    widest = max(config.d_model, columns, config.mlp_width, config.n_outputs) * max(1, config.n_heads)
    if len(names) * rows * columns * widest * item < MUCH / 4:
        return
    output = columns * config.n_outputs if logits else 0
    size = item * rows * (output + sum(_numbers_per_row(name, config, columns) for name in names))
    check_memory(
        f"{len(names)} sites of {rows} x {columns} tokens", size, network.device,
        "shorter prompts take less, and fewer sites (names_filter=, of caches); patterns and scores take most",
    )  # fmt: skip


def _numbers_per_row(name: str, config: ModelConfig, columns: int) -> int:
    """Numbers at a site in one row of so many columns, at least."""
    site, layer = sites.find(name, config)
    at = config if layer is None else config.at_layer(layer)
    known = {**dict.fromkeys("pqk", columns), "d": at.d_model, "e": at.head_width, "v": at.n_outputs}
    known |= {axis: axis_size(axis, at) for axis in "hgmx"}
    if ".shared." in name:
        del known["m"]  # shared experts have a width of their own
    return prod(known.get(axis, 1) for axis in site.axes.split()[1:])


def bytes_per_token(config: ModelConfig, columns: int, item: int, *, explicit: bool) -> int:
    """Upper estimate of the bytes that one token of a sweep takes; `explicit`: attention patterns included."""
    widths = [(mixer.query_width(config), mixer.z_width(config)) for mixer in config.mixers]
    wide = max(config.head_width, *(width for pair in widths for width in pair))
    heads = wide * (config.n_heads + 2 * config.kv_heads)
    widest = 5 * config.d_model + max(2 * heads, 3 * config.mlp_width // 2)
    keys_and_values = 4 * config.kv_heads * wide
    patterns = 3 * config.n_heads * columns if explicit else 0
    return item * (widest + keys_and_values + patterns)
