"""What the directions that a dictionary writes say from weights alone: logits, neurons, heads, other features."""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.stats import upcast
from interp.model.config import MLP
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.frozen import final_norm, output_norm

STREAM = (
    "hook_resid_pre",
    "hook_resid_mid",
    "hook_resid_post",
    "hook_attn_out",
    "hook_mlp_out",
    "hook_embed",
)
"""Sites whose vectors stand in the stream, or are added to it as they are."""


class Listed(NamedTuple):
    """The largest values of each row, in falling order, and where they are."""

    values: Float[Tensor, "n k"]
    indices: Int[Tensor, "n k"]


def largest(values: Float[Tensor, "n m"], most: int, own: Int[Tensor, "n"] | None = None) -> Listed:
    """The `most` largest values of each row, or all there are; NaN comes last, and `own`, a place of each row, never.

    Of values that are equal to 1e-9 of the row's largest size the first stands first: sums in another order change no
    list.

    Example:
        >>> largest(torch.tensor([[0.5, 1.0, 0.2]]), 5, own=torch.tensor([1])).indices.tolist()
        [[0, 2]]
    """
    there = values.double().nan_to_num(nan=0.0)
    size = there.abs().amax(1, keepdim=True)
    level = (there / size.where(size > 0, 1.0)).round(decimals=9)
    ranked = torch.where(values.isnan(), -2.0, level)
    if own is not None:
        ranked = ranked.scatter(1, own[:, None], -torch.inf)
    count = min(most, values.shape[1] - (0 if own is None else 1))
    indices = ranked.sort(dim=1, descending=True, stable=True).indices[:, :count]
    return Listed(values.gather(1, indices), indices)


def cosines(rows: Float[Tensor, "n d"], others: Float[Tensor, "m d"]) -> Float[Tensor, "n m"]:
    """The cosine of every row with every other one, in the rows' dtype; 0 for a row of zeros.

    Example:
        >>> cosines(torch.tensor([[3.0, 4.0]]), torch.eye(2))
        tensor([[0.6000, 0.8000]])
    """
    ours, theirs = (torch.nn.functional.normalize(x.to(rows), dim=1, eps=0.0) for x in (rows, others))
    return ours.nan_to_num(nan=0.0) @ theirs.nan_to_num(nan=0.0).mT


def added_to_stream(
    network: Transformer, site: str, rows: Float[Tensor, "n o"]
) -> Float[Tensor, "n d"] | None:
    """What vectors of a site add to the stream: themselves, or through W_O or W_out; None where no matrix says it.

    The norm of what a sublayer adds (sandwich norms) is at scale 1, as `interp.weights.neurons` has it.
    """
    name, layer = site.split(".")[-1], layer_of(site)
    if name in STREAM:
        return rows
    if layer is None:
        return None
    weights = Weights(network).layer(layer)
    if site.endswith(".attn.hook_z"):
        out = output_norm(network, layer, "attn_out").through(upcast(weights.W_O))
        return rows @ out.flatten(0, -2).to(rows) if out.shape[:-1].numel() == rows.shape[1] else None
    if site.endswith(".mlp.hook_post") and (written := _neurons_write(network, layer)) is not None:
        return rows @ written.to(rows)
    return None


def added_logits(network: Transformer, added: Float[Tensor, "n d"]) -> Float[Tensor, "n v"] | None:
    """The logits of what is added to the final stream, the norm at scale 1, each row centred; None without linear ones.

    Through the gain of the final norm, times the factor on the logits: a constant on all logits has no effect.
    """
    if not network.config.unembed or network.mlm_head is not None:
        return None
    unembedding = final_norm(network).reading(upcast(Weights(network).W_U)) * network.config.logit_scale
    logits = added @ unembedding.to(added)
    return logits - logits.mean(-1, keepdim=True)


def neuron_layer(site: str) -> int | None:
    """The layer of the MLP that writes last at a site, or whose neurons the site holds; None where there is none."""
    layer, name = layer_of(site), site.split(".")[-1]
    if layer is None or name not in ("hook_post", "hook_mlp_out", "hook_resid_post", "hook_resid_pre"):
        return None
    return layer - 1 if name == "hook_resid_pre" else layer


def neuron_directions(network: Transformer, site: str) -> Float[Tensor, "m o"] | None:
    """The directions at a site of the neurons of `neuron_layer`.

    At `mlp.hook_post` the neurons are the coordinates; in the stream and at `hook_mlp_out` they are rows of W_out.
    None before the first MLP and where a layer's MLP has no such neurons.
    """
    layer = neuron_layer(site)
    written = None if layer is None or layer < 0 else _neurons_write(network, layer)
    if written is not None and site.endswith("hook_post") and not site.endswith("hook_resid_post"):
        return torch.eye(len(written)).to(written)
    return written


def neuron_site(network: Transformer, site: str) -> str | None:
    """The site with the activations of the neurons of `neuron_directions`; None where there are none."""
    layer = neuron_layer(site)
    none = layer is None or layer < 0 or _neurons_write(network, layer) is None
    return None if none else f"blocks.{layer}.mlp.hook_post"


def head_shares(network: Transformer, site: str, rows: Float[Tensor, "n o"]) -> Float[Tensor, "n h"] | None:
    """The share of every head in the summed norms of a row's heads; None where rows are not heads side by side."""
    heads = network.config.n_heads
    if not site.endswith(".attn.hook_z") or rows.shape[1] % heads:
        return None
    norms = rows.unflatten(1, (heads, -1)).norm(dim=-1)
    return norms / norms.sum(1, keepdim=True)


def layer_of(site: str) -> int | None:
    """The layer of a site's full name; None for one outside of the blocks."""
    match = re.match(r"blocks\.(\d+)\.", site)
    return None if match is None else int(match[1])


def _neurons_write(network: Transformer, layer: int) -> Float[Tensor, "m d"] | None:
    """What each neuron of a layer adds to the stream per unit; None without plain neurons."""
    if network.config.block.unusual is not None or not isinstance(network.config.mlp, MLP):
        return None
    W_out = Weights(network).layer(layer).W_out
    return None if W_out is None else output_norm(network, layer, "mlp_out").through(upcast(W_out))
