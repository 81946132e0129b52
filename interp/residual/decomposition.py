"""The residual stream taken apart: what each part of the model wrote into it, checked to sum to the whole.

`cache` is any mapping from site names to tensors (an `ActivationCache`, say). Elhage et al. 2021: the stream at any
depth is the embedding plus everything the heads and MLPs before it added.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.stats import wide
from interp.core.transfers import check
from interp.model.config import WITH_HEADS, FullSoftmax, ModelConfig
from interp.model.parts import Named, Part
from interp.model.records import require
from interp.model.sites import attention_input, embedding_parts, final_stream
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.frozen import FrozenNorm, embedding_norm, output_norm, sum_norm

Cache = Mapping[str, Tensor]
Split = Callable[[int, str], dict[Part, Tensor]]
"""From layer and name of a sublayer to its parts."""

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest error of a sum, relative to its largest part, by the dtype the model ran in."""


class IncompleteSumError(ArithmeticError):
    """Parts that should sum to a whole do not; the message holds the relative error, and so does `error`."""

    def __init__(self, message: str, error: float) -> None:
        super().__init__(message)
        self.error = error


REMAINDER = "remainder"
"""The name of everything that a decomposition does not split."""


@dataclass(frozen=True, eq=False)
class Decomposition:
    """What the parts of a model wrote to the residual stream (or the stream at some depths), stacked and named.

    `found["L0H3"]` is what one part wrote; it takes whatever `Part.of` takes.
    """

    values: Float[Tensor, "c ..."]
    """One entry per part along the first axis."""
    parts: tuple[str, ...]
    """The parts' names, in the order of the values: `embed`, `L0H3`, `L0.mlp`, `L0N17`, `L0.attn_bias`, `remainder`."""
    complete: bool = False
    """Whether they were checked to sum to the whole final residual stream."""
    miss: Float[Tensor, ""] | None = None
    """By how much their checked sum misses the stream, relative; None if nothing was checked."""

    @property
    def error(self) -> float | None:
        """`miss` as a number, for which the host waits for a device."""
        return None if self.miss is None else float(self.miss)

    def __getitem__(self, part: Named) -> Float[Tensor, "..."]:
        name = REMAINDER if part == REMAINDER else str(Part.of(part))
        if name not in self.parts:
            raise KeyError(f"no part {name!r} here; parts: {', '.join(self.parts[:12])} ...")
        return self.values[self.parts.index(name)]


def sum_error(
    parts: Float[Tensor, "c ..."], whole: Float[Tensor, "..."], terms: Float[Tensor, "..."] | None = None
) -> float:
    """max |sum of parts - whole| relative to the largest absolute part (or whole); sums in float32 at least.

    Each vector (each number, for `[c b]`) has its own scale, so a huge position hides no error elsewhere.
    terms: what `whole` is a difference of, whose rounding it carries; the largest of them counts too.
    """
    return float(_sum_error(parts, whole, terms))


def _sum_error(
    parts: Float[Tensor, "c ..."], whole: Float[Tensor, "..."], terms: Float[Tensor, "..."] | None
) -> Float[Tensor, ""]:
    dtype = torch.promote_types(parts.dtype, torch.float32)
    error = (parts.sum(0, dtype=dtype) - whole).abs()
    scale = torch.maximum(parts.abs().amax(0), whole.abs()).to(dtype)
    if terms is not None:
        scale = torch.maximum(scale, terms.to(dtype).abs().max())
    if whole.ndim > 1:
        error, scale = error.amax(-1), scale.amax(-1)
    return (error / scale.clamp_min(torch.finfo(dtype).tiny)).max()


def check_sum(
    parts: Float[Tensor, "c ..."],
    whole: Float[Tensor, "..."],
    what: str,
    dtype: torch.dtype,
    *,
    terms: Float[Tensor, "..."] | None = None,
) -> Float[Tensor, ""]:
    """The relative error of a sum; IncompleteSumError if it exceeds the tolerance of `dtype`, or is not a number."""
    miss = _sum_error(parts, whole, terms)

    def failure() -> IncompleteSumError:
        error = float(miss)
        return IncompleteSumError(
            f"{what}: parts miss the whole by {error:.2e} of the largest part, allowed {TOLERANCE[dtype]:.0e}"
            f" in {dtype} (was the pass edited, or a weight changed since?)",
            error,
        )

    check(miss <= TOLERANCE[dtype], failure)
    return miss


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
    """Embeddings and what each sublayer added before depth `layer`; checked to sum to the stream there.

    In post-norm models every part goes through the later norms of the stream at their frozen scales, and each norm's
    beta is a part of its own (`L0.ln1_bias`).
    """

    return _collected(cache, model, depth(model, layer), as_wholes(cache))


def head_results(
    cache: Cache, model: Transformer, layer: int, *, cross: bool = False
) -> Float[Tensor, "h b p d"]:
    """What each head of a block adds to the stream, without the bias; checked: heads + bias = attn_out.

    z W_O, through the norm and the factor of attention's output where the family has them. cross: the heads of
    cross-attention.
    """
    return head_parts(cache, model, layer, cross=cross).values[:-1]


def head_parts(cache: Cache, model: Transformer, layer: int, *, cross: bool = False) -> Decomposition:
    """What each head of a block adds to the stream (`L0H3`, of cross-attention `L0X3`) and, last, their bias."""
    weights = Weights(model).layer(layer, cross=cross)
    z = cache[f"blocks.{layer}.{'cross_attn' if cross else 'attn'}.hook_z"]
    results = einsum(z, weights.W_O.to(z), "b p h e, h e d -> h b p d")
    bias = weights.b_O.to(z).expand_as(results[0])[None]
    sublayer = "cross_attn_out" if cross else "attn_out"
    values = _added(model, layer, sublayer, torch.cat((results, bias)))
    whole = cache[f"blocks.{layer}.hook_{sublayer}"]
    miss = check_sum(values, whole, f"heads of layer {layer}", model.dtype)
    return Decomposition(values, tuple(map(str, _heads(model.config, layer, cross=cross))), miss=miss)


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
    names = [name for name, head in zip(every.parts, is_head, strict=True) if head]
    heads = torch.tensor(is_head, device=every.values.device)
    rest = every.values[~heads].sum(0, keepdim=True)
    values = torch.cat((every.values[heads], rest))
    return Decomposition(values, (*names, REMAINDER), every.complete, every.miss)


def before_attention(cache: Cache, model: Transformer, layer: int, split: Split) -> Decomposition:
    """What was written to the stream that attention of block `layer` reads; checked to sum to it.

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
    own = order[: order.index("attn_out")]
    return [*((i, each) for i in range(layer) for each in order), *((layer, each) for each in own)]


def by_source(cache: Cache, model: Transformer, layer: int, pos: int = -1) -> Float[Tensor, "h k b d"]:
    """What each head of a block moved from each source position to position `pos`; checked to sum to the heads.

    a_ij (v_j W_O), b_V included in v. Ferrando et al. 2024, the head's intermediate representations.
    """
    require("additive", model.config.mixers[layer : layer + 1], "splitting heads by source")
    weights = Weights(model)
    w = weights.layer(layer)
    pattern = cache[f"blocks.{layer}.attn.hook_pattern"][:, :, pos]
    v = cache[f"blocks.{layer}.attn.hook_v"][:, :, weights.kv_head()]
    moved = einsum(v, w.W_O.to(v), "b k h e, h e d -> h k b d") * rearrange(pattern, "b h k -> h k b 1")

    def output() -> Tensor:
        z = cache[f"blocks.{layer}.attn.hook_z"][:, pos]
        return einsum(z, w.W_O.to(z), "b h e, h e d -> b d") + w.b_O.to(z)

    moved = output_norm(model, layer, "attn_out").of(output).through(moved)
    heads = head_results(cache, model, layer)[:, :, pos]
    check_sum(rearrange(moved, "h k b d -> k h b d"), heads, f"sources of layer {layer}", model.dtype)
    return moved


def by_neuron(
    cache: Cache, model: Transformer, layer: int, pos: int = -1, *, before: bool = False
) -> Decomposition:
    """What each neuron of a block wrote at position `pos` (`L0N17`), and b_out; checked to sum to mlp_out.

    n_u w_out,u for neuron u (Geva et al. 2022). One position only: all of them would be [neuron, batch, pos, d_model].
    before: those of the MLP before attention (`L0B17`), in Macaron blocks; they sum to mlp_before_out.
    """
    weights, mlp = Weights(model).layer(layer, before=before), "mlp_before" if before else "mlp"
    if weights.W_out is None or weights.b_out is None:
        kind = model.config.mlp_in_words
        raise KeyError(f"layer {layer} has no neurons that write on their own: this model is {kind}")
    post = cache[f"blocks.{layer}.{mlp}.hook_post"][:, pos]
    out = cache[f"blocks.{layer}.hook_{mlp}_out"][:, pos]
    neurons = einsum(post, weights.W_out, "b m, m d -> m b d")
    stacked = _added(model, layer, f"{mlp}_out", torch.cat((neurons, weights.b_out.expand_as(out)[None])))
    check_sum(stacked, out, f"neurons of layer {layer}", model.dtype)
    kind = "neuron_before" if before else "neuron"
    parts = [*(Part(kind, layer, u) for u in range(len(neurons))), Part(f"{mlp}_bias", layer)]
    return Decomposition(stacked, tuple(map(str, parts)))


def as_wholes(cache: Cache) -> Split:
    """Every sublayer as one part."""

    def split(i: int, sublayer: str) -> dict[Part, Tensor]:
        site = f"blocks.{i}.hook_{sublayer}"
        return {Part.of(site): cache[site]}

    return split


def into_heads(cache: Cache, model: Transformer) -> Split:
    """Sublayers with heads as their heads and their bias, others as one part."""

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
    split: Split,
    *,
    before: Iterable[tuple[int, str]] | None = None,
    whole: Float[Tensor, "b p d"] | None = None,
) -> Decomposition:
    """Embeddings and the parts that `split` makes of every sublayer before depth `n`, as they stand in the stream.

    before: which sublayers, by layer and name, where they end inside of a block; whole: what they then sum to.
    """
    parts = _embedded(cache, model)
    every = [(i, sublayer) for i in range(n) for sublayer in model.config.sublayers]
    for i, sublayer in every if before is None else before:
        parts |= split(i, sublayer)
        norm = sum_norm(model, i, sublayer)
        if norm.norm is not None:
            parts = _behind(norm.recorded(cache), parts, Part(f"{norm.norm.name}_bias", i))
    stacked, whole = torch.stack(list(parts.values())), stream(cache, model, n) if whole is None else whole
    miss = check_sum(stacked, whole, f"parts before depth {n}", model.dtype)
    return Decomposition(stacked, tuple(map(str, parts)), n == model.config.n_layers, miss)


def _added(
    model: Transformer, layer: int, sublayer: str, parts: Float[Tensor, "c *n d"]
) -> Float[Tensor, "c *n d"]:
    """All parts of a sublayer's output as what they add to the stream; the last, its bias, takes the norm's beta."""
    dtype = torch.promote_types(parts.dtype, torch.float32)
    return output_norm(model, layer, sublayer).of(lambda: parts.sum(0, dtype=dtype)).split(parts, -1)


def _behind(norm: FrozenNorm, parts: dict[Part, Tensor], bias: Part) -> dict[Part, Tensor]:
    """Parts of the stream after a norm of it, with beta as one more."""
    new = {part: norm.through(value) for part, value in parts.items()}
    if norm.beta is None:
        return new
    like = next(iter(new.values()))
    return new | {bias: norm.beta.to(like.device).expand_as(like)}


def _embedded(cache: Cache, model: Transformer) -> dict[Part, Tensor]:
    """The parts of the stream entering the first block."""
    parts = {Part.of(site): cache[site] for site in embedding_parts(model.config)}
    return _behind(embedding_norm(model).recorded(cache), parts, Part("embed_bias"))


def not_linear(config: ModelConfig) -> str | None:
    """Why a model has no logits that are linear in its normed final stream; None if it has them."""
    if not config.unembed:
        return "has no logits"
    if config.mlm_head is not None:
        return "computes its logits by a non-linear masked-LM head"
    return None if config.output == FullSoftmax() else f"has the output layer {config.output}"


def logit_direction(
    model: Transformer, answer: Int[Tensor, "b"], wrong: Int[Tensor, "b"] | None
) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b"]]:
    """The direction of a logit (difference) at the output of the final norm, and its constant beta W_U + b_U.

    The factor on the logits is in both; a soft cap is not, so these are logits before the cap. Errors: ValueError
    where the logits are not linear in the normed stream (a masked-LM head), or there are none.
    """
    if what := not_linear(model.config):
        raise ValueError(f"this model {what}: parts of its stream have no logits of their own")
    weights, factor = Weights(model), model.config.logit_scale
    direction, constant = wide(weights.W_U.mT[answer]), wide(weights.b_U[answer])
    if wrong is not None:
        direction = direction - wide(weights.W_U.mT[wrong])
        constant = constant - wide(weights.b_U[wrong])
    constant = constant + einsum(direction, wide(weights.final_beta), "b d, d -> b")
    return direction * factor, constant * factor
