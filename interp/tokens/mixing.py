"""Mixing of positions by attention of one block: by weights, by norms of what is moved, and by distances (ALTI).

Query i receives from source j, over all heads, T_i(x_j) = sum_h a^h_ij f^h(x_j) + [i = j] x_i, where f^h(x_j) =
v^h_j W_O^h, with b_V in v (b_O belongs to no source: it is part of the constant). The norm of attention's output
(sandwich) and that of the sum (post-norm) act on it as linear maps at their frozen scales. The MLP moves nothing
between positions and is left out, in parallel blocks too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.stats import upcast
from interp.core.wording import nearest
from interp.model.config import ModelConfig
from interp.model.edits import Detach
from interp.model.records import require
from interp.model.sites import attention_input
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.duration import ELEMENTWISE, announce
from interp.passes.edited import STREAM, after_pattern, edits_at, inner_site, layer_of
from interp.passes.frozen import SUM_NORMS, FrozenNorm, output_norm, sum_norm
from interp.residual.edited_sums import head_shares, multiple

CHUNK = 2**24
"""Numbers of T_i(x_j) in memory at a time: 64 MiB in float32."""
FLOW_TOKENS = 64
"""The longest prompt that `flow` accepts."""

Kernel = Literal["attention", "values", "attn_norms", "attn_res_norms", "norms", "alti"]
"""How the matrix `[query, key]` of one block is computed.

attention: mean of the heads' patterns. values: ||a_ij v_j||, heads concatenated. attn_norms: ||sum_h a_ij f(x_j)||
(Attn-N). attn_res_norms: the same with the residual added (AttnRes-N). norms: the same after the norm of the sum, in
post-norm models (AttnResLn-N), else AttnRes-N. alti: by distance, see `SourceSplit.alti`.
"""
WITHOUT_RESIDUAL: tuple[Kernel, ...] = ("values", "attn_norms")
"""Kernels that leave out the stream of the position itself, and so cannot be chained over layers."""
Extent = Literal["z", "attn", "res", "block"]
"""The tensor that is split: the heads' z, attention's output, that plus the residual, that after the post-norm."""
EXTENTS: dict[Kernel, Extent] = {"values": "z", "attn_norms": "attn", "attn_res_norms": "res"}
"""Extent of each kernel that does not use the whole block."""


@dataclass(frozen=True, eq=False)
class SourceSplit:
    """Factors of the sum `output[i] = constant[i] + sum_j T_i(x_j)` over source positions, for one block.

    T_i(x_j) = sum_h pattern[h, i, j] value[j, h] out[h] / scale[i] + [i = j] stream[i]. No vector of d_model is stored
    per pair (i, j).
    """

    pattern: Float[Tensor, "b h q k"]
    value: Float[Tensor, "b k h e"]
    """One value per query head, b_V included."""
    out: Float[Tensor, "h e d"]
    """W_O followed by the linear part of every norm up to the output."""
    scale: Float[Tensor, "b q 1"]
    """The frozen scale of those norms, by which their output is divided."""
    stream: Float[Tensor, "b q d"]
    """Residual stream of each position itself; zeros if the split does not include the residual."""
    constant: Float[Tensor, "b q d"]
    """b_O and the betas."""

    @classmethod
    def of(cls, model: Transformer, layer: int, trace: Trace, upto: Extent = "block") -> "SourceSplit":
        """The split of a recorded block (`split_reads`), edits included.

        Patterns and values are the recorded ones, after edits.

        Raises:
            ValueError: an edit that turns a sum over sources into something else than a multiple of it.
        """
        require("additive", [model.config.mixers[layer]], "splitting a block by source")
        weights = Weights(model).layer(layer)
        stream, pattern, v = (upcast(trace[read]) for read in mixing_reads(model.config, layer, "alti"))
        split = cls(
            pattern=pattern,
            value=v[:, :, Weights(model).kv_head()],
            out=weights.W_O.to(v),
            scale=torch.ones_like(stream[..., :1]),
            stream=torch.zeros_like(stream),
            constant=weights.b_O.to(v).expand_as(stream),
        )
        edited = {at: upcast(trace[read]) for at, read in _edited_reads(model, layer, upto).items()}
        if "z" in edited:
            share = head_shares(model, layer, pattern, split.value, edited["z"])
            split = replace(split, pattern=pattern * share)
        if upto == "z":
            return split
        split = split.after(output_norm(model, layer, "attn_out"))
        if "attn" in edited:
            split = split._scaled_to_edit(model, layer, edited["attn"])
        if upto != "attn":
            split = replace(split, stream=stream)
        if upto == "block":
            split = split.after(sum_norm(model, layer, "attn_out"))
        return split._scaled_to_edit(model, layer, edited["block"]) if "block" in edited else split

    def after(self, norm: FrozenNorm) -> "SourceSplit":
        """The split of the norm's output, with the norm's scale frozen at that of the sum; beta joins the constant."""
        frozen = norm.of(lambda: self.output)
        return replace(
            self,
            out=norm.through(self.out),
            scale=self.scale if frozen.scale is None else self.scale * frozen.scale,
            stream=frozen.through(self.stream),
            constant=frozen.split(self.constant[None], 0)[0],
        )

    def _scaled_to_edit(
        self, model: Transformer, layer: int, edited: Float[Tensor, "b q d"]
    ) -> "SourceSplit":
        """The split with all parts of each query times the factor by which an edit multiplied their sum."""
        z = einsum(self.pattern.abs(), self.value.abs(), "b h q k, b k h e -> b q h e")
        size = einsum(z, self.out.abs(), "b q h e, h e d -> b q d") / self.scale
        size = size + self.stream.abs() + self.constant.abs()
        share = multiple(model, layer, edited, self.output, size, self.pattern.shape[-1])
        return replace(
            self,
            pattern=self.pattern * rearrange(share, "b q 1 -> b 1 q 1"),
            stream=self.stream * share,
            constant=self.constant * share,
        )

    @cached_property
    def moved(self) -> Float[Tensor, "b q d"]:
        """Vector that attention moved to each query from all positions."""
        z = einsum(self.pattern, self.value, "b h q k, b k h e -> b q h e")
        return einsum(z, self.out, "b q h e, h e d -> b q d") / self.scale

    @cached_property
    def kept(self) -> Float[Tensor, "b q d"]:
        """Vector that attention moved from each position to itself."""
        diagonal = rearrange(self.pattern.diagonal(dim1=-2, dim2=-1), "b h q -> b q h 1")
        return einsum(diagonal * self.value, self.out, "b q h e, h e d -> b q d") / self.scale

    @property
    def output(self) -> Float[Tensor, "b q d"]:
        """The sum that is split: constant, residual, and what attention moved."""
        return self.constant + self.stream + self.moved

    def value_norms(self) -> Float[Tensor, "b h q k"]:
        """||a_ij v_j|| of every head (Kobayashi et al. 2020)."""
        return self.pattern.abs() * rearrange(self.value.norm(dim=-1), "b k h -> b h 1 k")

    def lengths(self) -> Float[Tensor, "b k h"]:
        """||f^h(x_j)||: the length of the vector that a head reads from a source, before attention and `scale`.

        Kobayashi et al. 2020.
        """
        return torch.cat([moved.norm(dim=-1) for _, moved in self._source_chunks()], 1)

    def norms(self) -> Float[Tensor, "b q k"]:
        """||T_i(x_j)||: the norm of the sum over heads, not the sum of norms (Kobayashi et al. 2021).

        Computed from the Gram matrix `[h h]` of the heads' f(x_j) at every source: b q k h^2 products and no vector per
        pair. Where heads cancel, the error is up to sqrt(eps) times the sum of norms.
        """
        grams = [einsum(m, m, "b k h d, b k g d -> b k h g") for _, m in self._source_chunks()]
        crossed = einsum(self.pattern, torch.cat(grams, 1), "b h q k, b k h g -> b g q k")
        norms = (crossed * self.pattern).sum(1).clamp_min(0).sqrt() / self.scale
        return norms.diagonal_scatter((self.stream + self.kept).norm(dim=-1), dim1=-2, dim2=-1)

    def ratio(self) -> Float[Tensor, "b q"]:
        """The mixing ratio ||sum_{j != i} T_i(x_j)|| / (that + ||T_i(x_i)||) (Kobayashi et al. 2021)."""
        others, own = (self.moved - self.kept).norm(dim=-1), (self.stream + self.kept).norm(dim=-1)
        return others / (others + own)

    def alti(self) -> Float[Tensor, "b q k"]:
        """Proximity of each source to the output: max(0, ||y_i||_1 - ||y_i - T_i(x_j)||_1), not normalised.

        y is the output, constant included (Ferrando et al. 2022; L1, since the space is anisotropic). Exactly 0 for
        masked sources. Needs T_i(x_j) itself: b q k h d products per block, `CHUNK` numbers in memory at a time
        (`[b q d]` for one source at the least).
        """
        y, columns = self.output, []
        for first, moved in self._source_chunks():
            n = moved.shape[1]
            block = self.pattern[..., first : first + n]
            moved_pairs = einsum(block, moved, "b h q k, b k h d -> b q k d") / self.scale[:, :, None]
            index = torch.arange(n, device=y.device)
            moved_pairs[:, first + index, index] += self.stream[:, first + index]
            columns.append(closer_(moved_pairs, y[:, :, None]))
        return torch.cat(columns, -1)

    def _source_chunks(self) -> Iterator[tuple[int, Float[Tensor, "b k h d"]]]:
        """Yields the position of the first source of a chunk, and f^h(x_j) for the sources in the chunk."""
        rows, n, heads = self.value.shape[:3]
        step = max(1, CHUNK // (rows * max(n, heads) * self.out.shape[-1]))
        for first in range(0, n, step):
            values = self.value[:, first : first + step]
            yield first, einsum(values, self.out, "b k h e, h e d -> b k h d")


def closer_(part: Float[Tensor, "*n d"], whole: Float[Tensor, "*m d"]) -> Float[Tensor, "*n"]:
    """max(0, ||y||_1 - ||y - z||_1): how much closer a part z brings the whole y (Ferrando et al. 2022).

    |y| - |y - z| is taken element by element before the sum, to keep float32 precision. Overwrites `part`.
    """
    return (whole.abs() - part.sub_(whole).abs_()).sum(-1).clamp_min(0)


def mixing_reads(config: ModelConfig, layer: int, kernel: Kernel) -> tuple[Read, ...]:
    """Reads of one block that a kernel needs, in a model without edits."""
    site = f"blocks.{layer}.attn.hook_pattern"
    if kernel == "attention":
        return (Read(site, head_mean),)
    return Read(attention_input(config, layer)), Read(site), Read(f"blocks.{layer}.attn.hook_v")


def split_reads(model: Transformer, layer: int, upto: Extent = "block") -> tuple[Read, ...]:
    """Reads of one block that `SourceSplit.of` needs."""
    return (*mixing_reads(model.config, layer, "alti"), *_edited_reads(model, layer, upto).values())


def _edited_reads(model: Transformer, layer: int, upto: Extent) -> dict[Extent, Read]:
    """Reads of those sums of a split that an edit changes: there the recorded value is not the sum of the parts."""
    after = after_pattern(model.config, layer)
    before_z = after[: after.index("attn.hook_z") + 1]
    reads: dict[Extent, Read] = {}
    if edits_at(model, layer, before_z):
        reads["z"] = Read(f"blocks.{layer}.attn.hook_z")
    if upto != "z" and edits_at(model, layer, after[len(before_z) :]):
        reads["attn"] = Read(f"blocks.{layer}.hook_attn_out")
    if upto == "block" and model.config.norms_sum:
        sites = [f"{SUM_NORMS['attn_out']}.hook_{name}" for name in ("scale", "normalized")]
        if edits_at(model, layer, ["hook_resid_mid", *sites]):
            reads["block"] = Read(f"blocks.{layer}.{sites[-1]}")
    return reads


def check_stream(model: Transformer, what: str, allowed: tuple[type, ...] = (Detach,)) -> None:
    """Checks that no edit replaces the stream between blocks by something that the model's parts did not write.

    Raises:
        ValueError: an edit that does, named in the message.
    """
    for edit in model.edits:
        inside = layer_of(edit, model) is not None and inner_site(edit) in STREAM
        if inside and edit.site != "blocks.0.hook_resid_pre" and not isinstance(edit.change, allowed):
            raise ValueError(
                f"{what} requires a stream that is what the model wrote into it; the edit of {edit.name} puts "
                f"something else there: edit what is added to it instead"
            )


def head_mean(pattern: Float[Tensor, "b h q k"]) -> Float[Tensor, "b q k"]:
    """The mean of the heads' patterns, in float32 at least."""
    return pattern.mean(1, dtype=torch.promote_types(pattern.dtype, torch.float32))


@torch.no_grad()
def contributions(
    model: Transformer, layer: int, trace: Trace, kernel: Kernel
) -> tuple[Float[Tensor, "b q k"], Float[Tensor, "b q"]]:
    """The kernel's matrix of one block, each row divided by its sum, and the mixing ratio of every query.

    With `attention`, rows are not divided: they sum to 1, or to less with an attention sink. The mixing ratio is
    `SourceSplit.ratio` for kernels of norms, else the share of the row that is off the diagonal. Where no source
    contributes (ALTI, if no source brings the biases closer to the output) the query gets all of its row: our
    convention.
    """
    if kernel == "attention":
        require("distribution", [model.config.mixers[layer]], "kernel='attention'")
        (read,) = mixing_reads(model.config, layer, kernel)
        return trace[read], _share_of_others(trace[read])
    if kernel == "values":
        lengths = SourceSplit.of(model, layer, trace, "z").value_norms().norm(dim=1)
        matrix = own_if_nobody(lengths)
        return matrix, _share_of_others(matrix)
    if kernel == "alti":
        split = SourceSplit.of(model, layer, trace)
        announce_pairs("ALTI", split, model)
        matrix = own_if_nobody(split.alti())
        return matrix, _share_of_others(matrix)
    parts = SourceSplit.of(model, layer, trace, EXTENTS.get(kernel, "block"))
    return own_if_nobody(parts.norms()), parts.ratio()


def announce_pairs(name: str, split: SourceSplit, model: Transformer) -> None:
    """Show a `Note`, once, where a vector for every head and pair of tokens takes minutes over all layers."""
    rows, n, heads = split.value.shape[:3]
    width, layers = split.out.shape[-1], model.config.n_layers
    announce(
        f"{name} of {rows} rows of {n} tokens, with a vector for every pair of them and head in {layers} layers",
        ELEMENTWISE * layers * heads * rows * n * n * width,
        model.device,
        "shorter prompts take less, by their length squared",
    )


def shares(x: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k"]:
    """Rows divided by their sums; NaN for a row of zeros."""
    return x / x.sum(-1, keepdim=True)


def own_if_nobody(x: Float[Tensor, "b q k"]) -> Float[Tensor, "b q k"]:
    """Rows divided by their sums; a row of zeros becomes the row of the identity matrix."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return shares(torch.where(x.sum(-1, keepdim=True) == 0, eye, x))


def _share_of_others(x: Float[Tensor, "b q k"]) -> Float[Tensor, "b q"]:
    return 1 - x.diagonal(dim1=-2, dim2=-1) / x.sum(-1).clamp_min(torch.finfo(x.dtype).tiny)


def with_residual(pattern: Float[Tensor, "*b q k"]) -> Float[Tensor, "*b q k"]:
    """A + I, rows divided by their sums: half of each row is the position's own stream (Abnar & Zuidema 2020)."""
    eye = torch.eye(pattern.shape[-1], dtype=pattern.dtype, device=pattern.device)
    return shares(pattern + eye)


def rollout(layers: Sequence[Float[Tensor, "b q k"]]) -> Float[Tensor, "b q k"]:
    """R^l = M^l R^(l-1) over all layers, first to last (Abnar & Zuidema 2020): output position x token."""
    rolled = layers[0]
    for layer in layers[1:]:
        rolled = layer @ rolled
    return rolled


def rolled_row(layers: Sequence[Float[Tensor, "b q k"]], at: Int[Tensor, "b"]) -> Float[Tensor, "b k"]:
    """One row of `rollout` per prompt, at position `at`, without products of whole matrices."""
    row = layers[-1][torch.arange(len(at), device=at.device), at]
    for layer in reversed(layers[:-1]):
        row = einsum(row, layer, "b q, b q k -> b k")
    return row


def flow(layers: Float[Tensor, "l q k"], at: int) -> Float[Tensor, "k"]:
    """Maximum flow from output position `at` to each token, with the matrices' entries as capacities.

    Attention flow (Abnar & Zuidema 2020): one maximum flow per token in a layered graph of (l + 1) n nodes and l n^2
    edges. Each flow is at most 1 if rows sum to 1, but their sum may be more. Computed by shortest augmenting paths
    (networkx), at worst O(nodes^2 edges) each: 0.05 s for 4 layers and 18 tokens, 4 s for 12 and 64.

    Raises:
        ValueError: more than `FLOW_TOKENS` tokens.
    """
    import networkx as nx  # type: ignore[import-untyped]  # torch requires it; slow to import

    depth, n = layers.shape[:2]
    if n > FLOW_TOKENS:
        raise ValueError(f"attention flow requires at most {FLOW_TOKENS} tokens, got {n}: try rollout")
    graph = nx.DiGraph()
    graph.add_nodes_from((level, i) for level in range(depth + 1) for i in range(n))
    edges = layers.nonzero()
    for (level, query, key), capacity in zip(edges.tolist(), layers[tuple(edges.T)].tolist(), strict=True):
        graph.add_edge((level + 1, query), (level, key), capacity=capacity)
    residual = nx.algorithms.flow.build_residual_network(graph, "capacity")
    solve = nx.algorithms.flow.shortest_augmenting_path
    most = [solve(graph, (depth, at), (0, i), residual=residual).graph["flow_value"] for i in range(n)]
    return layers.new_tensor(most)


def layers_read(model: Transformer, kernel: Kernel, layers: Sequence[int]) -> tuple[Read, ...]:
    """Reads of some blocks that a kernel needs.

    Raises:
        ValueError: an unknown kernel, or a model that also attends to a memory.
    """
    if kernel not in get_args(Kernel):
        raise ValueError(f"unknown kernel {kernel!r}; {nearest(kernel, get_args(Kernel))}")
    check_tokens(model.config)
    if kernel == "attention":
        return tuple(read for layer in layers for read in mixing_reads(model.config, layer, kernel))
    return tuple(read for layer in layers for read in split_reads(model, layer, EXTENTS.get(kernel, "block")))


def check_tokens(config: ModelConfig) -> None:
    """Raises a ValueError for a model with cross-attention, whose state depends on more than its own tokens."""
    if config.cross_attention:
        raise ValueError(
            "token attribution requires a model whose only tokens are its own; this one also attends to the memory "
            "of an encoder"
        )
