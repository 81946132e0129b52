"""Functions of logits: loss, accuracy, a table, a sampled token."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


@runtime_checkable
class Decoder(Protocol):
    """Protocol of an object that turns ids into text."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of some ids."""
        ...


def lm_cross_entropy_loss(
    logits: Float[Tensor, "b p v"],
    tokens: Int[Tensor, "b p"],
    attention_mask: Bool[Tensor, "..."] | Int[Tensor, "..."] | None = None,
    per_token: bool = False,
) -> Float[Tensor, "..."]:
    """-log p(next token) in nats: the mean over real tokens, or `[b, p - 1]` with `per_token`.

    Args:
        attention_mask: a token counts where it and the one before it are real; 0 elsewhere in `per_token`.

    Raises:
        AssertionError: a mask of another shape than the tokens.
    """
    log_probs = logits[..., :-1, :].log_softmax(-1)
    losses = -log_probs.gather(-1, tokens[..., 1:, None])[..., 0]
    if attention_mask is None:
        return losses if per_token else losses.sum() / losses.numel()
    assert attention_mask.shape == tokens.shape, (
        "attention_mask must have the same shape as tokens, "
        f"got {tuple(attention_mask.shape)} and {tuple(tokens.shape)}"
    )
    counted = attention_mask[:, :-1].bool() & attention_mask[:, 1:].bool()
    losses = losses.masked_fill(~counted.to(losses.device), 0.0)
    return losses if per_token else losses.sum() / counted.sum().to(losses)


def lm_accuracy(
    logits: Float[Tensor, "b p v"], tokens: Int[Tensor, "b p"], per_token: bool = False
) -> Float[Tensor, ""] | Bool[Tensor, "b q"]:
    """Share of tokens whose next token has the largest logit; `[b, p - 1]` with `per_token`."""
    hits = logits.argmax(-1)[:, :-1] == tokens[:, 1:]
    return hits if per_token else hits.sum() / hits.numel()


def logits_to_df(
    logits: Float[Tensor, "v"], tokenizer: Decoder | None = None, top_k: int | None = None
) -> pd.DataFrame:
    """The `top_k` likeliest tokens (None: all) with logit, log-probability and probability, likeliest first."""
    log_probs = logits.float().log_softmax(-1)
    order = log_probs.exp().argsort(descending=True)[:top_k]
    indices: list[int] = order.tolist()
    columns: dict[str, list[int] | list[str] | list[float]] = {"token_index": indices}
    if tokenizer is not None:
        columns["token_string"] = [tokenizer.decode([i]) for i in indices]
    columns["logit"] = logits[order].tolist()
    columns["log_prob"] = log_probs[order].tolist()
    columns["probability"] = log_probs[order].exp().tolist()
    return pd.DataFrame(columns)


def sample_logits(
    final_logits: Float[Tensor, "b v"],
    top_k: int | None = None,
    top_p: float | int | None = None,
    temperature: float | int = 1.0,
    freq_penalty: float | int = 0.0,
    repetition_penalty: float | int = 1.0,
    tokens: Tensor | None = None,
) -> Int[Tensor, "b"]:
    """The next token of every row, sampled.

    In this order: `repetition_penalty` divides positive logits of tokens seen in `tokens` and multiplies negative
    ones; temperature (0: the largest logit, nothing below applies); `freq_penalty` times the count of each seen token
    is taken off; `top_k` keeps the k largest logits, else `top_p` the likeliest tokens up to that probability.

    Raises:
        AssertionError: `top_k` or `top_p` out of range, or a frequency penalty without `tokens` `[b, p]`.
    """
    if repetition_penalty != 1.0 and tokens is not None:
        seen = torch.zeros_like(final_logits, dtype=torch.bool).scatter_(1, tokens, value=True)
        penalised = torch.where(
            final_logits > 0, final_logits / repetition_penalty, final_logits * repetition_penalty
        )
        final_logits = torch.where(seen, penalised, final_logits)
    if temperature == 0.0:
        return final_logits.argmax(-1)
    logits = final_logits / temperature
    if freq_penalty > 0:
        assert tokens is not None, "Must provide input_tokens if applying a frequency penalty"
        assert tokens.ndim == 2, "Frequency penalty do not support input in the form of embeddings"
        counts = torch.zeros_like(logits).scatter_add_(1, tokens, torch.ones_like(tokens, dtype=logits.dtype))
        logits = logits - freq_penalty * counts
    if top_k is not None:
        assert top_k > 0, "top_k has to be greater than 0"
        least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    elif top_p is not None:
        assert 1.0 >= top_p > 0.0, "top_p has to be in (0, 1]"
        logits = logits.masked_fill(_beyond(logits, top_p), -torch.inf)
    return torch.distributions.Categorical(logits=logits.float()).sample()


def _beyond(logits: Float[Tensor, "b v"], top_p: float) -> Bool[Tensor, "b v"]:
    """The tokens without which the likelier ones already have more than this probability; never the likeliest."""
    ordered, order = logits.sort(descending=True)
    total = ordered.softmax(-1).cumsum(-1)
    beyond = torch.zeros_like(total, dtype=torch.bool)
    beyond[..., 1:] = total[..., :-1] > top_p
    return beyond.scatter(-1, order, beyond)
