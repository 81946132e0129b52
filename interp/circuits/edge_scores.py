"""The kernel of edge attribution: the change of every sender against the gradient at every receiver.

The score of an edge u -> v is the sum over positions of (u's change) . (gradient at v's input), both d_model wide.
Only the changes of z and the gradients of q, k, v are kept, d_head wide per head. Both are mapped to d_model for a few
positions at a time, so that no tensor `[batch, pos, head, d_model]` ever exists, and the sum over positions and d_model
is one matrix product per layer. Memory per layer and position is linear in heads * d_head and in d_model; the tensors
that are d_model wide per head have a fixed size (`experiments/bench/attribution_patching.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from interp.causal.graph import EdgeGraph
from interp.core.stats import upcast
from interp.core.transfers import to_device
from interp.model.edits import Add
from interp.model.sites import attention_input, final_stream
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.frozen import output_norm, output_scale
from interp.passes.memory import tile_floats

START = "blocks.0.hook_resid_pre"
_HEADS = ("attn.hook_q", "attn.hook_k", "attn.hook_v")
_SUMMED = (
    "hook_resid_pre", "hook_mlp_before_in", "hook_resid_pre_attn", "hook_resid_mid", "hook_resid_post", "hook_attn_out",
    "hook_mlp_in", "ln1_post.hook_normalized",
)  # fmt: skip
"""Sites of a block that hold sums of senders' outputs: the only edit allowed there is to add a constant."""
_INPUTS = ("hook_q_input", "hook_k_input", "hook_v_input")
_BY_HAND = ("ln1.hook_normalized", *_HEADS)
"""Sites past which edge attribution computes gradients itself, from those at queries, keys and values."""


def check_edits(model: Transformer, *, gradients: bool = False) -> None:
    """ValueError for edits under which edges are undefined, as an input is no longer a sum of senders' outputs.

    Edits of embeddings, inside attention and MLPs, and of what heads (z) and MLPs add are the senders' outputs; what
    is added to the stream is the same in both runs.

    Args:
        gradients: whether gradients are carried from queries, keys and values to the stream by hand, as edge
            attribution does, past what may be edited between them.
    """
    added = (*_SUMMED, *(_BY_HAND if gradients else _INPUTS))
    never = ("attn.hook_result", *((*_INPUTS, "ln1.hook_scale") if gradients else ()))
    for edit in model.edits:
        name = edit.site.split(".", 2)[2] if edit.site.startswith("blocks.") else ""
        if edit.site != START and (name in never or (name in added and not isinstance(edit.change, Add))):
            raise ValueError(
                f"edges require inputs that are sums of what heads and MLPs say; this model is edited at {edit.name}: "
                "edit heads (L0H1), MLPs (L0.mlp) or embeddings instead, or Add to the stream"
            )


@dataclass(frozen=True, eq=False)
class SenderChange:
    """Change of each sender's addition to the stream, other run minus own run; heads as z, d_head wide.

    Where a layer norms the sum of its heads (sandwich and output norms), a head's share is the norm of its z W_O with
    the scale of the run: the shares of all heads and of b_O sum to what the layer adds in that run. The share of b_O
    then changes with the scale; it belongs to no head and is left out.
    """

    model: Transformer
    start: Float[Tensor, "b p d"]
    z: tuple[Float[Tensor, "b p h e"], ...]
    mlps: Mapping[str, tuple[Float[Tensor, "b p d"], ...]]
    """What each MLP of a layer adds, by `EdgeGraph.mlps`."""

    @classmethod
    def reads(cls, model: Transformer) -> tuple[Read, ...]:
        """The sites that both runs have to record."""
        mlps = model.config.mlps
        sites = [START]
        for layer in range(model.config.n_layers):
            sites += [
                f"blocks.{layer}.{name}" for name in ("attn.hook_z", *(f"hook_{mlp}_out" for mlp in mlps))
            ]
            sites += output_scale(model.config, layer, "attn_out")
        return tuple(map(Read, sites))

    @classmethod
    def between(cls, model: Transformer, own: Trace, other: Trace) -> "SenderChange":
        """The change from the run that is intervened on to the one that the values come from."""
        layers = range(model.config.n_layers)

        def change(site: str) -> Tensor:
            return upcast(other[Read(site)]) - upcast(own[Read(site)])

        def heads(layer: int) -> Tensor:
            other_z, own_z = (z_over_scale(model, run, layer) for run in (other, own))
            return other_z - own_z

        mlps = {
            mlp: tuple(change(f"blocks.{layer}.hook_{mlp}_out") for layer in layers)
            for mlp in model.config.mlps
        }
        return cls(model, change(START), tuple(heads(layer) for layer in layers), mlps)

    def vectors(self, graph: EdgeGraph, rows: slice, columns: slice) -> Float[Tensor, "b s c d"]:
        """Change of every sender's addition to the stream at some positions of some rows."""
        start = self.start[rows, columns]
        b, c, d = start.shape
        change = start.new_empty(b, len(graph.senders), c, d)
        change[:, 0] = start
        for layer, z in enumerate(self.z):
            out = output_norm(self.model, layer, "attn_out").through(
                upcast(Weights(self.model).layer(layer).W_O)
            )
            change[:, graph.heads(layer)] = einsum(
                z[rows, columns], out.to(start), "b c h e, h e d -> b h c d"
            )
            for mlp, added in self.mlps.items():
                change[:, graph.mlp_sender(layer, mlp)] = added[layer][rows, columns]
        return change


@dataclass(frozen=True, eq=False)
class Gradients:
    """Weighted gradients d metric / d input of receivers, at k points of each example; for heads at q, k and v.

    Layers may be missing if their receivers see none of the senders in question.
    """

    model: Transformer
    heads: Mapping[int, Float[Tensor, "b k p r e"]]
    stream: Mapping[int, Float[Tensor, "b k p d"]]
    """Input of the heads of a layer, before their norm."""
    mlps: Mapping[tuple[str, int], Float[Tensor, "b p d"]]
    """Input of an MLP (of `EdgeGraph.mlps`) of a layer."""
    end: Float[Tensor, "b p d"]

    @classmethod
    def reads(cls, model: Transformer, layers: range, mlps: Mapping[str, range]) -> tuple[Read, ...]:
        """The reads of a differentiated pass for the heads of some layers, and for each MLP of some."""
        heads = [Read(f"blocks.{layer}.{name}", grad=True) for layer in layers for name in _HEADS]
        inputs = [_mlp_input(mlp, layer) for mlp, those in mlps.items() for layer in those]
        streams = [Read(attention_input(model.config, layer)) for layer in layers]
        return (
            *streams,
            *heads,
            *(Read(site, grad=True) for site in inputs),
            Read(final_stream(model.config), grad=True),
        )

    @classmethod
    def of(cls, model: Transformer, trace: Trace, weights: Float[Tensor, "k"]) -> "Gradients":
        """The gradients from a pass whose rows are `example, point`, with the weight of every point."""
        gradient_sites = {read.site for read in trace if read.grad}
        layers = range(model.config.n_layers)

        def of(site: str, *, grad: bool = True) -> Tensor:
            value = upcast(trace[Read(site, grad=grad)]).to(model.device)
            return rearrange(value, "(b k) ... -> b k ...", k=len(weights))

        def weighted(sites: list[str]) -> Tensor:
            share = to_device(weights, model.device)
            stacked = torch.cat([of(site) for site in sites], -2) if len(sites) > 1 else of(sites[0])
            return stacked if len(share) == 1 else torch.einsum("bk...,k->bk...", stacked, share.to(stacked))

        reading = [layer for layer in layers if f"blocks.{layer}.{_HEADS[0]}" in gradient_sites]
        every = [(mlp, layer) for mlp in model.config.mlps for layer in layers]
        mlps = [at for at in every if _mlp_input(*at) in gradient_sites]
        return cls(
            model,
            {layer: weighted([f"blocks.{layer}.{name}" for name in _HEADS]) for layer in reading},
            {layer: of(attention_input(model.config, layer), grad=False) for layer in reading},
            {at: weighted([_mlp_input(*at)]).sum(1) for at in mlps},
            weighted([final_stream(model.config)]).sum(1),
        )

    def inputs(self, layer: int, rows: slice, columns: slice) -> Float[Tensor, "b r c d"]:
        """The gradient at every head's query, key and value input of a layer, at some positions of some rows."""
        attn, block = self.model.block(layer).attn, self.model.block(layer)
        grad = self.heads[layer][rows, :, columns]
        stream = self.stream[layer][rows, :, columns]
        weight = rearrange(attn.qkv.weight.to(grad), "(r e) d -> r e d", e=attn.d_head)
        normed = einsum(grad, weight, "b k c r e, r e d -> b k r c d")  # gradient at the normed stream
        return block.reading(block.ln1).gradient(normed, stream[:, :, None]).sum(1)


@torch.no_grad()
def edge_scores(
    graph: EdgeGraph, change: SenderChange, gradients: Gradients, *, first: int = 0, last: int | None = None
) -> Float[Tensor, "b sender receiver"]:
    """sum_pos change(u) . gradient(v) of every edge from the senders `first` to `last`; 0 where there is none."""
    b, p, d = change.start.shape
    scores = change.start.new_zeros(b, len(graph.senders), len(graph.receivers))
    points = max((x.shape[1] for x in gradients.heads.values()), default=1)
    width = d * (len(graph.senders) + (points + 1) * (graph.n_heads + 2 * graph.n_kv_heads))
    for rows, columns in _tiles(b, p, max(1, tile_floats(scores.device) // width)):
        senders = rearrange(change.vectors(graph, rows, columns), "b s c d -> b s (c d)")
        for receivers, n_read, received in _receiver_gradients(graph, gradients, rows, columns):
            visible = slice(first, min(n_read, len(graph.senders) if last is None else last))
            flat = rearrange(received, "b r c d -> b (c d) r")
            scores[rows, visible, receivers] += senders[:, visible] @ flat
    return scores.mul_(to_device(graph.exists, scores.device))


def _receiver_gradients(
    graph: EdgeGraph, gradients: Gradients, rows: slice, columns: slice
) -> Iterator[tuple[slice, int, Float[Tensor, "b r c d"]]]:
    """Receivers of each layer, the largest number of senders that one of them reads, and the gradients there."""
    for layer in range(graph.n_layers):
        if ("mlp_before", layer) in gradients.mlps:
            place = graph.mlp_receiver(layer, "mlp_before")
            received = gradients.mlps["mlp_before", layer][rows, None, columns]
            yield slice(place, place + 1), int(graph.visible[place]), received
        parts, inputs = [], graph.inputs(layer)
        first = last = inputs.stop
        if layer in gradients.heads:
            first, parts = inputs.start, [gradients.inputs(layer, rows, columns)]
        if ("mlp", layer) in gradients.mlps:
            last, parts = last + 1, [*parts, gradients.mlps["mlp", layer][rows, None, columns]]
        if parts:
            n_read = int(graph.visible[last - 1])
            yield slice(first, last), n_read, parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    end = len(graph.receivers) - 1
    yield slice(end, end + 1), len(graph.senders), gradients.end[rows, None, columns]


def _mlp_input(mlp: str, layer: int) -> str:
    """The site of the stream that an MLP of a layer reads."""
    return f"blocks.{layer}.hook_{mlp}_in"


def _tiles(b: int, p: int, columns: int) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of tiles of at most `columns` positions: several whole rows, or a part of one row."""
    if columns >= p:
        step = columns // p
        yield from ((slice(i, min(i + step, b)), slice(0, p)) for i in range(0, b, step))
        return
    for i in range(b):
        yield from ((slice(i, i + 1), slice(j, min(j + columns, p))) for j in range(0, p, columns))


def z_over_scale(model: Transformer, run: Mapping[Read, Tensor], layer: int) -> Float[Tensor, "b p h e"]:
    """z of the heads of a layer, divided by the scale of the norm of their sum where there is one."""
    z, scale = upcast(run[Read(f"blocks.{layer}.attn.hook_z")]), output_scale(model.config, layer, "attn_out")
    return z / upcast(run[Read(scale[0])])[..., None] if scale else z
