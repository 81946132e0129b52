"""Rows of a generated task by their place, and which of their tokens the context determines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from interp.core.boundary import public
from interp.core.kinds import Device, FromZero, Seed
from interp.core.memory import check_memory
from interp.core.stats import upcast
from interp.core.transfers import check
from interp.data.batch import Batch
from interp.model.loss import next_token_loss

IdMatrix = np.ndarray[tuple[int, int], np.dtype[np.int64]]


@public()
@dataclass(frozen=True)
class Place:
    """Seed and step of one batch of generated data, which decide its random numbers without running earlier steps."""

    seed: Seed
    step: FromZero | None
    """Number of training updates before this batch; None: the held-out rows."""

    @property
    def generator(self) -> np.random.Generator:
        """The random numbers of this place."""
        return np.random.default_rng([0 if self.step is None else self.step + 1, self.seed])


@public()
@dataclass(frozen=True, eq=False)
class Examples:
    """Rows of training data, with what the context determines in them."""

    batch: Batch
    """Tokens that the model reads; for an encoder-decoder the target, start token first."""
    determined: Bool[Tensor, "b n"] | None = None
    """True at tokens from the second on that follow from what stands before (or from the source); None: not known."""
    source: Batch | None = None
    """Tokens that the encoder of an encoder-decoder reads."""
    weight: Float[Tensor, "b"] | None = None
    """Factor on the losses of each row in training, the divisor of the mean kept; None: 1 each."""

    def __post_init__(self) -> None:
        rows, columns = self.batch.tokens.shape
        self.batch.require_one_continuation("examples")
        if self.determined is not None and self.determined.shape != (rows, columns - 1):
            raise ValueError(
                f"determined must have one column per token after the first, [{rows}, {columns - 1}], "
                f"got {list(self.determined.shape)}"
            )
        if self.source is not None and len(self.source) != rows:
            raise ValueError(f"one source per target is required, got {len(self.source)} for {rows}")
        if self.weight is not None and self.weight.shape != (rows,):
            raise ValueError(f"one weight per row is required, [{rows}], got {list(self.weight.shape)}")

    @property
    def counted(self) -> Bool[Tensor, "b n"]:
        """True at tokens from the second on that are predicted: real, and in one text with the token before."""
        known = self.batch.predicted
        return torch.ones_like(self.batch.tokens[:, 1:], dtype=torch.bool) if known is None else known

    @public()
    def to(self, device: Device) -> Examples:
        """The examples on another device."""
        device = torch.device(device)
        return replace(
            self,
            batch=self.batch.to(device),
            determined=None if self.determined is None else self.determined.to(device),
            source=None if self.source is None else self.source.to(device),
            weight=None if self.weight is None else self.weight.to(device),
        )

    @public()
    def rows(self, index: Int[Tensor, "n"]) -> Examples:
        """Examples of the rows of these numbers, in this order, of the same width; a row may come several times."""
        rows = self.batch.rows(index)  # checks the index
        determined, weight = (
            None if x is None else x[index.to(x.device)] for x in (self.determined, self.weight)
        )
        source = None if self.source is None else self.source.rows(index)
        return Examples(rows, determined, source, weight)

    @public()
    def split(self, size: int) -> Iterator[Examples]:
        """Consecutive parts of at most `size` rows; ValueError for a size below 1."""
        if size < 1:
            raise ValueError(f"parts of at least one row are required, got {size}")
        for start in range(0, len(self.batch), size):
            yield self.rows(torch.arange(start, min(start + size, len(self.batch))))

    @public()
    def predicted(self, *, determined_only: bool = False) -> Bool[Tensor, "b n"]:
        """True at tokens from the second on that a loss counts: predicted ones, or those that the context determines.

        Raises:
            ValueError: if the data does not say which are determined.
        """
        if not determined_only:
            return self.counted
        if self.determined is None:
            raise ValueError("determined_only requires data that says which tokens the context determines")
        return self.determined

    @public()
    def measured(
        self, logits: Float[Tensor, "b p v"], *, determined_only: bool = False
    ) -> Float[Tensor, "b"]:
        """One number per row, from its logits: a loss, or with a wrong answer a logit difference.

        Without answers the mean nats per token that counts (`asked`). Where the rows have an answer, -log p of it at
        the last token; with a wrong one too, logit(answer) - logit(wrong) there.

        Args:
            logits: [b, p, v].
            determined_only: count only the tokens that the context determines.

        Returns:
            [b], in `unit`.

        Raises:
            ValueError: a row of which no token counts.
        """
        batch = self.batch
        if batch.answer is None:
            predicted = self.predicted(determined_only=determined_only)
            unlike = "rows with a token to predict are required, some have none that is asked"
            check(predicted.any(1).all(), partial(ValueError, unlike))
            losses = next_token_loss(logits, batch.tokens, batch.keep, batch.documents)
            return (losses * predicted).sum(1) / predicted.sum(1)
        last = upcast(logits[torch.arange(len(batch), device=logits.device), batch.last()])
        right = last.gather(1, batch.answer[:, None])[:, 0]
        if batch.wrong is None:
            return last.logsumexp(1) - right
        return right - last.gather(1, batch.wrong[:, None])[:, 0]

    @property
    def unit(self) -> str:
        """The unit of `measured`."""
        return "nats" if self.batch.wrong is None else "logits"


def after_bos(tokens: IdMatrix, determined: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> Examples:
    """Rows of token ids with BOS (id 0) put before each, and which of the tokens after BOS are determined."""
    padded = np.pad(tokens.astype(np.int64), ((0, 0), (1, 0)))
    return Examples(Batch(torch.from_numpy(padded), bos=True), torch.from_numpy(determined))


def check_rows(task: object, rows: int, width: int) -> None:
    """ValueError for more rows of a task, or longer ones, than the memory holds."""
    check_memory(
        f"{rows} rows of {width} tokens of {type(task).__name__}", 32 * rows * width, torch.device("cpu"),
        "fewer rows, and shorter ones by the task's fields, take less",
    )  # fmt: skip


def different(generator: np.random.Generator, rows: int, count: int, low: int, high: int) -> IdMatrix:
    """Per row `count` different integers of [low, high) in random order, shape [rows, count].

    Example:
        >>> sorted(different(np.random.default_rng(0), 1, 3, 5, 8)[0].tolist())
        [5, 6, 7]
    """
    check_memory(
        f"{rows} draws of different ones of {high - low} ids (d_vocab, rows, examples)", 16 * rows * (high - low),
        torch.device("cpu"), "a smaller vocabulary and fewer or shorter rows take less",
    )  # fmt: skip
    return low + generator.random((rows, high - low)).argsort(axis=1)[:, :count]


def require(condition: bool, what: str, got: object) -> None:
    """ValueError for a parameter of a task, unless the condition holds."""
    if not condition:
        raise ValueError(f"the task requires {what}, got {got}")
