"""What a part of the stream becomes on its way to the end, from the formulas: one norm after the other, each frozen.

A part is `[.., d]`, anything that was added to the stream of `some_tokens()`; norms of the sum (post-norm models, norms
after the embedding) act on it with the statistics of the whole stream that stood there.
"""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from interp.lab.ngpt import _Step, _Turn
from interp.model import LayerNorm, NoNorm
from interp.model.norm import Normalize
from tests.configs import CONFIGS, build
from tests.model.observed import everything

Place = tuple[int, int]
"""Layer and sublayer (0 attention, 1 MLP) after which a part is in the stream; the embedding is at (-1, 0)."""

EMBEDDING: Place = (-1, 0)
SUBLAYERS = {"mlp_before_out": 0, "attn_out": 0, "mlp_out": 1}
"""Each with its number in a `Place` (blocks with a first MLP have no norms of the sum)."""


def frozen(norm: Normalize, part: Tensor, whole: Tensor) -> Tensor:
    """(part - mean) / root(mean square of the whole - its mean, + eps) * gamma; no mean under RMSNorm."""
    kind = norm.kind
    if isinstance(kind, NoNorm):
        return part
    if isinstance(norm, _Turn):  # nGPT's norm of the sum, whose gain comes first
        kept = 1 - norm.weight.sigmoid()
        return part * kept / ((whole * kept).square().mean(-1, keepdim=True) + kind.eps) ** 0.5
    if isinstance(kind, LayerNorm):
        part, whole = part - part.mean(-1, keepdim=True), whole - whole.mean(-1, keepdim=True)
    sigma = ((whole * whole).mean(-1, keepdim=True) + kind.eps) ** 0.5
    offset = 0 if isinstance(kind, LayerNorm) else int(kind.unit_offset)
    gamma = norm.turn.weight.exp() if isinstance(norm, _Step) else norm.weight + offset
    return part / sigma * gamma


@functools.cache
def embeddings(name: str) -> dict[str, Tensor]:
    """The embeddings that are summed, by name."""
    sites = ("hook_embed", "hook_pos_embed", "hook_type_embed")
    return {s.removeprefix("hook_"): everything(name)[s] for s in sites if s in everything(name)}


def norms_of_the_sum(name: str) -> Iterator[tuple[Place, str, Normalize, Tensor]]:
    """Every norm that the stream itself goes through before its end: place, name of its beta, the norm, its input."""
    config, model, seen = CONFIGS[name], build(name), everything(name)
    if model.ln_embed is not None:
        yield EMBEDDING, "embed_bias", model.ln_embed, torch.stack(list(embeddings(name).values())).sum(0)
    if not config.norms_sum:
        return
    for layer in range(config.n_layers):
        block = model.blocks[layer]
        yield (layer, 0), f"L{layer}.ln1_bias", block.ln1, seen[f"blocks.{layer}.hook_resid_mid"]
        yield (layer, 1), f"L{layer}.ln2_bias", block.ln2, seen[f"blocks.{layer}.hook_resid_post"]


def pushed(name: str, part: Tensor, since: Place, depth: int = 2, *, behind: bool = False) -> Tensor:
    """The part as it stands in the stream entering block `depth`; `behind`: it arose behind the norm of its place."""
    for place, _, norm, whole in norms_of_the_sum(name):
        if (place > since or (place == since and not behind)) and place < (depth, 0):
            part = frozen(norm, part, whole)
    return part


@functools.cache
def betas(name: str, depth: int = 2) -> dict[str, Tensor]:
    """What the betas of those norms are in the stream entering block `depth`."""
    shape = everything(name)["hook_embed"]
    return {
        label: pushed(name, norm.bias.expand_as(shape), place, depth, behind=True)
        for place, label, norm, _ in norms_of_the_sum(name)
        if norm.bias is not None and place < (depth, 0)
    }


@functools.cache
def bare(name: str, layer: int, sublayer: str) -> Tensor:
    """A sublayer's output before any norm and factor of it."""
    block, seen = build(name).blocks[layer], everything(name)
    if sublayer == "attn_out":
        return seen[f"blocks.{layer}.attn.hook_result"].sum(2) + bias_of(name, layer, sublayer)
    part = sublayer.removesuffix("_out")
    out = getattr(block, part).out
    return seen[f"blocks.{layer}.{part}.hook_post"] @ out.weight.T + bias_of(name, layer, sublayer)


def bias_of(name: str, layer: int, sublayer: str) -> Tensor:
    """b_O or b_out, zeros where there is none."""
    block = build(name).blocks[layer]
    bias = getattr(block, sublayer.removesuffix("_out")).out.bias
    return torch.zeros(24, dtype=torch.float64) if bias is None else bias


def written(name: str, layer: int, sublayer: str, part: Tensor, pos: int | slice = slice(None)) -> Tensor:
    """What a part of a sublayer's bare output adds to the stream: through the norm of that output, times the factor."""
    block, config = build(name).blocks[layer], CONFIGS[name]
    norm = block.ln1_post if sublayer == "attn_out" else block.ln2_post
    if norm is not None:
        part = frozen(norm, part, bare(name, layer, sublayer)[:, pos])
    half = 0.5 if "mlp_before" in config.mlps and sublayer != "attn_out" else 1.0
    return part * config.residual_scale * half


@functools.cache
def sublayers(name: str, depth: int = 2) -> dict[str, Tensor]:
    """Every part of the stream entering block `depth`, by name: embeddings, sublayers, betas."""
    parts = {label: pushed(name, value, EMBEDDING, depth) for label, value in embeddings(name).items()}
    for layer in range(depth):
        for sublayer, i in SUBLAYERS.items():
            site = f"blocks.{layer}.hook_{sublayer}"
            if site in everything(name):
                parts[f"L{layer}.{sublayer.removesuffix('_out')}"] = pushed(
                    name, everything(name)[site], (layer, i), depth
                )
    return parts | betas(name, depth)
