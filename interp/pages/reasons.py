"""Why each head attends where it does, for the page: the largest parts of every score, as small whole numbers.

A score is a sum over pairs of parts, as `interp.attention.attention_attribution(by="head")` splits it. Of every score
the page keeps the largest parts at the query and at the key (each times the whole other side) and the largest pairs;
all pairs would be more than the rest of the page.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor

from interp.attention.attention_attribution import sides_of
from interp.attention.score_parts import ScoreParts, every_score
from interp.core.transfers import checks_together, to_host
from interp.core.viewer import Brief
from interp.data.batch import Batch
from interp.model.config import ModelConfig
from interp.model.parts import Part
from interp.model.tap import Trace
from interp.model.transformer import Transformer
from interp.pages.views import packed
from interp.passes.memory import tile_floats

SIDES = 3
"""Parts of each side that are kept of a score."""
PAIRS = 3
"""Pairs that are kept of a score."""
MOST_SCORES = 4_500
"""Scores that are split: about 0.4 MB of the page of a model with 30 layers, and half a second."""
MOST_PAIRS = 4_000_000_000
"""Pairs of parts whose terms are computed for the page: about two minutes of one CPU core. A score has as many as the
square of the number of parts before its layer: 27 million in the last of 80 layers with 64 heads."""
TOO_LONG = (
    "the scores of one head are more on this prompt than the page splits, or have more pairs of parts; "
    "attention_attribution splits each"
)
"""Text of the page for a prompt, or a model, that is too long for it."""
STEPS = 32_767
"""The largest number of a head is kept as this whole number."""


@dataclass(frozen=True, eq=False, repr=False)
class Reasons(Brief):
    """The largest parts of the scores of one head on a prompt."""

    part: str
    """The head."""
    query_parts: Sequence[str]
    key_parts: Sequence[str]
    unit: float
    """Size of 1 in the values of `cells`."""
    cells: Int[np.ndarray, "pairs numbers"]
    """By query, key within (those that it sees): the query and the key; the score; what positions add; parts of the
    query and their values; parts of the key and theirs; the query parts of pairs, their key parts, and their values."""

    def payload(self) -> dict[str, object]:
        """The data for the script of the page, with the names of those parts only that occur in it."""
        sides = min(SIDES, len(self.query_parts))
        of_pairs = 4 + 4 * sides
        pairs = (self.cells.shape[1] - of_pairs) // 3
        cells = self.cells.copy()
        names: dict[str, list[str]] = {}
        for name, parts, start, pair in (
            ("query", self.query_parts, 4, of_pairs),
            ("key", self.key_parts, 4 + 2 * sides, of_pairs + pairs),
        ):
            columns = [*range(start, start + sides), *range(pair, pair + pairs)]
            used, place = np.unique(cells[:, columns], return_inverse=True)
            cells[:, columns] = place.reshape(len(cells), -1)
            names[name] = [parts[i] for i in used]
        return {**names, "unit": self.unit, "width": cells.shape[1], "cells": packed(cells)}


def reasons(model: Transformer, batch: Batch, written: xr.Dataset | None, trace: Trace) -> list[Reasons]:
    """The reasons of all heads, or, where these are too many, of the heads that write most of the answer.

    A head whose pairs are more than what is left of `MOST_PAIRS` is passed over for the next one.

    Args:
        written: the attribution to heads, which says how much they write; None = the first ones.
        trace: a pass that read `score_reads` of the layers that are `splitting`.
    """
    config = model.config
    heads = [(layer, head) for layer in splitting(config) for head in range(config.n_heads)]
    of_head = batch.tokens.shape[1] * (batch.tokens.shape[1] + 1) // 2
    sides = {layer: sides_of(config, layer, heads=True) for layer in splitting(config)}
    pairs = {layer: of_head * len(x["query_part"]) * len(x["key_part"]) for layer, x in sides.items()}
    if written is not None:
        size = {
            str(name): abs(float(x)) for name, x in zip(written.part.values, written.value[0], strict=True)
        }
        heads.sort(key=lambda head: -size.get(str(Part("head", *head)), 0.0))
    chosen: set[tuple[int, int]] = set()
    left = MOST_PAIRS
    for head in heads:
        if len(chosen) < MOST_SCORES // of_head and pairs[head[0]] <= left:
            chosen.add(head)
            left -= pairs[head[0]]
    layers = sorted({layer for layer, _ in chosen})
    largest: list[_Largest] = []
    with checks_together() as checks:
        for layer, layer_heads, scores in every_score(model, batch, layers, trace, chosen):
            names = [str(Part("head", layer, head)) for head in layer_heads]
            largest.append(_Largest.of(layer, names, scores))
    numbers = {(i, name): x for i, each in enumerate(largest) for name, x in each.numbers.items()}
    on_host = to_host({**numbers, **{(-1, i): flag for i, flag in checks.flags.items()}})
    checks.settle({i: on_host[-1, i] for i in checks.flags})
    return [
        reason
        for i, each in enumerate(largest)
        for reason in each.reasons(on_host[i, "values"], on_host[i, "places"], sides[each.layer])
    ]


def splitting(config: ModelConfig) -> list[int]:
    """The layers with scores that are sums over pairs of parts."""
    known = not config.block.why_not("matrices")
    return [layer for layer, mixer in enumerate(config.mixers) if known and mixer.traits.separable]


@dataclass(frozen=True, eq=False)
class _Largest:
    """The largest parts of the scores of heads that see the same."""

    layer: int
    heads: Sequence[str]
    """Whose scores stand one after the other."""
    numbers: Mapping[str, Tensor]
    """Values and places, a row per score: on the model's device."""
    widths: tuple[int, int, int]
    """How many parts of the query, of the key, and pairs are kept."""

    @classmethod
    def of(cls, layer: int, heads: Sequence[str], scores: ScoreParts) -> _Largest:
        """From scores that were split; all pairs of all scores together would not fit into memory."""
        parts = scores.query.shape[1], scores.key.shape[1]
        tile = max(1, tile_floats(scores.query.device) // (parts[0] * parts[1]))
        tiles = zip(scores.query.split(tile), scores.key.split(tile), strict=True)
        terms, of_terms = (
            torch.cat(rows) for rows in zip(*(_largest_terms(*ends) for ends in tiles), strict=True)
        )
        values = torch.cat([scores.total[:, None], scores.position[:, None], terms], 1)
        places = torch.cat([scores.places, of_terms], 1)
        widths = min(SIDES, parts[0]), min(SIDES, parts[1]), min(PAIRS, parts[0] * parts[1])
        return cls(layer, heads, {"values": values, "places": places}, widths)

    def reasons(self, values: Tensor, places: Tensor, sides: Mapping[str, list[str]]) -> Iterator[Reasons]:
        """The reasons of each head that is kept, from its numbers on the host."""
        value, place = (x.numpy().reshape(len(self.heads), -1, x.shape[1]) for x in (values, places))
        unit = np.abs(value).max((1, 2)).astype(float).clip(np.finfo(np.float32).tiny) / STEPS
        whole = np.rint(value / unit.astype(value.dtype)[:, None, None])
        queries, keys, _ = np.cumsum(self.widths)
        total, query, key, pair = np.split(whole, [2, 2 + queries, 2 + keys], 2)
        its, of_query, of_key, of_pairs = np.split(place, [2, 2 + queries, 2 + keys], 2)
        parts = [its, total, of_query, query, of_key, key, of_pairs, pair]
        cells = np.concatenate([x.astype("<i2") for x in parts], 2)
        for head, one, its_cells in zip(self.heads, unit.tolist(), cells, strict=True):
            yield Reasons(head, sides["query_part"], sides["key_part"], one, its_cells)


def _largest_terms(
    query: Float[Tensor, "n c e"], key: Float[Tensor, "n c2 e"]
) -> tuple[Float[Tensor, "n values"], Int[Tensor, "n places"]]:
    """The largest terms of scores: of query parts times the whole key, of key parts, and of pairs; then their parts."""
    pairs = einsum(query, key, "n c e, n c2 e -> n c c2")
    of_query, of_key, of_pairs = pairs.sum(2), pairs.sum(1), pairs.flatten(1)
    tops = [
        (terms, terms.abs().topk(min(most, terms.shape[1])).indices)
        for terms, most in ((of_query, SIDES), (of_key, SIDES), (of_pairs, PAIRS))
    ]
    (_, its_query), (_, its_key), (_, pair) = tops
    values = torch.cat([terms.gather(1, top) for terms, top in tops], 1)
    return values, torch.cat([its_query, its_key, pair // key.shape[1], pair % key.shape[1]], 1)
