"""The residual stream taken apart: what each part of the model wrote into it, checked to sum to the whole.

`cache` is any mapping from site names to tensors (an `ActivationCache`, say). Elhage et al. 2021: the stream at any
depth is the embedding plus everything the heads and MLPs before it added.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor

from interp.model.config import Learned
from interp.model.transformer import Transformer
from interp.model.weights import Weights

Cache = Mapping[str, Tensor]

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest error of a sum, relative to its largest part, by the dtype the model ran in."""


class IncompleteSumError(ArithmeticError):
    """Parts that should sum to a whole do not; the message holds the error."""


@dataclass(frozen=True, eq=False)
class Parts:
    """Named parts stacked along the first axis."""

    values: Float[Tensor, "c ..."]
    labels: tuple[str, ...]
    complete: bool = False
    """Whether they were checked to sum to the whole final residual stream."""

    def __getitem__(self, label: str) -> Float[Tensor, "..."]:
        if label not in self.labels:
            raise KeyError(f"no part {label!r}; parts: {', '.join(self.labels[:12])} ...")
        return self.values[self.labels.index(label)]


def sum_error(
    parts: Float[Tensor, "c ..."], whole: Float[Tensor, "..."], terms: Float[Tensor, "..."] | None = None
) -> float:
    """max |sum of parts - whole| relative to the largest absolute part (or whole); sums in float32 at least.

    Each vector (each number, for `[c b]`) has its own scale, so a huge position hides no error elsewhere.
    terms: what `whole` is a difference of, whose rounding it carries; the largest of them counts too.
    """
    wide = torch.promote_types(parts.dtype, torch.float32)
    error = (parts.sum(0, dtype=wide) - whole).abs()
    scale = torch.maximum(parts.abs().amax(0), whole.abs()).to(wide)
    if terms is not None:
        scale = torch.maximum(scale, terms.to(wide).abs().max())
    if whole.ndim > 1:
        error, scale = error.amax(-1), scale.amax(-1)
    return float((error / scale.clamp_min(torch.finfo(wide).tiny)).max())


def check_sum(
    parts: Float[Tensor, "c ..."],
    whole: Float[Tensor, "..."],
    what: str,
    dtype: torch.dtype,
    *,
    terms: Float[Tensor, "..."] | None = None,
) -> float:
    """The relative error of a sum; IncompleteSumError if it exceeds the tolerance of `dtype`, or is not a number."""
    error = sum_error(parts, whole, terms)
    if not error <= TOLERANCE[dtype]:
        raise IncompleteSumError(
            f"{what}: parts miss the whole by {error:.2e} of the largest part, allowed {TOLERANCE[dtype]:.0e}"
            f" in {dtype} (was the pass edited, or a weight changed since?)"
        )
    return error


def stream(cache: Cache, model: Transformer, layer: int | None) -> Float[Tensor, "b p d"]:
    """The residual stream entering block `layer` (None or n_layers: leaving the last block)."""
    layer = depth(model, layer)
    if layer == model.config.n_layers:
        return cache[f"blocks.{layer - 1}.hook_resid_post"]
    return cache[f"blocks.{layer}.hook_resid_pre"]


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
) -> Parts:
    """The stream itself at each depth up to `layer`: states to look through with a lens, not parts that sum.

    Labels `0_pre`, `0_mid`, ..., `final_post`. `incl_mid` is ignored where a block has no middle (parallel,
    attention-only).
    """
    n = depth(model, layer)
    states, labels = [], []
    has_mid = incl_mid and model.config.mlp is not None and not model.config.parallel
    for i in range(n):
        states.append(cache[f"blocks.{i}.hook_resid_pre"])
        labels.append(f"{i}_pre")
        if has_mid:
            states.append(cache[f"blocks.{i}.hook_resid_mid"])
            labels.append(f"{i}_mid")
    states.append(stream(cache, model, n))
    labels.append("final_post" if n == model.config.n_layers else f"{n}_pre")
    return Parts(torch.stack(states), tuple(labels))


def by_sublayer(cache: Cache, model: Transformer, layer: int | None = None) -> Parts:
    """Embeddings and what each attention and MLP added before depth `layer`; checked to sum to the stream there."""
    n = depth(model, layer)
    embeddings = _embeddings(cache, model)
    values, labels = list(embeddings.values()), list(embeddings)
    for i in range(n):
        for part in ("attn_out", "mlp_out") if model.config.mlp else ("attn_out",):
            values.append(cache[f"blocks.{i}.hook_{part}"])
            labels.append(f"{i}_{part}")
    stacked = torch.stack(values)
    check_sum(stacked, stream(cache, model, n), f"sublayers before depth {n}", model.dtype)
    return Parts(stacked, tuple(labels), complete=n == model.config.n_layers)


def head_results(cache: Cache, model: Transformer, layer: int) -> Float[Tensor, "h b p d"]:
    """What each head of a block wrote, z W_O without b_O; checked: heads + b_O = attn_out."""
    weights = Weights(model).layer(layer)
    z = cache[f"blocks.{layer}.attn.hook_z"]
    results = einsum(z, weights.W_O, "b p h e, h e d -> h b p d")
    out = cache[f"blocks.{layer}.hook_attn_out"]
    bias = weights.b_O.expand_as(out)[None]
    check_sum(torch.cat((results, bias)), out, f"heads of layer {layer}", model.dtype)
    return results


def by_head(cache: Cache, model: Transformer, layer: int | None = None) -> Parts:
    """Every head's write before depth `layer` (`L0H3`) and one `remainder`: embeddings, MLPs and biases.

    Checked twice: heads + b_O = attn_out in each layer, and all parts against the stream.
    """
    n = depth(model, layer)
    whole = by_sublayer(cache, model, n)
    heads = [head_results(cache, model, i) for i in range(n)]
    labels = [f"L{i}H{h}" for i in range(n) for h in range(model.config.n_heads)]
    rest = [v for v, name in zip(whole.values, whole.labels, strict=True) if not name.endswith("attn_out")]
    rest += [Weights(model).layer(i).b_O.expand_as(rest[0]) for i in range(n)]
    remainder = torch.stack(rest).sum(0)
    stacked = torch.cat((*heads, remainder[None]))
    check_sum(stacked, stream(cache, model, n), f"heads before depth {n}", model.dtype)
    return Parts(stacked, (*labels, "remainder"), complete=n == model.config.n_layers)


def by_source(cache: Cache, model: Transformer, layer: int, pos: int = -1) -> Float[Tensor, "h k b d"]:
    """What each head of a block moved from each source position to position `pos`; checked to sum to the heads.

    a_ij (v_j W_O), b_V included in v. Ferrando et al. 2024, the head's intermediate representations.
    """
    weights = Weights(model)
    pattern = cache[f"blocks.{layer}.attn.hook_pattern"][:, :, pos]
    v = cache[f"blocks.{layer}.attn.hook_v"][:, :, weights.kv_head()]
    written = einsum(v, weights.layer(layer).W_O, "b k h e, h e d -> h k b d")
    moved = written * rearrange(pattern, "b h k -> h k b 1")
    heads = head_results(cache, model, layer)[:, :, pos]
    check_sum(rearrange(moved, "h k b d -> k h b d"), heads, f"sources of layer {layer}", model.dtype)
    return moved


def by_neuron(cache: Cache, model: Transformer, layer: int, pos: int = -1) -> Parts:
    """What each neuron of a block wrote at position `pos` (`L0N17`), and b_out; checked to sum to mlp_out.

    n_u w_out,u for neuron u (Geva et al. 2022). One position only: all of them would be [neuron, batch, pos, d_model].
    """
    weights = Weights(model).layer(layer)
    if weights.W_out is None or weights.b_out is None:
        raise KeyError(f"layer {layer} has no MLP: this model is attention-only")
    post = cache[f"blocks.{layer}.mlp.hook_post"][:, pos]
    out = cache[f"blocks.{layer}.hook_mlp_out"][:, pos]
    neurons = einsum(post, weights.W_out, "b m, m d -> m b d")
    stacked = torch.cat((neurons, weights.b_out.expand_as(out)[None]))
    check_sum(stacked, out, f"neurons of layer {layer}", model.dtype)
    labels = tuple(f"L{layer}N{u}" for u in range(neurons.shape[0]))
    return Parts(stacked, (*labels, "bias"))


def logit_direction(
    weights: Weights, answer: Int[Tensor, "b"], wrong: Int[Tensor, "b"] | None
) -> tuple[Float[Tensor, "b d"], Float[Tensor, "b"]]:
    """The unembedding direction of a logit (difference), and the constant beta W_U + b_U along it."""
    direction, constant = weights.W_U.mT[answer], weights.b_U[answer]
    if wrong is not None:
        direction = direction - weights.W_U.mT[wrong]
        constant = constant - weights.b_U[wrong]
    return direction, constant + einsum(direction, weights.final_beta, "b d, d -> b")


def _embeddings(cache: Cache, model: Transformer) -> dict[str, Tensor]:
    found = {"embed": cache["hook_embed"]}
    if isinstance(model.config.position, Learned):
        found["pos_embed"] = cache["hook_pos_embed"]
    return found
