"""The residual stream taken apart: the addition of each part of the model, checked to sum to the whole.

`cache` is any mapping from site names to tensors (an `ActivationCache`, say). Elhage et al. 2021: the stream at any
depth is the embedding plus everything the heads and MLPs before it added.

What a sum of parts may miss its whole by, wherever one is checked. Sums are made in float32 at least; n terms of
absolute sum S are allowed eps (8 + sqrt n) S (`bound`), and in half precision what the model itself rounded on the way,
`ROUNDINGS` times a sublayer's output or a head's z (`in_half`). What is left is the part `rounding`.

| sum | terms | in half precision |
|---|---|---|
| stream = embeddings + sublayers (`rounded_off`) | the parts, number by number | the additions are made again |
| heads, neurons = their sublayer (`head_parts`, `by_neuron`) | products z W, post W and the bias | the output |
| sources = their head (`by_source`, attribution by source) | products a v W | z, `ROUNDINGS` |
| attribution = logit | columns, length of out . direction by sublayer | stream and sublayers as above, folded |
| pairs = q . k of the stream (`score_parts`) | lengths of all query parts x all key parts | as in float32 |
| q . k of the stream = the score of the pass | length of q x length of k, before they cancel | that, `ROUNDINGS` |
| ALTI-Logit = logit | what heads moved, other columns | length of what heads moved, `ROUNDINGS` |
| orders, paths = the frozen pass (`paths`) | lengths of a v and of columns of W, by head | float32: start upcast |
| the frozen pass = the pass | the same, six roundings a layer | the same in the model's eps: coarse, and noted |
| an edited z, output = c x what was moved (`edited_sums`) | a v, a v W | z, `ROUNDINGS` |

Depth enters by n alone: errors of rounding are independent, so they grow by sqrt n while S grows by n, and at 80 layers
the bound is still a few millionths of S. Where the stream is added up in half precision depth does not enter at all:
what is compared are two sums of the same numbers in the same order. `tests/residual/test_bounds.py` holds each at 80
layers in four dtypes, and that each finds what is missing. (Relevances under backward rules have a bound of their own,
`interp.passes.rules.completeness`; integrals of gradients report an error that is no rounding.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.stats import WIDE, upcast
from interp.core.transfers import check
from interp.model.config import WITH_HEADS, FullSoftmax, ModelConfig
from interp.model.parts import Part, PartName
from interp.model.records import require
from interp.model.sites import attention_input, embedding_parts, final_stream
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.frozen import FrozenNorm, embedding_norm, output_norm, sum_norm

Cache = Mapping[str, Tensor]
PartSplit = Callable[[int, str], dict[Part, Tensor]]
"""Function from layer and name of a sublayer to its parts."""

EPS = {
    dtype: torch.finfo(dtype).eps for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
}
"""Twice the largest relative error of rounding a number, by dtype."""
ROUNDINGS = 4
"""Most roundings of a sublayer's output between its heads (or neurons) and the stream.

They are the product, the bias, the norm after it, the factor.
"""


class IncompleteSumError(ArithmeticError):
    """Parts that should sum to a whole do not; the message and `error` give the relative error."""

    def __init__(self, message: str, error: float, allowed: float = 0.0) -> None:
        super().__init__(message)
        self.error = error
        self.allowed = allowed
        """What rounding could have made of it, relative to the same."""


def bound(n: int, size: Float[Tensor, "*b"], dtype: torch.dtype) -> Float[Tensor, "*b"]:
    """Largest rounding error of a sum of n terms: eps (8 + sqrt n) times the sum of their absolute values.

    n additions round by half an eps of what was summed so far, which is at most `size`; the roundings are independent,
    so they add up to sqrt(n / 12) eps size, one standard deviation: the bound is at 3.5 of them for however many
    terms, and the 8 is what terms carry that are products themselves (their own sums, scales, factors).

    Args:
        n: number of terms.
        size: sum of the absolute values, in the units of the terms.
        dtype: dtype of the sum.
    """
    return EPS[dtype] * (8 + n**0.5) * size


class Missed(NamedTuple):
    """Miss of a sum, and the miss that rounding explains, where the two are closest."""

    error: Float[Tensor, ""]
    """Miss relative to the largest part."""
    allowed: Float[Tensor, ""]
    """Allowed miss, relative to the same."""


REMAINDER = "remainder"
"""Name of everything that a decomposition does not split."""


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Additions of a model's parts to the residual stream (or the stream at some depths), stacked and named.

    `found["L0H3"]` is the addition of one part; the index is whatever `Part.of` takes.
    """

    values: Float[Tensor, "c ..."]
    """One entry per part along the first axis."""
    parts: tuple[str, ...]
    """The parts' names, in the order of the values: `embed`, `L0H3`, `L0.mlp`, `L0N17`, `L0.attn_bias`, `remainder`."""
    complete: bool = False
    """Whether the parts were checked to sum to the whole final residual stream."""
    rounding: Float[Tensor, "..."] | None = None
    """Rest of the whole after its parts, in float32 at least: what the pass rounded off where it added them up.

    The parts and this sum to the whole. None if nothing was checked.
    """
    missed: Missed | None = None
    """Miss of the checked sum; None if nothing was checked."""

    def __getitem__(self, part: PartName) -> Float[Tensor, "..."]:
        name = REMAINDER if part == REMAINDER else str(Part.of(part))
        if name not in self.parts:
            raise KeyError(f"no part {name!r} here; parts: {', '.join(self.parts[:12])} ...")
        return self.values[self.parts.index(name)]


def sum_error(parts: Float[Tensor, "c ..."], whole: Float[Tensor, "..."]) -> float:
    """max |sum of parts - whole| relative to the largest absolute part (or whole); sums in float32 at least.

    Each vector (each number, for `[c b]`) has its own scale, so a huge position hides no error elsewhere.
    """
    error = (upcast(parts).sum(0) - upcast(whole)).abs()
    scale = _largest(parts, whole)
    error = error.amax(-1, keepdim=True) if whole.ndim > 1 else error
    return float((error / scale).max())


def _largest(parts: Float[Tensor, "c ..."], whole: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The largest number of each vector of the parts and the whole."""
    largest = upcast(torch.maximum(_absolute(parts, torch.inf), whole.abs().to(parts)))
    largest = largest.amax(-1, keepdim=True) if whole.ndim > 1 else largest
    return largest.clamp_min(torch.finfo(largest.dtype).tiny)


def check_sum(
    parts: Float[Tensor, "c ..."],
    whole: Float[Tensor, "..."],
    what: str,
    *,
    size: Float[Tensor, "..."] | None = None,
    more: Float[Tensor, "..."] | float = 0.0,
) -> Missed:
    """Miss of parts against their whole, number by number; IncompleteSumError where rounding explains less.

    The sum is made in float32 at least, and its terms are allowed what `bound` says.

    Args:
        parts: the terms, along the first axis.
        whole: their sum.
        what: words for them in the message.
        size: the sum of the absolute terms, for parts that are sums of products themselves, which may be small where
            their terms are not; None: that of the parts and the whole.
        more: rounding of the whole by the model beyond that.
    """
    parts, whole = upcast(parts), upcast(whole)
    of_parts = _absolute(parts) + whole.abs()
    size = of_parts if size is None else torch.maximum(upcast(size), of_parts)
    error = (parts.sum(0) - whole).abs()
    return check_missed(error, bound(len(parts), size, parts.dtype) + more, _largest(parts, whole), what)


def check_missed(
    error: Float[Tensor, "..."], allowed: Float[Tensor, "..."], scale: Float[Tensor, "..."], what: str
) -> Missed:
    """The largest of these errors against what is allowed; IncompleteSumError if it is more, or is not a number.

    Args:
        scale: size that both are relative to.
    """
    allowed = allowed.expand_as(error)
    found = _NOTHING
    if error.numel():
        worst = (error / allowed.clamp_min(torch.finfo(error.dtype).tiny)).flatten().argmax()
        found = Missed(*((x / scale).take(worst) for x in (error, allowed)))  # a device is not waited for

    def failure() -> IncompleteSumError:
        missed, explained = float(found.error), float(found.allowed)
        return IncompleteSumError(
            f"{what}: parts miss the whole by {missed:.2e} of the largest part, rounding explains {explained:.0e} "
            "(was the pass edited, or a weight changed since?)",
            missed,
            explained,
        )

    check(found.error <= found.allowed, failure)
    return found


_NOTHING = Missed(torch.tensor(0.0), torch.tensor(0.0))


def rounded_off(
    cache: Cache,
    model: Transformer,
    places: Iterable[tuple[int, str]],
    whole: Float[Tensor, "*b d"],
    what: str,
) -> tuple[Float[Tensor, "*b d"], Missed]:
    """Rest of a stream that its embeddings and sublayers do not explain, in float32 at least.

    It is checked to be rounding, and the check is as sharp in half precision as in float32. There every addition rounds
    by 1/256 (bfloat16) of all that was added before, so that a bound on the sum of 60 sublayers could not fail.
    So the additions are made once more, in the same order and the model's dtype: the same numbers, added alike, give
    the same stream, bit by bit and at any depth. One rounding of the largest stream on the way is allowed (a fused
    kernel may save one); 8 + 1.5 sqrt(n) where norms stand in the stream, or where a wrapped network adds n parts in
    an order of its own. In float32 the parts are summed and `bound` is allowed, as for every other sum.

    Args:
        places: layer and name of the sublayers that wrote to the stream.

    Raises:
        IncompleteSumError: the rest is more than rounding.
    """
    replay = _Replay.of(cache, model, places)
    whole = upcast(whole)
    if model.dtype in WIDE:
        allowed = bound(replay.n, replay.size + whole.abs(), model.dtype)
    else:
        same = not replay.normed and not model.config.block.proven
        allowed = EPS[model.dtype] * (1 if same else 8 + 1.5 * replay.n**0.5) * replay.largest
    error = (upcast(replay.stream) - whole).abs()
    scale = replay.largest.amax(-1, keepdim=True).clamp_min(torch.finfo(whole.dtype).tiny)
    return whole - replay.exact, check_missed(error, allowed, scale, what)


@dataclass(frozen=True, eq=False)
class _Replay:
    """A stream added up again from the additions to it."""

    stream: Float[Tensor, "*b d"]
    """The sum in the model's dtype, every addition rounded as in the pass."""
    exact: Float[Tensor, "*b d"]
    """The sum in float32 at least."""
    size: Float[Tensor, "*b d"]
    """The sum of the absolute terms."""
    largest: Float[Tensor, "*b d"]
    """The largest absolute value of a term or of the stream on the way."""
    n: int = 1
    """Number of terms."""
    normed: bool = False
    """Whether a norm stands in the stream."""

    @classmethod
    def of(cls, cache: Cache, model: Transformer, places: Iterable[tuple[int, str]]) -> _Replay:
        """The stream of the embeddings and these sublayers, added up again."""
        first, *others = (cache[site] for site in embedding_parts(model.config))
        size = upcast(first).abs()
        found = cls(first.to(model.dtype), upcast(first), size, size)
        for other in others:
            found = found.plus(other)
        found = found.through(embedding_norm(model).recorded(cache))
        for layer, sublayer in places:
            found = found.plus(cache[f"blocks.{layer}.hook_{sublayer}"])
            found = found.through(sum_norm(model, layer, sublayer).recorded(cache))
        return found

    def plus(self, term: Float[Tensor, "*b d"]) -> _Replay:
        """The replay with one more term."""
        # the sum in float32, rounded once: what an addition in half precision gives
        stream = (upcast(self.stream) + upcast(term.to(self.stream))).to(self.stream.dtype)
        term = upcast(term)
        largest = torch.maximum(torch.maximum(self.largest, term.abs()), upcast(stream).abs())
        return replace(
            self,
            stream=stream,
            exact=self.exact + term,
            size=self.size + term.abs(),
            largest=largest,
            n=self.n + 1,
        )

    def through(self, norm: FrozenNorm) -> _Replay:
        """The replay after a norm of the stream, if there is one."""
        if norm.norm is None:
            return self
        stream = norm.norm(self.stream)
        return _Replay(
            stream,
            norm.split(self.exact[None], 0)[0],
            norm.size(self.size),
            torch.maximum(norm.size(self.largest), upcast(stream).abs()),
            self.n + 1,
            normed=True,
        )


def stream(cache: Cache, model: Transformer, layer: int | None) -> Float[Tensor, "b p d"]:
    """The residual stream entering block `layer` (None or n_layers: leaving the last block)."""
    layer = depth(model, layer)
    last = layer == model.config.n_layers
    return cache[final_stream(model.config) if last else f"blocks.{layer}.hook_resid_pre"]


def depth(model: Transformer, layer: int | None) -> int:
    """A depth between blocks, 0 to n_layers; None and -1 mean n_layers. IndexError for any other."""
    n = model.config.n_layers
    if layer is None or layer == -1:
        return n
    if not 0 <= layer <= n:
        raise IndexError(f"depths between blocks are 0 to {n} (or -1), got {layer}")
    return layer


def accumulated(
    cache: Cache, model: Transformer, layer: int | None = None, *, incl_mid: bool = False
) -> Decomposition:
    """The stream itself at each depth up to `layer`: states to look through with a lens, not parts that sum.

    Names `L0.resid`, `L0.resid_mid`, ..., and that of the final stream, `L1.resid_post`. `incl_mid` is ignored where a
    block has no middle (parallel, attention-only); a Macaron block has two, `L0.resid_pre_attn` before attention and
    `L0.resid_mid` after it.
    """
    n, config = depth(model, layer), model.config
    left_out = ("hook_resid_post", "hook_resid_mid_cross")
    inner = [config.stream_after(sublayer) for sublayer in config.sublayers if incl_mid]
    names = ["hook_resid_pre", *(name for name in inner if name not in left_out)]
    sites = [f"blocks.{i}.{name}" for i in range(n) for name in names]
    sites.append(final_stream(config) if n == config.n_layers else f"blocks.{n}.hook_resid_pre")
    return Decomposition(
        torch.stack([cache[site] for site in sites]), tuple(str(Part.of(site)) for site in sites)
    )


def by_sublayer(cache: Cache, model: Transformer, layer: int | None = None) -> Decomposition:
    """Embeddings and each sublayer's addition before depth `layer`; checked to sum to the stream there.

    In post-norm models every part goes through the later norms of the stream at their frozen scales, and each norm's
    beta is a part of its own (`L0.ln1_bias`).
    """
    return _collected(cache, model, depth(model, layer), as_wholes(cache))


def head_results(
    cache: Cache, model: Transformer, layer: int, *, cross: bool = False
) -> Float[Tensor, "h b p d"]:
    """Addition of each head of a block to the stream, without the bias; checked: heads + bias = attn_out.

    z W_O, through the norm and the factor of attention's output where the family has them. cross: the heads of
    cross-attention.
    """
    return head_parts(cache, model, layer, cross=cross).values[:-1]


def head_parts(cache: Cache, model: Transformer, layer: int, *, cross: bool = False) -> Decomposition:
    """Addition of each head of a block to the stream (`L0H3`, of cross-attention `L0X3`) and, last, their bias."""
    weights = Weights(model).layer(layer, cross=cross)
    z = upcast(cache[f"blocks.{layer}.{'cross_attn' if cross else 'attn'}.hook_z"])
    W_O, b_O = weights.W_O.to(z), weights.b_O.to(z)
    results = einsum(z, W_O, "b p h e, h e d -> h b p d")
    size = einsum(z.abs(), W_O.abs(), "b p h e, h e d -> b p d") + b_O.abs()
    sublayer = "cross_attn_out" if cross else "attn_out"
    values, size = _added(model, layer, sublayer, torch.cat((results, b_O.expand_as(results[0])[None])), size)
    whole = cache[f"blocks.{layer}.hook_{sublayer}"]
    missed = check_sum(values, whole, f"heads of layer {layer}", size=size, more=rounded_output(model, whole))
    names = tuple(map(str, _heads(model.config, layer, cross=cross)))
    return Decomposition(values, names, rounding=upcast(whole) - values.sum(0), missed=missed)


def in_half(model: Transformer) -> float:
    """Rounding of a sublayer's output or of a head's z in half precision, relative to it; 0 in float32 and float64.

    There what was rounded is no more than `bound` holds. Products are summed in float32 and rounded once; so are the
    bias, the norm and the factor after them.
    """
    return 0.0 if model.dtype in WIDE else ROUNDINGS * EPS[model.dtype]


def rounded_output(model: Transformer, whole: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"] | float:
    """Rounding of each number of a sublayer's output in half precision.

    What is rounded is about as large as the number, or, where that happens to be small, as the rest of its vector.
    """
    share = in_half(model)
    return share and share * torch.maximum(
        upcast(whole).abs(), upcast(whole).square().mean(-1, keepdim=True).sqrt()
    )


def _heads(config: ModelConfig, layer: int, *, cross: bool) -> list[Part]:
    """The heads of a layer's attention, and their bias."""
    head, bias = ("cross_head", "cross_attn_bias") if cross else ("head", "attn_bias")
    return [*(Part(head, layer, h) for h in range(config.n_heads)), Part(bias, layer)]


def by_head(cache: Cache, model: Transformer, layer: int | None = None) -> Decomposition:
    """Every head's write before depth `layer` (`L0H3`; of cross-attention `L0X3`) and one `remainder`.

    The remainder holds embeddings, MLPs and biases. Checked twice: heads + bias = attn_out in each layer, and all
    parts against the stream.
    """
    every = _collected(cache, model, depth(model, layer), into_heads(cache, model))
    is_head = [Part.of(name).kind in ("head", "cross_head") for name in every.parts]
    heads = [i for i, head in enumerate(is_head) if head]
    others = every.values[~torch.tensor(is_head, device=every.values.device)]
    values = torch.stack(
        [*(every.values[i] for i in heads), others.sum(0)]
    )  # of views: nothing is held twice
    names = (*(every.parts[i] for i in heads), REMAINDER)
    return Decomposition(values, names, every.complete, every.rounding, every.missed)


def before_attention(cache: Cache, model: Transformer, layer: int, split: PartSplit) -> Decomposition:
    """Parts of the stream that attention of block `layer` reads; checked to sum to it.

    Embeddings and every sublayer as `as_wholes` or `into_heads` split it. In Macaron blocks the MLP before attention is
    one of them.
    """
    whole = cache[attention_input(model.config, layer)]
    return _collected(
        cache, model, layer, split, before=places_before_attention(model.config, layer), whole=whole
    )


def places_before_attention(config: ModelConfig, layer: int) -> list[tuple[int, str]]:
    """Layer and name of every sublayer that wrote to the stream which attention of block `layer` reads."""
    order = config.sublayers
    before = order[: order.index("attn_out")]
    return [*((i, each) for i in range(layer) for each in order), *((layer, each) for each in before)]


def by_source(cache: Cache, model: Transformer, layer: int, pos: int = -1) -> Float[Tensor, "h k b d"]:
    """Addition of each head of a block at position `pos` by source position; checked to sum to the heads.

    a_ij (v_j W_O), b_V included in v. Ferrando et al. 2024, the head's intermediate representations.
    """
    require("additive", model.config.mixers[layer : layer + 1], "splitting heads by source")
    weights = Weights(model)
    w = weights.layer(layer)
    pattern = upcast(cache[f"blocks.{layer}.attn.hook_pattern"][:, :, pos])
    v = upcast(cache[f"blocks.{layer}.attn.hook_v"])[:, :, weights.kv_head()]
    W_O = w.W_O.to(v)
    moved = einsum(v, W_O, "b k h e, h e d -> h k b d") * rearrange(pattern, "b h k -> h k b 1")
    z = upcast(cache[f"blocks.{layer}.attn.hook_z"][:, pos])
    norm = output_norm(model, layer, "attn_out").of(
        lambda: einsum(z, W_O, "b h e, h e d -> b d") + w.b_O.to(z)
    )
    size = einsum(pattern.abs(), v.abs(), W_O.abs(), "b h k, b k h e, h e d -> h b d")
    moved, heads = norm.through(moved), head_results(cache, model, layer)[:, :, pos]
    by_token = rearrange(moved, "h k b d -> k h b d")
    size = norm.size(size)
    check_sum(by_token, heads, f"sources of layer {layer}", size=size, more=in_half(model) * size)
    return moved


def by_neuron(
    cache: Cache, model: Transformer, layer: int, pos: int = -1, *, before: bool = False
) -> Decomposition:
    """Addition of each neuron of a block at position `pos` (`L0N17`), and b_out; checked to sum to mlp_out.

    n_u w_out,u for neuron u (Geva et al. 2022). One position only: all of them would be [neuron, batch, pos, d_model].

    Args:
        cache: the activations of a pass.
        layer: the block.
        pos: the position.
        before: whether the neurons are those of the MLP before attention (`L0B17`), in Macaron blocks; they sum to
            mlp_before_out.
    """
    weights, mlp = Weights(model).layer(layer, before=before), "mlp_before" if before else "mlp"
    if weights.W_out is None or weights.b_out is None:
        kind = model.config.mlp_in_words
        raise KeyError(f"layer {layer} has no neurons that write on their own: this model is {kind}")
    post = upcast(cache[f"blocks.{layer}.{mlp}.hook_post"][:, pos])
    out = cache[f"blocks.{layer}.hook_{mlp}_out"][:, pos]
    W_out, b_out = weights.W_out.to(post), weights.b_out.to(post)
    neurons = einsum(post, W_out, "b m, m d -> m b d")
    size = post.abs() @ W_out.abs() + b_out.abs()
    written = torch.cat((neurons, b_out.expand_as(neurons[0])[None]))
    stacked, size = _added(model, layer, f"{mlp}_out", written, size)
    missed = check_sum(stacked, out, f"neurons of layer {layer}", size=size, more=rounded_output(model, out))
    kind = "neuron_before" if before else "neuron"
    parts = [*(Part(kind, layer, u) for u in range(len(neurons))), Part(f"{mlp}_bias", layer)]
    return Decomposition(
        stacked, tuple(map(str, parts)), rounding=upcast(out) - stacked.sum(0), missed=missed
    )


def as_wholes(cache: Cache) -> PartSplit:
    """Split of every sublayer into one part."""

    def split(i: int, sublayer: str) -> dict[Part, Tensor]:
        site = f"blocks.{i}.hook_{sublayer}"
        return {Part.of(site): upcast(cache[site])}

    return split


def into_heads(cache: Cache, model: Transformer) -> PartSplit:
    """Split of sublayers with heads into their heads and their bias, of others into one part."""

    def split(i: int, sublayer: str) -> dict[Part, Tensor]:
        if sublayer not in WITH_HEADS:
            return as_wholes(cache)(i, sublayer)
        cross = sublayer == "cross_attn_out"
        found = head_parts(cache, model, i, cross=cross)
        return dict(zip(_heads(model.config, i, cross=cross), found.values, strict=True))

    return split


def _collected(
    cache: Cache,
    model: Transformer,
    n: int,
    split: PartSplit,
    *,
    before: Iterable[tuple[int, str]] | None = None,
    whole: Float[Tensor, "b p d"] | None = None,
) -> Decomposition:
    """Embeddings and the parts that `split` makes of every sublayer before depth `n`, as they stand in the stream.

    Args:
        before: the sublayers, by layer and name, where they end inside of a block.
        whole: the stream that they then sum to.
    """
    parts = _embedded(cache, model)
    every = [(i, sublayer) for i in range(n) for sublayer in model.config.sublayers]
    places = every if before is None else list(before)
    left = torch.zeros_like(next(iter(parts.values())))
    for i, sublayer in places:
        pieces = split(i, sublayer)
        left = left + _left(cache[f"blocks.{i}.hook_{sublayer}"], pieces, model, f"{sublayer} of layer {i}")
        parts |= pieces
        norm = sum_norm(model, i, sublayer)
        if norm.norm is not None:
            recorded_norm = norm.recorded(cache)
            parts, left = (
                _behind(recorded_norm, parts, Part(f"{norm.norm.name}_bias", i)),
                recorded_norm.through(left),
            )
    whole = stream(cache, model, n) if whole is None else whole
    what = f"parts before depth {n}"
    rounding, missed = rounded_off(cache, model, places, whole, what)
    names = tuple(map(str, parts))
    rows = _moved(parts, rounding, left)
    stacked = rows[: len(names)]
    size = _absolute(stacked) + upcast(whole).abs()
    size = size + size.mean(-1, keepdim=True)  # a norm in the stream takes a mean off
    summed = check_sum(rows, whole, what, size=size)
    return Decomposition(
        stacked,
        names,
        n == model.config.n_layers,
        upcast(whole) - stacked.sum(0),
        _worse(missed, summed),
    )


def _moved(parts: dict[Part, Tensor], *more: Tensor) -> Float[Tensor, "c *n d"]:
    """The parts and what follows them in one tensor; they are taken out of the dict, so that none is there twice."""
    first = next(iter(parts.values()))
    found = first.new_empty(len(parts) + len(more), *first.shape)
    for row, part in zip(found, list(parts), strict=False):
        row.copy_(parts.pop(part))
    found[-len(more) :] = torch.stack(more)
    return found


def _absolute(parts: Float[Tensor, "c *n"], order: float = 1.0) -> Float[Tensor, "*n"]:
    """The sum of the parts' absolute values (the largest one, with infinity), which are never made."""
    return torch.linalg.vector_norm(parts, ord=order, dim=0)


def _left(
    out: Float[Tensor, "*b d"], pieces: Mapping[Part, Tensor], model: Transformer, what: str
) -> Float[Tensor, "*b d"]:
    """Rest of a sublayer's output that its pieces do not explain; IncompleteSumError where it is no rounding."""
    each, out = torch.stack(list(pieces.values())), upcast(out)
    size = (
        each.abs().sum(0).amax(-1, keepdim=True)
    )  # pieces are products: one may be small where its terms are not
    check_sum(each, out, what, size=size, more=rounded_output(model, out))
    return out - each.sum(0)


def _worse(one: Missed, other: Missed) -> Missed:
    """The miss that is nearer to what is allowed."""
    tiny = torch.finfo(torch.float32).tiny
    nearer = one.error / one.allowed.clamp_min(tiny) >= other.error / other.allowed.clamp_min(tiny)
    return Missed(*(torch.where(nearer, x, y.to(x)) for x, y in zip(one, other, strict=True)))


def _added(
    model: Transformer,
    layer: int,
    sublayer: str,
    parts: Float[Tensor, "c *n d"],
    size: Float[Tensor, "*n d"],
) -> tuple[Float[Tensor, "c *n d"], Float[Tensor, "*n d"]]:
    """Parts of a sublayer's output as additions to the stream, and the sum of their absolute terms there.

    The last part, its bias, takes the norm's beta.
    """
    norm = output_norm(model, layer, sublayer).of(lambda: parts.sum(0))
    return norm.split(parts, -1), norm.size(size)


def _behind(norm: FrozenNorm, parts: dict[Part, Tensor], bias: Part) -> dict[Part, Tensor]:
    """Parts of the stream after a norm of it, with beta as one more."""
    new = {part: norm.through(value) for part, value in parts.items()}
    if norm.beta is None:
        return new
    like = next(iter(new.values()))
    return new | {bias: upcast(norm.beta).to(like.device).expand_as(like)}


def _embedded(cache: Cache, model: Transformer) -> dict[Part, Tensor]:
    """The parts of the stream entering the first block."""
    parts = {Part.of(site): upcast(cache[site]) for site in embedding_parts(model.config)}
    return _behind(embedding_norm(model).recorded(cache), parts, Part("embed_bias"))


def not_linear(config: ModelConfig) -> str | None:
    """Reason why a model has no logits that are linear in its normed final stream; None if it has them."""
    if not config.unembed:
        return "has no logits"
    if config.mlm_head is not None:
        return "computes its logits by a non-linear masked-LM head"
    return None if config.output == FullSoftmax() else f"has the output layer {config.output}"


def logit_direction(
    model: Transformer, answer: Int[Tensor, "b"], wrong: Int[Tensor, "b"] | None
) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b"]]:
    """The direction of a logit (difference) at the output of the final norm, and its constant beta W_U + b_U.

    The factor on the logits is in both; a soft cap is not, so these are logits before the cap.

    Raises:
        ValueError: logits that are not linear in the normed stream (a masked-LM head), or none.
    """
    if what := not_linear(model.config):
        raise ValueError(f"this model {what}: parts of its stream have no logits of their own")
    weights, factor = Weights(model), model.config.logit_scale
    direction, constant = upcast(weights.W_U.mT[answer]), upcast(weights.b_U[answer])
    if wrong is not None:
        direction = direction - upcast(weights.W_U.mT[wrong])
        constant = constant - upcast(weights.b_U[wrong])
    constant = constant + einsum(direction, upcast(weights.final_beta), "b d, d -> b")
    return direction * factor, constant * factor
