"""One attention score as a sum over pairs: a part of the stream at the query times a part of the stream at the key.

With the norms at the scales of the pass, a head's query and key vectors are sums over what every part of the model
wrote to the residual stream, and its score is their product. This file computes the terms of that product. Two
questions return them: `attention_attribution` all pairs, `attention_paths` the largest pairs with the tokens that their
heads read.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.stats import upcast
from interp.core.transfers import check, to_device, to_host
from interp.data.batch import Batch
from interp.model.attention import Attention, picked
from interp.model.config import WITH_HEADS, ModelConfig
from interp.model.layout import PerRow, one_position
from interp.model.norm import HeadNorm
from interp.model.parts import Part, PartName, as_part
from interp.model.position import Rotation
from interp.model.records import require
from interp.model.sites import attention_input, embedding_parts
from interp.model.tap import Read, Trace
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.edited import edits_at
from interp.passes.frozen import embedding_scale, input_norm, sum_norm, sum_scale
from interp.passes.needs import Steps, recorded
from interp.residual.attribution import places_of
from interp.residual.decomposition import (
    Decomposition,
    IncompleteSumError,
    as_wholes,
    before_attention,
    bound,
    by_source,
    in_half,
    into_heads,
    places_before_attention,
)
from interp.residual.edited_sums import head_shares
from interp.weights.head_circuits import HeadCircuits

ScoreSplit = Literal["part", "head", "source"]
"""Parts of the stream: sublayers; or single heads; or single heads, each also by the token that it moved from."""
QueryPosition = int | PerRow
"""One token of every prompt: one for all, or one for each."""
QUERY, KEY = 0, 1
"""Indices into axes of length 2 that hold the query first, then the key."""
_SIDES: tuple[Literal["q", "k"], ...] = ("q", "k")


def as_head(name: PartName, config: ModelConfig) -> tuple[int, int]:
    """Layer and index of the named head, whose scores are checked to be sums over pairs of parts.

    Raises:
        KeyError, IndexError: a part that the model lacks.
        ValueError: a part that is no head of self-attention, and a mixer whose scores are not one product of queries
            and keys.
    """
    part = as_part(name, config)
    if part.kind != "head" or part.layer is None or part.index is None:
        raise ValueError(f"a head of self-attention is required, such as L1H2, got {part}")
    require("separable", [config.mixers[part.layer]], f"splitting the scores of {part} by parts")
    return part.layer, part.index


def rows_of(query: QueryPosition, key: QueryPosition) -> int | None:
    """Number of prompts that have positions of their own; None if both positions hold for any number of prompts.

    Raises:
        ValueError: query positions for another number of prompts than key positions, or for none.
    """
    places = {"query": query, "key": key}
    for name, pos in places.items():
        one_position(pos, name)
    counts = {name: len(pos) for name, pos in places.items() if isinstance(pos, PerRow)}
    if len(set(counts.values())) > 1:
        raise ValueError(
            f"one position of each is required for every prompt, or one for all, got {counts['query']} queries "
            f"and {counts['key']} keys"
        )
    return next(iter(counts.values()), None)


@dataclass(frozen=True, eq=False)
class _Side:
    """The affine map from the stream to the query vectors, or to the key vectors, of some heads."""

    matrix: Float[Tensor, "h d e"]
    """Matrix from the stream to the heads, its norms at scale 1."""
    constant: Float[Tensor, "h b 1 e"]
    """Constant that is added, scaled and rotated: from the stream norm's beta, b_Q or b_K, and the head norm's beta."""
    scale: Float[Tensor, "#h b"]
    """Factor on `matrix`: one over the scales of the norms, and for queries the factor on the scores."""
    rotation: Rotation | None

    def of(self, parts: Float[Tensor, "c b d"]) -> Float[Tensor, "h b c e"]:
        """Linear part of the query or key vectors of parts of the stream."""
        joint = rearrange(self.matrix, "h d e -> d (h e)")  # one matrix product for all heads
        read = rearrange(
            rearrange(parts, "c b d -> b c d") @ joint, "b c (h e) -> h b c e", h=len(self.matrix)
        )
        return _rotated(read * self.scale[..., None, None], self.rotation)

    def lengths(self, parts: Float[Tensor, "c b d"]) -> Float[Tensor, "h b c"]:
        """Lengths sqrt(sum_de (x_d W_de)^2) of the parts' vectors as if no products cancelled.

        Their rounding is relative to these. They are also the root mean square length under random signs.
        """
        row_squares = self.matrix.square().sum(-1)
        unscaled = einsum(parts.square(), row_squares, "c b d, h d -> h b c").sqrt()
        return unscaled * self.scale.abs()[..., None]


@dataclass(frozen=True, eq=False)
class _End:
    """Query vectors, or key vectors, of some heads: of every part of the stream, and of the whole stream."""

    parts: Float[Tensor, "h b c e"]
    """The vector of every part, the constant last."""
    rounding: Float[Tensor, "h b e"]
    """The vector of the stream's rest that no part explains."""
    stream: Float[Tensor, "h b e"]
    """The vector of the whole stream."""
    size: Float[Tensor, "h b"]
    """The sum of the parts' lengths."""
    length: Float[Tensor, "h b"]
    """Length of the vector of the whole stream as if no products cancelled (`_Side.lengths`)."""

    @classmethod
    def of(cls, side: _Side, parts: Decomposition, stream: Float[Tensor, "b d"], at: int) -> _End:
        """The queries or keys of the parts of the stream at one end of the scores."""
        assert parts.rounding is not None
        values, rounding = parts.values[:, :, at], parts.rounding[None, :, at]
        rows = len(stream)
        constant = side.constant.expand(len(side.matrix), rows, 1, -1)
        bias = constant.norm(dim=-1)[..., 0]
        return cls(
            torch.cat((side.of(values), constant), 2),
            side.of(rounding)[:, :, 0],
            (side.of(stream[None]) + constant)[:, :, 0],
            side.lengths(values).sum(-1) + side.lengths(rounding)[..., 0] + bias,
            side.lengths(stream[None])[..., 0] + bias,
        )

    def at(self, heads: Int[Tensor, "h 1"], rows: Int[Tensor, "n"]) -> _End:
        """The vectors of these heads `[h 1]` at these rows `[n]`: axes [h b] become [h n]."""
        tensors = (self.parts, self.rounding, self.stream, self.size, self.length)
        return _End(*(x[heads, rows] for x in tensors))


@dataclass(frozen=True, eq=False)
class ScoreParts:
    """One score of every row as `position` and the sum over pairs of `query[c] . key[c']`."""

    parts: tuple[str, ...]
    """The parts of the stream, the same on both sides; each side has its bias after them."""
    query: Float[Tensor, "b c e"]
    key: Float[Tensor, "b c e"]
    position: Float[Tensor, "b"]
    """Term of the score from positions (ALiBi, relative buckets); 0 under others."""
    total: Float[Tensor, "b"]
    """The score of the pass, before any soft cap."""
    rounding: Float[Tensor, "b"]
    """Rest of the score after `position` and the pairs: what the pass rounded off."""
    error: Float[Tensor, "b"]
    """Size of the rounding, relative to the longest query part times the longest key part."""
    places: Int[Tensor, "b 2"]
    """Positions of query and key among the real tokens of the row."""
    sources: Mapping[int, Float[Tensor, "2 b h k e"]]
    """By layer: the query and key vectors of each head's write, by the token that it moved from."""

    @property
    def pairs(self) -> Float[Tensor, "b c c2"]:
        """Term of the score from every pair of parts."""
        return einsum(self.query, self.key, "b c e, b d e -> b c d")

    def of_sources(self, side: int) -> dict[int, Float[Tensor, "b h k"]]:
        """By layer, term of each head on one side by source token, times the sum of all parts of the other side."""
        other_side = (self.key, self.query)[side].sum(1)
        return {
            layer: einsum(x[side], other_side, "b h k e, b e -> b h k") for layer, x in self.sources.items()
        }


@torch.no_grad()
def score_parts(
    model: Transformer,
    batch: Batch,
    head: tuple[int, int],
    query: QueryPosition,
    key: QueryPosition,
    by: ScoreSplit,
) -> Steps[ScoreParts]:
    """The score of `head` in each row, split into terms; rows must be padded on the left.

    Raises:
        IndexError: a position that a row lacks.
        ValueError: a key that the query does not see.
        IncompleteSumError: where the parts do not sum to the score, as under edits of the head's own queries or
            scores.
    """
    places = torch.stack([places_of(batch, pos) for pos in (query, key)], 1)
    columns = places + batch.tokens.shape[1] - batch.lengths[:, None]
    reads = _reads(model, head[0], columns, by)
    run = yield from recorded(batch, list(reads.values()))
    seen = {site: upcast(run.trace[read]) for site, read in reads.items()}
    return _scores_at(model, batch, head, places, seen, by)


def score_reads(model: Transformer, layers: Sequence[int]) -> list[Read]:
    """The reads of a pass that `every_score` needs."""
    sites = [site for layer in layers for site in (*_sites(model, layer, "head"), _scores(layer))]
    return [Read(site) for site in dict.fromkeys(sites)]


@torch.no_grad()
def every_score(
    model: Transformer,
    batch: Batch,
    layers: Sequence[int],
    trace: Trace,
    heads: Container[tuple[int, int]] | None = None,
) -> Iterator[tuple[int, Sequence[int], ScoreParts]]:
    """Yields a layer, heads of it with the same mask, and all their scores on one prompt, split into terms.

    `ScoreParts` has one row for each head, query and visible key, heads outermost and keys innermost. The stream is
    split once for each token, and all pairs of tokens share that. Errors as in `score_parts`.

    Args:
        trace: a pass that read `score_reads`.
        heads: layer and index of the heads to return; None: all.
    """
    if not layers:
        return
    masks = to_host({layer: trace[Read(_scores(layer))][0] > -torch.inf for layer in layers})
    # [1 p ...] -> [p 2 ...]: every token becomes a row, with the same values as a query and as a key
    seen = {
        site: upcast(trace[Read(site)])[0].unsqueeze(1)
        for site in dict.fromkeys(site for layer in layers for site in _sites(model, layer, "head"))
    }
    seen = {site: x.expand(-1, 2, *x.shape[2:]) for site, x in seen.items()}
    split = cache(into_heads(seen, model))
    for layer in layers:
        scores, parts = upcast(trace[Read(_scores(layer))])[0], before_attention(seen, model, layer, split)
        head_ids = [h for h in range(len(scores)) if heads is None or (layer, h) in heads]
        for layer_heads, split_scores in _layer_scores(
            model, batch, layer, seen, parts, scores, (masks[layer], head_ids)
        ):
            yield layer, layer_heads, split_scores


def _layer_scores(
    model: Transformer,
    batch: Batch,
    layer: int,
    seen: Mapping[str, Tensor],
    parts: Decomposition,
    scores: Float[Tensor, "h q k"],
    chosen: tuple[Bool[Tensor, "h q k"], Sequence[int]],
) -> Iterator[tuple[Sequence[int], ScoreParts]]:
    """Split scores of one layer, as in `every_score`; `chosen`: masks of the visible keys, on the host, and heads."""
    masks, head_ids = chosen
    factor = _attention(model, layer).score_factor((scores > -torch.inf).sum(-1), scores)
    columns = torch.arange(scores.shape[-1], device=scores.device)[:, None].expand(-1, 2)
    rows = batch.rows(torch.zeros(len(columns), dtype=torch.long))
    queries, keys = (
        end for end, _ in _queries_and_keys(model, rows, layer, slice(None), columns, seen, parts, factor)
    )
    by_mask: dict[bytes, list[int]] = {}
    for head in head_ids:
        by_mask.setdefault(masks[head].numpy().tobytes(), []).append(head)
    for heads in by_mask.values():
        head_index = to_device(heads, scores.device)[:, None]
        places = to_device(masks[heads[0]].nonzero(), scores.device)
        query, key = places.T
        recorded = scores[head_index, query, key]
        position = position_term(model, head_index[:, 0], places, recorded)
        q, k, total = queries.at(head_index, query), keys.at(head_index, key), recorded
        if model.config.attn_softcap is not None:
            total = _content_scores(model, layer, head_index, (query, key), seen, factor) + position
        remainder = _checked_rounding(
            model, [(layer, head) for head in heads], (q, k), position, total, recorded
        )
        row_places = places.expand(len(heads), -1, -1)  # [h pair 2]; below [h pair ...] -> [(h pair) ...]
        q_parts, k_parts, position, total, rounding, error, row_places = (
            x.flatten(0, 1) for x in (q.parts, k.parts, position, total, *remainder, row_places)
        )
        yield (
            heads,
            ScoreParts(parts.parts, q_parts, k_parts, position, total, rounding, error, row_places, {}),
        )


def _reads(model: Transformer, layer: int, columns: Int[Tensor, "b 2"], by: ScoreSplit) -> dict[str, Read]:
    """By site, the reads that `_scores_at` needs: at the query and the key of every row where that suffices."""
    reads = {site: Read(site, partial(_columns, columns=columns)) for site in _sites(model, layer, by)}
    reads |= {
        site: Read(site, partial(_query_rows, columns=columns)) for site in _weights_read(model, layer, by)
    }
    return reads | {site: Read(site) for site in _values_read(model, layer, by)}


def _scores_at(
    model: Transformer,
    batch: Batch,
    head: tuple[int, int],
    places: Int[Tensor, "b 2"],
    seen: Mapping[str, Tensor],
    by: ScoreSplit,
) -> ScoreParts:
    """The split scores for the query and key in `places`, computed from the activations `seen`."""
    layer, index = head
    columns = places + batch.tokens.shape[1] - batch.lengths[:, None]
    scores = seen[_scores(layer)][:, index]  # [b h 2 k] -> [b 2 k], the rows of the two positions
    recorded = scores[:, QUERY].gather(1, columns[:, KEY:].to(scores.device))[:, 0]
    _check_visible(recorded, places, head)
    factor = _attention(model, layer).score_factor((scores[:, QUERY] > -torch.inf).sum(-1)[:, None], recorded)
    parts = before_attention(seen, model, layer, as_wholes(seen) if by == "part" else into_heads(seen, model))
    (queries, query_map), (keys, key_map) = _queries_and_keys(
        model, batch, layer, slice(index, index + 1), columns, seen, parts, factor.T
    )
    head_index, rows = torch.full_like(places[:1, :1], index), torch.arange(len(batch), device=places.device)
    position, total = position_term(model, head_index[:, 0], places, recorded[None]), recorded[None]
    if model.config.attn_softcap is not None:
        total = _content_scores(model, layer, head_index, (rows, rows), seen, factor.T) + position
    rounding, error = _checked_rounding(model, [head], (queries, keys), position, total, recorded[None])
    sources = _sources(model, layer, seen, batch, (query_map, key_map)) if by == "source" else {}
    q, k = queries.parts[0], keys.parts[0]
    return ScoreParts(parts.parts, q, k, position[0], total[0], rounding[0], error[0], places, sources)


def _queries_and_keys(
    model: Transformer,
    batch: Batch,
    layer: int,
    heads: slice,
    columns: Int[Tensor, "b 2"],
    seen: Mapping[str, Tensor],
    parts: Decomposition,
    factor: Float[Tensor, "#h #b"],
) -> tuple[tuple[_End, _Side], tuple[_End, _Side]]:
    """Query and key vectors of these heads at these columns (query, key), each with the map that made them."""
    like = seen[attention_input(model.config, layer)]
    query, key = (
        _side(model, layer, heads, seen, at, _rotation(model, layer, batch, columns[:, at], like), times)
        for at, times in ((QUERY, factor), (KEY, torch.ones_like(factor)))
    )
    ends = (_End.of(side, parts, like[:, at], at) for at, side in ((QUERY, query), (KEY, key)))
    return (next(ends), query), (next(ends), key)


# --- what is read ---------------------------------------------------------------------------------------------------


def _sites(model: Transformer, layer: int, by: ScoreSplit) -> Iterator[str]:
    """Sites that are read at the query and the key only."""
    config = model.config
    yield from (*embedding_parts(config), *embedding_scale(config), attention_input(config, layer))
    for i, sublayer in places_before_attention(config, layer):
        yield f"blocks.{i}.hook_{sublayer}"
        yield from sum_scale(config, i, sublayer)
        if by != "part" and sublayer in WITH_HEADS:
            yield f"blocks.{i}.{sublayer.removesuffix('_out')}.hook_z"
    yield from input_norm(model, layer, "attn_out").sites
    yield from (_head_scale(layer, side) for side in _SIDES if _head_norm(model, layer, side) is not None)
    if config.attn_softcap is not None:
        yield from (product_site(model, layer, side) for side in _SIDES)


def _weights_read(model: Transformer, layer: int, by: ScoreSplit) -> Iterator[str]:
    """Sites of scores and patterns `[b h q k]`, of which the rows of the two positions are read."""
    yield _scores(layer)
    yield from (f"blocks.{i}.attn.hook_pattern" for i in _split_layers(model.config, layer, by))


def _values_read(model: Transformer, layer: int, by: ScoreSplit) -> Iterator[str]:
    """Sites of the values `[b k h e]`, which are read at all positions."""
    yield from (f"blocks.{i}.attn.hook_v" for i in _split_layers(model.config, layer, by))


def _split_layers(config: ModelConfig, layer: int, by: ScoreSplit) -> list[int]:
    """The layers whose heads are split by source."""
    return [i for i in range(layer) if by == "source" and config.mixers[i].traits.additive]


def _scores(layer: int) -> str:
    return f"blocks.{layer}.attn.hook_attn_scores"


def product_site(model: Transformer, layer: int, part: str) -> str:
    """Site of the queries (`part` "q") or keys ("k") that enter the score: after head norms and rotation, if any."""
    if HeadCircuits(model).rotary(layer) is not None:
        return f"blocks.{layer}.attn.hook_rot_{part}"
    normed = _head_norm(model, layer, part) is not None
    return f"blocks.{layer}.attn.{f'{part}_norm.hook_normalized' if normed else f'hook_{part}'}"


def _columns(x: Tensor, columns: Int[Tensor, "b n"]) -> Tensor:
    return picked(x.expand(len(columns), *x.shape[1:]), columns.to(x.device))


def _query_rows(x: Float[Tensor, "#b h q k"], columns: Int[Tensor, "b n"]) -> Float[Tensor, "b h n k"]:
    return x.expand(len(columns), -1, -1, -1).take_along_dim(columns.to(x.device)[:, None, :, None], 2)


# --- from the stream to the score -----------------------------------------------------------------------------------


def _attention(model: Transformer, layer: int) -> Attention:
    return model.block(layer).attn


def _head_norm(model: Transformer, layer: int, side: str) -> HeadNorm | None:
    attention = _attention(model, layer)
    return attention.q_norm if side == "q" else attention.k_norm


def _side(
    model: Transformer,
    layer: int,
    heads: slice,
    seen: Mapping[str, Tensor],
    at: int,
    rotation: Rotation | None,
    factor: Float[Tensor, "#h #b"],
) -> _Side:
    """The map from the stream to the query or key vectors of some heads, its norms at the scales of the pass."""
    side = _SIDES[at]
    stream = seen[attention_input(model.config, layer)]
    reading = HeadCircuits(model, folded=True, biases=True).reading(layer, side)[heads].to(stream)
    matrix, bias = reading[:, :-1], reading[:, -1:]
    norm = input_norm(model, layer, "attn_out")
    # In half precision the recorded scale is off by up to 1/256, so it is computed from the stream.
    norm = norm.of(stream) if in_half(model) else norm.recorded(seen)
    scale = torch.ones_like(stream[:, at, 0]) if norm.scale is None else norm.scale[:, at, 0]
    after, beta = torch.ones_like(scale)[None], torch.zeros_like(bias)
    if (head_norm := _head_norm(model, layer, side)) is not None:
        of_heads = seen[_head_scale(layer, side)][:, at, :, 0]
        group = Weights(model).kv_head()[heads] if side == "k" else heads
        after = of_heads[:, slice(0, 1) if head_norm.whole else group].T
        if head_norm.norm.bias is not None:
            norm_bias = head_norm.norm.bias.to(stream)
            head_bias = (
                norm_bias.unflatten(0, (-1, head_norm.d_head))[group] if head_norm.whole else norm_bias
            )
            beta = head_bias.expand(len(bias), -1)[:, None]
    factor = factor.expand(-1, len(scale))
    constant = (bias[:, None] / after[..., None, None] + beta[:, None]) * factor[..., None, None]
    return _Side(matrix, _rotated(constant, rotation), factor / (scale * after), rotation)


def _head_scale(layer: int, side: str) -> str:
    return f"blocks.{layer}.attn.{side}_norm.hook_scale"


def _rotation(
    model: Transformer, layer: int, batch: Batch, column: Int[Tensor, "b"], like: Tensor
) -> Rotation | None:
    """The rotary rotation at one column of each row; None where queries and keys are not rotated."""
    rotary = HeadCircuits(model).rotary(layer)
    if rotary is None:
        return None
    rotation = Rotation.at(rotary, model.config.head_width, batch.places, like.dtype)
    cos, sin = (_columns(x, column[:, None]).to(like.device) for x in (rotation.cos, rotation.sin))
    return Rotation(cos, sin, rotation.interleaved)


def _rotated(x: Float[Tensor, "h b c e"], rotation: Rotation | None) -> Float[Tensor, "h b c e"]:
    if rotation is None:
        return x
    turned = rotation.apply(rearrange(x, "h b c e -> b 1 (h c) e"))
    return rearrange(turned, "b 1 (h c) e -> h b c e", h=len(x))


def position_term(
    model: Transformer, heads: Int[Tensor, "h"], places: Int[Tensor, "b 2"], like: Float[Tensor, "h b"]
) -> Float[Tensor, "h b"]:
    """Term of the scores that ALiBi or relative buckets add; 0 in models with other positions."""
    if model.score_bias is None:
        return torch.zeros_like(like)
    query, key = places[:, QUERY, None], places[:, KEY, None]
    return model.score_bias(query, key, model.dtype)[:, heads, 0, 0].T.to(like)


def _content_scores(
    model: Transformer,
    layer: int,
    heads: Int[Tensor, "h 1"],
    rows: tuple[Int[Tensor, "b"], Int[Tensor, "b"]],
    seen: Mapping[str, Tensor],
    factor: Float[Tensor, "#h #n"],
) -> Float[Tensor, "h b"]:
    """Scores before soft cap and position term: products of the recorded queries and keys at `rows` (query, key)."""
    q, k = (seen[product_site(model, layer, side)] for side in _SIDES)
    queries, keys = q[rows[0], QUERY, heads], k[rows[1], KEY, Weights(model).kv_head()[heads]]
    factor_row = heads if len(factor) > 1 else torch.zeros_like(heads)
    return (queries * keys).sum(-1) * factor.expand(-1, len(q))[factor_row, rows[0]]


def _check_visible(scores: Float[Tensor, "b"], places: Int[Tensor, "b 2"], head: tuple[int, int]) -> None:
    """ValueError for a query that does not see its key."""
    if bool((hidden := scores == -torch.inf).any()):
        query, key = places[hidden][0].tolist()
        raise ValueError(
            f"a key that the query sees is required; token {query} does not see token {key} in {Part('head', *head)}"
        )


def _checked_rounding(
    model: Transformer,
    heads: Sequence[tuple[int, int]],
    ends: tuple[_End, _End],
    position: Float[Tensor, "h b"],
    total: Float[Tensor, "h b"],
    recorded: Float[Tensor, "h b"],
) -> tuple[Float[Tensor, "h b"], Float[Tensor, "h b"]]:
    """Rest of each score after its pairs and position term, and that rest relative to the largest term.

    Two sums are checked. First, the pairs, with the stream's rounding added to both sides, must sum to the product of
    the whole stream's query and key, in float32 at least. Second, that product must be the score of the pass; half
    precision rounds the normed stream, query, key and score on the way. The rounding of a term is relative to the
    lengths of its two vectors, even where their product is small.

    Raises:
        IncompleteSumError: one of the two sums misses by more than rounding.
    """
    query, key = ends
    # the sum over pairs is the product of the sums
    query_sum, key_sum = query.parts.sum(-2), key.parts.sum(-2)
    pairs, product = (query_sum * key_sum).sum(-1), (query.stream * key.stream).sum(-1)
    explained = ((query_sum + query.rounding) * (key_sum + key.rounding)).sum(-1)
    # terms of a score: the parts of both sides, d_model numbers of the stream for each vector, d_head of the product
    n = query.parts.shape[-2] + key.parts.shape[-2] + 2 + 2 * model.config.d_model + query.parts.shape[-1]
    most = query.length * key.length
    terms = position.abs() + total.abs()
    tiny = torch.finfo(product.dtype).tiny
    exact = bound(n, query.size * key.size, product.dtype).clamp_min(tiny)
    linear, cap = (explained - product).abs(), model.config.attn_softcap
    miss = (product + position - total).abs()
    if cap is not None:
        capped = cap * (product / cap).tanh() + position
        miss = torch.maximum(miss, (capped - recorded).abs())
    allowed = bound(model.config.d_model, most + terms, product.dtype) + in_half(model) * (most + terms)
    allowed = allowed.clamp_min(tiny)
    excess = torch.maximum(linear / exact, miss / allowed)
    pairs_worse = excess != miss / allowed  # the first sum exceeds its bound by the larger factor
    miss, allowed = torch.where(pairs_worse, linear, miss), torch.where(pairs_worse, exact, allowed)
    lengths = query.parts.norm(dim=-1).amax(-1) * key.parts.norm(dim=-1).amax(-1)
    size = torch.stack((lengths, position.abs(), total.abs())).amax(0).clamp_min(tiny)
    rounding = total - position - pairs
    failure = partial(_incomplete_sum, model, heads, excess, miss / size, allowed / size)
    check((excess <= 1).all(), failure)
    return rounding, rounding.abs() / size


def _incomplete_sum(
    model: Transformer,
    heads: Sequence[tuple[int, int]],
    excess: Float[Tensor, "h b"],
    error: Float[Tensor, "h b"],
    allowed: Float[Tensor, "h b"],
) -> IncompleteSumError:
    """The error to raise, about the score that exceeds its bound by the largest factor."""
    edited, worst = ", ".join(edit.name for edit in model.edits), int(excess.argmax())
    missed, explained = (float(x.flatten()[worst]) for x in (error, allowed))
    return IncompleteSumError(
        f"the score of {Part('head', *heads[worst // excess.shape[1]])}: parts miss it by {missed:.2e} of the largest, "
        f"rounding explains {explained:.0e} in {model.dtype}"
        + (f"; under the edits of {edited} it is not what the stream makes of it" if edited else ""),
        missed,
        explained,
    )


# --- where heads took it from ---------------------------------------------------------------------------------------


def _sources(
    model: Transformer, layer: int, seen: Mapping[str, Tensor], batch: Batch, sides: Sequence[_Side]
) -> dict[int, Float[Tensor, "2 b h k e"]]:
    """By layer, the query and key vectors of what every head moved from each source token, numbered without padding."""
    order = batch.real.int().argsort(dim=1, descending=True, stable=True)
    later, by_layer = places_before_attention(model.config, layer), {}
    for i in _split_layers(model.config, layer, "source"):
        trace = {**seen, f"blocks.{i}.attn.hook_pattern": _effective_pattern(model, i, seen)}
        by_side = []
        for at, side in enumerate(sides):
            moved = by_source(trace, model, i, at)  # [h k b d]
            for place in later[later.index((i, "attn_out")) :]:
                norm = sum_norm(model, *place).recorded(seen)
                moved = replace(norm, scale=None if norm.scale is None else norm.scale[:, at]).through(moved)
            heads = len(moved)
            read = side.of(rearrange(moved, "h k b d -> (h k) b d"))[0]  # [b (h k) e]
            vectors = rearrange(read, "b (h k) e -> b h k e", h=heads)
            by_side.append(vectors.take_along_dim(order.to(vectors.device)[:, None, :, None], 2))
        by_layer[i] = torch.stack(by_side)
    return by_layer


def _effective_pattern(
    model: Transformer, layer: int, seen: Mapping[str, Tensor]
) -> Float[Tensor, "b h 2 k"]:
    """The attention pattern at the two positions, times the factors by which edits scaled each head's output."""
    pattern = seen[f"blocks.{layer}.attn.hook_pattern"]
    if not edits_at(model, layer, ["attn.hook_z"]):
        return pattern
    v = seen[f"blocks.{layer}.attn.hook_v"][:, :, Weights(model).kv_head()]
    return pattern * head_shares(model, layer, pattern, v, seen[f"blocks.{layer}.attn.hook_z"])
