"""Random heads in place of a model's own, run on the model's own residual streams: the null of a head's score.

Even attention is a reference level, not a null distribution: an untrained head departs from it a little, which is
significant with enough rows. The p of a head's score therefore compares it with the scores of random heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from interp.core.haar import haar_frames
from interp.core.stats import upcast
from interp.model.attention import Attention
from interp.model.transformer import Transformer

MOST_RANDOM = 1_000_000
"""The most random heads per head; each takes a random model of its own, which is run on all rows."""


def random_heads(model: Transformer, n: int) -> Iterator[Transformer]:
    """The model with random heads, n times: `with_random_heads` of the seeds 0 to n - 1, one model at a time.

    Raises:
        ValueError: n below 0 or above `MOST_RANDOM`, a model whose heads read the stream by more than queries, keys and
            values, or one that is edited.
    """
    if not 0 <= n <= MOST_RANDOM:
        raise ValueError(
            f"random, a number of random heads beside each head, must be in [0, {MOST_RANDOM}], got {n}"
        )
    for mixer in model.config.mixers if n else ():
        if not (mixer.traits.queries and mixer.traits.reads_by_qkv):
            raise ValueError(
                "random heads require heads that read the stream by queries, keys and values alone, this model has "
                f"{type(mixer).__name__}: leave random at 0"
            )
    if n and model.edits:
        raise ValueError(
            "random heads stand beside a model without edits: leave random at 0, or the edits away"
        )
    return (with_random_heads(model, seed) for seed in range(n))


@torch.no_grad()
def with_random_heads(model: Transformer, seed: int) -> Transformer:
    """The model with random heads that are only observed: later layers read the output of the real heads.

    On the side of the stream, W_Q, W_K, W_V and W_O are each rotated by a uniformly random orthogonal matrix (Haar),
    drawn from the seed, the same in all layers. So a random head keeps the singular values, biases, positions and
    key/value group of one of the model's heads, but reads and writes random directions. Parameters outside attention
    are shared.

    In an untrained model with isotropic Gaussian head weights, the heads of a layer and the random heads in their place
    are exchangeable, whatever the rest of the model is.
    """
    copies = {name: value.clone() for name, value in model.named_parameters() if ".attn." in name}
    randomised = model.with_parameters(copies)
    d = model.config.d_model
    turns = haar_frames(4, d, d, torch.Generator().manual_seed(seed), torch.float32)
    for layer in range(model.config.n_layers):
        real, attention = (network.block(layer).attn for network in (model, randomised))
        attention.register_forward_hook(partial(_real_output, real))
        if layer and model.config.shared_blocks:
            continue  # the first layer's weights are all layers'
        for name, turn in zip("qkv", turns[:3], strict=True):
            _rotate_rows(attention.part(name)[0], turn)
        _rotate_rows(attention.out.weight.mT, turns[3])
    return randomised


def _rotate_rows(rows: Tensor, turn: Tensor) -> None:
    """Rotate rows `[... d]`, vectors of the stream, in place."""
    rows.copy_(upcast(rows) @ turn.to(upcast(rows)))


def _real_output(real: Attention, _: nn.Module, inputs: tuple[object, ...], __: Tensor) -> Tensor:
    """Forward hook of random attention: returns the real attention's output for the same inputs, without a tap."""
    x, source, shared, _tap, *only = inputs
    return cast(Tensor, real(x, source, shared, None, *only))
