"""Writing weights by hand: a model of Gaussian noise, and the heads and neurons that are planted in it."""

import torch
from jaxtyping import Float
from torch import Tensor

from interp.model.config import ModelConfig
from interp.model.mlp import FeedForward
from interp.model.transformer import Transformer


def noisy(config: ModelConfig, noise: float, generator: torch.Generator) -> Transformer:
    """A frozen model whose every parameter is drawn from N(0, noise^2)."""
    model = Transformer(config).requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * noise)
    return model


def plant_head(
    model: Transformer,
    where: tuple[int, int],
    *,
    query: Float[Tensor, "d e"],
    key: Float[Tensor, "d e"],
    value: Float[Tensor, "d e"],
    out: Float[Tensor, "e d"],
) -> None:
    """Write the four matrices (row convention) of the head at (layer, head) into the fused parameters."""
    layer, head = where
    attn = model.block(layer).attn
    for name, matrix in zip("qkv", (query, key, value), strict=True):
        attn.part(name)[0][head].copy_(matrix.T)
    columns = slice(head * attn.d_head, (head + 1) * attn.d_head)
    attn.out.weight[:, columns].copy_(out.T)


def plant_neurons(
    model: Transformer,
    layer: int,
    *,
    into: Float[Tensor, "d m"],
    bias: Float[Tensor, "m"],
    out: Float[Tensor, "m d"],
    offset: Float[Tensor, "d"] | None = None,
) -> None:
    """Write the first m neurons of a layer's MLP, `act(x into + bias) out`, and add `offset` to what the layer writes.

    The other neurons keep their weights.
    """
    mlp = model.block(layer).mlp
    assert isinstance(mlp, FeedForward)
    n = len(bias)
    mlp.into.weight[:n].copy_(into.T)
    mlp.into.bias[:n].copy_(bias)
    mlp.out.weight[:, :n].copy_(out.T)
    if offset is not None:
        mlp.out.bias.add_(offset)
