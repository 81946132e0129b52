"""One pass of an attention-only model as an affine map of its stream: attention patterns and norm scales as recorded.

Elhage et al. 2021: with its pattern A given, a head is the linear map A (x) W_V W_O, mixing positions on one side and
vectors on the other. A norm whose scale is given is affine too, so the model is a sum over the paths through its heads.

Terms are kept by ORDER, the number of heads that they passed, stacked along the first axis. Constants (b_V, b_O, betas)
stand where a rerun that adds the heads' previous outputs would meet them: a head acts with its constants on order 0,
and linearly on every other order.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from jaxtyping import Float
from torch import Tensor

from interp.model.config import ModelConfig
from interp.model.edits import Scale, Span, Zero, edited
from interp.model.mixer_variants import require
from interp.model.sites import final_stream, names
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.model.variants import FullSoftmax
from interp.model.weights import LayerWeights, Weights
from interp.passes.frozen import FrozenNorm, final_norm, input_norm, output_norm, sum_norm

_START = "blocks.0.hook_resid_pre"
_FROZEN = ("attn.hook_pattern", "ln1.hook_scale", "ln1_post.hook_scale")
_Z = "attn.hook_z"
_RECORDED = (
    "hook_q_input", "hook_k_input", "attn.hook_q", "attn.hook_k", "attn.q_norm", "attn.k_norm", "attn.hook_rot",
    "attn.hook_smeared_k", "attn.hook_attn_scores", "attn.hook_first_pattern", "attn.hook_pattern", "ln1.hook_scale",
    "ln1_post.hook_scale",
)  # fmt: skip
"""What the sites of a block begin with whose changes are in the recorded patterns and scales."""


def check_expandable(model: Transformer) -> None:
    """ValueError unless the model, under its edits, is a sum over paths once patterns and norm scales are given."""
    _check(model.config)
    for edit in model.edits:
        inner = edit.site.partition("blocks.")[2].partition(".")[2]
        scales = inner == _Z and isinstance(edit.change, Zero | Scale) and "e" not in edit.cells
        if inner and not scales and edit.site != _START and not inner.startswith(_RECORDED):
            raise ValueError(
                f"path expansion under an edit of {edit.name} ({type(edit.change).__name__}): that model is no sum of "
                "paths; Zero or Scale of heads, and changes of patterns, queries, keys or embeddings leave it one"
            )


def _times_edits(
    pattern: Float[Tensor, "b h q k"], model: Transformer, layer: int
) -> Float[Tensor, "b h q k"]:
    """The pattern with what the model's edits multiply each head's z with at every position."""
    mine = [edit for edit in model.edits if edit.site == f"blocks.{layer}.{_Z}"]
    if not mine:
        return pattern
    factors = pattern.new_ones(pattern.shape[0], pattern.shape[2], pattern.shape[1], 1)
    for edit in mine:
        factors = edited(edit, factors, Span())
    return pattern * factors.movedim(1, 2)


def frozen_reads(config: ModelConfig) -> tuple[Read, ...]:
    """What has to be recorded of a pass to freeze it.

    Errors: ValueError for a model that stays non-linear with patterns and scales given (MLP, masked-LM head), that
    also attends to a memory, or that has no logits.
    """
    _check(config)
    mine = {site for site in names(config) if site.partition("blocks.")[2].partition(".")[2] in _FROZEN}
    return tuple(Read(site) for site in (_START, *sorted(mine), final_stream(config)))


def _check(config: ModelConfig) -> None:
    problem = {
        "has an MLP": config.mlp is not None,
        "attends to the memory of an encoder": config.cross_attention,
        "has no logits": not config.unembed,
        "has a non-linear masked-LM head": config.mlm_head is not None,
        f"has the output layer {config.output}": config.output != FullSoftmax(),
    }
    if found := [what for what, is_so in problem.items() if is_so]:
        raise ValueError(
            f"path expansion is exact for attention-only models with an unembedding; this one {found[0]}"
        )
    require("additive", config.mixers, "path expansion")


class Frozen:
    """A recorded pass: the stream entering the first block, every block as an affine map, and the final stream."""

    def __init__(self, model: Transformer, trace: Trace) -> None:
        self.model, config = model, model.config
        seen = {read.site: trace[read] for read in frozen_reads(config)}
        wide = torch.promote_types(model.dtype, torch.float32)
        check_expandable(model)
        self.start: Float[Tensor, "b p d"] = seen[_START].to(wide)
        self.final: Float[Tensor, "b p d"] = seen[final_stream(config)]
        """As the model left it, in the model's dtype."""
        self.ending = final_norm(model).of(self.final.to(wide))
        wider = {site: value.to(wide) for site, value in seen.items() if site != final_stream(config)}
        self.layers = tuple(FrozenLayer(model, layer, wider) for layer in range(config.n_layers))

    @cached_property
    def direct(self) -> tuple[Float[Tensor, "b p d"], ...]:
        """The order-0 stream entering each block, and last the one that leaves the model."""
        streams = [self.start]
        for layer in self.layers:
            streams.append(layer.sum.split(streams[-1][None], 0)[0])
        return tuple(streams)

    @cached_property
    def orders(self) -> Float[Tensor, "order b p d"]:
        """The final stream by order, 0 to n_layers."""
        stack = self.start[None]
        for layer in self.layers:
            more = layer.added(layer.mixed(stack))
            zero = torch.zeros_like(stack[:1])
            stack = layer.sum.split(torch.cat((stack, zero)) + torch.cat((zero, more)), 0)
        return stack

    @cached_property
    def first_order(self) -> Float[Tensor, "l b p d"]:
        """Order 1 of the final stream by the layer whose heads wrote it (b_O included)."""
        found: list[Tensor] = []
        for layer, x in zip(self.layers, self.direct[:-1], strict=True):
            new = layer.added(layer.mixed(x[None]))[0]
            found = [layer.sum.through(old) for old in (*found, new)]
        return torch.stack(found)

    def logits(self, stream: Float[Tensor, "*n b p d"]) -> Float[Tensor, "*n b p v"]:
        """Logits of a whole stream (before a soft cap), the final norm at its frozen scale."""
        return self._read_out(stream, self.constant)

    def part_logits(self, part: Float[Tensor, "*n b p d"]) -> Float[Tensor, "*n b p v"]:
        """What a part of the stream adds to the logits: its frozen final norm times W_U, without constants."""
        return self._read_out(part, None)

    def _read_out(self, part: Tensor, constant: Tensor | None) -> Float[Tensor, "*n b p v"]:
        normed = self.ending.through(part) * self.model.config.logit_scale
        return F.linear(normed, Weights(self.model).W_U.mT.to(part), constant)

    @cached_property
    def constant(self) -> Float[Tensor, "v"]:
        """beta W_U + b_U, times the factor on the logits."""
        weights = Weights(self.model)
        total = weights.final_beta.to(self.start) @ weights.W_U.to(self.start) + weights.b_U.to(self.start)
        return total * self.model.config.logit_scale


class FrozenLayer:
    """One block: what its heads add to a stream, and what the block makes of the sum."""

    def __init__(self, model: Transformer, layer: int, seen: Mapping[str, Tensor]) -> None:
        weights = Weights(model)
        self.pattern: Float[Tensor, "b h q k"] = _times_edits(
            seen[f"blocks.{layer}.attn.hook_pattern"], model, layer
        )
        """As recorded, times what the model's edits multiply each head with."""
        self.reading, self.output, self.sum = (
            norm(model, layer, "attn_out").recorded(seen) for norm in (input_norm, output_norm, sum_norm)
        )
        self.weights: LayerWeights = weights.layer(layer)
        self.kv_head = weights.kv_head()

    def mixed(self, stack: Float[Tensor, "order b p d"]) -> Float[Tensor, "order b p h e"]:
        """z of every head by order: A N(x) W_V, with beta and b_V on order 0."""
        w = self.weights
        normed = self.reading.split(stack, 0)
        value = einsum(normed, w.W_V.to(stack), "o b p d, g d e -> o b p g e")
        value = _with(value, w.b_V)[:, :, :, self.kv_head]
        return einsum(self.pattern, value, "b h q k, o b k h e -> o b q h e")

    def added(self, z: Float[Tensor, "order b p h e"]) -> Float[Tensor, "order b p d"]:
        """What attention adds to the stream: z W_O through the norm and factor of its output; constants on order 0."""
        out = _with(einsum(z, self.weights.W_O.to(z), "o b p h e, h e d -> o b p d"), self.weights.b_O)
        return self.output.split(out, 0)


def _with(stack: Float[Tensor, "order *n"], constant: Tensor | None) -> Float[Tensor, "order *n"]:
    """The terms by order, a constant added to the lowest."""
    return stack if constant is None else torch.cat((stack[:1] + constant.to(stack), stack[1:]))


@dataclass(frozen=True, eq=False)
class Readings:
    """Numbers read off a stream x, `sum_k weight[b,c,k] x[b,k] . direction[b,c]`: Elhage's A (x) W, seen from the end.

    Carrying one back through a norm or a head keeps its form, so no path ever holds a stream of its own.
    """

    weight: Float[Tensor, "b c k"]
    direction: Float[Tensor, "b c d"]

    def of(self, stream: Float[Tensor, "b k d"]) -> Float[Tensor, "b c"]:
        """The numbers for one stream."""
        return ((self.weight @ stream) * self.direction).sum(-1)

    def of_constant(self, vector: Tensor) -> Float[Tensor, "b c"]:
        """The numbers for a stream that is this vector at every position."""
        return self.weight.sum(-1) * (self.direction @ vector.to(self.direction))

    def of_heads(self, z: Float[Tensor, "b k h e"], out: Float[Tensor, "h e d"]) -> Float[Tensor, "b c h"]:
        """The numbers for z W_O of each head."""
        mixed = einsum(self.weight, z, "b c k, b k h e -> b c h e")
        return (mixed * einsum(self.direction, out.to(z), "b c d, h e d -> b c h e")).sum(-1)

    def before(self, norm: FrozenNorm) -> "Readings":
        """The same numbers read before a norm and the factor after it, but for its beta."""
        weight = self.weight if norm.factor == 1 else self.weight * norm.factor
        if norm.scale is not None:
            weight = weight / rearrange(norm.scale, "b k 1 -> b 1 k")
        return Readings(weight, replace(norm, factor=1.0, scale=None).back(self.direction))

    def through_heads(self, layer: FrozenLayer) -> "Readings":
        """What one reading of the attention output reads in the stream through each head `[b h]`, constants apart."""
        w, weight = layer.weights, torch.einsum("bq,bhqk->bhk", self.weight[:, 0], layer.pattern)
        value = w.W_V[layer.kv_head].to(self.direction)
        direction = torch.einsum("bd,hed,hce->bhc", self.direction[:, 0], w.W_O.to(value), value)
        return Readings(weight, direction).before(layer.reading)
