"""First weights other than GPT-2's, which every model begins with."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from interp.core.boundary import public
from interp.model.attention import Attention, CrossAttention
from interp.model.block import FeedForward


@public()
@torch.no_grad()
def xavier(model: nn.Module) -> None:
    """Give every linear map and table uniform weights of +-sqrt(6 / (rows + columns)), as Glorot and Bengio (2010).

    Their variance is 2 / (rows + columns). Queries, keys and values of all heads, and the branches of a gated MLP,
    are matrices by themselves, though they are stored in one; others count as they are stored. What is no linear map
    or table (gains, biases, convolutions, experts) stays as it is. Draws from torch's global generator.

    Args:
        model: the network, changed in place.

    Source:
        Glorot and Bengio 2010, equation 16.

    Example:
        >>> network = interp.model.build(interp.lab.training.attention_only(1, 36, 8))
        >>> xavier(network)
        >>> bool(network.embed.weight.abs().max() <= (6 / (36 + 64)) ** 0.5)
        True
    """
    done: set[int] = set()
    for weight, rows in _matrices(model):
        if id(weight) not in done:  # tied matrices are one
            done.add(id(weight))
            for part in weight.split(rows):
                nn.init.xavier_uniform_(part)


def _matrices(model: nn.Module) -> Iterator[tuple[Tensor, list[int]]]:
    """Every matrix, and the rows of each of those that are stored in it."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear | nn.Embedding) and isinstance(child.weight, nn.Parameter):
                yield child.weight, _rows(parent, name, len(child.weight))


def _rows(parent: nn.Module, name: str, rows: int) -> list[int]:
    if isinstance(parent, Attention) and name in ("qkv", "kv"):
        heads = parent.heads[1:] if isinstance(parent, CrossAttention) else parent.heads
        if sum(heads) * parent.d_head == rows:
            return [n * parent.d_head for n in heads]
    if isinstance(parent, FeedForward) and parent.gated and name == "into":
        return [rows // 2] * 2
    return [rows]
