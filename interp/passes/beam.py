"""Beam search: the most probable continuations that a few kept at every step lead to, by a score fair to long ones."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.stats import wide
from interp.core.viewer import Brief
from interp.data.batch import Batch
from interp.model.tap import Edit
from interp.model.transformer import Transformer
from interp.passes.generate import Decoder, check_generation
from interp.passes.question import NotFiniteError

MOST_BEAMS = 2**20
"""Of one prompt; every one is a row of a pass."""


@dataclass(frozen=True, eq=False, repr=False)
class Beams(Brief):
    """The best continuations of every prompt, the best first."""

    tokens: Int[Tensor, "b k n"]
    """New tokens; from a stop token on it is repeated."""
    lengths: Int[Tensor, "b k"]
    """How many of them are real, the stop token included."""
    log_probs: Float[Tensor, "b k"]
    """log p of the continuation given the prompt, in nats."""
    scores: Float[Tensor, "b k"]
    """What they are ranked by: `log_probs` over the length penalty."""
    prompts: Batch

    @property
    def best(self) -> Batch:
        """The prompts, padded on the left, each with its best continuation."""
        return self.ranked(0)

    def ranked(self, place: int) -> Batch:
        """The prompts with the continuations of one rank, counted from 0. Errors: IndexError for one not there."""
        if not 0 <= place < self.tokens.shape[1]:
            raise IndexError(f"continuations of ranks 0 to {self.tokens.shape[1] - 1} were kept, got {place}")
        new, lengths = self.tokens[:, place], self.lengths[:, place, None]
        real = torch.arange(new.shape[1], device=new.device) < lengths
        tokens = torch.cat((self.prompts.tokens, new), 1)
        if self.prompts.keep is None and bool(real.all()):
            return Batch(tokens, None, self.prompts.bos)
        return Batch(tokens, torch.cat((self.prompts.real, real), 1), self.prompts.bos)


def beam_search(
    model: Transformer,
    batch: Batch,
    max_new_tokens: int,
    *,
    beams: int = 4,
    length_penalty: float = 0.6,
    stop_tokens: Collection[int] = (),
    use_cache: bool = True,
    edits: Sequence[Edit] = (),
) -> Beams:
    """The continuations of highest score log p(Y) / ((5 + |Y|) / 6)^length_penalty that a search of this width finds.

    Wu et al. 2016, equation 14, without its coverage term; Vaswani et al. 2017 use 4 beams and 0.6. |Y| is the number
    of new tokens. At every step each prompt keeps its `beams` most probable unfinished continuations; one of the
    `beams` most probable extensions that ends in a stop token is finished, and the search of all prompts ends after
    `max_new_tokens`, or once nothing unfinished can reach the worst of `beams` finished ones. With one beam it is
    greedy; with as many as there are continuations it is exact. A penalty of 0 ranks by probability alone, 1 nearly by
    the mean per token. `edits` as in `generate`.
    Errors: ValueError for less than one beam or more than 2^20, a penalty that is negative or not finite, edits of some
    rows, no new token; and as `generate`.
    """
    if not 1 <= beams <= MOST_BEAMS:
        raise ValueError(f"1 to {MOST_BEAMS} beams are required, got {beams}")
    if not 0 <= length_penalty < float("inf"):
        raise ValueError(f"a finite length_penalty >= 0 is required, got {length_penalty}")
    if any(edit.of_rows for edit in edits):
        raise ValueError(
            "a beam search requires edits of all rows alike, since every prompt has several; one names some, or a "
            "position for each"
        )
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens >= 1 is required, got {max_new_tokens}")
    batch = batch.to(model.device).left_aligned()
    check_generation(model.config, batch, max_new_tokens, stop_tokens)
    decoder = Decoder.opened(model, batch, max_new_tokens, use_cache=use_cache, edits=edits)
    stops = torch.tensor(sorted(stop_tokens), dtype=torch.long, device=model.device)
    search = _Search(len(batch), beams, max_new_tokens, length_penalty, stops)
    with torch.no_grad():
        for step in range(max_new_tokens):
            logits = wide(decoder.next_logits()[0])
            if not bool(logits.amax(-1).isfinite().all()):
                raise NotFiniteError("a beam search requires finite logits, the model's are NaN or infinite")
            rows, tokens = search.extended(logits.log_softmax(-1), step)
            if search.settled(step + 1):
                break
            if step + 1 < max_new_tokens:
                decoder.take(rows)
                decoder.push(tokens)
    return search.found(batch)


class _Search:
    """What is unfinished (alive) and what is finished, for b prompts of k beams each."""

    def __init__(self, b: int, k: int, n: int, penalty: float, stops: Int[Tensor, "s"]) -> None:
        self.k, self.n, self.penalty, self.stops = k, n, penalty, stops
        here = stops.device
        self.log_probs = torch.full((b, k), -torch.inf, dtype=torch.float64, device=here)
        self.log_probs[:, 0] = 0.0  # one beam for now: the others would be its copies
        self.tokens = torch.zeros(b, k, n, dtype=torch.long, device=here)
        self.ended_scores = torch.full((b, k), -torch.inf, dtype=torch.float64, device=here)
        self.ended_log_probs, self.ended_tokens = self.ended_scores.clone(), self.tokens.clone()
        self.ended_lengths = torch.zeros(b, k, dtype=torch.long, device=here)
        self.length = 0

    def divisor(self, length: int) -> float:
        """The length penalty."""
        return float(((5 + length) / 6) ** self.penalty)

    def extended(
        self, log_probs: Float[Tensor, "r v"], step: int
    ) -> tuple[Int[Tensor, "bk"], Int[Tensor, "bk"]]:
        """Take one step; returns the row of the passes that each beam goes on from, and the token that it takes.

        log_probs: of every beam's next token; in the first step one row per prompt.
        """
        (b, k), v = self.log_probs.shape, log_probs.shape[-1]
        each = log_probs.view(b, -1, v).expand(-1, k, -1) if step == 0 else log_probs.view(b, k, v)
        total = (self.log_probs[..., None] + each.double()).flatten(1)
        wanted = min(total.shape[1], k * (1 + len(self.stops)))
        best, place = total.topk(wanted, 1)
        beam, token = place // v, place % v
        ends = torch.isin(token, self.stops)
        self.length = step + 1
        self._finish(best, beam, token, ends & (torch.arange(wanted, device=ends.device) < k))
        alive = best.masked_fill(ends, -torch.inf)
        order = alive.argsort(dim=1, descending=True, stable=True)[:, :k]
        beam, token = beam.gather(1, order), token.gather(1, order)
        self.log_probs = alive.gather(1, order)
        self.tokens = self.tokens.gather(1, beam[..., None].expand_as(self.tokens)).clone()
        self.tokens[..., step] = token
        first = torch.arange(b, device=beam.device)[:, None] * (1 if step == 0 else k)
        return (first + (0 if step == 0 else beam)).expand(b, k).flatten(), token.flatten()

    def _finish(
        self,
        log_probs: Float[Tensor, "b w"],
        beam: Int[Tensor, "b w"],
        token: Int[Tensor, "b w"],
        ended: Bool[Tensor, "b w"],
    ) -> None:
        """Let the candidates that ended compete with those that had ended before."""
        log_probs = log_probs.masked_fill(~ended, -torch.inf)
        tokens = self.tokens.gather(1, beam[..., None].expand(-1, -1, self.n)).clone()
        tokens[..., self.length - 1 :] = token[..., None]
        self._compete(log_probs, tokens)

    def _compete(self, log_probs: Float[Tensor, "b w"], tokens: Int[Tensor, "b w n"]) -> None:
        scores = torch.cat((self.ended_scores, log_probs / self.divisor(self.length)), 1)
        lengths = torch.full_like(log_probs, self.length, dtype=torch.long)
        order = scores.argsort(dim=1, descending=True, stable=True)[:, : self.k]
        self.ended_scores = scores.gather(1, order)
        self.ended_log_probs = torch.cat((self.ended_log_probs, log_probs), 1).gather(1, order)
        self.ended_lengths = torch.cat((self.ended_lengths, lengths), 1).gather(1, order)
        joined = torch.cat((self.ended_tokens, tokens), 1)
        self.ended_tokens = joined.gather(1, order[..., None].expand(-1, -1, self.n))

    def settled(self, step: int) -> bool:
        """Whether no unfinished continuation can reach the worst finished one of its prompt any more.

        log p only falls and the penalty only grows, so that log p now over the penalty at the end is a bound.
        """
        reach = self.log_probs.amax(1) / self.divisor(self.n)
        return bool((reach <= self.ended_scores.amin(1)).all())

    def found(self, prompts: Batch) -> Beams:
        """Everything that ended, and what is unfinished where the search is at its end."""
        if self.length == self.n:
            self._compete(self.log_probs, self.tokens)
        width = int(self.ended_lengths.max())
        there = int((self.ended_scores > -torch.inf).sum(1).min())
        return Beams(
            self.ended_tokens[:, :there, :width], self.ended_lengths[:, :there],
            self.ended_log_probs[:, :there], self.ended_scores[:, :there], prompts,
        )  # fmt: skip
