"""The lenses: what the stream says at each depth, and what a training step would write."""

import re
from collections.abc import Sequence
from itertools import zip_longest

import numpy as np
from jaxtyping import Bool, Float

from interp.core.visible import visible
from interp.model.parts import Part
from interp.views.maps import CellMap
from interp.views.scale import ColourScale

MOST_DEPTHS = 16
"""Depths of a lens, and layers of the backward lens, that are shown; of more a choice."""
WHOLE_WORD = re.compile(r"\s[^\W\d_]{2,}")
"""A token that is a word by itself: a space and at least two letters."""


def lens_map(
    words: Sequence[Sequence[str]],
    probabilities: Float[np.ndarray, "depths pos"],
    depths: Sequence[str],
    tokens: Sequence[str],
) -> CellMap:
    """The most probable token at every depth and position, coloured by its probability."""
    scale = ColourScale.mass("probability of the top token")
    shown = [[visible(word) for word in row] for row in words]
    title, axes = "logit lens: top token at each depth", ("depth", "token read last")
    return CellMap(probabilities, scale, title, depths, tokens, axes, words=shown)


def shown_depths(count: int, most: int = MOST_DEPTHS) -> list[int]:
    """Places of so many depths evenly apart, the first and the last among them; all if they are no more."""
    if count <= most:
        return list(range(count))
    return sorted({round(i * (count - 1) / (most - 1)) for i in range(most)})


def depth_labels(depths: Sequence[str]) -> list[str]:
    """The depths of a lens in words, by their parts or sites: embedding, after layer 0, ..., output."""
    parts = [Part.of(depth) for depth in depths]
    labels = [_in_words(part) for part in parts]
    others = [i for i, part in enumerate(parts) if part.kind != "resid"]
    if len(others) == 1:
        labels[others[0]] = "output"
    return labels


def _in_words(part: Part) -> str:
    if part.kind == "resid":
        return f"after layer {part.layer - 1}" if part.layer else "embedding"
    return f"after layer {part.layer}" if part.kind in ("hook_resid_post", "block") else str(part)


def word_of(words: Sequence[str], *, names_answer: bool = False) -> str:
    """The first of some tokens if it is the answer, or none is a whole word; else the first that is one."""
    whole = (word for word in words if WHOLE_WORD.fullmatch(word))
    return words[0] if names_answer else next(whole, words[0])


def backward_map(
    words: Sequence[Sequence[str]],
    delta: Float[np.ndarray, "layers pos"],
    marked: Bool[np.ndarray, "layers pos"],
    layers: Sequence[int],
    tokens: Sequence[str],
    title: str,
) -> CellMap:
    """The norm of delta, the gradient at a matrix's output, in each layer and position, with a word that it writes."""
    scale = ColourScale.mass("norm of δ", float(np.nanmax(delta, initial=0.0)) or 1.0)
    rows = [str(layer) for layer in layers]
    return CellMap(delta, scale, title, rows, tokens, ("layer", "token"), words=words, marked=marked)


def telling_layers(
    delta: Float[np.ndarray, "layers pos"], marked: Bool[np.ndarray, "layers pos"]
) -> list[int]:
    """The layers by how much they tell: by turns the one of the largest norm and the next that names the answer."""
    by_size = np.argsort(-delta.max(1), kind="stable").tolist()
    naming = [layer for layer in by_size if marked[layer].any()]
    pairs = zip_longest(by_size, naming)
    return [*dict.fromkeys(layer for pair in pairs for layer in pair if layer is not None)]
