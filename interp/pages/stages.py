"""One head's attention in its stages, for the pages: q . k, scaled, masked, through the softmax, times the values.

The numbers are those of the pass: its queries and keys as they enter the product, its scores, its pattern, its z. As
Transformer Explainer shows them (Cho et al. 2024), for every key at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.attention.score_parts import product_site
from interp.core.stats import upcast
from interp.core.transfers import to_host
from interp.model.parts import Part
from interp.model.sites import names
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.pages.reasons import STEPS, splitting
from interp.pages.views import packed

STEPS_IN_WORDS = (
    "q · k: the query of the token that looks times the key of every token, also of those it may not see. ×: the "
    "factor that keeps scores small, 1 / √d_head in most models. masked: later tokens get −∞; what positions add and a "
    "soft cap are in it. softmax: the shares that sum to 1, the attention above. × value: how far the share times the "
    "token's value goes in the direction of what the head puts out, z; these sum to the length of z. Softmax "
    "is coloured as attention, from 0 to 1; the other columns in grey, by the size of their own numbers."
)
"""Words of the pages for the steps."""
NEVER = -(STEPS + 1)
"""Code of a masked score among whole numbers."""
CLOSE = 1e-3
"""Relative difference up to which scores are what is scaled and masked, so that they need no numbers of their own."""


@dataclass(frozen=True, eq=False)
class HeadStages:
    """The stages of the heads of a layer for some queries; keys are all those of the prompt, also later ones."""

    products: Float[Tensor, "h q k"]
    """q . k, after norms and rotation."""
    scaled: Float[Tensor, "h q k"]
    """Times the factor that the number of keys decides, 1 / sqrt(d_head) in most models."""
    scores: Float[Tensor, "h q k"]
    """As the softmax gets them: -inf where the mask forbids, with what positions add and after any soft cap."""
    pattern: Float[Tensor, "h q k"]
    """After the softmax."""
    weighted: Float[Tensor, "h q k"]
    """How far each key's a v goes in the direction of their sum z: (a v . z) / ||z||, which sums to ||z||."""
    factor: Float[Tensor, "#q"]
    """Factor on the products of each query."""

    @classmethod
    def of(
        cls,
        qkv: tuple[Float[Tensor, "q h r"], Float[Tensor, "k g r"], Float[Tensor, "k g e"]],
        scores: Float[Tensor, "h q k"],
        pattern: Float[Tensor, "h q k"],
        factor: Float[Tensor, "#q"],
    ) -> HeadStages:
        """The stages from what a pass recorded; grouped heads share keys and values."""
        q, k, v = (upcast(x).transpose(0, 1) for x in qkv)
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        products, shares = torch.bmm(q, k.mT), upcast(pattern)
        z = torch.bmm(shares, v)
        length = z.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
        weighted = shares * torch.bmm(z / length, v.mT)
        return cls(products, products * factor[:, None], upcast(scores), shares, weighted, factor)


def staged(model: Transformer) -> list[int]:
    """The layers with heads that have all stages: one product of queries and keys, a softmax, and moved values."""
    config = model.config
    site_names = set(names(config))
    return [
        layer
        for layer in splitting(config)
        if config.mixers[layer].traits.additive and site_names.issuperset(sites_of(model, layer))
    ]


def sites_of(model: Transformer, layer: int) -> tuple[str, str, str, str, str]:
    """Where queries and keys enter their product, the values, the scores and the pattern."""
    v, scores, pattern = (f"blocks.{layer}.attn.hook_{name}" for name in ("v", "attn_scores", "pattern"))
    return product_site(model, layer, "q"), product_site(model, layer, "k"), v, scores, pattern


def factor_of(model: Transformer, layer: int, scores: Float[Tensor, "h q k"]) -> Float[Tensor, "#q"]:
    """The factor on the products of each query."""
    seen = (scores > -torch.inf).any(0).sum(-1)[None]
    return upcast(model.block(layer).attn.score_factor(seen, upcast(scores))[0])


def stage_reads(model: Transformer, layers: Iterable[int]) -> list[Read]:
    """The reads that `every_stage` needs."""
    return [Read(site) for layer in layers for site in sites_of(model, layer)]


@torch.no_grad()
def every_stage(model: Transformer, layers: Sequence[int], trace: Trace) -> dict[int, HeadStages]:
    """The stages of every query of the only row, by layer; trace: a pass that read `stage_reads`."""
    found = {}
    for layer in layers:
        q, k, v, scores, pattern = (trace[Read(site)][0] for site in sites_of(model, layer))
        found[layer] = HeadStages.of((q, k, v), scores, pattern, factor_of(model, layer, scores))
    return found


def payload(model: Transformer, heads: Iterable[str], trace: Trace) -> Mapping[str, Mapping[str, object]]:
    """The data of these heads for the script of the page, by name: whole numbers, and the size of 1 in them.

    q . k of every pair; the factor of every query; the weighted values; the scores where they are something else than
    what is scaled with later keys masked. trace: as `every_stage` takes it.
    """
    able, chosen = set(staged(model)), dict[int, list[int]]()
    for part in map(Part.of, heads):
        if part.layer in able:
            assert part.layer is not None and part.index is not None
            chosen.setdefault(part.layer, []).append(part.index)
    stages = _on_host(every_stage(model, sorted(chosen), trace))
    return {
        str(Part("head", layer, head)): values
        for layer, of_layer in chosen.items()
        for head, values in zip(of_layer, _stage_values(stages[layer], of_layer), strict=True)
    }


def _on_host(stages: Mapping[int, HeadStages]) -> dict[int, dict[str, np.ndarray]]:
    """The stages of every layer and the factors of their queries, fetched in one copy."""
    kept = ("products", "scaled", "scores", "weighted", "factor")
    fetched = to_host({(layer, name): getattr(each, name) for layer, each in stages.items() for name in kept})
    return {layer: {name: fetched[layer, name].numpy() for name in kept} for layer in stages}


def _stage_values(stages: Mapping[str, np.ndarray], heads: Sequence[int]) -> Iterator[dict[str, object]]:
    """The data of some heads of a layer for the script."""
    products, scaled, scores, weighted = (
        stages[name][heads] for name in ("products", "scaled", "scores", "weighted")
    )
    factor = [float(f"{x:.6g}") for x in np.broadcast_to(stages["factor"], scores.shape[1]).tolist()]
    each = zip(_whole(products), _whole(weighted), _whole(scores), _plain(scaled, scores), strict=True)
    for of_products, of_weighted, of_scores, plain in each:
        found: dict[str, object] = {"products": of_products, "factor": factor, "weighted": of_weighted}
        yield found if plain else {**found, "scores": of_scores}


def _plain(scaled: Float[np.ndarray, "h q k"], scores: Float[np.ndarray, "h q k"]) -> Bool[np.ndarray, "h"]:
    """The heads with scores that were only scaled, with later keys masked."""
    causal = np.tri(scores.shape[1], dtype=bool)
    masked = ((scores > -np.inf) == causal).all((1, 2))
    off, size = (np.abs(x).max(1) for x in ((scores - scaled)[:, causal], scaled[:, causal]))
    return masked & (off <= CLOSE * size)


def _whole(values: Float[np.ndarray, "h q k"]) -> Iterator[dict[str, object]]:
    """The numbers of every head as 16-bit whole ones of a unit, `NEVER` for minus infinity."""
    masked = values == -np.inf
    known = np.where(masked, 0.0, values)
    unit = np.abs(known).max((1, 2)).astype(float).clip(np.finfo(np.float32).tiny) / STEPS
    whole = np.where(masked, NEVER, np.rint(known / unit.astype(known.dtype)[:, None, None])).astype("<i2")
    for cells, one in zip(whole, unit.tolist(), strict=True):
        yield {"unit": float(f"{one:.8g}"), "cells": packed(cells)}
