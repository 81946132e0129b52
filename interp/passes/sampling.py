"""How the next token is chosen from the logits: repetition penalty, then temperature, top-k and top-p."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.fitting import fits
from interp.core.hints import Required
from interp.core.kinds import Number
from interp.core.stats import upcast
from interp.core.transfers import to_device
from interp.data.batch import Batch
from interp.passes.question import NotFiniteError

MOST_PENALTY = 1000.0
"""The largest repetition penalty, whose inverse is the smallest: beyond, logits overflow in half precision."""


def _no_temperature(value: object) -> str | None:
    return None if fits(value, Number) and isinstance(value, int | float) and value > 0 else ""


@public()
@dataclass(frozen=True)
class Sampling:
    """Rule by which the next token is drawn from the logits: temperature, then top-k, then top-p."""

    temperature: Annotated[float, Required("a number above 0 (greedy: no sampling)", _no_temperature)] = 1.0
    top_k: int | None = None
    """Number of most probable tokens that are kept; None: all."""
    top_p: float | None = None
    """Probability that the fewest kept tokens sum to at least; None: all are kept."""
    seed: int | None = None
    """Seed of the draws, by which a row is drawn alike on every device and whatever rows are beside it; None: torch's
    global generator."""

    def __post_init__(self) -> None:
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k >= 1 is required, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p in (0, 1] is required, got {self.top_p}")

    @public()
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

    Greedy without `sampling`. ValueError for a penalty that is not positive, or a thousand times more or less than 1.
    """

    def __init__(
        self, batch: Batch, d_vocab: int, *, sampling: Sampling | None, repetition_penalty: float
    ) -> None:
        if not 1 / MOST_PENALTY <= repetition_penalty <= MOST_PENALTY:
            raise ValueError(
                f"repetition_penalty in [{1 / MOST_PENALTY:g}, {MOST_PENALTY:g}] is required (1: none), "
                f"got {repetition_penalty}"
            )
        self._sampling = sampling
        self._penalty = repetition_penalty
        self._present = None if repetition_penalty == 1 else present(batch, d_vocab)
        self._draws = None if sampling is None or sampling.seed is None else _draws(batch, sampling.seed)

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
            if self._draws is None:
                tokens = torch.multinomial(probabilities, 1)[:, 0]
            else:
                uniform = torch.tensor(
                    [draw.random() for draw in self._draws], dtype=torch.float64, device="cpu"
                )
                tokens = inverse_draw(probabilities, uniform)
        if self._present is not None:
            self._present.scatter_(1, tokens[:, None], True)
        return tokens


def _draws(batch: Batch, seed: int) -> list[np.random.Generator]:
    """A generator for every row: of the seed, the number of the row, and how many rows before it have that number."""
    numbers = range(len(batch)) if batch.row is None else batch.row.tolist()
    seen: Counter[int] = Counter()
    draws = []
    for number in numbers:
        draws.append(np.random.default_rng([abs(seed), int(seed < 0), number, seen[number]]))
        seen[number] += 1
    return draws


def inverse_draw(probabilities: Float[Tensor, "b v"], uniform: Float[Tensor, "b"]) -> Int[Tensor, "b"]:
    """The token of each row at which the cumulated probability passes a number in [0, 1): one draw of each row.

    Summed in float64, which half a vocabulary of small probabilities requires; a token of probability 0 is never drawn.
    """
    cumulated = probabilities.double().cumsum(-1)
    place = to_device(uniform, probabilities.device)[:, None] * cumulated[:, -1:]
    return torch.searchsorted(cumulated, place, right=True)[:, 0].clamp_max(_last_possible(probabilities))


def _last_possible(probabilities: Float[Tensor, "b v"]) -> Int[Tensor, "b"]:
    """The last token of each row with a probability above 0: where rounding would go beyond."""
    return probabilities.shape[-1] - 1 - (probabilities > 0).flip(-1).int().argmax(-1)


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
