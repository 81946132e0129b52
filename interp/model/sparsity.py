"""Which keys a query sees under a fixed sparse pattern, as a question about their positions.

Positions count the kept tokens of a text, so that a padded row sees what the unpadded one does. The definitions reach
both ways; a causal model sees the part of it up to the query. The question is asked of a run of queries, "does one of
them see this key?": of a run of one it is the mask itself, of a block of queries it says which keys to gather.
"""

import functools
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from interp.model.mixer_variants import BigBird, Dilated, FixedBlocks, Longformer, Sparsity, Strided

Ints = Int[Tensor, "..."]
Bools = Bool[Tensor, "..."]


def visible(kind: Sparsity, query: Int[Tensor, "#b q"], key: Int[Tensor, "#b k"]) -> Bool[Tensor, "#b q k"]:
    """Whether the query at a position sees the key at a position, causality aside."""
    each = query[..., None]
    return run_sees(kind, each, each, key[:, None])


def run_sees(kind: Sparsity, first: Ints, last: Ints, key: Ints) -> Bools:
    """Whether one of the queries at positions `first` to `last` sees the key, causality aside; shapes broadcast.

    With t = query - key:
    `Dilated`: t = 0, +-dilation, ..., +-(width - 1) dilation.
    `Strided` (Child et al. 2019, section 4.2): |t| < stride, or t a multiple of stride.
    `FixedBlocks` (the same): the query's block, and the last `summary` positions of every block.
    `Longformer` (Beltagy et al. 2020, section 3.1): the dilated window; the first `n_global` positions see and are seen
    by all.
    `BigBird` (Zaheer et al. 2020, section 2), in blocks: n_window // 2 neighbours on each side, the first `n_global`,
    which see and are seen by all, and the drawn ones of `drawn_blocks`, in both directions.
    """
    low, high = first - key, last - key
    if isinstance(kind, Dilated):
        return _steps(low, high, kind.width, kind.dilation)
    if isinstance(kind, Strided):
        return ((high > -kind.stride) & (low < kind.stride)) | _has_multiple(low, high, kind.stride)
    if isinstance(kind, Longformer):
        window = _steps(low, high, kind.width, kind.dilation)
        return window | (key < kind.n_global) | (first < kind.n_global)
    first, last, at = (_floor(x, kind.block) for x in (first, last, key))
    if isinstance(kind, FixedBlocks):
        own = (first <= at) & (at <= last)
        return own | (key % kind.block >= kind.block - kind.summary)
    reach = kind.n_window // 2
    near = (first - reach <= at) & (at <= last + reach)
    return near | (at < kind.n_global) | (first < kind.n_global) | _one_drawn(kind, first, last, at)


@dataclass(frozen=True)
class Piece:
    """A run of queries, the keys that one of them sees, and who sees which."""

    queries: slice
    keys: Int[Tensor, "k"]
    allowed: Bool[Tensor, "q k"]


def pieces(
    kind: Sparsity, n_query: int, n_key: int, device: torch.device, *, causal: bool, run: int = 64
) -> tuple[Piece, ...]:
    """The pattern of the last `n_query` of `n_key` positions, one text without padding, as runs of queries.

    Its size follows the number of keys that runs see; a matrix `[n_query, n_key]` is never made.
    """
    key = torch.arange(n_key, device=device)
    found = []
    for start in range(n_key - n_query, n_key, run):
        query = key[start : start + run]
        before = key[: start + run] if causal else key
        keys = before[run_sees(kind, query[0], query[-1], before)]
        allowed = visible(kind, query[None], keys[None])[0]
        if causal:
            allowed &= keys <= query[:, None]
        begin = start - n_key + n_query
        found.append(Piece(slice(begin, begin + len(query)), keys, allowed))
    return tuple(found)


def drawn_blocks(kind: BigBird, n: int, device: torch.device) -> Bool[Tensor, "n n"]:
    """Which of the blocks before it, neither global nor in its window, each of `n` query blocks has drawn.

    Block i takes the `n_random` with the smallest hash of (seed, i, j): a function of seed and i, so that a longer text
    changes nothing. All of them where there are no more.
    """
    i = torch.arange(n, device=device)
    query, key = i[:, None], i[None]
    free = (key >= kind.n_global) & (key < query - kind.n_window // 2)
    order = _hashed(_hashed(_hashed(torch.full_like(i, kind.seed)[:, None]) + query) + key)
    order = order.masked_fill(~free, torch.iinfo(torch.int64).max)
    chosen = order.argsort(dim=-1, stable=True)[:, : kind.n_random]
    return torch.zeros_like(free).scatter(-1, chosen, True) & free


def _one_drawn(kind: BigBird, first: Ints, last: Ints, key: Ints) -> Bools:
    """Whether one of the query blocks from `first` to `last` has drawn the key block, or was drawn by it."""
    n = int(max(last.amax(), key.amax())) + 1
    counts = _draws_before(kind, 1 << n.bit_length(), key.device)
    return counts[last + 1, key] > counts[first, key]


@functools.lru_cache(maxsize=8)
def _draws_before(kind: BigBird, n: int, device: torch.device) -> Int[Tensor, "_ n"]:
    """How many of the query blocks before the i-th are linked to key block j."""
    drawn = drawn_blocks(kind, n, device)
    return torch.nn.functional.pad((drawn | drawn.mT).cumsum(0), (0, 0, 1, 0))


def _steps(low: Ints, high: Ints, width: int, dilation: int) -> Bools:
    """Whether a multiple of `dilation`, less than `width` of them from 0, lies between."""
    end = (width - 1) * dilation
    return _has_multiple(low.clamp_min(-end), high.clamp_max(end), dilation)


def _has_multiple(low: Ints, high: Ints, of: int) -> Bools:
    return _floor(high, of) * of >= low


def _floor(x: Ints, by: int) -> Ints:
    return torch.div(x, by, rounding_mode="floor")


def _hashed(x: Ints) -> Ints:
    """A bijective mixing of 64-bit integers (splitmix64's constants), so that equal draws need equal inputs."""
    x = x + _signed(0x9E3779B97F4A7C15)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _signed(unsigned: int) -> int:
    return unsigned - 2**64 if unsigned >= 2**63 else unsigned


def _shifted(x: Ints, by: int) -> Ints:
    """A shift to the right that brings in zeros."""
    return (x >> by) & (2 ** (64 - by) - 1)
