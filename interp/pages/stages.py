"""One head's attention in its stages, for the pages: q . k, scaled, masked, through the softmax, times the values.

The numbers are those of the pass: its queries and keys as they enter the product, its scores, its pattern, its z. As
Transformer Explainer shows them (Cho et al. 2024), for every key at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from einops import einsum
from jaxtyping import Float
from torch import Tensor

from interp.attention.score_parts import product_site
from interp.core.stats import wide
from interp.core.transfers import fetched
from interp.data.batch import Batch
from interp.model.parts import Part
from interp.model.sites import names
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.pages.reasons import STEPS, splitting
from interp.pages.views import packed
from interp.passes.observe import observe

STEPS_IN_WORDS = (
    "q · k: the query of the token that looks times the key of every token, also of those it may not see. ×: the "
    "factor that keeps scores small, 1 / √d_head in most models. masked: later tokens get −∞; what positions add and a "
    "soft cap are in it. softmax: the shares that sum to 1, the attention above. × value: how far the share times the "
    "token's value goes in the direction of what the head puts out, z; these sum to the length of z. Here blue is "
    "positive and red negative, each column has a scale of its own; softmax goes from 0 to 1."
)
"""What the pages say of the steps."""
NEVER = -(STEPS + 1)
"""What stands for a masked score among whole numbers."""
CLOSE = 1e-3
"""Relative difference up to which scores are what is scaled and masked, so that they need no numbers of their own."""


@dataclass(frozen=True, eq=False)
class Stages:
    """What the heads of a layer do with some queries; keys are all those of the prompt, also later ones."""

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

    @classmethod
    def of(
        cls,
        qkv: tuple[Float[Tensor, "q h r"], Float[Tensor, "k g r"], Float[Tensor, "k g e"]],
        scores: Float[Tensor, "h q k"],
        pattern: Float[Tensor, "h q k"],
        factor: Float[Tensor, "#q"],
    ) -> Stages:
        """The stages from what a pass recorded; grouped heads share keys and values."""
        q, k, v = (wide(x) for x in qkv)
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        products = einsum(q, k, "q h r, k h r -> h q k")
        shares = wide(pattern)
        z = einsum(shares, v, "h q k, k h e -> h q e")
        length = z.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(z.dtype).tiny)
        weighted = shares * einsum(z / length, v, "h q e, k h e -> h q k")
        return cls(products, products * factor[:, None], wide(scores), shares, weighted)


def staged(model: Transformer) -> list[int]:
    """The layers whose heads have all stages: one product of queries and keys, a softmax, and values moved by it."""
    config = model.config
    there = set(names(config))
    return [
        layer
        for layer in splitting(config)
        if config.mixers[layer].traits.additive and there.issuperset(sites_of(model, layer))
    ]


def sites_of(model: Transformer, layer: int) -> tuple[str, str, str, str, str]:
    """Where queries and keys enter their product, the values, the scores and the pattern."""
    v, scores, pattern = (f"blocks.{layer}.attn.hook_{name}" for name in ("v", "attn_scores", "pattern"))
    return product_site(model, layer, "q"), product_site(model, layer, "k"), v, scores, pattern


def factor_of(model: Transformer, layer: int, scores: Float[Tensor, "h q k"]) -> Float[Tensor, "#q"]:
    """What the products of each query are multiplied by."""
    seen = (scores > -torch.inf).any(0).sum(-1)[None]
    return wide(model.block(layer).attn.score_factor(seen, wide(scores))[0])


@torch.no_grad()
def every_stage(model: Transformer, batch: Batch, layers: Iterable[int]) -> dict[int, Stages]:
    """Those of every query of the only row, by layer: one pass."""
    reads = {layer: [Read(site) for site in sites_of(model, layer)] for layer in layers}
    trace = observe(model, batch, [read for each in reads.values() for read in each], answers_only=True).trace
    found = {}
    for layer, each in reads.items():
        q, k, v, scores, pattern = (trace[read][0] for read in each)
        found[layer] = Stages.of((q, k, v), scores, pattern, factor_of(model, layer, scores))
    return found


def payload(model: Transformer, batch: Batch, heads: Iterable[str]) -> Mapping[str, Mapping[str, object]]:
    """What the script of the page needs of these heads, by name: whole numbers, and what 1 stands for in them.

    q . k of every pair; the factor of every query; the weighted values; the scores where they are something else than
    what is scaled with later keys masked.
    """
    able = set(staged(model))
    chosen = [part for part in map(Part.of, heads) if part.layer in able]
    layers = sorted({part.layer for part in chosen if part.layer is not None})
    stages = _on_host(model, every_stage(model, batch, layers))
    found: dict[str, Mapping[str, object]] = {}
    for part in chosen:
        assert part.layer is not None and part.index is not None
        one, h = stages[part.layer], part.index
        scores = one["scores"][h]
        found[str(part)] = {
            "products": _whole(one["products"][h]),
            "factor": [float(f"{x:.6g}") for x in one["factor"].expand(len(scores)).tolist()],
            "weighted": _whole(one["weighted"][h]),
            **({} if _plain(one["scaled"][h], scores) else {"scores": _whole(scores)}),
        }
    return found


def _on_host(model: Transformer, stages: Mapping[int, Stages]) -> dict[int, dict[str, Tensor]]:
    """The stages of every layer and the factors of their queries, fetched in one copy."""
    kept = ("products", "scaled", "scores", "weighted")
    parts = {(layer, name): getattr(each, name) for layer, each in stages.items() for name in kept}
    factors = {(layer, "factor"): factor_of(model, layer, each.scores) for layer, each in stages.items()}
    here = fetched({**parts, **factors})
    return {layer: {name: here[layer, name] for name in (*kept, "factor")} for layer in stages}


def _plain(scaled: Float[Tensor, "q k"], scores: Float[Tensor, "q k"]) -> bool:
    """Whether scores are what was scaled, with later keys masked and nothing else."""
    causal = torch.ones_like(scores, dtype=torch.bool).tril()
    if not torch.equal(scores > -torch.inf, causal):
        return False
    return bool((scores - scaled)[causal].abs().max() <= CLOSE * scaled[causal].abs().max())


def _whole(values: Float[Tensor, "q k"]) -> dict[str, object]:
    """Numbers as 16-bit whole ones of a unit, `NEVER` for minus infinity."""
    masked = values == -torch.inf
    known = values.masked_fill(masked, 0.0)
    unit = max(float(known.abs().max()), torch.finfo(torch.float32).tiny) / STEPS
    whole = (known / unit).round().long().masked_fill(masked, NEVER)
    return {"unit": float(f"{unit:.8g}"), "cells": packed(whole.cpu().numpy().astype("<i2"))}
