"""What an attention pattern says about a head: where it looks, how widely, how far back.

Every score is a reduction of one pattern `[b h q k]`, so the pattern itself need not be kept. Those about repeats are
for rows of BOS and a number of random tokens over and over: these have no meaning, so only copying from the earlier
repeat can explain attention there (Olsson et al. 2022).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.stats import wide

REPEAT_SCORES = ("previous_token", "duplicate_token", "induction")
SCORES = (*REPEAT_SCORES, "current_token", "first_token", "local", "entropy")
"""Scores of a pattern on repeated tokens, in the order of `pattern_scores`."""
NEAR = 5
"""Tokens that count as local: the current one and those just before it."""


def pattern_scores(
    pattern_bhqk: Float[Tensor, "b h q k"], period: int, kernel: Float[Tensor, "b h n"] | None = None
) -> Float[Tensor, "b h s"]:
    """Every score of each row and head, in the order of `SCORES`; all are means over queries i >= 1.

    kernel: `distance_kernel` to a distance that is far enough, where somebody has it.

    The first three are those of `repeat_scores`. current_token: A[i, i]. first_token: A[i, 0]. local: attention to the
    last `NEAR` tokens (fewer where the period is short), BOS left out. entropy: H_i / log(i + 1), 1 for even attention.
    """
    queries = pattern_bhqk.shape[-1] - 1
    nearest = min(NEAR - 1, period - 2)
    near = distance_kernel(pattern_bhqk, nearest) if kernel is None else kernel[..., : nearest + 1]
    counted = torch.arange(queries, queries - near.shape[-1], -1, device=near.device)
    others = (
        wide(pattern_bhqk.diagonal(0, -2, -1))[..., 1:].mean(-1),
        wide(pattern_bhqk[..., 1:, 0]).mean(-1),
        (near * counted).sum(-1) / queries,
        relative_entropy(pattern_bhqk).mean(-1),
    )
    return torch.cat((repeat_scores(pattern_bhqk, period), torch.stack(others, -1)), -1)


def copy_scores(
    pattern_bhqk: Float[Tensor, "b h q k"], copies: Bool[Tensor, "b q k"], place: Int[Tensor, "b q"]
) -> Float[Tensor, "b h s"]:
    """`pattern_scores` on rows of any kind, where `copies` says which earlier tokens each token repeats.

    place: how many tokens of its row stand before each, -1 at padding. Means are over the real tokens but the first, of
    duplicate_token and induction over those that repeat an earlier one: NaN for a row in which none does.
    """
    values, real = wide(pattern_bhqk), place >= 0
    later, back = place > 0, place[:, :, None] - place[:, None, :]
    there = real[:, :, None] & real[:, None, :]
    followed = F.pad(copies, (1, 0))[..., :-1]
    near = (back >= 0) & (back < NEAR) & later[:, None, :]
    surprise = entropy(values) / (place.clamp_min(1) + 1).to(values).log()[:, None]
    again = copies.any(-1)
    asked = {
        "previous_token": (back == 1, later),
        "duplicate_token": (copies, again),
        "induction": (followed, again),
        "current_token": (back == 0, later),
        "first_token": ((place == 0)[:, None, :].expand_as(there), later),
        "local": (near, later),
    }
    found = {
        name: ((values * (keys & there)[:, None]).sum(-1), queries) for name, (keys, queries) in asked.items()
    }
    found["entropy"] = surprise, later
    scores = [
        (each * queries[:, None]).sum(-1) / queries.sum(-1)[:, None]
        for each, queries in (found[name] for name in SCORES)
    ]
    return torch.stack(scores, -1)


def repeat_scores(pattern_bhqk: Float[Tensor, "b h q k"], period: int) -> Float[Tensor, "b h 3"]:
    """The three scores about repeats of each row and head, in the order of `REPEAT_SCORES`.

    Column 0 is BOS; token i (from 1) equals token i - period where that is at least 1. previous_token: A[i, i-1] over
    i >= 1. duplicate_token: attention to all earlier copies, over the queries that have one (i > period). induction:
    `induction_score`.
    """
    previous = wide(pattern_bhqk.diagonal(-1, -2, -1)).mean(-1)
    duplicate = _attention_back(pattern_bhqk, period, 0)
    return torch.stack((previous, duplicate, induction_score(pattern_bhqk, period)), -1)


def induction_score(pattern_bhqk: Float[Tensor, "b h q k"], period: int) -> Float[Tensor, "b h"]:
    """Attention to what followed the earlier copies of each token, the prefix-matching score of Olsson et al. 2022.

    The sum over all earlier copies, averaged over the queries that have one (i > period): 1 is a perfect induction
    head. Errors: ValueError for rows with less than two repeats of the period after BOS.
    """
    return _attention_back(pattern_bhqk, period, 1)


def distance_kernel(pattern_bhqk: Float[Tensor, "b h q k"], farthest: int) -> Float[Tensor, "b h n"]:
    """Mean attention to the token 0, 1, ..., `farthest` before the query, over the queries that have one besides BOS.

    Errors: ValueError for a distance that no query has.
    """
    n = pattern_bhqk.shape[-1]
    if not 0 <= farthest < n - 1:
        raise ValueError(f"distances of 0 to {n - 2} are required for {n} columns, got {farthest}")
    # Keys without BOS, zeros before them: row i then holds distances farthest ... 0 from its column i - 1 on, and all
    # rows are one strided band. One sum instead of a mean per diagonal (`experiments/bench/stream.py`).
    padded = F.pad(pattern_bhqk[..., 1:], (farthest, 0))
    rows, heads, _, width = padded.shape
    steps = (*padded.stride()[:2], width + 1, 1)
    band = padded.as_strided((rows, heads, n - 1, farthest + 1), steps, width)
    counted = torch.arange(n - 1, n - 2 - farthest, -1, device=padded.device)
    return wide(band).sum(-2).flip(-1) / counted


def relative_entropy(pattern_bhqk: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h rows"]:
    """H_i / log(i + 1) of every causal row i >= 1: 1 for even attention to all that it may see, 0 for one token."""
    found = entropy(pattern_bhqk[..., 1:, :])
    return found / torch.arange(2, pattern_bhqk.shape[-1] + 1, device=found.device).to(found).log()


def entropy(rows: Float[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
    """Entropy of attention rows, -sum a log a in nats; rows that sum to less than 1 (sinks) are brought to 1 first.

    A row without any attention has entropy 0.
    """
    values = wide(rows)
    tiny = torch.finfo(values.dtype).tiny
    total = values.sum(-1)
    mass = total.clamp_min(tiny)
    # In one buffer of its own: a third of the time of torch.special.entr (`experiments/bench/stream.py`).
    surprise = values.clamp_min(tiny).log_().mul_(values).sum(-1)
    return mass.log() * (total > 0) - surprise / mass


def even_attention(n: int, window: int | None) -> Float[Tensor, "1 1 q k"]:
    """The pattern of a head that spreads its attention evenly over every token a causal mask lets it see."""
    seen = torch.ones(n, n, dtype=torch.float64).tril()
    seen = seen if window is None else seen.triu(1 - window)
    return (seen / seen.sum(-1, keepdim=True))[None, None]


def _attention_back(pattern_bhqk: Float[Tensor, "b h q k"], period: int, shift: int) -> Float[Tensor, "b h"]:
    """Attention to the earlier copies of each token (shift 0) or to what followed them (shift 1), mean over queries.

    One diagonal per distance; on each, the first key that follows or is a real copy is 1 + shift (column 0 is BOS).
    """
    n = pattern_bhqk.shape[-1]
    queries = n - 1 - period
    if queries < 1:
        raise ValueError(f"at least two repeats of {period} tokens after BOS are required, got {n} columns")
    copies = range(1, (n - 2) // period + 1)
    diagonals = (pattern_bhqk.diagonal(shift - copy * period, -2, -1)[..., 1 + shift :] for copy in copies)
    return torch.stack([wide(diagonal).sum(-1) for diagonal in diagonals]).sum(0) / queries
