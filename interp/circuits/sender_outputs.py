"""What every sender of an edge graph adds to the stream in one run, heads kept as z, d_head wide."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from interp.circuits.edge_scores import START
from interp.core.precision import wide
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.model.weights import Weights

Values = dict[Read, Tensor]
"""Answers to `edge_scores.Change.reads`."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """What every sender adds to the stream, one row per example or one for all; heads as z, d_head wide.

    Behind a norm of the sum of a layer's heads (sandwich and output norms), z is divided by the norm's scale in its
    own run, so that W_O and the linear part of the norm make a head's share of it; the bias b_O is then one head more,
    whose z is 1 / scale.
    """

    start: Float[Tensor, "n p d"]
    heads: tuple[Float[Tensor, "n p h e"], ...]
    mlp: tuple[Float[Tensor, "n p d"], ...]

    @classmethod
    def of(cls, model: Transformer, values: Values) -> "Outputs":
        """From the answers to `Change.reads`."""
        layers = range(model.config.n_layers)
        mlp = [mlp_output(values, layer) for layer in layers if model.config.mlp is not None]
        heads = [head_outputs(model, values, layer) for layer in layers]
        return cls(wide(values[Read(START)]), tuple(heads), tuple(mlp))

    def zero(self, n_heads: int) -> "Outputs":
        """The same with nothing said; a bias behind a norm is no head's, it stays what it is."""

        def nothing(x: Tensor) -> Tensor:
            return torch.zeros_like(x[:1])

        heads = tuple(nothing(x[:, :, :n_heads]) for x in self.heads)
        return Outputs(nothing(self.start), heads, tuple(map(nothing, self.mlp)))

    def summed(self, weights: Float[Tensor, "b p"]) -> "Outputs":
        """The weighted sum over the examples, position by position, as one row."""

        def one(x: Tensor) -> Tensor:
            return torch.einsum("bp...,bp->p...", x, weights.to(x))[None]

        return Outputs(one(self.start), tuple(map(one, self.heads)), tuple(map(one, self.mlp)))

    def __add__(self, other: "Outputs") -> "Outputs":
        heads, mlp = (
            tuple(x + y for x, y in zip(mine, theirs, strict=True))
            for mine, theirs in ((self.heads, other.heads), (self.mlp, other.mlp))
        )
        return Outputs(self.start + other.start, heads, mlp)


def head_outputs(model: Transformer, values: Values, layer: int) -> Float[Tensor, "n p h e"]:
    """What the heads of a layer say, see `Outputs`."""
    z, post = wide(values[Read(f"blocks.{layer}.attn.hook_z")]), Read(f"blocks.{layer}.ln1_post.hook_scale")
    if post not in values:
        return z
    scale = wide(values[post])[..., None]
    if model.block(layer).attn.out.bias is None:
        return z / scale
    one = torch.zeros_like(z[:, :, :1])
    one[..., 0] = 1
    return torch.cat((z, one), 2) / scale


def head_matrices(model: Transformer, layer: int) -> Float[Tensor, "h e d"]:
    """What turns the `head_outputs` of a layer into what is added to the stream."""
    out, norm = wide(Weights(model).layer(layer).W_O), model.block(layer).post_norm("attn_out")
    bias = model.block(layer).attn.out.bias
    if norm is not None and norm.gamma is not None:
        if bias is not None:
            extra = torch.zeros_like(out[:1])
            extra[0, 0] = wide(bias)
            out = torch.cat((out, extra))
        out = norm.frozen(out, out.new_ones(1))
    return out * model.config.factor("attn_out")


def mlp_output(values: Values, layer: int) -> Float[Tensor, "n p d"]:
    """What the MLP of a layer adds to the stream."""
    return wide(values[Read(f"blocks.{layer}.hook_mlp_out")])
