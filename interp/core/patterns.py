"""Scores of an attention pattern: where a head looks, how widely, how far back.

Every score is a reduction of one pattern `[b h q k]`, so the pattern itself need not be kept. Scores about repeats are
for rows of BOS followed by the same random tokens several times. Random tokens have no meaning, so attention to an
earlier repeat shows copying (Olsson et al. 2022).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.stats import upcast

REPEAT_SCORES = ("previous_token", "duplicate_token", "induction")
SCORES = (*REPEAT_SCORES, "current_token", "first_token", "local", "entropy")
"""Scores of a pattern on repeated tokens, in the order of `pattern_scores`."""
NEAR = 5
"""Number of tokens that count as local: the current one and those just before it."""
RUNS = 4
"""Number of runs of queries. Entropies of a run are computed together, over the keys that its last query sees."""


def pattern_scores(
    pattern_bhqk: Float[Tensor, "b h q k"], period: int, kernel: Float[Tensor, "b h n"] | None = None
) -> Float[Tensor, "b h s"]:
    """Every score of each row and head, in the order of `SCORES`; all are means over queries i >= 1.

    The first three are those of `repeat_scores`. current_token: A[i, i]. first_token: A[i, 0]. local: attention to the
    last `NEAR` tokens (fewer where the period is short), BOS left out. entropy: H_i / log(i + 1), 1 for even attention.

    Args:
        period: number of tokens that repeat.
        kernel: `distance_kernel` for at least the local distances; None: computed here.
    """
    queries = pattern_bhqk.shape[-1] - 1
    nearest = min(NEAR - 1, period - 2)
    near = distance_kernel(pattern_bhqk, nearest) if kernel is None else kernel[..., : nearest + 1]
    counted = torch.arange(queries, queries - near.shape[-1], -1, device=near.device)
    others = (
        near[..., 0],
        upcast(pattern_bhqk[..., 1:, 0]).mean(-1),
        (near * counted).sum(-1) / queries,
        relative_entropy(pattern_bhqk).mean(-1),
    )
    return torch.cat((repeat_scores(pattern_bhqk, period), torch.stack(others, -1)), -1)


def copy_keys(copies: Bool[Tensor, "b q k"], place: Int[Tensor, "#b q"]) -> Float[Tensor, "b s q k"]:
    """Mask, as numbers, of the queries and keys that each score of `copy_scores` but the entropy sums over.

    Args:
        copies: True where the query token repeats the key token.
        place: position of each token in its row, -1 at padding; a single row if it is the same for all.
    """
    later, back = place > 0, place[:, :, None] - place[:, None, :]
    followed = F.pad(copies, (1, 0))[..., :-1]
    keys = {
        "previous_token": back == 1,
        "duplicate_token": copies,
        "induction": followed & copies.any(-1, keepdim=True),
        "current_token": back == 0,
        "first_token": (place == 0)[:, None, :],
        "local": (back >= 0) & (back < NEAR) & later[:, None, :],
    }
    sees_copy = later[:, :, None] & (place >= 0)[:, None, :]
    masks = torch.empty(len(copies), len(keys), *copies.shape[1:], device=copies.device)
    for i, name in enumerate(SCORES[:-1]):  # from bool to float, without a second copy
        masks[:, i] = keys[name] & sees_copy
    return masks


def copy_scores(
    pattern_bhqk: Float[Tensor, "b h q k"], keys: Float[Tensor, "b s q k"], place: Int[Tensor, "b q"]
) -> Float[Tensor, "b h n"]:
    """`pattern_scores` for rows of any kind, with the masks `keys` of `copy_keys` for the same `place`.

    Means are over all real tokens but the first; of duplicate_token and induction over tokens that repeat an earlier
    one, NaN for a row without any. One matrix product computes all sums over a pattern.
    """
    values, later = upcast(pattern_bhqk), place > 0
    surprise = causal_entropy(values) / (place.clamp_min(1) + 1).to(values).log()[:, None]
    sums = values.flatten(2) @ keys.to(values).flatten(2).mT
    total = torch.cat((sums, (surprise * later[:, None]).sum(-1, keepdim=True)), -1)
    return total / _query_counts(keys, place)[:, None]


def even_copy_scores(
    keys: Float[Tensor, "b s q k"], place: Int[Tensor, "b q"], window: int | None
) -> Float[Tensor, "b n"]:
    """`copy_scores` of attention that is spread evenly over what a causal layer with this window sees, in float64.

    A query then attends with 1 / m to each of the m tokens that it sees, and its entropy is log m.
    """
    later, seen = place > 0, place.clamp_min(0) + 1
    inside = keys
    if window is not None:
        back = place[:, :, None] - place[:, None, :]
        inside, seen = keys * (back < window)[:, None], seen.clamp_max(window)
    sums = (inside.sum(-1).double() / seen[:, None]).sum(-1)
    surprise = seen.double().log() / (place.clamp_min(1) + 1).double().log()
    return torch.cat((sums, (surprise * later).sum(-1, keepdim=True)), -1) / _query_counts(keys, place)


def _query_counts(keys: Float[Tensor, "b s q k"], place: Int[Tensor, "b q"]) -> Int[Tensor, "b n"]:
    """Number of queries of each row that each score of `copy_scores` is a mean over."""
    later, again = place > 0, keys[:, SCORES.index("duplicate_token")].sum(-1) > 0
    return torch.stack(
        [again if name in ("duplicate_token", "induction") else later for name in SCORES], 1
    ).sum(-1)


def repeat_scores(pattern_bhqk: Float[Tensor, "b h q k"], period: int) -> Float[Tensor, "b h 3"]:
    """The three scores about repeats of each row and head, in the order of `REPEAT_SCORES`.

    Column 0 is BOS; token i (from 1) equals token i - period where that is at least 1. previous_token: A[i, i-1] over
    i >= 1. duplicate_token: attention to all earlier copies, over the queries that have one (i > period). induction:
    `induction_score`.
    """
    previous = upcast(pattern_bhqk.diagonal(-1, -2, -1)).mean(-1, keepdim=True)
    return torch.cat((previous, _copy_attention(pattern_bhqk, period)), -1)


def induction_score(pattern_bhqk: Float[Tensor, "b h q k"], period: int) -> Float[Tensor, "b h"]:
    """Prefix-matching score: attention to the tokens after the earlier copies of each token (Olsson et al. 2022).

    The sum over all earlier copies, averaged over the queries that have one (i > period): 1 is a perfect induction
    head.

    Raises:
        ValueError: rows with less than two repeats of the period after BOS.
    """
    return _copy_attention(pattern_bhqk, period)[..., 1]


def distance_kernel(pattern_bhqk: Float[Tensor, "b h q k"], farthest: int) -> Float[Tensor, "b h n"]:
    """Mean attention to the token 0, ..., `farthest` positions back, over queries for which it exists and is not BOS.

    Raises:
        ValueError: a distance at which no query has such a token.
    """
    n = pattern_bhqk.shape[-1]
    if not 0 <= farthest < n - 1:
        raise ValueError(f"distances of 0 to {n - 2} are required for {n} columns, got {farthest}")
    # Row i of the pattern has distances farthest ... 0 in its columns i - farthest ... i. So all rows are one strided
    # view, and one sum replaces a mean per diagonal. The first rows, which are shorter, are padded with zeros.
    first = F.pad(pattern_bhqk[:, :, 1 : farthest + 1, 1 : farthest + 1], (farthest, 0))
    others = pattern_bhqk[:, :, farthest + 1 :, 1:]
    total = _diagonal_band(first, farthest + 1).sum(-2) + _diagonal_band(others, farthest + 1).sum(-2)
    counted = torch.arange(n - 1, n - 2 - farthest, -1, device=others.device)
    return total.flip(-1) / counted


def _diagonal_band(rows: Float[Tensor, "b h q k"], width: int) -> Float[Tensor, "b h q n"]:
    """View `[b h q n]` of `width` keys per query: from key 0 for the first query, one key later for each next one."""
    *steps, query_step, key_step = rows.stride()
    return upcast(rows.as_strided((*rows.shape[:3], width), (*steps, query_step + key_step, key_step)))


def relative_entropy(pattern_bhqk: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h rows"]:
    """H_i / log(i + 1) of every causal row i >= 1: 1 for even attention to all that it may see, 0 for one token.

    Keys after the query are not read.
    """
    entropies = causal_entropy(pattern_bhqk)[..., 1:]
    return (
        entropies / torch.arange(2, pattern_bhqk.shape[-1] + 1, device=entropies.device).to(entropies).log()
    )


def causal_entropy(pattern_bhqk: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q"]:
    """`entropy` of every row of a causal pattern, without reading most of the masked entries."""
    n = pattern_bhqk.shape[-1]
    starts = range(0, n, -(-n // RUNS))
    ends = [*starts[1:], n]
    runs = [_mass_and_surprise(pattern_bhqk[..., a:b, :b]) for a, b in zip(starts, ends, strict=True)]
    return _entropy(*(torch.cat(parts, -1) for parts in zip(*runs, strict=True)))


def entropy(rows: Float[Tensor, "*b k"]) -> Float[Tensor, "*b"]:
    """Entropy of attention rows, -sum a log a in nats; rows that sum to less than 1 (sinks) are brought to 1 first.

    A row without any attention has entropy 0.
    """
    return _entropy(*_mass_and_surprise(rows))


def _mass_and_surprise(rows: Float[Tensor, "*b k"]) -> tuple[Float[Tensor, "*b"], Float[Tensor, "*b"]]:
    """sum a and sum a log a of attention rows."""
    values = upcast(rows)
    # In-place operations on one buffer: a third of the time of torch.special.entr (`experiments/bench/stream.py`).
    surprise = values.clamp_min(torch.finfo(values.dtype).tiny).log_().mul_(values)
    return values.sum(-1), surprise.sum(-1)


def _entropy(total: Float[Tensor, "*b"], surprise: Float[Tensor, "*b"]) -> Float[Tensor, "*b"]:
    mass = total.clamp_min(torch.finfo(total.dtype).tiny)
    return mass.log() * (total > 0) - surprise / mass


def even_attention(n: int, window: int | None) -> Float[Tensor, "1 1 q k"]:
    """The pattern of a head that spreads its attention evenly over every token a causal mask lets it see."""
    seen = torch.ones(n, n, dtype=torch.float64).tril()
    seen = seen if window is None else seen.triu(1 - window)
    return (seen / seen.sum(-1, keepdim=True))[None, None]


def _copy_attention(pattern_bhqk: Float[Tensor, "b h q k"], period: int) -> Float[Tensor, "b h 2"]:
    """Attention to all earlier copies of the query token, and to the tokens after them; mean over queries with a copy.

    Column 0 is BOS. For every distance (1, 2, ... periods) the copy and the next token are a band of two keys.
    """
    n = pattern_bhqk.shape[-1]
    queries = n - 1 - period
    if queries < 1:
        raise ValueError(f"at least two repeats of {period} tokens after BOS are required, got {n} columns")
    farther = range(period, n - 1, period)
    bands = [_diagonal_band(pattern_bhqk[:, :, back + 1 :, 1:], 2).sum(-2) for back in farther]
    return torch.stack(bands).sum(0) / queries
