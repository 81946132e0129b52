"""The letters that name the axes of arrays, and shapes in words."""

from collections.abc import Sequence

AXES: dict[str, str] = {
    "b": "batch row",
    "p": "position",
    "q": "query position",
    "k": "key position",
    "h": "query head",
    "g": "key/value head",
    "d": "residual stream",
    "e": "per-head width",
    "r": "width of a query or key, where it is another",
    "w": "latent width",
    "m": "MLP neuron",
    "v": "vocabulary",
    "l": "layer",
    "c": "component",
    "s": "source position",
    "x": "expert",
    "y": "feature",
    "n": "memory",
    "j": "query/key head of memories",
    "f": "width of a value",
    "u": "channel",
    "1": "kept for broadcasting",
}


def describe(axes: str) -> str:
    """Words for an axis string: `"b q h"` -> `"[batch row, query position, query head]"`."""
    return "[" + ", ".join(AXES[a] for a in axes.split()) + "]"


def shape_text(shape: Sequence[int]) -> str:
    """A shape as people write it, `[2, 7, 64]`, whatever sequence type it arrived in."""
    return "[" + ", ".join(str(int(n)) for n in shape) + "]"
