"""The one axis alphabet: every shape annotation, site and error message uses these letters."""

from collections.abc import Iterable, Sequence

AXES: dict[str, str] = {
    "b": "batch row",
    "p": "position",
    "q": "query position",
    "k": "key position",
    "h": "query head",
    "g": "key/value head",
    "d": "residual stream",
    "e": "per-head width",
    "m": "MLP neuron",
    "v": "vocabulary",
    "l": "layer",
    "c": "component",
    "s": "source position",
    "x": "expert",
    "1": "kept for broadcasting",
}


def describe(axes: str) -> str:
    """Words for an axis string: `"b q h"` -> `"[batch row, query position, query head]"`."""
    return "[" + ", ".join(AXES[a] for a in axes.split()) + "]"


def shape_text(shape: Sequence[int]) -> str:
    """A shape as people write it, `[2, 7, 64]`, whatever sequence type it arrived in."""
    return "[" + ", ".join(str(int(n)) for n in shape) + "]"


def nearest(name: str, known: Iterable[str], count: int = 3) -> str:
    """A readable hint, `"nearest: a, b"`, of the known names closest to `name`; empty if none is close."""
    import difflib

    close = difflib.get_close_matches(name, list(known), n=count, cutoff=0.4)
    return f"nearest: {', '.join(close)}" if close else "no name is close"
