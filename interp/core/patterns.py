"""Scores of an attention pattern: where a head looks, how widely, how far back.

Every score is a reduction of one pattern `[b h q k]`, so the pattern itself need not be kept. Those about repeats are
for rows of BOS and a number of random tokens over and over: these have no meaning, so only copying from the earlier
repeat can explain attention there (Olsson et al. 2022).
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
"""Tokens that count as local: the current one and those just before it."""
RUNS = 4
"""Number of runs of queries; entropies of a run are computed together, over the keys that its last query sees."""


def pattern_scores(
    pattern_bhqk: Float[Tensor, "b h q k"], period: int, kernel: Float[Tensor, "b h n"] | None = None
) -> Float[Tensor, "b h s"]:
    """Every score of each row and head, in the order of `SCORES`; all are means over queries i >= 1.

    The first three are those of `repeat_scores`. current_token: A[i, i]. first_token: A[i, 0]. local: attention to the
    last `NEAR` tokens (fewer where the period is short), BOS left out. entropy: H_i / log(i + 1), 1 for even attention.

    Args:
        kernel: `distance_kernel` to a distance that is far enough, where the caller has it.
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
    """1 at the queries and keys that each score of `copy_scores` but the entropy sums over, else 0.

    Args:
        copies: which earlier tokens each token repeats.
        place: how many tokens of its row stand before each, -1 at padding; one row of them where all rows have the
            same.
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
    found = torch.empty(len(copies), len(keys), *copies.shape[1:], device=copies.device)
    for i, name in enumerate(SCORES[:-1]):  # each is written once, as numbers
        found[:, i] = keys[name] & sees_copy
    return found


def copy_scores(
    pattern_bhqk: Float[Tensor, "b h q k"], keys: Float[Tensor, "b s q k"], place: Int[Tensor, "b q"]
) -> Float[Tensor, "b h n"]:
    """`pattern_scores` on rows of any kind, where `keys` are those of `copy_keys` for the same places.

    Means are over the real tokens but the first, of duplicate_token and induction over those that repeat an earlier
    one: NaN for a row in which none does. One matrix product takes all sums of a pattern.
    """
    values, later = upcast(pattern_bhqk), place > 0
    surprise = causal_entropy(values) / (place.clamp_min(1) + 1).to(values).log()[:, None]
    sums = values.flatten(2) @ keys.to(values).flatten(2).mT
    total = torch.cat((sums, (surprise * later[:, None]).sum(-1, keepdim=True)), -1)
    return total / _queries(keys, place)[:, None]


def even_copy_scores(
    keys: Float[Tensor, "b s q k"], place: Int[Tensor, "b q"], window: int | None
) -> Float[Tensor, "b n"]:
    """`copy_scores` of attention that is spread evenly over what a causal layer with this window sees, in float64.

    A query then pays 1 / m to each of the m tokens that it sees, and its entropy is log m.
    """
    later, seen = place > 0, place.clamp_min(0) + 1
    inside = keys
    if window is not None:
        back = place[:, :, None] - place[:, None, :]
        inside, seen = keys * (back < window)[:, None], seen.clamp_max(window)
    sums = (inside.sum(-1).double() / seen[:, None]).sum(-1)
    surprise = seen.double().log() / (place.clamp_min(1) + 1).double().log()
    return torch.cat((sums, (surprise * later).sum(-1, keepdim=True)), -1) / _queries(keys, place)


def _queries(keys: Float[Tensor, "b s q k"], place: Int[Tensor, "b q"]) -> Int[Tensor, "b n"]:
    """How many queries each score of `copy_scores` is a mean over."""
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
    return torch.cat((previous, _attention_back(pattern_bhqk, period)), -1)


def induction_score(pattern_bhqk: Float[Tensor, "b h q k"], period: int) -> Float[Tensor, "b h"]:
    """Prefix-matching score: attention to the tokens after the earlier copies of each token (Olsson et al. 2022).

    The sum over all earlier copies, averaged over the queries that have one (i > period): 1 is a perfect induction
    head.

    Raises:
        ValueError: rows with less than two repeats of the period after BOS.
    """
    return _attention_back(pattern_bhqk, period)[..., 1]


def distance_kernel(pattern_bhqk: Float[Tensor, "b h q k"], farthest: int) -> Float[Tensor, "b h n"]:
    """Mean attention to the token 0, 1, ..., `farthest` before the query, over the queries that have one besides BOS.

    Raises:
        ValueError: a distance that no query has.
    """
    n = pattern_bhqk.shape[-1]
    if not 0 <= farthest < n - 1:
        raise ValueError(f"distances of 0 to {n - 2} are required for {n} columns, got {farthest}")
    # Query i holds distances farthest ... 0 in its columns i - farthest ... i, so all queries are one strided band: one
    # sum instead of a mean per diagonal. The first ones, that see less without BOS, get zeros before them.
    first = F.pad(pattern_bhqk[:, :, 1 : farthest + 1, 1 : farthest + 1], (farthest, 0))
    others = pattern_bhqk[:, :, farthest + 1 :, 1:]
    total = _band(first, farthest + 1).sum(-2) + _band(others, farthest + 1).sum(-2)
    counted = torch.arange(n - 1, n - 2 - farthest, -1, device=others.device)
    return total.flip(-1) / counted


def _band(rows: Float[Tensor, "b h q k"], width: int) -> Float[Tensor, "b h q n"]:
    """The first `width` keys of the first query, of each later one as many that begin one key further on; a view."""
    *steps, step, one = rows.stride()
    return upcast(rows.as_strided((*rows.shape[:3], width), (*steps, step + one, one)))


def relative_entropy(pattern_bhqk: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h rows"]:
    """H_i / log(i + 1) of every causal row i >= 1: 1 for even attention to all that it may see, 0 for one token.

    What stands after the query in its row is not looked at.
    """
    found = causal_entropy(pattern_bhqk)[..., 1:]
    return found / torch.arange(2, pattern_bhqk.shape[-1] + 1, device=found.device).to(found).log()


def causal_entropy(pattern_bhqk: Float[Tensor, "b h q k"]) -> Float[Tensor, "b h q"]:
    """`entropy` of every row of a causal pattern; most of what is hidden from a query is not looked at."""
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
    # In one buffer of its own: a third of the time of torch.special.entr (`experiments/bench/stream.py`).
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


def _attention_back(pattern_bhqk: Float[Tensor, "b h q k"], period: int) -> Float[Tensor, "b h 2"]:
    """Attention to the earlier copies of each token, and to what followed them, mean over the queries that have one.

    Column 0 is BOS, so the first key that is a copy is 1: of every distance one band, two keys wide.
    """
    n = pattern_bhqk.shape[-1]
    queries = n - 1 - period
    if queries < 1:
        raise ValueError(f"at least two repeats of {period} tokens after BOS are required, got {n} columns")
    farther = range(period, n - 1, period)
    bands = [_band(pattern_bhqk[:, :, back + 1 :, 1:], 2).sum(-2) for back in farther]
    return torch.stack(bands).sum(0) / queries
