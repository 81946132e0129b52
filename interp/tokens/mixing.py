"""Mixing of positions by attention of one block: by weights, by norms of what is moved, and by distances (ALTI).

What query i takes from source j, with all heads summed, is T_i(x_j) = sum_h a^h_ij f^h(x_j) + [i = j] x_i, where
f^h(x_j) = v^h_j W_O^h with b_V in it (b_O belongs to no source: it is part of the constant). The norm of attention's
output (sandwich) and that of the sum (post-norm) act on it as linear maps at their frozen scales. The MLP moves
nothing between positions and is left out, in parallel blocks too.
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
from interp.passes.edited import STREAM, after_pattern, edits_at, inner_site, layer_of
from interp.passes.frozen import SUM_NORMS, FrozenNorm, output_norm, sum_norm
from interp.residual.edited_sums import head_shares, multiple

CHUNK = 2**24
"""Numbers of T_i(x_j) in memory at a time: 64 MiB in float32."""
FLOW_TOKENS = 64
"""The longest prompt that `flow` accepts."""

Kernel = Literal["attention", "values", "attn_norms", "attn_res_norms", "norms", "alti"]
"""How one block is turned into a matrix `[query, key]`.

attention: mean of the heads' patterns. values: ||a_ij v_j||, heads concatenated. attn_norms: ||sum_h a_ij f(x_j)||
(Attn-N). attn_res_norms: with the residual (AttnRes-N). norms: as they leave the block, so after the norm of the sum
where there is one (AttnResLn-N), else AttnRes-N. alti: by distance, see `SourceSplit.alti`.
"""
WITHOUT_RESIDUAL: tuple[Kernel, ...] = ("values", "attn_norms")
"""Kernels that leave out the stream a position already has: they cannot be chained over layers."""
Extent = Literal["z", "attn", "res", "block"]
"""End of a split block: the heads' z, attention's addition, that plus the residual, that after its norm."""
EXTENTS: dict[Kernel, Extent] = {"values": "z", "attn_norms": "attn", "attn_res_norms": "res"}
"""Extent of each kernel that does not use the whole block."""


@dataclass(frozen=True, eq=False)
class SourceSplit:
    """Attention of one block as parts: `output[i] = constant[i] + sum_j T_i(x_j)`, with nothing per pair as wide as d.

    T_i(x_j) = sum_h pattern[h, i, j] value[j, h] out[h] / scale[i] + [i = j] stream[i].
    """

    pattern: Float[Tensor, "b h q k"]
    value: Float[Tensor, "b k h e"]
    """One value per query head, b_V included."""
    out: Float[Tensor, "h e d"]
    """W_O followed by the linear part of every norm up to the output."""
    scale: Float[Tensor, "b q 1"]
    """Divisor of those norms."""
    stream: Float[Tensor, "b q d"]
    """Stream of each position itself; zeros where the residual does not count."""
    constant: Float[Tensor, "b q d"]
    """b_O and the betas."""

    @classmethod
    def of(cls, model: Transformer, layer: int, trace: Trace, upto: Extent = "block") -> "SourceSplit":
        """The split of a recorded block (`split_reads`), edits included.

        Patterns and values count as they were recorded.

        Raises:
            ValueError: an edit that makes of what attention moved anything but a multiple of it.
        """
        require("additive", [model.config.mixers[layer]], "splitting a block by source")
        weights = Weights(model).layer(layer)
        stream, pattern, v = (upcast(trace[read]) for read in mixing_reads(model.config, layer, "alti"))
        found = cls(
            pattern=pattern,
            value=v[:, :, Weights(model).kv_head()],
            out=weights.W_O.to(v),
            scale=torch.ones_like(stream[..., :1]),
            stream=torch.zeros_like(stream),
            constant=weights.b_O.to(v).expand_as(stream),
        )
        edited = {at: upcast(trace[read]) for at, read in _edited_reads(model, layer, upto).items()}
        if "z" in edited:
            share = head_shares(model, layer, pattern, found.value, edited["z"])
            found = replace(found, pattern=pattern * share)
        if upto == "z":
            return found
        found = found.after(output_norm(model, layer, "attn_out"))
        if "attn" in edited:
            found = found._rescaled(model, layer, edited["attn"])
        if upto != "attn":
            found = replace(found, stream=stream)
        if upto == "block":
            found = found.after(sum_norm(model, layer, "attn_out"))
        return found._rescaled(model, layer, edited["block"]) if "block" in edited else found

    def after(self, norm: FrozenNorm) -> "SourceSplit":
        """The split after a norm of the sum, at the scale of that sum; beta joins the constant."""
        frozen = norm.of(lambda: self.output)
        return replace(
            self,
            out=norm.through(self.out),
            scale=self.scale if frozen.scale is None else self.scale * frozen.scale,
            stream=frozen.through(self.stream),
            constant=frozen.split(self.constant[None], 0)[0],
        )

    def _rescaled(self, model: Transformer, layer: int, edited: Float[Tensor, "b q d"]) -> "SourceSplit":
        """All parts of every query times the one number by which an edit multiplied their sum."""
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
        """The whole: constant, residual, and everything moved."""
        return self.constant + self.stream + self.moved

    def value_norms(self) -> Float[Tensor, "b h q k"]:
        """||a_ij v_j|| of every head (Kobayashi et al. 2020)."""
        return self.pattern.abs() * rearrange(self.value.norm(dim=-1), "b k h -> b h 1 k")

    def lengths(self) -> Float[Tensor, "b k h"]:
        """||f^h(x_j)||: the length of what a head takes from a source, before attention and `scale`.

        Kobayashi et al. 2020.
        """
        return torch.cat([moved.norm(dim=-1) for _, moved in self._by_source()], 1)

    def norms(self) -> Float[Tensor, "b q k"]:
        """||T_i(x_j)||: the norm of the sum over heads, not the sum of norms (Kobayashi et al. 2021).

        From the Gram matrix `[h h]` of the heads' f(x_j) at every source: b q k h^2 products and no vector per pair.
        Where heads cancel, rounding leaves the root of the dtype's epsilon times the sum of norms.
        """
        grams = [einsum(m, m, "b k h d, b k g d -> b k h g") for _, m in self._by_source()]
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
        for first, moved in self._by_source():
            n = moved.shape[1]
            block = self.pattern[..., first : first + n]
            part = einsum(block, moved, "b h q k, b k h d -> b q k d") / self.scale[:, :, None]
            index = torch.arange(n, device=y.device)
            part[:, first + index, index] += self.stream[:, first + index]
            columns.append(closer_(part, y[:, :, None]))
        return torch.cat(columns, -1)

    def _by_source(self) -> Iterator[tuple[int, Float[Tensor, "b k h d"]]]:
        """f^h(x_j), some sources at a time: the first one's position, and theirs."""
        rows, n, heads = self.value.shape[:3]
        step = max(1, CHUNK // (rows * max(n, heads) * self.out.shape[-1]))
        for first in range(0, n, step):
            some = self.value[:, first : first + step]
            yield first, einsum(some, self.out, "b k h e, h e d -> b k h d")


def closer_(part: Float[Tensor, "*n d"], whole: Float[Tensor, "*m d"]) -> Float[Tensor, "*n"]:
    """max(0, ||y||_1 - ||y - z||_1): how much closer a part z brings the whole y (Ferrando et al. 2022).

    Number by number before the sum, which is what float32 has digits for. Overwrites `part`.
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
    """Reads of the sums of a split that edits may have changed, so that they are not the sum of their parts."""
    after = after_pattern(model.config, layer)
    before_z = after[: after.index("attn.hook_z") + 1]
    found: dict[Extent, Read] = {}
    if edits_at(model, layer, before_z):
        found["z"] = Read(f"blocks.{layer}.attn.hook_z")
    if upto != "z" and edits_at(model, layer, after[len(before_z) :]):
        found["attn"] = Read(f"blocks.{layer}.hook_attn_out")
    if upto == "block" and model.config.norm_place == "post":
        sites = [f"{SUM_NORMS['attn_out']}.hook_{name}" for name in ("scale", "normalized")]
        if edits_at(model, layer, ["hook_resid_mid", *sites]):
            found["block"] = Read(f"blocks.{layer}.{sites[-1]}")
    return found


def check_stream(model: Transformer, what: str, allowed: tuple[type, ...] = (Detach,)) -> None:
    """ValueError for edits that put into the stream between blocks what no earlier part of the model wrote.

    Raises:
        ValueError: naming the edit.
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
    """One block by one kernel, each row divided by its sum, and the mixing ratio of every query.

    Attention is left as it is: its rows sum to 1, or to less where a sink takes part. Ratio: of the norms as in
    `SourceSplit.ratio`, of other kernels the share of the row that is not the query's own. Where nobody contributes
    (ALTI, if the biases alone lie closer to the output than with any source) the position keeps all of itself: our
    convention.
    """
    if kernel == "attention":
        require("distribution", [model.config.mixers[layer]], "kernel='attention'")
        (read,) = mixing_reads(model.config, layer, kernel)
        return trace[read], _others(trace[read])
    if kernel == "values":
        lengths = SourceSplit.of(model, layer, trace, "z").value_norms().norm(dim=1)
        found = own_if_nobody(lengths)
        return found, _others(found)
    if kernel == "alti":
        found = own_if_nobody(SourceSplit.of(model, layer, trace).alti())
        return found, _others(found)
    parts = SourceSplit.of(model, layer, trace, EXTENTS.get(kernel, "block"))
    return own_if_nobody(parts.norms()), parts.ratio()


def shares(x: Float[Tensor, "*n k"]) -> Float[Tensor, "*n k"]:
    """Rows divided by their sums; NaN for a row of zeros."""
    return x / x.sum(-1, keepdim=True)


def own_if_nobody(x: Float[Tensor, "b q k"]) -> Float[Tensor, "b q k"]:
    """Rows divided by their sums; a row of zeros becomes that of the identity."""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    return shares(torch.where(x.sum(-1, keepdim=True) == 0, eye, x))


def _others(x: Float[Tensor, "b q k"]) -> Float[Tensor, "b q"]:
    return 1 - x.diagonal(dim1=-2, dim2=-1) / x.sum(-1).clamp_min(torch.finfo(x.dtype).tiny)


def with_residual(pattern: Float[Tensor, "*b q k"]) -> Float[Tensor, "*b q k"]:
    """(A + I), rows divided by their sums: half of each row is the position's own stream (Abnar & Zuidema 2020)."""
    eye = torch.eye(pattern.shape[-1], dtype=pattern.dtype, device=pattern.device)
    return shares(pattern + eye)


def rollout(layers: Sequence[Float[Tensor, "b q k"]]) -> Float[Tensor, "b q k"]:
    """R^l = M^l R^(l-1) over all layers, first to last (Abnar & Zuidema 2020): output position x token."""
    rolled = layers[0]
    for layer in layers[1:]:
        rolled = layer @ rolled
    return rolled


def rolled_row(layers: Sequence[Float[Tensor, "b q k"]], at: Int[Tensor, "b"]) -> Float[Tensor, "b k"]:
    """One row of `rollout` per prompt, at vector-matrix cost."""
    row = layers[-1][torch.arange(len(at), device=at.device), at]
    for layer in reversed(layers[:-1]):
        row = einsum(row, layer, "b q, b q k -> b k")
    return row


def flow(layers: Float[Tensor, "l q k"], at: int) -> Float[Tensor, "k"]:
    """The most that can flow from output position `at` to each token, with these matrices as capacities.

    Attention flow (Abnar & Zuidema 2020): one maximum flow per token in a layered graph of (l + 1) n nodes and l n^2
    edges; each is at most 1 for rows that sum to 1, their sum is not. By shortest augmenting paths (networkx), at worst
    O(nodes^2 edges) each: 0.05 s for 4 layers and 18 tokens, 4 s for 12 and 64.

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
    """ValueError for a model whose state depends on more than its own tokens."""
    if config.cross_attention:
        raise ValueError(
            "token attribution requires a model whose only tokens are its own; this one also attends to the memory "
            "of an encoder"
        )
