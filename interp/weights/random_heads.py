"""Random heads in place of a model's own, on the streams that its own make: the null of a head's score.

Attention that is spread evenly is a level, not chance: a head that nobody trained departs from it a little, and enough
rows show that beyond doubt. Whether a head does more than such a head is a question about heads, so the draws that
answer it are heads.
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
"""The most random heads per head: each is a model of its own, drawn and run."""


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
    """A model with random heads on the streams of the given one: later layers read what the given heads write.

    W_Q, W_K, W_V and W_O are turned in the stream, each by a uniformly random orthogonal matrix (Haar) that is drawn
    from the seed and is the same in all layers. So a random head has the singular values of one of the model's own
    heads, its biases, its positions and its group, and reads and writes random directions. What it writes is not passed
    on: every layer reads the stream as it is in the model. Parameters outside attention are shared.

    In a model whose head weights are isotropic Gaussian draws that nobody trained, the heads of a layer and the random
    ones in their place are exchangeable, whatever the rest of the model is.
    """
    copies = {name: value.clone() for name, value in model.named_parameters() if ".attn." in name}
    found = model.with_parameters(copies)
    d = model.config.d_model
    turns = haar_frames(4, d, d, torch.Generator().manual_seed(seed), torch.float32)
    for layer in range(model.config.n_layers):
        real, attention = (each.block(layer).attn for each in (model, found))
        for name, turn in zip("qkv", turns[:3], strict=True):
            _turn(attention.part(name)[0], turn)
        _turn(attention.out.weight.mT, turns[3])
        attention.register_forward_hook(partial(_as_written_by, real))
    return found


def _turn(rows: Tensor, turn: Tensor) -> None:
    """Turn rows `[... d]` of the stream, in place."""
    rows.copy_(upcast(rows) @ turn.to(upcast(rows)))


def _as_written_by(real: Attention, _: nn.Module, given: tuple[object, ...], __: Tensor) -> Tensor:
    """What the real heads write for the same input: a forward hook of the random ones, which alone are observed."""
    x, source, shared, _tap, *only = given
    return cast(Tensor, real(x, source, shared, None, *only))
