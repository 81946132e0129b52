"""Successor heads, read off the weights: a head that maps "3" to "4" and "Monday" to "Tuesday".

Gould et al. 2023, "Successor Heads: Recurring, Interpretable Attention Heads In The Wild".
"""

import string
from collections.abc import Mapping
from types import MappingProxyType

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.stats import upcast
from interp.core.transfers import to_device
from interp.data.text import Text
from interp.data.words import single_token
from interp.model.parts import Part
from interp.weights.copying import unembedding_rows
from interp.weights.head_circuits import HeadCircuits

SEQUENCES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "numbers": tuple(str(i) for i in range(31)),
        "number words": (
            *("one", "two", "three", "four", "five", "six"),
            *("seven", "eight", "nine", "ten", "eleven", "twelve"),
        ),
        "months": (
            *("January", "February", "March", "April", "May", "June"),
            *("July", "August", "September", "October", "November", "December"),
        ),
        "weekdays": ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"),
        "letters": tuple(string.ascii_uppercase),
    }
)
"""Ordered sequences of words, by name."""
SHORTEST = 5
"""Number of consecutive items that must be single tokens for a sequence to be used."""


def known_sequences(text: Text) -> dict[str, Int[Tensor, "n"]]:
    """Token ids of each sequence's longest run of single-token items (the first such run), by name.

    Raises:
        ValueError: no sequence with `SHORTEST` such items in a row, or no tokenizer.
    """
    runs = {name: _longest_run([single_token(text, item) for item in s]) for name, s in SEQUENCES.items()}
    sequences = {name: torch.tensor(ids) for name, ids in runs.items() if len(ids) >= SHORTEST}
    if not sequences:
        raise ValueError(f"a sequence with {SHORTEST} items in a row that are single tokens is required")
    return sequences


def successor_hits(circuits: HeadCircuits, ids: Int[Tensor, "n"]) -> Bool[Tensor, "pair l h"]:
    """Whether each head maps each item of a sequence (but the last) to the next one rather than to any other item.

    The full OV circuit (final norm folded in), restricted to the items on both sides: the largest entry of row i
    stands in column i + 1. An item that a head maps to itself is no hit.
    """
    ids = to_device(ids, circuits.network.device)
    sources, outputs = upcast(circuits.embedded[ids]), unembedding_rows(circuits.network, ids)
    layers = []
    for layer in range(circuits.config.n_layers):
        ov = circuits.ov(Part("attn", layer))
        layers.append((sources @ upcast(ov.A)) @ (upcast(ov.B) @ outputs.mT))
    return hits(torch.stack(layers)).movedim(-1, 0)


def hits(logits: Float[Tensor, "*b n n"]) -> Bool[Tensor, "*b m"]:
    """Whether the largest entry of row i stands in column i + 1, for all rows but the last; a tie is no hit."""
    best = logits[..., :-1, :].topk(2)
    following = torch.arange(1, logits.shape[-1], device=logits.device)
    return (best.indices[..., 0] == following) & (best.values[..., 0] > best.values[..., 1])


def _longest_run(ids: list[int | None]) -> list[int]:
    """The longest run of ids without a None (the first, among equals)."""
    best: list[int] = []
    run: list[int] = []
    for item in ids:
        run = [] if item is None else [*run, item]
        best = run if len(run) > len(best) else best
    return best
