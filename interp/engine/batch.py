"""A batch of token rows with its padding said explicitly; nothing downstream guesses it from the tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from interp.core.shapes import shape_text

Side = Literal["left", "right"]


@dataclass(frozen=True, eq=False)
class Batch:
    """Token rows `[b p]` and which of them are real."""

    tokens: Int[Tensor, "b p"]
    keep: Bool[Tensor, "b p"] | None = None
    """True at real tokens; None = no padding anywhere."""
    bos: bool = False
    """Whether a beginning-of-sequence token was prepended to every row."""
    answer: Int[Tensor, "b"] | None = None
    """The token each row should be followed by, where a question has one."""
    wrong: Int[Tensor, "b"] | None = None
    """The token the answer is contrasted with."""

    def __post_init__(self) -> None:
        if self.tokens.ndim != 2 or self.tokens.is_floating_point() or self.tokens.numel() == 0:
            raise ValueError(
                "a batch requires at least one token id, shape [batch, pos], "
                f"got {self.tokens.dtype} of shape {shape_text(self.tokens.shape)}"
            )
        if self.keep is not None and self.keep.shape != self.tokens.shape:
            raise ValueError(
                f"keep must have the tokens' shape {shape_text(self.tokens.shape)}, got {shape_text(self.keep.shape)}"
            )

    @classmethod
    def of(
        cls, rows: Sequence[Sequence[int]], *, pad_id: int = 0, side: Side = "right", bos: bool = False
    ) -> "Batch":
        """Rows of any lengths, padded to the longest; `keep` is None when they are all equally long."""
        lengths = [len(row) for row in rows]
        if not rows or min(lengths) == 0:
            raise ValueError(f"every prompt requires at least one token, got lengths {lengths}")
        width = max(lengths)
        tokens = torch.full((len(rows), width), pad_id)
        keep = torch.zeros(len(rows), width, dtype=torch.bool)
        for i, row in enumerate(rows):
            span = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
            tokens[i, span] = torch.tensor(list(row))
            keep[i, span] = True
        return cls(tokens, None if min(lengths) == width else keep, bos)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def lengths(self) -> Int[Tensor, "b"]:
        """How many real tokens each row has."""
        if self.keep is None:
            return torch.full((len(self),), self.tokens.shape[1], device=self.tokens.device)
        return self.keep.sum(1)

    def last(self) -> Int[Tensor, "b"]:
        """Column of the last real token of each row."""
        n = self.tokens.shape[1]
        if self.keep is None:
            return torch.full((len(self),), n - 1, device=self.tokens.device)
        return n - 1 - self.keep.flip(1).int().argmax(1)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on another device."""
        return self._each(lambda x: x.to(device))

    def split(self, size: int) -> Iterator["Batch"]:
        """Consecutive parts of at most `size` rows, of the same width."""
        for start in range(0, len(self), size):
            yield self._each(itemgetter(slice(start, start + size)))

    def with_answers(self, answer: Int[Tensor, "b"], wrong: Int[Tensor, "b"] | None) -> "Batch":
        """The same rows with the tokens a question is about."""
        return replace(self, answer=answer, wrong=wrong)

    def left_aligned(self) -> "Batch":
        """The same rows with all padding moved to the left, so that every row ends in the last column."""
        if self.keep is None:
            return self
        order = self.keep.int().argsort(dim=1, stable=True)
        return replace(self, tokens=self.tokens.gather(1, order), keep=self.keep.gather(1, order))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        def changed(x: Tensor | None) -> Tensor | None:
            return None if x is None else change(x)

        return Batch(
            change(self.tokens), changed(self.keep), self.bos, changed(self.answer), changed(self.wrong)
        )
