"""One attention score as a sum over pairs: a part of the stream at the query times a part of the stream at the key.

With the norms at the scales of the pass, query and key of a head are sums over what every part of the model wrote to
the stream, and a score is their product. This file has the kernel, whose numbers two questions label: which pairs make
a score (`attention_attribution`), and where their heads took it from (`attention_paths`).
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
"""Sublayers; heads apart; and heads apart with the tokens that they moved from."""
QueryPosition = int | PerRow
"""One token of every prompt: one for all, or one for each."""
QUERY, KEY = 0, 1
"""The two columns that are read of every row, in this order."""
_SIDES: tuple[Literal["q", "k"], ...] = ("q", "k")


def as_head(given: PartName, config: ModelConfig) -> tuple[int, int]:
    """Layer and index of the head that is meant, one whose scores are sums over pairs of parts.

    Raises:
        KeyError, IndexError: a part that the model lacks.
        ValueError: one that is no head of self-attention, and for a mixer whose scores are not one product of queries
            and keys.
    """
    part = as_part(given, config)
    if part.kind != "head" or part.layer is None or part.index is None:
        raise ValueError(f"a head of self-attention is required, such as L1H2, got {part}")
    require("separable", [config.mixers[part.layer]], f"splitting the scores of {part} by parts")
    return part.layer, part.index


def rows_of(query: QueryPosition, key: QueryPosition) -> int | None:
    """Number of prompts that positions are given for; None for any. ValueError where the two differ, or for none."""
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
    """The map from the stream to the query, or the key, of some heads at one end of the score."""

    matrix: Float[Tensor, "h d e"]
    """Matrix from the stream to the heads, its norms at scale 1."""
    constant: Float[Tensor, "h b 1 e"]
    """Constant that is added: beta of the norm, the bias, beta of the norm of queries or keys; placed and scaled."""
    scale: Float[Tensor, "#h b"]
    """Factor on `matrix`: one over the scales of the norms, and for queries the factor on the scores."""
    rotation: Rotation | None

    def of(self, parts: Float[Tensor, "c b d"]) -> Float[Tensor, "h b c e"]:
        """Query or key vectors of parts of the stream."""
        joint = rearrange(self.matrix, "h d e -> d (h e)")
        read = rearrange(
            rearrange(parts, "c b d -> b c d") @ joint, "b c (h e) -> h b c e", h=len(self.matrix)
        )
        return _placed(read * self.scale[..., None, None], self.rotation)

    def lengths(self, parts: Float[Tensor, "c b d"]) -> Float[Tensor, "h b c"]:
        """Lengths of the parts' vectors if nothing in the products cancelled, to which their rounding is relative.

        The root of the sum of (x_d W_de)^2 over d and e, which is also the length expected of random signs.
        """
        rows = self.matrix.square().sum(-1)
        found = einsum(parts.square(), rows, "c b d, h d -> h b c").sqrt()
        return found * self.scale.abs()[..., None]


@dataclass(frozen=True, eq=False)
class _End:
    """Queries, or keys, of some heads: as sums of parts, and of the stream that the parts sum to."""

    parts: Float[Tensor, "h b c e"]
    """The vector of every part, the constant last."""
    rounding: Float[Tensor, "h b e"]
    """The vector of the stream that no part explains."""
    whole: Float[Tensor, "h b e"]
    """The vector of the stream itself."""
    size: Float[Tensor, "h b"]
    """The sum of the parts' lengths."""
    length: Float[Tensor, "h b"]
    """Length of the whole before anything cancelled."""

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
        """The part of this end that belongs to some heads at some rows."""
        every = (self.parts, self.rounding, self.whole, self.size, self.length)
        return _End(*(x[heads, rows] for x in every))


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
        """Term of each head on one side by source, times the whole other side; by layer."""
        other = (self.key, self.query)[side].sum(1)
        return {layer: einsum(x[side], other, "b h k e, b e -> b h k") for layer, x in self.sources.items()}


@torch.no_grad()
def score_parts(
    model: Transformer,
    batch: Batch,
    head: tuple[int, int],
    query: QueryPosition,
    key: QueryPosition,
    by: ScoreSplit,
) -> Steps[ScoreParts]:
    """One score of each row taken apart; rows must end in the last column.

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
    return _split(model, batch, head, places, seen, by)


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
    """All scores of some layers on one prompt: the layer, heads that see the same, and their scores taken apart.

    The scores have a row for each of the heads, query and key it sees, in the order of heads, queries within, keys
    within those. The stream is split once for each token, which the pairs then share; errors as in `score_parts`.

    Args:
        trace: a pass that read `score_reads`.
        heads: the heads that are wanted, by layer and index; None: all.
    """
    if not layers:
        return
    masks = to_host({layer: trace[Read(_scores(layer))][0] > -torch.inf for layer in layers})
    # Every token is a row, at both ends of the scores.
    seen = {
        site: upcast(trace[Read(site)])[0].unsqueeze(1)
        for site in dict.fromkeys(site for layer in layers for site in _sites(model, layer, "head"))
    }
    seen = {site: x.expand(-1, 2, *x.shape[2:]) for site, x in seen.items()}
    split = cache(into_heads(seen, model))
    for layer in layers:
        scores, parts = upcast(trace[Read(_scores(layer))])[0], before_attention(seen, model, layer, split)
        wanted = [h for h in range(len(scores)) if heads is None or (layer, h) in heads]
        for layer_heads, found in _of_layer(model, batch, layer, seen, parts, scores, (masks[layer], wanted)):
            yield layer, layer_heads, found


def _of_layer(
    model: Transformer,
    batch: Batch,
    layer: int,
    seen: Mapping[str, Tensor],
    parts: Decomposition,
    scores: Float[Tensor, "h q k"],
    chosen: tuple[Bool[Tensor, "h q k"], Sequence[int]],
) -> Iterator[tuple[Sequence[int], ScoreParts]]:
    """Scores of one layer, taken apart; asked: the keys that each head's queries see, on the host, and heads."""
    masks, wanted = chosen
    factor = _attention(model, layer).score_factor((scores > -torch.inf).sum(-1), scores)
    both = torch.arange(scores.shape[-1], device=scores.device)[:, None].expand(-1, 2)
    rows = batch.rows(torch.zeros(len(both), dtype=torch.long))
    queries, keys = (end for end, _ in _taken(model, rows, layer, slice(None), both, seen, parts, factor))
    by_mask: dict[bytes, list[int]] = {}
    for head in wanted:
        by_mask.setdefault(masks[head].numpy().tobytes(), []).append(head)
    for heads in by_mask.values():
        which = to_device(heads, scores.device)[:, None]
        places = to_device(masks[heads[0]].nonzero(), scores.device)
        query, key = places.T
        recorded = scores[which, query, key]
        position = _position(model, which[:, 0], places, recorded)
        q, k, total = queries.at(which, query), keys.at(which, key), recorded
        if model.config.attn_softcap is not None:
            total = _content(model, layer, which, (query, key), seen, factor) + position
        found = _checked(model, [(layer, head) for head in heads], (q, k), position, total, recorded)
        each = places.expand(len(heads), -1, -1)
        q_parts, k_parts, position, total, rounding, error, each = (
            x.flatten(0, 1) for x in (q.parts, k.parts, position, total, *found, each)
        )
        yield (
            heads,
            ScoreParts(parts.parts, q_parts, k_parts, position, total, rounding, error, each, {}),
        )


def _reads(model: Transformer, layer: int, columns: Int[Tensor, "b 2"], by: ScoreSplit) -> dict[str, Read]:
    """By site, the reads at the query and the key of every row."""
    reads = {site: Read(site, partial(_columns, columns=columns)) for site in _sites(model, layer, by)}
    reads |= {site: Read(site, partial(_rows, columns=columns)) for site in _weights_read(model, layer, by)}
    return reads | {site: Read(site) for site in _values_read(model, layer, by)}


def _split(
    model: Transformer,
    batch: Batch,
    head: tuple[int, int],
    places: Int[Tensor, "b 2"],
    seen: Mapping[str, Tensor],
    by: ScoreSplit,
) -> ScoreParts:
    """The scores at these places, taken apart, from the values that were read there."""
    layer, index = head
    columns = places + batch.tokens.shape[1] - batch.lengths[:, None]
    scores = seen[_scores(layer)][:, index]
    recorded = scores[:, QUERY].gather(1, columns[:, KEY:].to(scores.device))[:, 0]
    _check_visible(recorded, places, head)
    factor = _attention(model, layer).score_factor((scores[:, QUERY] > -torch.inf).sum(-1)[:, None], recorded)
    parts = before_attention(seen, model, layer, as_wholes(seen) if by == "part" else into_heads(seen, model))
    (queries, one), (keys, other) = _taken(
        model, batch, layer, slice(index, index + 1), columns, seen, parts, factor.T
    )
    query_place, rows = torch.full_like(places[:1, :1], index), torch.arange(len(batch), device=places.device)
    position, total = _position(model, query_place[:, 0], places, recorded[None]), recorded[None]
    if model.config.attn_softcap is not None:
        total = _content(model, layer, query_place, (rows, rows), seen, factor.T) + position
    rounding, error = _checked(model, [head], (queries, keys), position, total, recorded[None])
    sources = _sources(model, layer, seen, batch, (one, other)) if by == "source" else {}
    q, k = queries.parts[0], keys.parts[0]
    return ScoreParts(parts.parts, q, k, position[0], total[0], rounding[0], error[0], places, sources)


def _taken(
    model: Transformer,
    batch: Batch,
    layer: int,
    heads: slice,
    columns: Int[Tensor, "b 2"],
    seen: Mapping[str, Tensor],
    parts: Decomposition,
    factor: Float[Tensor, "#h #b"],
) -> tuple[tuple[_End, _Side], tuple[_End, _Side]]:
    """Queries and keys of these heads at these columns, as maps of the stream and of its parts."""
    like = seen[attention_input(model.config, layer)]
    query, key = (
        _side(model, layer, heads, seen, at, _rotation(model, layer, batch, columns[:, at], like), times)
        for at, times in ((QUERY, factor), (KEY, torch.ones_like(factor)))
    )
    ends = (_End.of(side, parts, like[:, at], at) for at, side in ((QUERY, query), (KEY, key)))
    return (next(ends), query), (next(ends), key)


# --- what is read ---------------------------------------------------------------------------------------------------


def _sites(model: Transformer, layer: int, by: ScoreSplit) -> Iterator[str]:
    """Sites that are read at the query and the key alone."""
    config = model.config
    yield from (*embedding_parts(config), *embedding_scale(config), attention_input(config, layer))
    for i, sublayer in places_before_attention(config, layer):
        yield f"blocks.{i}.hook_{sublayer}"
        yield from sum_scale(config, i, sublayer)
        if by != "part" and sublayer in WITH_HEADS:
            yield f"blocks.{i}.{sublayer.removesuffix('_out')}.hook_z"
    yield from input_norm(model, layer, "attn_out").sites
    yield from (_head_scale(layer, part) for part in _SIDES if _head_norm(model, layer, part) is not None)
    if config.attn_softcap is not None:
        yield from (product_site(model, layer, part) for part in _SIDES)


def _weights_read(model: Transformer, layer: int, by: ScoreSplit) -> Iterator[str]:
    """Reads with queries on their third axis."""
    yield _scores(layer)
    yield from (f"blocks.{i}.attn.hook_pattern" for i in _split_layers(model.config, layer, by))


def _values_read(model: Transformer, layer: int, by: ScoreSplit) -> Iterator[str]:
    """Reads at all positions."""
    yield from (f"blocks.{i}.attn.hook_v" for i in _split_layers(model.config, layer, by))


def _split_layers(config: ModelConfig, layer: int, by: ScoreSplit) -> list[int]:
    """The layers whose heads are split by source."""
    return [i for i in range(layer) if by == "source" and config.mixers[i].traits.additive]


def _scores(layer: int) -> str:
    return f"blocks.{layer}.attn.hook_attn_scores"


def product_site(model: Transformer, layer: int, part: str) -> str:
    """Site of queries or keys in the form that scores are made of."""
    if HeadCircuits(model).rotary(layer) is not None:
        return f"blocks.{layer}.attn.hook_rot_{part}"
    normed = _head_norm(model, layer, part) is not None
    return f"blocks.{layer}.attn.{f'{part}_norm.hook_normalized' if normed else f'hook_{part}'}"


def _columns(x: Tensor, columns: Int[Tensor, "b n"]) -> Tensor:
    return picked(x.expand(len(columns), *x.shape[1:]), columns.to(x.device))


def _rows(x: Float[Tensor, "#b h q k"], columns: Int[Tensor, "b n"]) -> Float[Tensor, "b h n k"]:
    return x.expand(len(columns), -1, -1, -1).take_along_dim(columns.to(x.device)[:, None, :, None], 2)


# --- from the stream to the score -----------------------------------------------------------------------------------


def _attention(model: Transformer, layer: int) -> Attention:
    return model.block(layer).attn


def _head_norm(model: Transformer, layer: int, part: str) -> HeadNorm | None:
    attention = _attention(model, layer)
    return attention.q_norm if part == "q" else attention.k_norm


def _side(
    model: Transformer,
    layer: int,
    heads: slice,
    seen: Mapping[str, Tensor],
    at: int,
    rotation: Rotation | None,
    factor: Float[Tensor, "#h #b"],
) -> _Side:
    """Query or key of some heads as a map of the stream, its norms at the scales of the pass."""
    part = _SIDES[at]
    stream = seen[attention_input(model.config, layer)]
    reading = HeadCircuits(model, folded=True, biases=True).reading(layer, part)[heads].to(stream)
    matrix, bias = reading[:, :-1], reading[:, -1:]
    norm = input_norm(model, layer, "attn_out")
    # Half precision records a scale that is off by up to 1/256: there it is made of the stream.
    norm = norm.of(stream) if in_half(model) else norm.recorded(seen)
    scale = torch.ones_like(stream[:, at, 0]) if norm.scale is None else norm.scale[:, at, 0]
    after, beta = torch.ones_like(scale)[None], torch.zeros_like(bias)
    if (head_norm := _head_norm(model, layer, part)) is not None:
        of_heads = seen[_head_scale(layer, part)][:, at, :, 0]
        group = Weights(model).kv_head()[heads] if part == "k" else heads
        after = of_heads[:, slice(0, 1) if head_norm.whole else group].T
        if head_norm.norm.bias is not None:
            every = head_norm.norm.bias.to(stream)
            head_bias = every.unflatten(0, (-1, head_norm.d_head))[group] if head_norm.whole else every
            beta = head_bias.expand(len(bias), -1)[:, None]
    factor = factor.expand(-1, len(scale))
    constant = (bias[:, None] / after[..., None, None] + beta[:, None]) * factor[..., None, None]
    return _Side(matrix, _placed(constant, rotation), factor / (scale * after), rotation)


def _head_scale(layer: int, part: str) -> str:
    return f"blocks.{layer}.attn.{part}_norm.hook_scale"


def _rotation(
    model: Transformer, layer: int, batch: Batch, column: Int[Tensor, "b"], like: Tensor
) -> Rotation | None:
    """The rotation of one column of each row; None where queries and keys are not rotated."""
    rotary = HeadCircuits(model).rotary(layer)
    if rotary is None:
        return None
    whole = Rotation.at(rotary, model.config.head_width, batch.places, like.dtype)
    cos, sin = (_columns(x, column[:, None]).to(like.device) for x in (whole.cos, whole.sin))
    return Rotation(cos, sin, whole.interleaved)


def _placed(x: Float[Tensor, "h b c e"], rotation: Rotation | None) -> Float[Tensor, "h b c e"]:
    if rotation is None:
        return x
    turned = rotation.apply(rearrange(x, "h b c e -> b 1 (h c) e"))
    return rearrange(turned, "b 1 (h c) e -> h b c e", h=len(x))


def _position(
    model: Transformer, heads: Int[Tensor, "h"], places: Int[Tensor, "b 2"], like: Float[Tensor, "h b"]
) -> Float[Tensor, "h b"]:
    """Term of the scores from positions."""
    if model.score_bias is None:
        return torch.zeros_like(like)
    query, key = places[:, QUERY, None], places[:, KEY, None]
    return model.score_bias(query, key, model.dtype)[:, heads, 0, 0].T.to(like)


def _content(
    model: Transformer,
    layer: int,
    heads: Int[Tensor, "h 1"],
    rows: tuple[Int[Tensor, "b"], Int[Tensor, "b"]],
    seen: Mapping[str, Tensor],
    factor: Float[Tensor, "#h #n"],
) -> Float[Tensor, "h b"]:
    """The scores before their soft cap and without positions, from the queries and keys that the pass has in rows."""
    q, k = (seen[product_site(model, layer, part)] for part in _SIDES)
    queries, keys = q[rows[0], QUERY, heads], k[rows[1], KEY, Weights(model).kv_head()[heads]]
    whose = heads if len(factor) > 1 else torch.zeros_like(heads)
    return (queries * keys).sum(-1) * factor.expand(-1, len(q))[whose, rows[0]]


def _check_visible(scores: Float[Tensor, "b"], places: Int[Tensor, "b 2"], head: tuple[int, int]) -> None:
    """ValueError for a query that does not see its key."""
    if bool((hidden := scores == -torch.inf).any()):
        query, key = places[hidden][0].tolist()
        raise ValueError(
            f"a key that the query sees is required; token {query} does not see token {key} in {Part('head', *head)}"
        )


def _checked(
    model: Transformer,
    heads: Sequence[tuple[int, int]],
    ends: tuple[_End, _End],
    position: Float[Tensor, "h b"],
    total: Float[Tensor, "h b"],
    recorded: Float[Tensor, "h b"],
) -> tuple[Float[Tensor, "h b"], Float[Tensor, "h b"]]:
    """Rest of each row's score after its pairs, and its size relative to the largest term.

    Two sums are checked. The pairs, with what the pass rounded off in the stream, against the product of query and key
    of the whole stream: in float32 at least, whatever the model's dtype. And that product against the score of the
    pass, where half precision rounded the normed stream, query, key and score. A term is a product of vectors and
    carries the rounding of their lengths, however small it is itself.

    Raises:
        IncompleteSumError: the parts, or the score, are beyond rounding.
    """
    query, key = ends
    # the sum over pairs is the product of the sums
    query_sum, key_sum = query.parts.sum(-2), key.parts.sum(-2)
    pairs, whole = (query_sum * key_sum).sum(-1), (query.whole * key.whole).sum(-1)
    every = ((query_sum + query.rounding) * (key_sum + key.rounding)).sum(-1)
    # added up for a score: the parts of both sides, the stream's d_model numbers for each vector, the pair's d_head
    n = query.parts.shape[-2] + key.parts.shape[-2] + 2 + 2 * model.config.d_model + query.parts.shape[-1]
    most = query.length * key.length
    terms = position.abs() + total.abs()
    tiny = torch.finfo(whole.dtype).tiny
    exact = bound(n, query.size * key.size, whole.dtype).clamp_min(tiny)
    linear, cap = (every - whole).abs(), model.config.attn_softcap
    miss = (whole + position - total).abs()
    if cap is not None:
        capped = cap * (whole / cap).tanh() + position
        miss = torch.maximum(miss, (capped - recorded).abs())
    allowed = bound(model.config.d_model, most + terms, whole.dtype) + in_half(model) * (most + terms)
    allowed = allowed.clamp_min(tiny)
    over = torch.maximum(linear / exact, miss / allowed)
    split = over != miss / allowed  # the pairs are the sum that is further beyond its bound
    miss, allowed = torch.where(split, linear, miss), torch.where(split, exact, allowed)
    lengths = query.parts.norm(dim=-1).amax(-1) * key.parts.norm(dim=-1).amax(-1)
    size = torch.stack((lengths, position.abs(), total.abs())).amax(0).clamp_min(tiny)
    rounding = total - position - pairs
    failure = partial(_beyond, model, heads, over, miss / size, allowed / size)
    check((over <= 1).all(), failure)
    return rounding, rounding.abs() / size


def _beyond(
    model: Transformer,
    heads: Sequence[tuple[int, int]],
    over: Float[Tensor, "h b"],
    error: Float[Tensor, "h b"],
    allowed: Float[Tensor, "h b"],
) -> IncompleteSumError:
    """The failure of the score that is furthest beyond rounding."""
    edited, worst = ", ".join(edit.name for edit in model.edits), int(over.argmax())
    missed, explained = (float(x.flatten()[worst]) for x in (error, allowed))
    return IncompleteSumError(
        f"the score of {Part('head', *heads[worst // over.shape[1]])}: parts miss it by {missed:.2e} of the largest, "
        f"rounding explains {explained:.0e} in {model.dtype}"
        + (f"; under the edits of {edited} it is not what the stream makes of it" if edited else ""),
        missed,
        explained,
    )


# --- where heads took it from ---------------------------------------------------------------------------------------


def _sources(
    model: Transformer, layer: int, seen: Mapping[str, Tensor], batch: Batch, sides: Sequence[_Side]
) -> dict[int, Float[Tensor, "2 b h k e"]]:
    """By layer, every head's write as query and key vectors, by source, numbered as the prompt numbers its tokens."""
    order = batch.real.int().argsort(dim=1, descending=True, stable=True)
    later, found = places_before_attention(model.config, layer), {}
    for i in _split_layers(model.config, layer, "source"):
        trace = {**seen, f"blocks.{i}.attn.hook_pattern": _effective(model, i, seen)}
        both = []
        for at, side in enumerate(sides):
            moved = by_source(trace, model, i, at)
            for place in later[later.index((i, "attn_out")) :]:
                norm = sum_norm(model, *place).recorded(seen)
                moved = replace(norm, scale=None if norm.scale is None else norm.scale[:, at]).through(moved)
            heads = len(moved)
            read = side.of(rearrange(moved, "h k b d -> (h k) b d"))[0]
            each = rearrange(read, "b (h k) e -> b h k e", h=heads)
            both.append(each.take_along_dim(order.to(each.device)[:, None, :, None], 2))
        found[i] = torch.stack(both)
    return found


def _effective(model: Transformer, layer: int, seen: Mapping[str, Tensor]) -> Float[Tensor, "b h 2 k"]:
    """The weights of the values: the pattern, times what edits multiplied the head by."""
    pattern = seen[f"blocks.{layer}.attn.hook_pattern"]
    if not edits_at(model, layer, ["attn.hook_z"]):
        return pattern
    v = seen[f"blocks.{layer}.attn.hook_v"][:, :, Weights(model).kv_head()]
    return pattern * head_shares(model, layer, pattern, v, seen[f"blocks.{layer}.attn.hook_z"])
