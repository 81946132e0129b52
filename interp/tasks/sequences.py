"""Generated token sequences, in which the context determines some tokens; each task needs one ability of a head.

A record says what rows look like; `batch` draws them from the random numbers of a place. The held-out rows are other
draws of the same kind. All tasks are our own wording of well-known ones; sources stand below.
"""

from dataclasses import dataclass

import numpy as np
import torch

from interp.core.boundary import public
from interp.core.kinds import PositiveCount
from interp.data.batch import Batch
from interp.tasks.examples import Examples, Place, after_bos, check_rows, different, require


@public()
@dataclass(frozen=True)
class AssociativeRecall:
    """Pairs of a key and a value, then some of the keys again, each with its value (Arora et al. 2023, MQAR).

    [bos, k_1, v_1 .. k_n, v_n, q_1, v(q_1) .. q_m, v(q_m)]: keys differ, queries differ. Keys are the lower half of the
    ids, values the upper; values may repeat. Determined: the values after the queries.
    """

    d_vocab: int = 64
    """Number of token ids; id 0 is the beginning, half of the others are keys."""
    pairs: int = 8
    """Number n of keys with a value."""
    queries: int = 4
    """Number m of keys that are repeated as queries."""

    def __post_init__(self) -> None:
        require(1 <= self.queries <= self.pairs, f"1 to {self.pairs} queries", self.queries)
        require(self.d_vocab >= 3, "d_vocab of 3 or more", self.d_vocab)
        require(self.pairs <= self._keys, f"pairs <= {self._keys}, the keys of d_vocab", self.pairs)

    @property
    def width(self) -> int:
        """Tokens of a row."""
        return 1 + 2 * (self.pairs + self.queries)

    @property
    def _keys(self) -> int:
        return (self.d_vocab - 1) // 2

    @public()
    def batch(self, place: Place, rows: PositiveCount) -> Examples:
        """The rows of a place."""
        generator = place.generator
        keys = different(generator, rows, self.pairs, 1, 1 + self._keys)
        values = generator.integers(1 + self._keys, self.d_vocab, size=keys.shape)
        positions = different(generator, rows, self.queries, 0, self.pairs)
        order = np.concatenate([np.tile(np.arange(self.pairs), (rows, 1)), positions], axis=1)
        ordered = [np.take_along_axis(ids, order, axis=1) for ids in (keys, values)]
        tokens = np.stack(ordered, axis=2).reshape(rows, -1)  # [rows, pair, (key value)] -> [rows, token]
        index = np.arange(tokens.shape[1])
        return after_bos(tokens, np.tile((index >= 2 * self.pairs) & (index % 2 == 1), (rows, 1)))


@public()
@dataclass(frozen=True)
class InContextRegression:
    """Regression in context with one-hot weights: y = w . x copies one coordinate of x, w is hidden per row.

    [bos, x_1 .. x_k, y, x_1 .. x_k, y, ...] with y = x_j, j the row's own, the x of one example different (after Garg
    et al. 2022, with tokens for numbers). The first example tells j. Determined: every later y; without reading the
    examples at best 1 / k of them can be right.
    """

    d_vocab: int = 64
    """Number of token ids; id 0 is the beginning and nothing else."""
    inputs: int = 4
    """Number k of coordinates of x."""
    examples: int = 8
    """Examples in a row."""

    def __post_init__(self) -> None:
        require(self.inputs >= 2 and self.examples >= 2, "2 inputs, 2 examples", (self.inputs, self.examples))
        require(self.inputs < self.d_vocab, f"more than {self.inputs} ids", self.d_vocab)

    @property
    def width(self) -> int:
        """Tokens of a row."""
        return 1 + self.examples * (self.inputs + 1)

    @public()
    def batch(self, place: Place, rows: PositiveCount) -> Examples:
        """The rows of a place."""
        check_rows(self, rows, self.width)
        generator, k = place.generator, self.inputs
        x = different(generator, rows * self.examples, k, 1, self.d_vocab)
        hidden = generator.integers(0, k, size=rows)
        y = np.take_along_axis(x, np.repeat(hidden, self.examples)[:, None], axis=1)
        tokens = np.concatenate([x, y], axis=1).reshape(rows, -1)
        index = np.arange(tokens.shape[1])
        return after_bos(tokens, np.tile((index % (k + 1) == k) & (index > k), (rows, 1)))


@public()
@dataclass(frozen=True)
class SequencePairs:
    """A sequence and its copy, or itself backwards, for an encoder-decoder (the first task of Transformer tutorials).

    Source [s_1 .. s_n, end], n uniform in [low, high]; target [start, s_1 .. s_n, end] or [start, s_n .. s_1, end]. The
    start token is id 0 and the padding of both sides, the end id 1. Determined: the whole target.
    """

    d_vocab: int = 32
    """Token ids; 0 and 1 are the start and the end."""
    low: int = 4
    """The shortest sequence."""
    high: int = 12
    """The longest sequence."""
    backwards: bool = False
    """Whether the target is the sequence backwards."""

    def __post_init__(self) -> None:
        require(1 <= self.low <= self.high, "1 <= low <= high", f"{self.low} and {self.high}")
        require(self.d_vocab >= 4, "d_vocab >= 4", self.d_vocab)

    @property
    def width(self) -> int:
        """Tokens of the longest target, which the source is one shorter than."""
        return self.high + 2

    @public()
    def batch(self, place: Place, rows: PositiveCount) -> Examples:
        """The rows of a place."""
        generator = place.generator
        check_rows(self, rows, self.width)
        lengths = generator.integers(self.low, self.high + 1, size=(rows, 1))
        symbols = generator.integers(2, self.d_vocab, size=(rows, self.high))
        index = np.arange(self.high + 1)
        padded = [np.pad(symbols, ((0, 0), (0, 1)))] * 2
        if self.backwards:
            padded[1] = np.take_along_axis(symbols, np.maximum(lengths - 1 - index, 0), axis=1)
        ended = [np.where(index < lengths, ids, index == lengths) for ids in padded]  # the end token is 1
        keep = torch.from_numpy(index <= lengths)
        target = torch.from_numpy(np.pad(ended[1], ((0, 0), (1, 0))))
        start = torch.ones(rows, 1, dtype=torch.bool)
        return Examples(
            Batch(target, torch.cat([start, keep], 1)), keep, Batch(torch.from_numpy(ended[0]), keep)
        )
