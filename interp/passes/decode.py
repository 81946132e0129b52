"""Targets of an encoder-decoder: a source is encoded once, and the decoder continues its start token."""

from collections.abc import Collection

import torch

from interp.data.batch import Batch
from interp.model.encoder_decoder import EncoderDecoder
from interp.passes.generate import generate


@torch.no_grad()
def encoded(model: EncoderDecoder, source: Batch, target: Batch | None = None) -> Batch:
    """The target as a batch of the decoder, its memory the encoded source; without a target, the start token alone.

    What takes a Transformer and a batch takes `model.decoder` and this one, `observe` for one. The memory has no
    gradient.
    """
    source = source.to(model.device)
    memory = model.encode(source.tokens, keep=source.keep)
    if target is None:
        start = torch.full((len(source), 1), model.config.start_token, device=model.device)
        return Batch(start, memory=memory)
    return Batch(target.tokens.to(model.device), target.keep, target.bos, memory=memory).to(model.device)


def greedy_decode(
    model: EncoderDecoder,
    source: Batch,
    max_new_tokens: int,
    *,
    stop_tokens: Collection[int] = (),
    use_cache: bool = True,
) -> Batch:
    """The start token and up to `max_new_tokens` tokens after it, each the most probable one.

    A row ends with a stop token and is padded with it, not kept. Padding of the source, on either side, changes
    nothing. For sampling, edits and reads: `stream(model.decoder, encoded(model, source), n)`.
    Errors: ValueError as in `generate`.
    """
    start = encoded(model, source)
    return generate(model.decoder, start, max_new_tokens, stop_tokens=stop_tokens, use_cache=use_cache)
