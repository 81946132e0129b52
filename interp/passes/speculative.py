"""Speculative decoding: a small model guesses some tokens, the large one judges them in one pass, and what comes out is
distributed as if the large one had drawn every token by itself.

Leviathan et al. 2023, algorithm 1; Chen et al. 2023. The proof is theirs (appendix A.1), the test is ours: every way
that the draws can fall, summed exactly (`tests/passes/test_speculative.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.stats import wide
from interp.core.viewer import Brief
from interp.data.batch import Batch, Prompts
from interp.model.kv_cache import KVCache
from interp.model.tap import Tap
from interp.model.transformer import Transformer
from interp.passes.generate import check_generation
from interp.passes.observe import Model, as_model
from interp.passes.question import NotFiniteError
from interp.passes.sampling import Sampling


@dataclass(frozen=True, eq=False, repr=False)
class Speculated(Brief):
    """Prompts with their continuations, and how many of the guesses were taken."""

    batch: Batch
    drafted: Int[Tensor, "b"]
    """Tokens that the small model guessed."""
    accepted: Int[Tensor, "b"]
    """Of these, the ones that were taken."""
    passes: Int[Tensor, "b"]
    """Passes of the large model; without a small one there is a pass for every new token."""


@runtime_checkable
class Draws(Protocol):
    """Where a continuation gets its random numbers."""

    def token(self, probabilities: Float[Tensor, "v"]) -> int:
        """A token of this distribution."""
        ...

    def accepts(self, probability: float) -> bool:
        """True with this probability."""
        ...


class RandomDraws:
    """The draws of a generator, seeded or torch's global one."""

    def __init__(self, sampling: Sampling | None) -> None:
        seed = None if sampling is None else sampling.seed
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)

    def token(self, probabilities: Float[Tensor, "v"]) -> int:
        """A token of this distribution."""
        return int(torch.multinomial(probabilities.cpu(), 1, generator=self._generator))

    def accepts(self, probability: float) -> bool:
        """True with this probability."""
        return float(torch.rand((), generator=self._generator, dtype=torch.float64)) < probability


@public(plain_pass=True)
def speculate(
    model: Model,
    draft: Model,
    prompts: Prompts,
    max_new_tokens: int = 20,
    *,
    lookahead: int = 4,
    sampling: Sampling | None = None,
    stop_tokens: Collection[int] = (),
    prepend_bos: bool | None = None,
) -> Speculated:
    """Prompts continued as `model` would continue them, most of the work done by `draft`, a smaller model.

    `draft` guesses `lookahead` tokens; `model` reads all of them in one pass. A guess x is taken with the probability
    min(1, p(x) / q(x)), p and q the two models' distributions after `sampling` (temperature, top-k, top-p); the first
    one that is not taken is replaced by a draw from max(0, p - q), normalised, and if all are taken `model` adds one
    of its own. Every token is then distributed by p (Leviathan et al. 2023, algorithm 1). Without `sampling` guesses
    are taken as long as they are the most probable tokens: greedy decoding, token by token the same up to rounding of
    passes of another width. A share of sum_x min(p(x), q(x)) of the guesses is taken. Prompts are continued one by
    one; a seed gives other tokens than `generate` does with it.
    Errors: ValueError for models of different vocabularies, mixers or MLPs that keep a state, which cannot take back
    what they read, a lookahead below 1, and as `HookedTransformer.generate`.

    Example:
        >>> found = interp.passes.speculate(model, model, prompt, 5, lookahead=3)
        >>> int(found.accepted), int(found.passes)  # a model takes all of its own guesses
        (3, 2)
    """
    subject, small = as_model(model), as_model(draft).transformer
    large = subject.transformer
    if lookahead < 1:
        raise ValueError(f"lookahead >= 1 is required, got {lookahead}")
    if (sizes := (large.config.n_outputs, small.config.n_outputs))[0] != sizes[1]:
        raise ValueError(f"two models of one vocabulary are required, got {sizes[0]} and {sizes[1]} tokens")
    for each in (large, small):
        if each.config.stateful:
            raise ValueError(
                "speculation requires models without a state of the past, which cannot be taken back"
            )
    batch = subject.text.batch(prompts, prepend_bos=prepend_bos, side="left")
    for each in (large, small):
        check_generation(each.config, batch, max_new_tokens, stop_tokens)
    draws, n = RandomDraws(sampling), max_new_tokens
    rows = [tokens[real] for tokens, real in zip(batch.tokens, batch.real, strict=True)]
    each_row = [
        continued_row(large, small, row, n, lookahead, sampling, set(stop_tokens), draws) for row in rows
    ]
    counts = torch.tensor([counted for _, counted in each_row]).reshape(-1, 3)
    found = Batch.of([tokens for tokens, _ in each_row], side="left", bos=batch.bos)
    return Speculated(found, *counts.unbind(1))


def continued_row(
    large: Transformer,
    small: Transformer,
    prompt: Int[Tensor, "p"],
    n: int,
    lookahead: int,
    sampling: Sampling | None,
    stops: set[int],
    draws: Draws,
) -> tuple[list[int], tuple[int, int, int]]:
    """One prompt and its continuation; how many tokens were drafted and accepted, and how many passes that took."""
    tokens: list[int] = prompt.tolist()
    end = len(tokens) + n
    judge, guesser = (_Reader(each, len(tokens), end, sampling) for each in (large, small))
    drafted = accepted = passes = 0
    while len(tokens) < end:
        start = len(tokens)
        guesses: list[int] = []
        q: list[Float[Tensor, "v"]] = []
        for _ in range(min(lookahead, end - start - 1)):
            q.append(guesser.after(tokens + guesses, 1)[0])
            guesses.append(draws.token(q[-1]))
        p = judge.after(tokens + guesses, len(guesses) + 1)
        new = _judged(guesses, q, p, draws)
        drafted, accepted, passes = drafted + len(guesses), accepted + len(new) - 1, passes + 1
        stopped = next((i for i, token in enumerate(new) if token in stops), None)
        tokens += new if stopped is None else new[: stopped + 1]
        if stopped is not None:
            accepted -= max(0, len(new) - 1 - (stopped + 1))
            break
        judge.forget(len(tokens) - 1)
        guesser.forget(len(tokens) - 1)
    return tokens, (drafted, accepted, passes)


def _judged(
    guesses: list[int], q: list[Float[Tensor, "v"]], p: list[Float[Tensor, "v"]], draws: Draws
) -> list[int]:
    """The guesses that are taken, and a token of the large model's after them."""
    for i, guess in enumerate(guesses):
        if not draws.accepts(min(1.0, float(p[i][guess] / q[i][guess]))):
            left = (p[i] - q[i]).clamp_min(0)
            return [*guesses[:i], draws.token(left / left.sum())]
    return [*guesses, draws.token(p[-1])]


class _Reader:
    """A model, what it has read of one text, and its distributions over the next tokens."""

    def __init__(self, model: Transformer, prompt: int, n_max: int, sampling: Sampling | None) -> None:
        cache = model.new_cache(1, n_max)
        if not isinstance(cache, KVCache):
            raise ValueError("speculative decoding requires our own cache; a wrapped model has another")
        self._model, self._cache, self._sampling, self._prompt = model, cache, sampling, prompt

    @torch.no_grad()
    def after(self, tokens: list[int], count: int) -> list[Float[Tensor, "v"]]:
        """The distributions of what follows the last `count` of these tokens, which go on from what was read."""
        new = torch.tensor([tokens[self._cache.length :]], device=self._model.device)
        tap = Tap(prompt=self._prompt) if self._model.edits else None
        logits = wide(self._model(new, tap, cache=self._cache)[0, -count:])
        if not bool(logits.amax(-1).isfinite().all()):
            raise NotFiniteError("speculative decoding requires finite logits, a model's are NaN or infinite")
        if self._sampling is None:
            best = torch.zeros_like(logits).scatter(1, logits.argmax(-1, keepdim=True), 1.0)
            return list(best.unbind(0))
        return list(self._sampling.probabilities(logits).unbind(0))

    def forget(self, length: int) -> None:
        """Take back what was read beyond this many tokens."""
        self._cache.length = min(self._cache.length, length)
