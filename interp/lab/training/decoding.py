"""Accuracy of an encoder-decoder by greedy decoding, without the target as input."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from interp.core.boundary import public
from interp.model.encoder_decoder import EncoderDecoder
from interp.passes.generate import decode
from interp.tasks.examples import Examples


@public()
def exactly_right(model: EncoderDecoder, examples: Examples, *, end: int = 1) -> Bool[Tensor, "b"]:
    """Which sources are decoded to their target, every token of it, and to nothing after it.

    The most probable token is taken each time, until `end` or as many tokens as the longest target has.

    Args:
        model: the encoder-decoder.
        examples: sources and their targets.
        end: the token that finishes every target.

    Returns:
        [b], True where the whole target is right.

    Raises:
        ValueError: examples without a source, or targets that do not finish with `end`.
    """
    target, source = examples.batch, examples.source
    if source is None:
        raise ValueError("decoding requires sources, the examples have none")
    last = target.tokens.gather(1, target.last()[:, None])
    if bool((last != end).any()):
        raise ValueError(f"targets that finish with token {end} are required, got {last.unique().tolist()}")
    found = decode(model, source, target.tokens.shape[1] - 1, stop_tokens=[end])
    width = max(found.tokens.shape[1], target.tokens.shape[1])
    said, told = (
        torch.nn.functional.pad(each.token_ids, (0, width - each.tokens.shape[1]), value=-1)
        for each in (found.to(target.tokens.device), target)
    )
    return (said == told).all(1)
