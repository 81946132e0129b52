"""Edges one at a time: the oracle of edge attribution.

An edge is corrupted by adding the sender's change to the receiver's own copy of the stream (`hook_q_input`, ...). The
gradient at such a copy is autograd's, `[batch, pos, head, d_model]` and all.
"""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from interp import Edit, Read, observe
from interp.data.batch import Batch
from interp.model import Tap, Transformer
from interp.model.config import ModelConfig
from interp.model.sites import final_stream

ANSWER, WRONG = 3, 4
START = "blocks.0.hook_resid_pre"


def difference(logits: Tensor) -> Tensor:
    """The answer's logit minus the wrong one's at the last token."""
    return logits[:, -1, ANSWER] - logits[:, -1, WRONG]


def edges(config: ModelConfig) -> list[str]:
    """Every edge by the definition: from what was added to the stream before it is read."""
    letter, found = "H" if config.kv_heads == config.n_heads else "G", []
    written = ["L0.resid"]
    for layer in range(config.n_layers):
        if "mlp_before" in config.mlps:
            found += [f"{u}->L{layer}.mlp_before" for u in written]
            written = [*written, f"L{layer}.mlp_before"]
        heads = [f"L{layer}H{h}" for h in range(config.n_heads)]
        queries = [f"L{layer}H{h}.q" for h in range(config.n_heads)]
        groups = [f"L{layer}{letter}{g}.{part}" for part in "kv" for g in range(config.kv_heads)]
        found += [f"{u}->{v}" for v in queries + groups for u in written]
        if config.mlp is not None:
            found += [f"{u}->L{layer}.mlp" for u in (written if config.parallel else written + heads)]
        written += heads + ([] if config.mlp is None else [f"L{layer}.mlp"])
    return found + [f"{u}->logits" for u in written]


def writes(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """What every sender adds to the stream, `[b p d]`."""
    config, layers = model.config, range(model.config.n_layers)
    sites = [START] + [f"blocks.{i}.attn.hook_result" for i in layers]
    sites += [f"blocks.{i}.hook_{mlp}_out" for i in layers for mlp in config.mlps]
    if config.norms_output:
        sites += [f"blocks.{i}.ln1_post.hook_scale" for i in layers]
    seen = observe(model, Batch(tokens), [Read(site) for site in sites]).trace
    found = {"L0.resid": seen[START]}
    for i in layers:
        result, norm = seen[f"blocks.{i}.attn.hook_result"], model.block(i).post_norm("attn_out")
        for h in range(config.n_heads):
            out = result[:, :, h]
            out = out if norm is None else norm.frozen(out, seen[f"blocks.{i}.ln1_post.hook_scale"])
            found[f"L{i}H{h}"] = out * config.residual_scale
        for mlp in config.mlps:
            found[f"L{i}.{mlp}"] = seen[f"blocks.{i}.hook_{mlp}_out"]
    return found


def place(config: ModelConfig, receiver: str) -> tuple[str, int | None]:
    """The site of a receiver's own copy of the stream, and which head (or group) of it."""
    node, _, part = receiver.partition(".")
    if node == "logits":
        return final_stream(config), None
    if part in ("mlp", "mlp_before"):
        return f"blocks.{node[1:]}.hook_{part}_in", None
    layer, head = re.split("[HG]", node[1:])
    return f"blocks.{layer}.hook_{part}_input", int(head)


def exact(model: Transformer, tokens: Tensor, edge: str, change: Mapping[str, Tensor]) -> Tensor:
    """The change of the metric of every row when this edge carries the corrupted run's value."""
    sender, receiver = edge.split("->")
    site, head = place(model.config, receiver)

    def corrupted(x: Tensor) -> Tensor:
        if head is None:
            return x + change[sender]
        x[:, :, head] += change[sender]
        return x

    with torch.no_grad():
        return difference(model(tokens, Tap(edits=[Edit(site, corrupted)]))) - difference(model(tokens))


def gradients(model: Transformer, tokens: Tensor) -> dict[str, Tensor]:
    """d metric / d copy of the stream, by site."""
    sites = {place(model.config, edge.split("->")[1])[0] for edge in edges(model.config)}
    own = [Edit(site, torch.clone) for site in sites]
    reads = [Read(site, grad=True) for site in sorted(sites)]
    trace = observe(model, Batch(tokens), reads, own, metric=lambda x: difference(x).sum()).trace
    return {read.site: trace[read] for read in reads}


def by_autograd(
    model: Transformer, clean: Tensor, change: Mapping[str, Tensor], edge: str, grads: Mapping[str, Tensor]
) -> Tensor:
    """One edge's score: what the sender changed times the gradient at the receiver's copy, summed."""
    sender, receiver = edge.split("->")
    site, head = place(model.config, receiver)
    grad = grads[site] if head is None else grads[site][:, :, head]
    return (change[sender] * grad).sum((1, 2))
