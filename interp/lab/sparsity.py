"""Fixed sparse patterns of softmax attention: which keys a query sees.

With t = query - key, in positions of kept tokens; of a run of queries it is asked whether one of them sees the key.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from interp.model.records import at_least_one, not_negative
from interp.model.sparsity import Sparsity

Ints = Int[Tensor, "..."]
Bools = Bool[Tensor, "..."]


@dataclass(frozen=True)
class Dilated(Sparsity):
    """Dilated window (atrous): a query sees itself and the keys `dilation`, 2 `dilation`, ... before it.

    `width` keys in all.
    """

    width: int
    dilation: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "width", "dilation")

    def run_sees(self, first: Ints, last: Ints, key: Ints) -> Bools:
        """t = 0, +-dilation, ..., +-(width - 1) dilation."""
        return _steps(first - key, last - key, self.width, self.dilation)


@dataclass(frozen=True)
class Strided(Sparsity):
    """Strided pattern (Child et al. 2019): the last `stride` keys, and every key a multiple of `stride` back."""

    stride: int

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "stride")

    def run_sees(self, first: Ints, last: Ints, key: Ints) -> Bools:
        """|t| < stride, or t a multiple of stride (section 4.2)."""
        low, high = first - key, last - key
        return ((high > -self.stride) & (low < self.stride)) | _has_multiple(low, high, self.stride)


@dataclass(frozen=True)
class FixedBlocks(Sparsity):
    """Fixed pattern (Child et al. 2019): keys of the query's own block, and the last `summary` keys of every block."""

    block: int
    summary: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "block", "summary")
        if self.summary > self.block:
            raise ValueError(f"FixedBlocks requires summary <= block, got {self.summary} and {self.block}")

    def run_sees(self, first: Ints, last: Ints, key: Ints) -> Bools:
        """The query's block, and the last `summary` positions of every block (section 4.2)."""
        first, last, at = (_floor(x, self.block) for x in (first, last, key))
        own = (first <= at) & (at <= last)
        return own | (key % self.block >= self.block - self.summary)


@dataclass(frozen=True)
class Segments(Sparsity):
    """Segments with a memory (Transformer-XL): keys of the query's own segment and of the `memory` positions before it.

    Dai et al. 2019, section 3.2. A text is read `size` tokens at a time; what layer l sees of earlier segments was made
    by layer l - 1 there, so that n layers reach n memories back. Positions are those of the config, best relative
    ones: rotary, ALiBi, buckets. Gradients pass between segments unless training stops them (`Training.segment`).
    """

    size: int
    memory: int
    """Positions before the segment that are seen; 0: segments know nothing of each other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "size")
        not_negative(self, "memory")

    def run_sees(self, first: Ints, last: Ints, key: Ints) -> Bools:
        """From `memory` positions before the first query's segment to the end of the last query's."""
        begin, end = (_floor(x, self.size) * self.size for x in (first, last))
        return (begin - self.memory <= key) & (key < end + self.size)


@dataclass(frozen=True)
class Longformer(Sparsity):
    """Longformer's pattern: a dilated window, and `n_global` first tokens that see and are seen by all.

    Beltagy et al. 2020.
    """

    width: int
    dilation: int = 1
    n_global: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "width", "dilation")
        not_negative(self, "n_global")

    def run_sees(self, first: Ints, last: Ints, key: Ints) -> Bools:
        """The window; the first `n_global` positions see and are seen by all (section 3.1)."""
        window = _steps(first - key, last - key, self.width, self.dilation)
        return window | (key < self.n_global) | (first < self.n_global)


@dataclass(frozen=True)
class BigBird(Sparsity):
    """BigBird's pattern of blocks: `n_window` neighbours, `n_random` drawn ones and `n_global` first blocks.

    Zaheer et al. 2020.
    """

    block: int
    n_window: int = 3
    """Blocks of the window, the query's own in its middle (a causal model sees the half before it)."""
    n_random: int = 1
    n_global: int = 1
    seed: int = 0
    """Seed of the drawn blocks; they depend on nothing else, least of all on the length of the text."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_one(self, "block", "n_window")
        not_negative(self, "n_random", "n_global")

    def run_sees(self, first: Ints, last: Ints, key: Ints) -> Bools:
        """Blocks of the window, the first `n_global`, and `drawn_blocks` (section 2).

        n_window // 2 neighbours to each side; the global blocks see and are seen by all; drawn blocks count in both
        directions.
        """
        first, last, at = (_floor(x, self.block) for x in (first, last, key))
        reach = self.n_window // 2
        near = (first - reach <= at) & (at <= last + reach)
        return near | (at < self.n_global) | (first < self.n_global) | _one_drawn(self, first, last, at)


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
    return F.pad((drawn | drawn.mT).cumsum(0), (0, 0, 1, 0))


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
