"""The residual stream taken apart: the addition of each part of the model, checked to sum to the whole.

`cache` is any mapping from site names to tensors (an `ActivationCache`, say). Elhage et al. 2021: the stream at any
depth is the embedding plus everything the heads and MLPs before it added.

Every check of such a sum allows the following error. Sums are computed in float32 at least. A sum of n terms whose
absolute values sum to S may be off by eps (8 + sqrt n) S (`bound`); in half precision also by what the model itself
rounded, `ROUNDINGS` eps times a sublayer's output or a head's z (`in_half`). The difference is the part `rounding`.

| sum | terms | in half precision |
|---|---|---|
| stream = embeddings + sublayers (`rounded_off`) | the parts, number by number | the additions are made again |
| heads, neurons = their sublayer (`head_parts`, `by_neuron`) | products z W, post W and the bias | the output |
| features, bias, skip, error = what a dictionary writes | lengths of f W_dec, b_dec, x W_skip | the output |
| sources = their head (`by_source`, attribution by source) | products a v W | z, `ROUNDINGS` |
| attribution = logit | columns, length of out . direction by sublayer | stream and sublayers as above, folded |
| pairs = q . k of the stream (`score_parts`) | lengths of all query parts x all key parts | as in float32 |
| q . k of the stream = the score of the pass | length of q x length of k, before they cancel | that, `ROUNDINGS` |
| ALTI-Logit = logit | what heads moved, other columns | length of what heads moved, `ROUNDINGS` |
| orders, paths = the frozen pass (`paths`) | lengths of a v and of columns of W, by head | float32: start upcast |
| the frozen pass = the pass | the same, six roundings a layer | the same in the model's eps: coarse, and noted |
| an edited z, output = c x what was moved (`edited_sums`) | a v, a v W | z, `ROUNDINGS` |

Depth enters only through n: rounding errors are independent, so they grow as sqrt n while S grows as n, and at 80
layers the bound is still a few millionths of S. In half precision depth does not enter the check of the stream: it
compares two sums of the same numbers in the same order. `tests/residual/test_bounds.py` tests each bound at 80 layers
in four dtypes, and that each check finds a part that is missing. (Relevances under backward rules have a bound of their
own, `interp.passes.rules.completeness`; integrals of gradients report an error that is not rounding.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.stats import WIDE, upcast
from interp.core.transfers import check
from interp.core.viewer import Brief
from interp.model.config import WITH_HEADS, FullSoftmax, ModelConfig
from interp.model.parts import Part, PartName
from interp.model.records import require
from interp.model.sites import attention_input, embedding_parts, final_stream
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.frozen import FrozenNorm, embedding_norm, output_norm, sum_norm

Cache = Mapping[str, Tensor]
PartSplit = Callable[[int, str], dict[Part, Tensor]]
"""Function from layer and name of a sublayer to its parts and what each adds to the stream."""

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
        """The largest error that rounding explains, relative to the same size as `error`."""


def bound(n: int, size: Float[Tensor, "*b"], dtype: torch.dtype) -> Float[Tensor, "*b"]:
    """Largest rounding error of a sum of n terms: eps (8 + sqrt n) times the sum of their absolute values.

    Each of n additions rounds by at most half an eps of the sum so far, which is at most `size`. The roundings are
    independent, so their sum has a standard deviation of sqrt(n / 12) eps size, and sqrt(n) is 3.5 of these for any n.
    The 8 allows for rounding inside terms that are products themselves (their own sums, scales, factors).

    Args:
        n: number of terms.
        size: sum of the absolute values, in the units of the terms.
        dtype: dtype of the sum.
    """
    return EPS[dtype] * (8 + n**0.5) * size


class Missed(NamedTuple):
    """Error of a sum, and the error that rounding explains, at the element where error / allowed is largest."""

    error: Float[Tensor, ""]
    """Absolute error, relative to the largest part."""
    allowed: Float[Tensor, ""]
    """Largest error that rounding explains, relative to the same."""


REMAINDER = "remainder"
"""Name of the one part that holds all that a decomposition does not split further."""


@public(plain_pass=True)
@dataclass(frozen=True, eq=False, repr=False)
class Decomposition(Brief):
    """Additions of a model's parts to the residual stream (or the stream at some depths), stacked and named.

    `decomposition["L0H3"]` is the addition of one part; the index is whatever `Part.of` takes.
    """

    values: Float[Tensor, "c ..."]
    """One entry per part along the first axis."""
    parts: tuple[str, ...]
    """The parts' names, in the order of the values: `embed`, `L0H3`, `L0.mlp`, `L0N17`, `L0.attn_bias`, `remainder`."""
    complete: bool = False
    """Whether the parts were checked to sum to the whole final residual stream."""
    rounding: Float[Tensor, "..."] | None = None
    """The whole minus the sum of its parts, in float32 at least: what the pass rounded off when it summed them.

    None if nothing was checked.
    """
    missed: Missed | None = None
    """Error of the checked sum; None if nothing was checked."""

    def __getitem__(self, part: PartName) -> Float[Tensor, "..."]:
        name = REMAINDER if part == REMAINDER else str(Part.of(part))
        if name not in self.parts:
            raise KeyError(f"no part {name!r} here; parts: {', '.join(self.parts[:12])} ...")
        return self.values[self.parts.index(name)]


def sum_error(parts: Float[Tensor, "c ..."], whole: Float[Tensor, "..."]) -> float:
    """max |sum of parts - whole| relative to the largest absolute part (or whole); sums in float32 at least.

    Each vector (each number, for `[c b]`) has its own scale, so a position of large norm hides no error elsewhere.
    """
    error = (upcast(parts).sum(0) - upcast(whole)).abs()
    scale = _largest(parts, whole)
    error = error.amax(-1, keepdim=True) if whole.ndim > 1 else error
    return float((error / scale).max())


def _largest(parts: Float[Tensor, "c ..."], whole: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Largest absolute value in each vector (each number, for `[c b]`), over all parts and the whole."""
    largest = upcast(torch.maximum(_absolute_sum(parts, torch.inf), whole.abs().to(parts)))
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
    """Error of a sum of parts against the whole, element by element; IncompleteSumError if it is more than rounding.

    The sum is computed in float32 at least; the error may be `bound`, plus `more`.

    Args:
        parts: the terms, along the first axis.
        whole: the tensor that they should sum to.
        what: words for the parts in the error's message.
        size: sum of the absolute terms of the parts, for parts that are sums of products themselves (a part may be
            small although its terms are large); None: the sum of the absolute parts and the whole.
        more: further error to allow, from rounding of the whole in the model's dtype.
    """
    parts, whole = upcast(parts), upcast(whole)
    of_parts = _absolute_sum(parts) + whole.abs()
    size = of_parts if size is None else torch.maximum(upcast(size), of_parts)
    error = (parts.sum(0) - whole).abs()
    return check_missed(error, bound(len(parts), size, parts.dtype) + more, _largest(parts, whole), what)


def check_missed(
    error: Float[Tensor, "..."], allowed: Float[Tensor, "..."], scale: Float[Tensor, "..."], what: str
) -> Missed:
    """The error with the largest error / allowed; IncompleteSumError if that is above 1, or NaN.

    Args:
        scale: size that error and allowed error are divided by in the result.
    """
    allowed = allowed.expand_as(error)
    worst_miss = _NO_MISS
    if error.numel():
        worst = (error / allowed.clamp_min(torch.finfo(error.dtype).tiny)).flatten().argmax()
        worst_miss = Missed(
            *((x / scale).take(worst) for x in (error, allowed))
        )  # a device is not waited for

    def failure() -> IncompleteSumError:
        missed, explained = float(worst_miss.error), float(worst_miss.allowed)
        return IncompleteSumError(
            f"{what}: parts miss the whole by {missed:.2e} of the largest part, rounding explains {explained:.0e} "
            "(was the pass edited, or a weight changed since?)",
            missed,
            explained,
        )

    check(worst_miss.error <= worst_miss.allowed, failure)
    return worst_miss


_NO_MISS = Missed(torch.tensor(0.0), torch.tensor(0.0))


class StreamStart(NamedTuple):
    """A stream that sublayers were added to, in place of the embeddings."""

    stream: Float[Tensor, "*b d"]
    norm: FrozenNorm
    """The norm that it passes before anything is added."""


def rounded_off(
    cache: Cache,
    model: Transformer,
    places: Iterable[tuple[int, str]],
    whole: Float[Tensor, "*b d"],
    what: str,
    *,
    start: StreamStart | None = None,
) -> tuple[Float[Tensor, "*b d"], Missed]:
    """The residual stream `whole` minus its embeddings and sublayers, in float32 at least, checked to be rounding.

    In float32 the parts are summed, and the error may be `bound`, as for every other sum. In bfloat16 each addition
    rounds by up to 1/256 of the stream so far, so such a bound over 60 sublayers would let any missing part pass.
    There the additions are repeated in the same order and the model's dtype, which gives the same stream bit by bit at
    any depth. The error may be one eps of the largest stream on the way (a fused kernel may save a rounding), or
    8 + 1.5 sqrt(n) eps where norms stand in the stream or a wrapped network adds its n parts in another order.

    Args:
        places: layer and name of the sublayers that wrote to the stream.
        start: the stream that they were added to; None: the embeddings.

    Raises:
        IncompleteSumError: the difference is more than rounding.
    """
    replay = _Replay.of(cache, model, places, start)
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
    """A residual stream, summed again from the embeddings and the sublayers' outputs."""

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
    def of(
        cls, cache: Cache, model: Transformer, places: Iterable[tuple[int, str]], start: StreamStart | None
    ) -> _Replay:
        """The stream of the embeddings (or `start`) and the sublayers in `places`, summed again in their order."""
        embeddings = [cache[site] for site in embedding_parts(model.config)] if start is None else []
        first, *others = [start.stream] if start is not None else embeddings
        size = upcast(first).abs()
        replay = cls(first.to(model.dtype), upcast(first), size, size)
        for other in others:
            replay = replay.plus(other)
        replay = replay.through(embedding_norm(model).recorded(cache) if start is None else start.norm)
        for layer, sublayer in places:
            replay = replay.plus(cache[f"blocks.{layer}.hook_{sublayer}"])
            replay = replay.through(sum_norm(model, layer, sublayer).recorded(cache))
        return replay

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
    """The stream itself at each depth up to `layer`, as for a logit lens: not parts that sum to anything.

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
    return _stream_parts(cache, model, depth(model, layer), as_wholes(cache))


def head_results(
    cache: Cache, model: Transformer, layer: int, *, cross: bool = False
) -> Float[Tensor, "h b p d"]:
    """Addition of each head of a block to the stream, without the bias; checked: heads + bias = attn_out.

    The addition is z W_O, through the norm and times the factor of attention's output where the model has them. cross:
    whether the heads are those of cross-attention.
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
    values, size = _stream_additions(
        model, layer, sublayer, torch.cat((results, b_O.expand_as(results[0])[None])), size
    )
    output = cache[f"blocks.{layer}.hook_{sublayer}"]
    missed = check_sum(
        values, output, f"heads of layer {layer}", size=size, more=rounded_output(model, output)
    )
    names = tuple(map(str, _heads_and_bias(model.config, layer, cross=cross)))
    return Decomposition(values, names, rounding=upcast(output) - values.sum(0), missed=missed)


def in_half(model: Transformer) -> float:
    """Relative rounding of a sublayer's output or a head's z in half precision; 0 in float32 and float64.

    In float32 `bound` already allows for it. In half precision products are summed in float32 and rounded once, and
    the bias, the norm and the factor after them round once each: `ROUNDINGS`.
    """
    return 0.0 if model.dtype in WIDE else ROUNDINGS * EPS[model.dtype]


def rounded_output(model: Transformer, whole: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"] | float:
    """Rounding of each number of a sublayer's output in half precision.

    It is relative to the number itself, or to the root mean square of its vector where that is larger.
    """
    share = in_half(model)
    return share and share * torch.maximum(
        upcast(whole).abs(), upcast(whole).square().mean(-1, keepdim=True).sqrt()
    )


def _heads_and_bias(config: ModelConfig, layer: int, *, cross: bool) -> list[Part]:
    """The heads of a layer's attention, and their bias."""
    head, bias = ("cross_head", "cross_attn_bias") if cross else ("head", "attn_bias")
    return [*(Part(head, layer, h) for h in range(config.n_heads)), Part(bias, layer)]


def by_head(cache: Cache, model: Transformer, layer: int | None = None) -> Decomposition:
    """Every head's write before depth `layer` (`L0H3`; of cross-attention `L0X3`) and one `remainder`.

    The remainder holds embeddings, MLPs and biases. Checked twice: heads + bias = attn_out in each layer, and all
    parts against the stream.
    """
    parts = _stream_parts(cache, model, depth(model, layer), into_heads(cache, model))
    is_head = [Part.of(name).kind in ("head", "cross_head") for name in parts.parts]
    heads = [i for i, head in enumerate(is_head) if head]
    others = parts.values[~torch.tensor(is_head, device=parts.values.device)]
    values = torch.stack(
        [*(parts.values[i] for i in heads), others.sum(0)]
    )  # stack of views: no second copy in memory
    names = (*(parts.parts[i] for i in heads), REMAINDER)
    return Decomposition(values, names, parts.complete, parts.rounding, parts.missed)


def before_attention(cache: Cache, model: Transformer, layer: int, split: PartSplit) -> Decomposition:
    """Parts of the stream that attention of block `layer` reads; checked to sum to it.

    The parts are the embeddings and what `split` (`as_wholes` or `into_heads`) makes of every earlier sublayer, in
    Macaron blocks also of the block's own MLP before attention.
    """
    whole = cache[attention_input(model.config, layer)]
    return _stream_parts(
        cache, model, layer, split, before=places_before_attention(model.config, layer), whole=whole
    )


def places_before_attention(config: ModelConfig, layer: int) -> list[tuple[int, str]]:
    """Layer and name of every sublayer that wrote to the stream which attention of block `layer` reads."""
    order = config.sublayers
    before = order[: order.index("attn_out")]
    return [
        *((i, sublayer) for i in range(layer) for sublayer in order),
        *((layer, sublayer) for sublayer in before),
    ]


def by_source(cache: Cache, model: Transformer, layer: int, pos: int = -1) -> Float[Tensor, "h k b d"]:
    """Addition of each head of a block at position `pos` by source position; checked to sum to the heads.

    The term of source j at position i is a_ij v_j W_O, with b_V in v; Ferrando et al. 2024.
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
    stacked, size = _stream_additions(model, layer, f"{mlp}_out", written, size)
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
        heads = head_parts(cache, model, i, cross=cross)
        return dict(zip(_heads_and_bias(model.config, i, cross=cross), heads.values, strict=True))

    return split


def _stream_parts(
    cache: Cache,
    model: Transformer,
    n: int,
    split: PartSplit,
    *,
    before: Iterable[tuple[int, str]] | None = None,
    whole: Float[Tensor, "b p d"] | None = None,
) -> Decomposition:
    """The embeddings and the parts that `split` makes of every sublayer before depth `n`, after the stream's norms.

    Args:
        before: layer and name of the sublayers, where the last block is not complete; None: all before depth n.
        whole: the stream that the parts should sum to; None: that of depth n.
    """
    parts = _embedding_parts(cache, model)
    all_places = [(i, sublayer) for i in range(n) for sublayer in model.config.sublayers]
    places = all_places if before is None else list(before)
    unexplained = torch.zeros_like(next(iter(parts.values())))
    for i, sublayer in places:
        pieces = split(i, sublayer)
        unexplained = unexplained + _unexplained(
            cache[f"blocks.{i}.hook_{sublayer}"], pieces, model, f"{sublayer} of layer {i}"
        )
        parts |= pieces
        norm = sum_norm(model, i, sublayer)
        if norm.norm is not None:
            recorded_norm = norm.recorded(cache)
            parts, unexplained = (
                _after_norm(recorded_norm, parts, Part(f"{norm.norm.name}_bias", i)),
                recorded_norm.through(unexplained),
            )
    whole = stream(cache, model, n) if whole is None else whole
    what = f"parts before depth {n}"
    rounding, missed = rounded_off(cache, model, places, whole, what)
    names = tuple(map(str, parts))
    rows = _stacked(parts, rounding, unexplained)
    stacked = rows[: len(names)]
    size = _absolute_sum(stacked) + upcast(whole).abs()
    size = size + size.mean(-1, keepdim=True)  # a norm in the stream takes a mean off
    summed = check_sum(rows, whole, what, size=size)
    return Decomposition(
        stacked,
        names,
        n == model.config.n_layers,
        upcast(whole) - stacked.sum(0),
        _worse_miss(missed, summed),
    )


def _stacked(parts: dict[Part, Tensor], *more: Tensor) -> Float[Tensor, "c *n d"]:
    """The parts, then `more`, in one tensor; empties the dict of parts on the way to save memory."""
    first = next(iter(parts.values()))
    stack = first.new_empty(len(parts) + len(more), *first.shape)
    for row, part in zip(stack, list(parts), strict=False):
        row.copy_(parts.pop(part))
    stack[-len(more) :] = torch.stack(more)
    return stack


def _absolute_sum(parts: Float[Tensor, "c *n"], order: float = 1.0) -> Float[Tensor, "*n"]:
    """Sum over parts of absolute values (their maximum, with order infinity), without a tensor of absolute values."""
    return torch.linalg.vector_norm(parts, ord=order, dim=0)


def _unexplained(
    out: Float[Tensor, "*b d"], pieces: Mapping[Part, Tensor], model: Transformer, what: str
) -> Float[Tensor, "*b d"]:
    """A sublayer's output minus its pieces, in float32 at least; IncompleteSumError if that is more than rounding."""
    stacked, out = torch.stack(list(pieces.values())), upcast(out)
    size = (
        stacked.abs().sum(0).amax(-1, keepdim=True)
    )  # a piece is a sum of products, and may be small although its terms are large
    check_sum(stacked, out, what, size=size, more=rounded_output(model, out))
    return out - stacked.sum(0)


def _worse_miss(first: Missed, second: Missed) -> Missed:
    """Of two errors, the one with the larger error / allowed."""
    tiny = torch.finfo(torch.float32).tiny
    nearer = first.error / first.allowed.clamp_min(tiny) >= second.error / second.allowed.clamp_min(tiny)
    return Missed(*(torch.where(nearer, x, y.to(x)) for x, y in zip(first, second, strict=True)))


def _stream_additions(
    model: Transformer,
    layer: int,
    sublayer: str,
    parts: Float[Tensor, "c *n d"],
    size: Float[Tensor, "*n d"],
) -> tuple[Float[Tensor, "c *n d"], Float[Tensor, "*n d"]]:
    """Parts of a sublayer's output after its output norm, if any, and the sum of their absolute terms (`size`) there.

    The norm's beta is added to the last part, the bias.
    """
    norm = output_norm(model, layer, sublayer).of(lambda: parts.sum(0))
    return norm.split(parts, -1), norm.size(size)


def _after_norm(norm: FrozenNorm, parts: dict[Part, Tensor], bias: Part) -> dict[Part, Tensor]:
    """Parts of the stream after a norm of the stream, with the norm's beta as the further part `bias`."""
    new = {part: norm.through(value) for part, value in parts.items()}
    if norm.beta is None:
        return new
    like = next(iter(new.values()))
    return new | {bias: upcast(norm.beta).to(like.device).expand_as(like)}


def _embedding_parts(cache: Cache, model: Transformer) -> dict[Part, Tensor]:
    """The parts of the stream entering the first block."""
    parts = {Part.of(site): upcast(cache[site]) for site in embedding_parts(model.config)}
    return _after_norm(embedding_norm(model).recorded(cache), parts, Part("embed_bias"))


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
