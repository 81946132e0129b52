"""Beam search: the continuations that a model finds most probable, as the first Transformer was decoded.

Sutskever et al. 2014, section 3.2; the length penalty of Wu et al. 2016, equation 14; Vaswani et al. 2017, section 6.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import NotNegative, PositiveCount
from interp.core.stats import upcast
from interp.data.batch import Batch
from interp.families.convert import AnyModel
from interp.model.encoder_decoder import EncoderDecoder
from interp.model.layout import NEW
from interp.model.transformer import Transformer
from interp.passes.generate import check_generation, encoded, longer


@dataclass(frozen=True, eq=False, repr=False)
class Beams:
    """The hypotheses of each row, the best first."""

    tokens: Int[Tensor, "b w n"]
    """New tokens; after the token that ends a hypothesis there is nothing but that token."""
    log_probs: Float[Tensor, "b w"]
    """Log-probabilities of the new tokens up to the end, in nats; -inf where there are fewer hypotheses than asked."""
    scores: Float[Tensor, "b w"]
    """`log_probs` over the length penalty, by which hypotheses are ranked."""
    lengths: Int[Tensor, "b w"]
    """Numbers of new tokens, the ending one included."""

    def __repr__(self) -> str:
        rows, width, n = self.tokens.shape
        return f"Beams({rows} rows, {width} hypotheses, up to {n} tokens)"


@public()
@torch.no_grad()
def beam_search(
    model: AnyModel,
    prompts: Batch,
    max_new_tokens: PositiveCount,
    *,
    width: PositiveCount = 4,
    end: int | None = None,
    length_penalty: NotNegative = 0.6,
) -> Beams:
    """The most probable continuations that a beam of hypotheses finds, for every row.

    Each step extends all hypotheses by every token and keeps the `width` most probable ones. One that has ended stays
    as it is and competes with the others. A beam of 1 is greedy decoding; one of all sequences finds the most probable.

    Args:
        model: the network; of an encoder-decoder the decoder's side is searched.
        prompts: the rows that are continued, of an encoder-decoder the sources.
        max_new_tokens: number of steps.
        width: number of hypotheses of each row.
        end: the token that ends a hypothesis; None: none does.
        length_penalty: exponent of (5 + length) / 6, by which the log-probability is divided for the final ranking;
            0: no penalty.

    Returns:
        The hypotheses of each row, the highest score first.

    Raises:
        ValueError: more tokens than the context holds, packed rows, rows of several continuations, an end outside the
            vocabulary, or a model that is edited at positions counted from the end, which would move with the text.

    Cost:
        No cache: every step passes all columns of `width` rows for each row.

    Source:
        Sutskever et al. 2014, section 3.2; Wu et al. 2016, equation 14 (without its coverage); Vaswani et al. 2017,
        section 6.1: width 4 and penalty 0.6.

    See Also:
        `exactly_right`: greedy decoding against targets.

    Example:
        >>> found = beam_search(model.transformer, Batch(torch.tensor([[1, 2]])), 2, width=3)
        >>> list(found.tokens.shape)
        [1, 3, 2]
    """
    if isinstance(model, EncoderDecoder):
        return _searched(model.decoder, encoded(model, prompts), max_new_tokens, width, end, length_penalty)
    start = prompts.to(model.device).left_aligned()
    return _searched(model, start, max_new_tokens, width, end, length_penalty)


def _searched(
    model: Transformer, start: Batch, n: int, width: int, end: int | None, length_penalty: float
) -> Beams:
    check_generation(model.config, start, n, [] if end is None else [end])
    for edit in model.edits:
        if any(edit.cells.get(axis) == NEW for axis in "pqk"):
            raise ValueError(
                f"beam search passes the whole text at each step, in which no token is new: the edit of {edit.name} "
                "is at new tokens; `generate` runs it, with width 1"
            )
        if any(_counts_from_the_end(edit.cells.get(axis)) for axis in "pqk"):
            raise ValueError(
                f"beam search passes the whole text at each step, and the edit of {edit.name} counts positions from "
                "its end: count them from the beginning"
            )
    rows, device = len(start), start.tokens.device
    new = torch.zeros(rows, width, 0, dtype=torch.int64, device=device)
    total = torch.full((rows, width), -torch.inf, dtype=torch.float64, device=device)
    total[:, 0] = 0.0  # all hypotheses are equal at first: one of them is extended
    lengths = torch.zeros(rows, width, dtype=torch.int64, device=device)
    ended = torch.zeros(rows, width, dtype=torch.bool, device=device)
    for _ in range(n):
        log_probs = upcast(_next_logits(model, start, new)).log_softmax(-1).double()  # [b w v]
        if end is not None:  # what has ended goes on with its last token, which costs nothing
            only_end = torch.full_like(log_probs[0, 0], -torch.inf)
            only_end[end] = 0.0
            log_probs = torch.where(ended[..., None], only_end, log_probs)
        total, index = (total[..., None] + log_probs).flatten(1).topk(width)
        parent, token = index // log_probs.shape[-1], index % log_probs.shape[-1]
        new = torch.cat((new.gather(1, parent[..., None].expand(-1, -1, new.shape[2])), token[..., None]), 2)
        lengths, ended = lengths.gather(1, parent), ended.gather(1, parent)
        lengths = lengths + ~ended
        ended = ended | (token == end) if end is not None else ended
        if bool(ended.all()):
            break
    scores = total / ((5 + lengths.double()) / 6) ** length_penalty
    scores, order = scores.sort(dim=1, descending=True, stable=True)
    tokens = new.gather(1, order[..., None].expand_as(new))
    return Beams(tokens, total.gather(1, order), scores, lengths.gather(1, order))


def _counts_from_the_end(index: object) -> bool:
    """Whether an index of an edit has negative numbers in it."""
    if isinstance(index, int):
        return index < 0
    if isinstance(index, slice):
        return any(map(_counts_from_the_end, (index.start, index.stop)))
    return (
        isinstance(index, Sequence) and not isinstance(index, str) and any(map(_counts_from_the_end, index))
    )


def _next_logits(model: Transformer, start: Batch, new: Int[Tensor, "b w n"]) -> Float[Tensor, "b w v"]:
    """Logits of the token after each hypothesis."""
    rows, width, n = new.shape
    begun = start.rows(torch.arange(rows).repeat_interleave(width))
    tokens = torch.cat((begun.tokens, new.flatten(0, 1)), 1)
    keep = None if begun.keep is None else F.pad(begun.keep, (0, n), value=True)
    last = torch.full((rows * width, 1), tokens.shape[1] - 1, device=tokens.device)
    types = longer(begun.types, n)
    logits = model(tokens, keep=keep, types=types, memory=begun.memory, logits_at=last)[:, 0]
    return logits.unflatten(0, (rows, width))
