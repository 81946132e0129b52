"""Rows of tokens that repeat, on which duplicate-token and induction heads are found, patched and trained.

Random tokens have no meaning, so only the earlier copy says what comes next (Olsson et al. 2022).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import Count, FromZero, PositiveCount, Seed
from interp.core.memory import check_memory
from interp.data.tokenizers import Tokenizer
from interp.tasks.examples import Examples, Place, after_bos, check_rows, different, require
from interp.tasks.lists import WORDS
from interp.tasks.pairs import Pair, TaskPairs, WordRow, pairs_of, required_single_tokens

SAMPLE = 25
"""Most tokens of a row on which copying is scored: those of Olsson et al."""
FARTHEST = 16
"""Largest distance of the attention kernel."""


@public()
@dataclass(frozen=True)
class RepeatedTokens:
    """Rows of BOS, then `period` distinct random tokens repeated `repeats` times (Olsson et al.: 25 x 4)."""

    period: Count = 25
    """Number of different tokens in a row."""
    repeats: Count = 4
    """Number of copies of them."""
    rows: Count = 32
    """Number of rows."""
    seed: Seed = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        if self.period < 2 or self.repeats < 2 or self.rows < 1:
            raise ValueError(f"period and repeats of at least 2 and one row are required, got {self}")

    @property
    def length(self) -> int:
        """Tokens per row, BOS included."""
        return 1 + self.period * self.repeats

    @property
    def farthest(self) -> int:
        """Largest distance of the attention kernel: earlier copies, and the tokens after them, are farther away."""
        return min(FARTHEST, self.period - 2)

    @property
    def sample(self) -> int:
        """Tokens at the beginning of the first copy on which copying is scored."""
        return min(SAMPLE, self.period)

    @public()
    def tokens(
        self,
        vocab: Count | Sequence[int],
        bos: FromZero | None = None,
        generator: np.random.Generator | None = None,
    ) -> Int[Tensor, "b p"]:
        """Token ids of the rows [bos, t_1 .. t_period, t_1 .. t_period, ...].

        Args:
            vocab: how many ids there are (0 .. vocab - 1), or the ids to draw from.
            bos: begins each row if given, and is never drawn.
            generator: where the random numbers come from, instead of the seed (which is PyTorch's).

        Raises:
            ValueError: fewer different ids than the period, and rows that do not fit into the free memory.

        Example:
            >>> interp.tasks.RepeatedTokens(period=5, repeats=3, rows=2).tokens(100, bos=0).shape
            torch.Size([2, 16])
        """
        ids = np.unique(np.arange(vocab) if isinstance(vocab, int) else np.asarray(vocab, dtype=np.int64))
        ids = ids if bos is None else ids[ids != bos]
        if len(ids) < self.period:
            raise ValueError(
                f"vocab must hold {self.period} distinct tokens besides BOS, got {len(ids)} to draw from"
            )
        drawn_from = self.period if generator is None else len(ids)
        check_memory(
            f"{self.rows} rows of {self.length} tokens (RepeatedTokens: rows)",
            8 * self.rows * (self.length + drawn_from), torch.device("cpu"), "fewer rows take less",
        )  # fmt: skip
        if generator is None:
            torchs = torch.Generator().manual_seed(self.seed)
            # the clone lets go of all that was drawn but the period
            order = [
                torch.randperm(len(ids), generator=torchs)[: self.period].clone() for _ in range(self.rows)
            ]
            once = torch.from_numpy(ids)[torch.stack(order)]
        else:
            drawn = generator.permuted(np.tile(ids, (self.rows, 1)), axis=1)[:, : self.period]
            once = torch.from_numpy(drawn.astype(np.int64))
        first = [] if bos is None else [torch.full((self.rows, 1), bos)]
        return torch.cat((*first, once.repeat(1, self.repeats)), 1)

    @public()
    def pairs(self, tokenizer: Tokenizer, *, ids: Sequence[int] | None = None) -> TaskPairs:
        """Rows of two copies without the last token, and corruptions with another token at `match`.

        [t_1 .. t_period, t_1 .. t_(period-1)] -> t_period. In the corrupted one the first occurrence of the last
        token, at role match, is another token from outside the row: the answer is still there, but nothing says that
        it follows. `wrong` is another token of the row, there twice, the answer once.

        Roles: match, source (the first occurrence of the answer, after match), end. One group.

        Args:
            tokenizer: the tokenizer of the model.
            ids: the tokens to draw from; None: common words that are single tokens. A row is decoded to its text,
                which tokenises to the same ids only where the tokenizer does so for any tokens, as it does for whole
                words.

        Returns:
            `TaskPairs`.

        Raises:
            ValueError: other than two copies of at least 3 tokens, or fewer than period + 1 different tokens.

        Caveat:
            The answer always stands `period` columns before its place, so attention by position alone can find it, in
            both prompts.

        Example:
            >>> pairs = interp.tasks.RepeatedTokens(3, 2, rows=2).pairs(model.text.tokenizer, ids=[7, 8, 9, 10])
            >>> bool((pairs.clean_tokens[:, 3] == pairs.answer).all())
            True
        """
        if self.period < 3 or self.repeats != 2:
            raise ValueError(f"two copies of a period of at least 3 tokens are required, got {self}")
        bos, least = tokenizer.bos_id, self.period + 1
        if ids is None:
            words = required_single_tokens(
                tokenizer, WORDS, task="repeated_sequences", kind="words", at_least=least
            )
            known = sorted(words.values())
        else:
            known = sorted({*ids} - {bos})
        if len(known) < least:
            raise ValueError(
                f"at least {least} different ids are required for period {self.period}, got {len(known)}"
            )
        generator = np.random.default_rng(self.seed)
        rows = self.tokens(known, bos, generator).tolist()
        pairs = [_repeated_pair(generator, tokenizer, row, known, int(bos is not None)) for row in rows]
        return pairs_of("repeated_sequences", pairs, changes=("match",))


@public()
@dataclass(frozen=True)
class RepeatedSequences:
    """Random tokens that repeat with a period of the row's own (Olsson et al. 2022), which induction heads predict.

    [bos, t_1 .. t_n, t_1 .. t_n, ...], n uniform in [low, high], the t different. Determined: all after the first copy.
    """

    d_vocab: int = 64
    """Number of token ids; id 0 is the beginning and nothing else."""
    width: int = 64
    """Tokens per row."""
    low: int = 8
    """The shortest period."""
    high: int = 24
    """The longest period."""

    def __post_init__(self) -> None:
        require(2 <= self.low <= self.high, "2 <= low <= high", f"{self.low} and {self.high}")
        require(self.high < self.d_vocab, f"more than {self.high} ids for the longest period", self.d_vocab)
        require(
            self.high + 2 <= self.width,
            f"a width of {self.high + 2} or more to repeat in (high + 2)",
            self.width,
        )

    @public()
    def batch(self, place: Place, rows: PositiveCount) -> Examples:
        """The rows of a place."""
        check_rows(self, rows, self.width)
        generator = place.generator
        period = generator.integers(self.low, self.high + 1, size=(rows, 1))
        once = different(generator, rows, self.high, 1, self.d_vocab)
        index = np.arange(self.width - 1)
        tokens = np.take_along_axis(once, index % period, axis=1)
        return after_bos(tokens, index >= period)


@public()
@dataclass(frozen=True)
class RepeatingChain:
    """Rows of a fixed random bigram chain that repeat with a period of their own.

    [bos, t_1 .. t_n, t_1 .. t_n, ...], n uniform in [low, high]: what the chain allows can be learned by heart, the
    rest only from the context, so that training has two parts. Determined: all after the first copy.
    """

    d_vocab: int = 64
    """Number of token ids; id 0 is the beginning and nothing else."""
    width: int = 64
    """Tokens per row."""
    low: int = 12
    """The shortest period."""
    high: int = 24
    """The longest period."""
    concentration: float = 0.1
    """Concentration of the Dirichlet distribution that the chain's rows are drawn from; small: predictable."""

    def __post_init__(self) -> None:
        require(1 <= self.low <= self.high, "1 <= low <= high", f"{self.low} and {self.high}")
        require(
            self.high + 2 <= self.width,
            f"a width of {self.high + 2} or more to repeat in (high + 2)",
            self.width,
        )
        require(self.d_vocab >= 3, "3 ids or more", self.d_vocab)
        require(0 < self.concentration < math.inf, "a concentration above 0 and finite", self.concentration)

    @public()
    def batch(self, place: Place, rows: PositiveCount) -> Examples:
        """The rows of a place."""
        check_rows(self, rows, self.width)
        generator = place.generator
        steps, token = self.chain.cumsum(1), np.zeros(rows, dtype=np.int64)
        once = np.empty((rows, self.high), dtype=np.int64)
        for i in range(self.high):
            drawn = (generator.random(rows)[:, None] > steps[token]).sum(1)
            once[:, i] = token = 1 + drawn.clip(max=self.d_vocab - 2)  # the last sum may be 1 - epsilon
        period = generator.integers(self.low, self.high + 1, size=(rows, 1))
        index = np.arange(self.width - 1)
        return after_bos(np.take_along_axis(once, index % period, axis=1), index >= period)

    @property
    def chain(self) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """Probabilities of the next token, `[token before, token - 1]`; the same for every seed."""
        check_memory(
            f"a chain of {self.d_vocab} ids (RepeatingChain: d_vocab)", 16 * self.d_vocab**2, torch.device("cpu"),
            "a smaller vocabulary takes less",
        )  # fmt: skip
        generator = np.random.default_rng(0)
        return generator.dirichlet([self.concentration] * (self.d_vocab - 1), size=self.d_vocab)


def _repeated_pair(
    generator: np.random.Generator, tokenizer: Tokenizer, tokens: list[int], known: Sequence[int], first: int
) -> Pair:
    """One pair from a row of two copies, which begin at column `first` (1 after BOS, else 0)."""
    source = first + (len(tokens) - first) // 2 - 1
    row, answer = tokens[:-1], tokens[-1]
    fresh = [i for i in known if i not in row]
    corrupt_ids = [*row[: source - 1], fresh[int(generator.integers(0, len(fresh)))], *row[source:]]
    wrong = row[int(generator.integers(first, source - 1))]
    columns = {"match": range(source - 1, source), "source": range(source, source + 1)}
    clean, corrupt = (
        WordRow(tokenizer.decode(ids[first:]), tuple(ids), columns) for ids in (row, corrupt_ids)
    )
    return Pair(clean, corrupt, answer, wrong, columns, group=f"twice {source + 1 - first} tokens")
