"""How the next token is chosen from the logits: repetition penalty, then temperature, top-k and top-p."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.stats import upcast
from interp.data.batch import Batch
from interp.passes.question import NotFiniteError


@public()
@dataclass(frozen=True)
class Sampling:
    """Rule by which the next token is drawn from the logits: temperature, then top-k, then top-p."""

    temperature: float = 1.0
    top_k: int | None = None
    """Number of most probable tokens that are kept; None: all."""
    top_p: float | None = None
    """Probability that the fewest kept tokens sum to at least; None: all are kept."""
    seed: int | None = None
    """Seed of a generator of its own; None: torch's global one."""

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(f"temperature > 0 is required (greedy: no sampling), got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k >= 1 is required, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p in (0, 1] is required, got {self.top_p}")

    def probabilities(self, logits: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        """The distribution drawn from: temperature first, then top-k, then top-p, renormalised."""
        logits = upcast(logits)  # the largest scaled logit is 0, however low the temperature
        lowest = torch.finfo(logits.dtype).tiny
        scaled = (logits - logits.amax(-1, keepdim=True)) / max(self.temperature, lowest)
        if self.top_k is not None:
            worst = scaled.topk(min(self.top_k, scaled.shape[-1])).values[:, -1:]
            scaled = scaled.masked_fill(scaled < worst, -torch.inf)
        probs = scaled.softmax(-1)
        if self.top_p is None:
            return probs
        ranked, order = probs.sort(descending=True, stable=True)
        before = ranked.cumsum(-1) - ranked
        beyond = before >= self.top_p
        beyond[:, 0] = False  # a p that the dtype rounds to 0 keeps the most probable too
        ranked = ranked.masked_fill(beyond, 0.0)
        truncated = torch.zeros_like(probs).scatter(1, order, ranked)  # back in the order of token ids
        return truncated / truncated.sum(-1, keepdim=True)


class Choice:
    """The rule of one generation with its state: the tokens already in each row, and its generator.

    Greedy without `sampling`. ValueError unless the penalty is positive.
    """

    def __init__(
        self, batch: Batch, d_vocab: int, *, sampling: Sampling | None, repetition_penalty: float
    ) -> None:
        if not repetition_penalty > 0:
            raise ValueError(f"repetition_penalty > 0 is required (1: none), got {repetition_penalty}")
        self._sampling = sampling
        self._penalty = repetition_penalty
        self._present = None if repetition_penalty == 1 else present(batch, d_vocab)
        seed = None if sampling is None else sampling.seed
        self._generator = None if seed is None else torch.Generator(batch.tokens.device).manual_seed(seed)

    def draw(self, logits: Float[Tensor, "b v"]) -> Int[Tensor, "b"]:
        """The next token of each row; it counts as present from now on.

        Raises:
            NotFiniteError: (a ValueError) where the largest logit of a row is NaN or infinite.
        """
        if not bool(logits.amax(-1).isfinite().all()):
            raise NotFiniteError(
                "a next token requires finite logits, the model's are NaN or infinite: see the prompt, the edits and "
                "the weights"
            )
        if self._present is not None:
            logits = penalised(logits, self._present, self._penalty)
        if self._sampling is None:
            tokens = logits.argmax(-1)
        else:
            probabilities = self._sampling.probabilities(logits)
            tokens = torch.multinomial(probabilities, 1, generator=self._generator)[:, 0]
        if self._present is not None:
            self._present.scatter_(1, tokens[:, None], True)
        return tokens


def penalised(
    logits: Float[Tensor, "b v"], present: Bool[Tensor, "b v"], penalty: float
) -> Float[Tensor, "b v"]:
    """Logits with those of the tokens already present divided by `penalty` if positive, else multiplied by it.

    Keskar et al. 2019 (CTRL), section 4.1, with the rule for negative logits that became common: both signs lose.
    The rule depends on where the logits' zero is, which softmax does not.
    """
    return torch.where(present, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def present(batch: Batch, d_vocab: int) -> Bool[Tensor, "b v"]:
    """True at the tokens that each row contains; padding does not count."""
    real = torch.ones_like(batch.tokens) if batch.keep is None else batch.keep.to(batch.tokens.dtype)
    return batch.tokens.new_zeros(len(batch), d_vocab).scatter_add_(1, batch.tokens, real) > 0
