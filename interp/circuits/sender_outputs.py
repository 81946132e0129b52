"""What every sender of an edge graph adds to the stream in one run, heads kept as z, d_head wide."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from interp.circuits.edge_scores import START, Change
from interp.core.precision import wide
from interp.data.batch import Batch
from interp.model.tap import Read
from interp.model.transformer import Transformer
from interp.model.weights import Weights
from interp.passes.observe import observe

Values = Mapping[Read, Tensor]
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

    @classmethod
    def nothing(cls, model: Transformer) -> "Outputs":
        """Nothing said, for all examples and positions; a bias behind a norm is no head's, it stays what it is."""
        config, like = model.config, wide(model.embed.weight[:0])
        stream, z = like.new_zeros(1, 1, 1), like.new_zeros(1, 1, config.n_heads, 1)
        return cls(
            stream, (z,) * config.n_layers, (stream,) * config.n_layers if config.mlp is not None else ()
        )

    def named(self) -> dict[str, Tensor]:
        """The same as one tensor per sender and layer, by name; `of_named` takes it back."""
        heads = {f"heads {layer}": x for layer, x in enumerate(self.heads)}
        return {"start": self.start} | heads | {f"mlp {layer}": x for layer, x in enumerate(self.mlp)}

    @classmethod
    def of_named(cls, values: Mapping[str, Tensor]) -> "Outputs":
        """What `named` made flat."""
        heads = tuple(x for name, x in values.items() if name.startswith("heads"))
        return cls(values["start"], heads, tuple(x for name, x in values.items() if name.startswith("mlp")))


def said_by_senders(model: Transformer, batch: Batch) -> dict[str, Float[Tensor, "b p ..."]]:
    """What every sender adds to the stream on some prompts, by name."""
    trace = observe(model, batch, Change.reads(model), answers_only=True).trace
    return Outputs.of(model, trace).named()


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
