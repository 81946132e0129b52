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
from jaxtyping import Int
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
TOO_LONG = "one head has more scores on this prompt than the page holds; attention_attribution splits each"
"""Text of the page for a prompt that is too long for it."""
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
        """The data for the script of the page."""
        names = {"query": list(self.query_parts), "key": list(self.key_parts)}
        return {**names, "unit": self.unit, "width": self.cells.shape[1], "cells": packed(self.cells)}


def reasons(model: Transformer, batch: Batch, written: xr.Dataset | None, trace: Trace) -> list[Reasons]:
    """The reasons of all heads; of a model with too many scores those of the heads that write most of the answer.

    Args:
        written: the attribution to heads, which says how much they write; None = the first ones.
        trace: a pass that read `score_reads` of the layers that are `splitting`.
    """
    config = model.config
    heads = [(layer, head) for layer in splitting(config) for head in range(config.n_heads)]
    most = MOST_SCORES // (batch.tokens.shape[1] * (batch.tokens.shape[1] + 1) // 2)
    if len(heads) > most and written is not None:
        size = {
            str(name): abs(float(x)) for name, x in zip(written.part.values, written.value[0], strict=True)
        }
        heads.sort(key=lambda head: -size.get(str(Part("head", *head)), 0.0))
    chosen = set(heads[:most])
    layers = sorted({layer for layer, _ in chosen})
    largest: list[_Largest] = []
    with checks_together() as checks:
        for layer, layer_heads, scores in every_score(model, batch, layers, trace, chosen):
            names = [str(Part("head", layer, head)) for head in layer_heads]
            largest.append(_Largest.of(layer, names, scores))
    numbers = {(i, name): x for i, each in enumerate(largest) for name, x in each.numbers.items()}
    on_host = to_host({**numbers, **{(-1, i): flag for i, flag in checks.flags.items()}})
    checks.settle({i: on_host[-1, i] for i in checks.flags})
    sides = {layer: sides_of(config, layer, heads=True) for layer in layers}
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
        """From scores that were split."""
        pairs = scores.pairs
        at = [(marginal.gather(1, top), top) for marginal, top in _tops(pairs)]
        several = pairs.flatten(1).split(max(1, tile_floats(pairs.device) // pairs[0].numel()))
        best = torch.cat([some.abs().topk(min(PAIRS, some.shape[1])).indices for some in several])
        width = pairs.shape[2]
        values = torch.cat(
            [
                scores.total[:, None], scores.position[:, None], *(x for x, _ in at),
                pairs.flatten(1).gather(1, best),
            ], 1,
        )  # fmt: skip
        places = torch.cat([scores.places, *(top for _, top in at), best // width, best % width], 1)
        widths = at[0][1].shape[1], at[1][1].shape[1], best.shape[1]
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


def _tops(pairs: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Terms of each part of the query and of each part of the key, with the largest of each."""
    found = []
    for marginal in (pairs.sum(2), pairs.sum(1)):
        found.append((marginal, marginal.abs().topk(min(SIDES, marginal.shape[1])).indices))
    return found
