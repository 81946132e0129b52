"""What every sender of an edge graph adds to the stream in one run, heads kept as z, d_head wide."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from interp.circuits.edge_scores import START, Change
from interp.core.precision import wide
from interp.data.batch import Batch
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.frozen import output_norm
from interp.passes.observe import observe

Values = Mapping[Read, Tensor]
"""Answers to `edge_scores.Change.reads`."""


def said_by_senders(model: Transformer, batch: Batch) -> dict[str, Float[Tensor, "b p ..."]]:
    """What every sender adds to the stream on some prompts, by the site where it is read; heads as z, d_head wide.

    After a norm of the sum of a layer's heads (sandwich and output norms), z is divided by the norm's scale in its
    own run, so that W_O and the linear part of the norm make a head's share of it; the bias b_O is then one head more,
    whose z is 1 / scale.
    """
    values = observe(model, batch, Change.reads(model), answers_only=True).trace
    found = {START: wide(values[Read(START)])}
    for layer in range(model.config.n_layers):
        found[f"blocks.{layer}.attn.hook_z"] = head_outputs(model, values, layer)
        if model.config.mlp is not None:
            found[f"blocks.{layer}.hook_mlp_out"] = mlp_output(values, layer)
    return found


def nothing_said(model: Transformer) -> dict[str, Float[Tensor, "1 1 ..."]]:
    """Nothing, for all examples and positions; a bias after a norm is no head's, it stays what it is."""
    stream = wide(model.embed.weight[:0]).new_zeros(1, 1, 1)
    z = stream.expand(1, 1, model.config.n_heads)[..., None]
    sites = [read.site for read in Change.reads(model)]
    return {site: z if site.endswith("hook_z") else stream for site in sites}


def head_outputs(model: Transformer, values: Values, layer: int) -> Float[Tensor, "n p h e"]:
    """What the heads of a layer say, see `said_by_senders`."""
    z, post = wide(values[Read(f"blocks.{layer}.attn.hook_z")]), Read(f"blocks.{layer}.ln1_post.hook_scale")
    if post not in values:
        return z
    scale = wide(values[post])[..., None]
    if model.block(layer).attn.out.bias is None:
        return z / scale
    one = torch.zeros_like(z[:, :, :1])
    one[..., 0] = 1
    return torch.cat((z, one), 2) / scale


def head_matrices(model: Transformer, layer: int) -> Float[Tensor, "h e d"]:
    """What turns the `head_outputs` of a layer into what is added to the stream."""
    out, norm = wide(Weights(model).layer(layer).W_O), output_norm(model, layer, "attn_out")
    bias = model.block(layer).attn.out.bias
    if norm.sites and bias is not None:
        extra = torch.zeros_like(out[:1])
        extra[0, 0] = wide(bias)
        out = torch.cat((out, extra))
    return norm.through(out)


def mlp_output(values: Values, layer: int) -> Float[Tensor, "n p d"]:
    """What the MLP of a layer adds to the stream."""
    return wide(values[Read(f"blocks.{layer}.hook_mlp_out")])
