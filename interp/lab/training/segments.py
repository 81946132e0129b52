"""Rows read segment by segment, each with a constant past: gradients stop where a segment begins.

Dai et al. 2019, "Transformer-XL", section 3.2, and truncated backpropagation of models with a state.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from interp.data.batch import Batch
from interp.model.kv_cache import KVCache
from interp.model.tap import Tap
from interp.model.transformer import Transformer


class ConstantPast(KVCache):
    """A cache whose keys, values and states are constants, while those of the pass itself have gradients."""

    def append(
        self, layer: int, k: Float[Tensor, "b n g r"], v: Float[Tensor, "b n g e"]
    ) -> tuple[Float[Tensor, "b k g r"], Float[Tensor, "b k g e"]]:
        """The constants of earlier segments, followed by these, which are kept as constants."""
        with torch.no_grad():
            super().append(layer, k, v)
        keys, values = (x[layer][:, : self.length] for x in (self.keys, self.values))
        return torch.cat((keys.to(k.dtype), k), 1), torch.cat((values.to(v.dtype), v), 1)

    def advance(self, n: int, keep: Bool[Tensor, "b k"] | None) -> None:
        """Count `n` tokens as seen; the states that they left are constants from now on."""
        super().advance(n, keep)
        self.states = {key: tuple(x.detach() for x in state) for key, state in self.states.items()}


def logits_by_segment(
    model: Transformer, batch: Batch, segment: int, tap: Tap | None = None
) -> Float[Tensor, "b p v"]:
    """The logits of a pass over whole rows, their gradients cut where every `segment` columns begin.

    Keys, values and states of earlier segments are constants. In Transformer-XL only the stream that keys and values
    are made of is one, so that its W_K and W_V also learn from the memory.

    Args:
        model: a causal network.
        batch: the rows; padding may stand on either side, segments are counted in columns.
        segment: columns of a segment.
        tap: edits of every segment's pass.

    Returns:
        [b, p, v], equal to the logits of one pass but for rounding.

    Raises:
        ValueError: packed rows, or a model that is not causal.
    """
    batch.require_one_text("a pass by segments")
    rows, n = batch.tokens.shape
    past = ConstantPast(model.config, rows, n, device=model.device, dtype=model.dtype)

    def parts() -> Iterator[Tensor]:
        for begin in range(0, n, segment):
            columns = slice(begin, begin + segment)
            keep = None if batch.keep is None else batch.keep[:, columns]
            yield model(batch.tokens[:, columns], tap, keep=keep, cache=past)

    return torch.cat(list(parts()), 1)
