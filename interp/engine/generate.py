"""Text continuation with a key/value cache: greedy, or sampled with temperature, top-k and top-p."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.engine.batch import Batch
from interp.model.kv_cache import KVCache
from interp.model.tap import Edit, Tap
from interp.model.transformer import Transformer


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn from the logits."""

    temperature: float = 1.0
    top_k: int | None = None
    """Keep the k most probable tokens."""
    top_p: float | None = None
    """Keep the fewest tokens whose probabilities sum to at least p."""
    seed: int | None = None
    """Seed of a generator of its own; None draws from torch's global one."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(f"temperature > 0 is required (greedy: no sampling), got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k >= 1 is required, got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p in (0, 1] is required, got {self.top_p}")

    def probabilities(self, logits: Float[Tensor, "b v"]) -> Float[Tensor, "b v"]:
        """The distribution drawn from: temperature first, then top-k, then top-p, renormalised."""
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) / self.temperature
        if self.top_k is not None:
            worst = wide.topk(min(self.top_k, wide.shape[-1])).values[:, -1:]
            wide = wide.masked_fill(wide < worst, -torch.inf)
        probs = wide.softmax(-1)
        if self.top_p is None:
            return probs
        ranked, order = probs.sort(descending=True, stable=True)
        before = ranked.cumsum(-1) - ranked
        ranked = ranked.masked_fill(before >= self.top_p, 0.0)
        kept = torch.zeros_like(probs).scatter(1, order, ranked)
        return kept / kept.sum(-1, keepdim=True)


@torch.no_grad()
def generate(
    model: Transformer,
    batch: Batch,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    stop_token: int | None = None,
    use_cache: bool = True,
    edits: Sequence[Edit] = (),
) -> Batch:
    """The prompts (padded on the left) followed by up to `max_new_tokens` new tokens.

    Greedy without `sampling`. A row that has produced `stop_token` is padded with it and marked as not kept; the
    loop ends when every row has. `edits` apply at every step, to the tokens computed in it.
    Errors: ValueError if the result would not fit the context.
    """
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens >= 0 is required, got {max_new_tokens}")
    batch = batch.to(model.device).left_aligned()
    rows, n = batch.tokens.shape
    if n + max_new_tokens > model.config.n_ctx:
        raise ValueError(
            f"{n} prompt tokens and {max_new_tokens} new ones do not fit the context of {model.config.n_ctx}"
        )
    n_max = n + max_new_tokens
    cache = KVCache(model.config, rows, n_max, device=model.device, dtype=model.dtype) if use_cache else None
    seed = None if sampling is None else sampling.seed
    dice = None if seed is None else torch.Generator(model.device).manual_seed(seed)
    tokens, keep = batch.tokens, batch.keep
    fresh, fresh_keep = tokens, keep
    done = torch.zeros(rows, dtype=torch.bool, device=model.device)
    for _ in range(max_new_tokens):
        tap = Tap(edits=edits) if edits else None
        logits = _last_logits(model, tap, *((fresh, fresh_keep) if use_cache else (tokens, keep)), cache)
        fresh = _draw(logits, sampling, dice)
        if stop_token is not None:
            fresh = fresh.masked_fill(done[:, None], stop_token)
        tokens, keep, fresh_keep = _grown(tokens, keep, fresh, done)
        if stop_token is not None:
            done |= fresh[:, 0] == stop_token
            if bool(done.all()):
                break
    return Batch(tokens, keep, batch.bos)


def _last_logits(
    model: Transformer,
    tap: Tap | None,
    tokens: Int[Tensor, "b p"],
    keep: Bool[Tensor, "b p"] | None,
    cache: KVCache | None,
) -> Float[Tensor, "b v"]:
    last = torch.full((tokens.shape[0], 1), tokens.shape[1] - 1, device=tokens.device)
    return model(tokens, tap, keep=keep, cache=cache, logits_at=last)[:, 0]


def _draw(
    logits: Float[Tensor, "b v"], sampling: Sampling | None, dice: torch.Generator | None
) -> Int[Tensor, "b 1"]:
    if sampling is None:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial(sampling.probabilities(logits), 1, generator=dice)


def _grown(
    tokens: Int[Tensor, "b p"],
    keep: Bool[Tensor, "b p"] | None,
    fresh: Int[Tensor, "b 1"],
    done: Bool[Tensor, "b"],
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Tokens and keep-mask with the new column, and the keep-mask of that column alone."""
    grown = torch.cat((tokens, fresh), 1)
    if keep is None and not bool(done.any()):
        return grown, None, None
    full = torch.ones_like(tokens, dtype=torch.bool) if keep is None else keep
    alive = ~done[:, None]
    return grown, torch.cat((full, alive), 1), alive
