"""A part of the residual stream carried through norms whose scale is given, and a direction carried back.

A norm at a given ("frozen") scale is affine, so what a part adds reaches the logits through a chain of affine maps: the
norm of its sublayer's output (sandwich and output norms) and the family's factor on it, the norms of the sum (post-norm
blocks), the final norm. Parts of a sum still sum to the whole after each; a direction after the chain, carried back,
reads the same number where the part writes. Each map is a `FrozenNorm`: at the scale that a pass recorded, at that of a
whole which is at hand, or at 1, as analyses of weights take it. (A lens of a whole state recomputes the scale.)
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from jaxtyping import Float
from torch import Tensor

from interp.core.stats import upcast
from interp.model.config import LayerNorm, ModelConfig, NoNorm
from interp.model.norm import Normalize
from interp.model.transformer import Transformer

OUTPUT_NORMS = {"attn_out": "ln1_post", "mlp_out": "ln2_post"}
"""The norm of what each sublayer puts out, in blocks that have one (sandwich, output)."""
SUM_NORMS = {"attn_out": "ln1", "cross_attn_out": "ln_cross", "mlp_out": "ln2"}
"""The norm of the stream after each sublayer, in post-norm blocks."""


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    """A norm at a given scale, a factor after it: x -> factor (x / scale * gamma + beta), x centred if LayerNorm."""

    norm: Normalize | None
    """None: no norm here."""
    factor: float = 1.0
    sites: tuple[str, ...] = ()
    """Where a pass records the scale, if it does."""
    scale: Float[Tensor, "*b 1"] | None = None
    """None: 1."""

    def recorded(self, seen: Mapping[str, Tensor]) -> "FrozenNorm":
        """The norm at the scale that a pass recorded; `seen` goes by site."""
        return replace(self, scale=seen[self.sites[0]]) if self.sites else self

    def of(self, whole: Float[Tensor, "*b d"] | Callable[[], Tensor]) -> "FrozenNorm":
        """The norm at the scale of the input `whole`; a function that makes `whole` is called only if needed."""
        if self.norm is None:
            return self
        return replace(self, scale=self.norm.scale(whole if isinstance(whole, Tensor) else whole()))

    def through(self, part: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """The image of one part of a sum: the linear part of the map, without beta."""
        if self.norm is not None:
            part = self.norm.frozen(part, part.new_ones(1) if self.scale is None else self.scale)
        return part if self.factor == 1 else part * self.factor

    def size(self, terms: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """Sums of absolute terms after the map, from `terms` before it: rounding errors are relative to these sums.

        LayerNorm subtracts the mean, so the mean of `terms` is added to each coordinate.
        """
        norm = self.norm
        if norm is not None and not isinstance(norm.kind, NoNorm):
            terms = terms + terms.mean(-1, keepdim=True) if isinstance(norm.kind, LayerNorm) else terms
            terms = terms if self.scale is None else terms / self.scale
            terms = terms if norm.gamma is None else terms * norm.gamma.abs().to(terms)
        terms = terms * abs(self.factor)
        return terms if self.beta is None else terms + self.beta.abs().to(terms)

    def back(self, direction: Float[Tensor, "*n d"]) -> Float[Tensor, "*n d"]:
        """The transpose of `through`: `part . back(u)` equals `through(part) . u`."""
        direction = direction if self.factor == 1 else direction * self.factor
        if self.norm is None:
            return direction
        return self.norm.pull_back(direction, direction.new_ones(1) if self.scale is None else self.scale)

    def reading(self, matrix: Float[Tensor, "*n d e"]) -> Float[Tensor, "*n d e"]:
        """The matrix M with x @ M = through(x) @ matrix: `matrix` folded with the norm's scale, gamma and centring.

        In float32 at least.
        """
        return self.back(upcast(matrix.mT)).mT

    @property
    def beta(self) -> Float[Tensor, "d"] | None:
        """The constant that the map adds to the sum, once; None if there is none."""
        bias = None if self.norm is None else self.norm.bias
        return bias if bias is None or self.factor == 1 else bias * self.factor

    def split(self, parts: Float[Tensor, "c *n d"], with_beta: int) -> Float[Tensor, "c *n d"]:
        """All parts of a sum after the map; beta is added to part number `with_beta`."""
        mapped, beta = self.through(parts), self.beta
        if beta is not None:
            mapped[with_beta] += beta.to(mapped)
        return mapped


def output_norm(model: Transformer, layer: int, sublayer: str) -> FrozenNorm:
    """The norm between the output of a sublayer (`attn_out`, ...) and what it adds to the stream."""
    config = model.config
    norm, factor = model.block(layer).post_norm(sublayer), config.factor(sublayer)
    return FrozenNorm(norm, factor, output_scale(config, layer, sublayer))


def sum_norm(model: Transformer, layer: int, sublayer: str) -> FrozenNorm:
    """The norm of the stream after a sublayer is added (post-norm blocks); no norm in other blocks."""
    return FrozenNorm(model.block(layer).sum_norm(sublayer), sites=sum_scale(model.config, layer, sublayer))


def input_norm(model: Transformer, layer: int, sublayer: str) -> FrozenNorm:
    """The norm between the stream and the input of the first matrices of a sublayer."""
    norm = model.block(layer).input_norm(sublayer)
    sites = () if isinstance(norm.kind, NoNorm) else (f"blocks.{layer}.{norm.name}.hook_scale",)
    return FrozenNorm(norm, sites=sites)


def embedding_norm(model: Transformer) -> FrozenNorm:
    """The norm between the sum of the embeddings and the stream that enters the first block."""
    return FrozenNorm(model.ln_embed, sites=embedding_scale(model.config))


def final_norm(model: Transformer) -> FrozenNorm:
    """The norm between the final stream and the input of the unembedding; `of` the final stream is its scale."""
    return FrozenNorm(model.ln_final)


# --- from the config alone: what has to be recorded -----------------------------------------------------------------


def output_scale(config: ModelConfig, layer: int, sublayer: str) -> tuple[str, ...]:
    """The site of the scale of `output_norm`, if it has one."""
    has_norm = sublayer in OUTPUT_NORMS and config.norms_output
    return _scale(config, f"blocks.{layer}.{OUTPUT_NORMS[sublayer]}") if has_norm else ()


def sum_scale(config: ModelConfig, layer: int, sublayer: str) -> tuple[str, ...]:
    """The site of the scale of `sum_norm`, if it has one."""
    return _scale(config, f"blocks.{layer}.{SUM_NORMS[sublayer]}") if config.norms_sum else ()


def embedding_scale(config: ModelConfig) -> tuple[str, ...]:
    """The site of the scale of `embedding_norm`, if it has one."""
    return _scale(config, "ln_embed") if config.embed_norm else ()


def _scale(config: ModelConfig, norm: str) -> tuple[str, ...]:
    return () if isinstance(config.norm, NoNorm) else (f"{norm}.hook_scale",)


def onwards(config: ModelConfig, layer: int, sublayer: str) -> Iterator[tuple[int, str]]:
    """Layer and name of every sublayer from this one on, itself included."""
    order = config.sublayers
    yield from ((layer, name) for name in order[order.index(sublayer) :])
    yield from ((later, name) for later in range(layer + 1, config.n_layers) for name in order)
